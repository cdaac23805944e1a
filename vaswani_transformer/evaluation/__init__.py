"""Quality of outputs: BLEU, chrF, perplexity as `evaluate.Metric`, and the record of an evaluation.

The scores of parse trees live in `parsing`.
"""
