"""Held-out scores, memory health and sampling."""
