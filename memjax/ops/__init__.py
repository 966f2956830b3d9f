"""Pure functions on arrays: no Flax, no config. What a notebook imports first."""
