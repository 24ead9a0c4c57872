"""PyTorch as a framework that differentiates functions, by `torch.func`."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from sgtrick._arguments.shapes import Shape
from sgtrick._host.derived import Dims, Leaves
from sgtrick._types import Args, Array, Function, Kwargs, Structure


class Torch:
    """The `Framework` of functions of tensors of PyTorch."""

    vjp = staticmethod(torch.func.vjp)
    jvp = staticmethod(torch.func.jvp)

    def symmetric(self, gradient: Function, points: Leaves, vs: Leaves) -> Leaves:
        """See `Framework`."""
        # Reverse over reverse works for everything that torch can differentiate twice. It gives the
        # transpose of the Hessian, which is symmetric.
        return torch.func.vjp(gradient, points)[1](vs)[0]  # type: ignore[no-any-return]

    def like(self, u: Any, y: Any) -> Any:
        """See `Framework`."""
        return torch.as_tensor(u, dtype=y.dtype, device=y.device).expand(y.shape)

    def shapes(self, f: Function, leaves: Sequence[tuple[Shape, Any]]) -> Structure:
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

    def is_cut_off(self, f: Function, points: Leaves, constants: Leaves, k: int) -> bool:
        """See `Framework`."""
        points, constants = list(_tensors(points)), _tensors(constants)
        # A clone is not a leaf of torch's graph, so the function may modify it in place.
        points[k] = points[k].requires_grad_().clone()
        with _Uses(points[k]) as uses:
            values = tf.nest.flatten(f(points, constants))
        return uses.seen and not any(value.requires_grad for value in values)

    def compiled(self, f: Function, dims: Dims) -> Function:
        """See `Framework`."""
        for in_dims in reversed(dims):
            f = torch.func.vmap(f, in_dims=in_dims)

        def of_arrays(*groups: Sequence[Array]) -> Structure:
            returned = f(*map(_tensors, groups))
            return tf.nest.map_structure(lambda t: t.detach().cpu().numpy(), returned)

        return of_arrays

    def advice(self, error: Exception) -> str | None:
        """See `Framework`."""
        for pattern, advice in _ADVICE:
            if re.search(pattern, str(error)):
                return advice
        return None


class _Uses(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Detects whether a function reads the entries of a tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__()
        self._x, self.seen = x, False

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Structure:
        """Called by torch for each operation."""
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _OF_THE_SHAPE and any(arg is self._x for arg in tf.nest.flatten(args)):
            self.seen = True
        return func(*args, **(kwargs or {}))


_OF_THE_SHAPE = {
    *("shape", "dtype", "device", "ndim", "size", "dim", "numel", "__len__", "is_floating_point"),
    *("requires_grad", "is_cuda", "layout", "names", "ndimension", "nelement"),
}

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
        "cannot map. Pass vmap=False, or use torch.where.",
    ),
    (
        r"Can't call numpy\(\)|__array__",
        "calls NumPy on a tensor, which loses the gradient. Use PyTorch's own functions, or "
        "from_numpy with a gradient that you supply.",
    ),
]


def _tensors(arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.from_numpy, arrays))
