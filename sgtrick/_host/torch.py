"""PyTorch as a framework that differentiates functions, by `torch.func`."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

# Tensors without values, by which torch.compile and torch.export trace. There is no public name.
from torch._subclasses import fake_tensor

from sgtrick._host.autodiff import Dims, Leaves
from sgtrick._types import Function, Structure


class Torch:
    """The `Framework` of functions of tensors of PyTorch."""

    title, recipe, takes_text = "PyTorch", "one by torch.autograd.grad", True

    # PyTorch has one forward mode for all threads, and an end of it in one ends it in the others.
    # Engines without an executor are called one at a time.
    vjp, jvp = staticmethod(torch.func.vjp), staticmethod(torch.func.jvp)

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """The product with the Hessian, reverse over reverse."""
        # Reverse over reverse works for everything that torch can differentiate twice. It gives the
        # transpose of the Hessian, which is symmetric.
        return torch.func.vjp(gradient, points)[1](vs)[0]  # type: ignore[no-any-return]

    def like(self, u: Any, y: Any) -> Any:
        """A cotangent or tangent `u` as a tensor like `y`."""
        return torch.as_tensor(u, dtype=y.dtype, device=y.device).expand(y.shape)

    def probe(self, y: torch.Tensor) -> torch.Tensor:
        """Irregular numbers of order 1, like `y`."""
        angles = torch.arange(y.numel(), dtype=y.dtype, device=y.device)
        return torch.cos(2.4 * angles + 1).reshape(y.shape)

    def raised(self, f: Function, dims: Dims, groups: Sequence[Leaves]) -> Exception | None:
        """What PyTorch raises for tensors without values."""
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [
                tuple(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in group)
                for group in map(_tensors, groups)
            ]
            log = logging.getLogger(fake_tensor.__name__)  # would print what is returned here
            was_disabled, log.disabled = log.disabled, True
            try:
                _mapped(f, dims)(*fakes)
            except Exception as error:
                return error
            finally:
                log.disabled = was_disabled
        return None

    def shapes(self, f: Function, leaves: Sequence[Any]) -> Structure:
        """Never called: the caller states the shape."""
        raise NotImplementedError

    def refusal(self, value: object) -> str | None:
        """Why a value is not a tensor of floating numbers; None if it is one."""
        if not isinstance(value, torch.Tensor):
            return (
                f"got {type(value).__name__}. A torch.Tensor that was computed from the arguments "
                "has a gradient; a Python number or a NumPy array has none."
            )
        if not value.is_floating_point():
            return f"got {value.dtype}: cast it to a float."
        return None

    def is_connected(self, value: torch.Tensor) -> bool:
        """Whether reverse or forward mode reaches the value."""
        tangent = torch.autograd.forward_ad.unpack_dual(value).tangent
        return value.requires_grad or tangent is not None

    def compiled(self, f: Function, dims: Dims) -> Function:
        """The mapped function, by `torch.func.vmap`; it is not compiled further."""
        f = _mapped(f, dims)

        def of_arrays(*groups: Leaves) -> Structure:
            returned = f(*map(_tensors, groups))
            return tf.nest.map_structure(_array, returned)

        return of_arrays

    def advice(self, error: Exception) -> str | None:
        """What to do about mixed dtypes, code that cannot be mapped, and NumPy."""
        for pattern, advice in _ADVICE:
            if re.search(pattern, str(error)):
                return advice
        return None


_ADVICE = [
    (
        r"same dtype|Double and Float|Float and Double|scalar type (Double|Float) but",
        "mixes dtypes: its arguments have the dtype of the engine, by default float64, and the "
        'parameters of a module are float32. Pass dtype="float32", or convert the module with '
        "module.double().",
    ),
    (
        r"vmap: .*(item\(\)|data-dependent)",
        "has an if or a loop that depends on values, .item() or the like, which torch.func.vmap "
        "cannot map. Use torch.where, or from_numpy with a gradient by torch.autograd.grad.",
    ),
    (
        r"Can't call numpy\(\)|__array__",
        "calls NumPy on a tensor, which loses the gradient. Use PyTorch's own functions, or "
        "from_numpy with a gradient that you supply.",
    ),
]


def _mapped(f: Function, dims: Dims) -> Function:
    for in_dims in reversed(dims):
        f = torch.func.vmap(f, in_dims=in_dims)
    return f


def _array(t: torch.Tensor) -> Any:
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()  # NumPy has no bfloat16


def _tensors(leaves: Leaves) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in leaves)
