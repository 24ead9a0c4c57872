"""Custom derivatives in TensorFlow: right under every transformation, and loud otherwise."""

from sgtrick._functions import from_value_and_gradient, with_gradient
from sgtrick._jvp import custom_jvp
from sgtrick._values import custom_gradient
from sgtrick._vjp import custom_vjp

__all__ = [
    "custom_gradient",
    "with_gradient",
    "from_value_and_gradient",
    "custom_jvp",
    "custom_vjp",
]
