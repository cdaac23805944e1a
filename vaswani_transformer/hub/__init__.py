"""Publishing to the Hugging Face Hub: the push, and the model card with its facts."""
