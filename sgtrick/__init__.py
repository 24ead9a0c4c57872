"""Custom derivatives in TensorFlow: right under every transformation, or an error."""

from importlib.metadata import version as _version

from sgtrick._check.check_gradient import check_gradient
from sgtrick._check.report import Entry, GradientCheckError, GradientReport
from sgtrick._custom_gradient import custom_gradient
from sgtrick._custom_jvp import custom_jvp
from sgtrick._custom_vjp import custom_vjp
from sgtrick._from_value_and_gradient import from_value_and_gradient
from sgtrick._host.executors import MainThreadExecutor
from sgtrick._host.from_framework import from_jax, from_torch
from sgtrick._host.from_numpy import from_numpy
from sgtrick._host.host_function import HostFunction
from sgtrick._implicit import implicit_reparameterize, implicit_root
from sgtrick._tricks import (
    clip_gradient,
    magic_box,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
    straight_through,
)
from sgtrick._versions import show_versions
from sgtrick._with_gradient import with_gradient

__all__ = [
    "custom_gradient",
    "with_gradient",
    "from_value_and_gradient",
    "custom_jvp",
    "custom_vjp",
    "stop_gradient",
    "straight_through",
    "scale_gradient",
    "reverse_gradient",
    "clip_gradient",
    "magic_box",
    "implicit_root",
    "implicit_reparameterize",
    "from_numpy",
    "from_torch",
    "from_jax",
    "HostFunction",
    "MainThreadExecutor",
    "check_gradient",
    "GradientReport",
    "Entry",
    "GradientCheckError",
    "show_versions",
]

__version__ = _version("sgtrick")
