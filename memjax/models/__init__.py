"""The language model and what its parameters are."""
