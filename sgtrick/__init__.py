"""Custom derivatives in TensorFlow: right under every transformation, and loud otherwise."""

from sgtrick._values import custom_gradient

__all__ = ["custom_gradient"]
