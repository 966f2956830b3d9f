"""Small functions that run beside the training loop."""
