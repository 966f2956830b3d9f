"""From an experiment to its functions: the only floor where all others meet."""
