"""PyTorch as a framework that differentiates functions, by `torch.func`."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from sgtrick._host.derived import Dims, Leaves
from sgtrick._types import Function, Structure


class Torch:
    """The `Framework` of functions of tensors of PyTorch."""

    # PyTorch has one forward mode for all threads, and an end of it in one ends it in the others.
    # Engines without an executor are called one at a time.
    vjp, jvp = staticmethod(torch.func.vjp), staticmethod(torch.func.jvp)

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """See `Framework`."""
        # Reverse over reverse works for everything that torch can differentiate twice. It gives the
        # transpose of the Hessian, which is symmetric.
        return torch.func.vjp(gradient, points)[1](vs)[0]  # type: ignore[no-any-return]

    def like(self, u: Any, y: Any) -> Any:
        """See `Framework`."""
        return torch.as_tensor(u, dtype=y.dtype, device=y.device).expand(y.shape)

    def shapes(self, f: Function, leaves: Sequence[Any]) -> Structure:
        """Never called: the caller states the shape."""
        raise NotImplementedError

    def refusal(self, value: object) -> str | None:
        """See `Framework`."""
        if not isinstance(value, torch.Tensor):
            return (
                f"got {type(value).__name__}. A torch.Tensor that was computed from the arguments "
                "has a gradient; a Python number or a NumPy array has none."
            )
        if not value.is_floating_point():
            return f"got {value.dtype}: cast it to a float."
        return None

    def is_connected(self, value: torch.Tensor) -> bool:
        """See `Framework`."""
        tangent = torch.autograd.forward_ad.unpack_dual(value).tangent
        return value.requires_grad or tangent is not None

    def compiled(self, f: Function, dims: Dims) -> Function:
        """See `Framework`."""
        for in_dims in reversed(dims):
            f = torch.func.vmap(f, in_dims=in_dims)

        def of_arrays(*groups: Leaves) -> Structure:
            returned = f(*map(_tensors, groups))
            return tf.nest.map_structure(lambda t: t.detach().cpu().numpy(), returned)

        return of_arrays

    def advice(self, error: Exception) -> str | None:
        """See `Framework`."""
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


def _tensors(leaves: Leaves) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in leaves)
