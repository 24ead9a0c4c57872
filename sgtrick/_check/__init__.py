"""Comparison of embedded derivatives with numerical ones."""
