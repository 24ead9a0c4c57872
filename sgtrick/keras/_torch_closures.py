"""The tensors that a function of torch reads besides its arguments."""

import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras._types import Tensors


class Outside(TorchFunctionMode):  # type: ignore[misc]
    """Finds tensors that a computation closes over, and replaces them by others.

    Attributes:
        found: By id. They are kept alive, since an id could be that of another tensor later.
    """

    def __init__(self, known: Tensors, instead: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._instead = instead or {}
        self._known: dict[int, Tensor] = {}
        self.know(known)

    def know(self, tensors: Structure) -> None:
        """Marks tensors that the computation does not close over."""
        for t in _pytree.tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                self._known[id(t)] = t  # kept alive, too

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Structure:
        del types

        def enter(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or id(t) in self._known:
                return t
            self.found[id(t)] = t
            return self._instead.get(id(t), t)

        args, kwargs = _pytree.tree_map(enter, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self.know(result)
        return result


class Unchanged:
    """Tensors that must not be changed in place, unless nothing refers to them any more."""

    def __init__(self, tensors: Tensors) -> None:
        self._versions = [(weakref.ref(t), t._version) for t in tensors]

    def check(self) -> None:
        """Raises the error of torch if one was changed."""
        for reference, version in self._versions:
            t = reference()
            if t is not None and t._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {list(t.shape)}, which a gradient "
                    f"function of sgtrick.keras.custom_vjp reads, is at version {t._version}; "
                    f"expected version {version} instead. Change a copy, as in out = out + 1."
                )


def read_by(f: Function) -> Iterator[Tensor]:
    """The tensors in the closure of a function, in its globals, and in what it calls."""
    rest: list[Any] = [f]
    seen = set()
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, types.FunctionType):
            rest += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
            rest += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            found = map(value.__globals__.get, value.__code__.co_names)
            rest += [t for t in found if isinstance(t, torch.Tensor)]
        elif isinstance(value, keras.Variable):
            rest.append(value.value)
        elif isinstance(value, functools.partial):
            rest += [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            rest += [value.__func__, _attributes(value.__self__)]
        elif isinstance(value, (list, tuple)):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
        elif callable(value):
            rest.append(_attributes(value))


def _attributes(value: object) -> dict[str, Any]:
    """Those of an object, but not of a layer, which has too many."""
    return {} if isinstance(value, (type, torch.nn.Module)) else getattr(value, "__dict__", {})


_EMPTY = types.CellType()
