"""Text to batches: reading parallel text, filters, tokenizers, tokenised pairs, prepared data, batches by tokens.

A pair's way: `parallel_text` finds the files, `pair_readers` reads them, `tokenized_pairs` (or `prepare`, once for all
trainings) turns text into token ids and drops pairs by their tokens, `batching` makes batches. `cleaning` writes text
without bad pairs. Also the synthetic corpus of the demo. Nothing here knows a model.
"""
