"""From text to batches: reading parallel text, filters, tokenizers, tokenised pairs, prepared data, batches by tokens.

Also the synthetic corpus of the demo. Nothing here knows a model.
"""
