"""Optax transforms and the builder of an optimizer from its config."""
