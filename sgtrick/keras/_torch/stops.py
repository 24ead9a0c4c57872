"""Derivatives of a gradient that `detach` has removed."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras._types import Gradient

_TO_HOST = {"item", "numpy", "tolist", "__array__", "__float__"}


class Stops(TorchFunctionMode):  # type: ignore[misc]
    """Follows what is computed from tensors, with and without its derivatives."""

    def __init__(self, xs: Sequence[Tensor]) -> None:
        super().__init__()
        self._sources = range(len(xs))
        # By id, with the tensor itself, since the id of one that is gone could be reused.
        self._reached = {id(x): (x, {k}, set[int]()) for k, x in enumerate(xs)}
        self._on_host = set[int]()

    def are_lost(self, gradients: Sequence[Gradient]) -> list[bool]:
        """By which of the tensors the derivatives of gradients are stopped, and so wholly lost.

        Gradients that are constant do not depend on them at all, so nothing is lost of these.
        """
        found = [self._reached.get(id(g), (g, set[int](), set[int]())) for g in gradients]
        connected = set[int]().union(*(by for _, by, _ in found))
        stopped = self._on_host.union(*(by for _, _, by in found))
        return [k in stopped and k not in connected for k in self._sources]

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Structure:
        """Called by torch for each operation."""
        del types
        result = func(*args, **(kwargs or {}))
        leaves = _pytree.tree_leaves((args, kwargs))
        read = [self._reached[id(t)] for t in leaves if id(t) in self._reached]
        name = getattr(func, "__name__", "")
        if not read or name.endswith("_like"):  # which read only the shape
            return result
        by = set[int]().union(*(by for _, by, _ in read))
        stopped = set[int]().union(*(by for _, _, by in read))
        if name in _TO_HOST:
            self._on_host |= by | stopped
        if name == "detach":
            by, stopped = set(), by | stopped
        for t in _pytree.tree_leaves(result):
            # The others have no derivatives to lose.
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                self._reached[id(t)] = t, by, stopped
        return result
