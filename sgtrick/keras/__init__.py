"""Custom derivatives in Keras: one form on its tensorflow, jax and torch backends."""

from sgtrick.keras._values import custom_gradient
from sgtrick.keras._vjp import custom_vjp

__all__ = ["custom_gradient", "custom_vjp"]
