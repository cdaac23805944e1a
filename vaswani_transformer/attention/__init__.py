"""What the heads look at: attention weights, measures of heads, word alignments, pictures and the page to explore."""
