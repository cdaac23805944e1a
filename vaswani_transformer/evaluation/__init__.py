"""Quality of outputs: BLEU, chrF, perplexity, and the record of an evaluation.

The scores of parse trees live in `parsing`.
"""
