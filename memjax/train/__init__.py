"""State, step, loop, checkpoints and hooks; everything is handed in as functions."""
