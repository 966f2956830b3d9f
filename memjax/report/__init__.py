"""Finished runs to tables; imports no jax."""
