"""Attention of the heads: attention weights, measures of heads, word alignments, pictures and the page to explore."""
