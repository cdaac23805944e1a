"""Training: schedule, trainer, callbacks, checkpoints, averaging, the plan of a run, and the run itself.

Batches come from `data`, settings from `recipes`, and the loss from the model's own `forward`.
"""
