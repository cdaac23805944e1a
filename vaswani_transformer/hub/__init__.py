"""Publishing to the Hugging Face Hub: the push, and the model card with its facts.

Loading from the Hub needs nothing of this room: `from_pretrained` and `decoding/pipelines.py` do it.
"""
