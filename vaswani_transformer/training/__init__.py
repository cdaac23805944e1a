"""Training: schedule, trainer, callbacks, checkpoints, averaging, and the run itself.

Batches come from `data`, settings from `recipes`, and the loss from the model's own `forward`.
"""
