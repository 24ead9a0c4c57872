"""Embedded derivatives against numerical ones."""
