"""Thin Linen modules over `memjax.ops`, each with its own config beside it."""
