"""The tensors that a function of torch reads besides its arguments."""

import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras._types import Product, Tensors


class Outside(TorchFunctionMode):  # type: ignore[misc]
    """Finds the tensors that a computation closes over, or replaces them by others.

    Attributes:
        found: By id. They are kept alive, since an id could be that of another tensor later.
        read: Those among them on which a result depends that has derivatives, unlike a shape, a
            comparison, or a detached tensor.
    """

    def __init__(self, known: Tensors, instead: dict[int, Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        self._instead = instead or {}
        self._known: dict[int, Tensor] = {}
        self.know(known)

    def know(self, tensors: Structure) -> None:
        """Marks tensors that the computation does not close over."""
        self._known |= {id(t): t for t in _tensors_in(tensors)}  # kept alive, too

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Structure:
        del types
        leaves, tree = _pytree.tree_flatten((args, kwargs or {}))
        tensors = _tensors_in(leaves)
        outside = {id(t): t for t in tensors if id(t) not in self._known}

        def call(instead: dict[int, Tensor]) -> Structure:
            replaced = [instead.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = _pytree.tree_unflatten(replaced, tree)
            return func(*args, **kwargs)

        def made(result: Structure) -> list[Tensor]:
            return [t for t in _tensors_in(result) if all(t is not leaf for leaf in leaves)]

        def depends_on(i: int) -> bool:
            def smooth(points: Tensors) -> list[Tensor]:
                return [y for y in made(call({i: points[0]})) if is_smooth(y)]

            return any(map(is_smooth, made(result))) and depends(smooth, [outside[i]])

        asked = [] if self._instead else [i for i, t in outside.items() if self._may_be_read(t)]
        known = [t for t in tensors if id(t) in self._known]
        versions = [(t, t._version) for t in known if asked and not t.is_inference()]
        result = call({i: t for i, t in self._instead.items() if i in outside})
        self.found |= outside
        self.know(made(result))
        # What was changed in place must not be changed once more. A map does not count changes.
        in_place = any(t._version != version for t, version in versions) or (
            transformed() and any(result is None or result is t for t in known)
        )
        self.read |= {i: outside[i] for i in asked if in_place or depends_on(i)}
        return result

    def _may_be_read(self, t: Tensor) -> bool:
        """Whether it has to be asked if the derivative by this tensor is lost."""
        is_followed = t.requires_grad or forward_ad._current_level >= 0 or transformed()
        return id(t) not in self.read and is_followed and is_smooth(t)


def _tensors_in(structure: Structure) -> list[Tensor]:
    return [t for t in _pytree.tree_leaves(structure) if isinstance(t, torch.Tensor)]


def depends(f: Product, xs: Tensors) -> bool:
    """Whether `f(xs)` is connected to `xs`."""
    if not transformed():  # so that f may use NumPy
        points = [x.detach().requires_grad_() for x in xs]
        with torch.enable_grad():
            return any(y.requires_grad for y in f(points))
    found: list[bool] = []

    def probed(*xs: Tensor) -> tuple[Tensor, ...]:
        ys = f(list(xs))
        found.extend(y.requires_grad for y in ys)
        return tuple(ys)

    torch.func.vjp(probed, *xs)
    return any(found)


def is_smooth(y: Tensor) -> bool:
    """Whether a tensor of this dtype has derivatives."""
    return bool(y.is_floating_point() or y.is_complex())


def transformed() -> bool:
    """Whether a transformation of `torch.func` is active."""
    return bool(torch._C._are_functorch_transforms_active())


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
                    f"expected version {version} instead. Change a copy, as in out = out + 1, or "
                    "pass one to the function."
                )


def read_by(f: Function) -> Iterator[Tensor]:
    """The tensors that a function can read: those that its code names, and that of what it calls.

    They are looked for in closures, defaults, globals and attributes, without running anything.
    """
    rest: list[tuple[Any, frozenset[str]]] = [(f, frozenset())]
    seen = {}
    while rest:
        value, names = rest.pop()
        if (id(value), names) in seen:
            continue
        seen[id(value), names] = value  # kept alive, since an id could come again
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if isinstance(value, (types.FunctionType, types.MethodType)):
            names = _names(getattr(value, "__code__", None))
        rest += [(held, names) for held in _held(value, names) if not _is_of_library(held)]


def _is_of_library(value: object) -> bool:
    """Whether this is a function of Keras or torch: of a layer, it would reach everything."""
    f = getattr(value, "__func__", value)
    return isinstance(f, types.FunctionType) and str(f.__module__).startswith(_LIBRARIES)


def _held(value: object, names: frozenset[str]) -> Iterable[Any]:
    """What a value holds, of which code with these names may make use."""
    if isinstance(value, types.FunctionType):
        return _held_by_function(value, names)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, keras.Variable):
        return (value.value,)
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    found = _attributes(value, names)
    if isinstance(value, types.ModuleType):
        return [held for held in found if isinstance(held, (torch.Tensor, keras.Variable))]
    return found


def _held_by_function(f: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in f.__closure__ or () if cell != _EMPTY)
    yield from f.__defaults__ or ()
    yield from (f.__kwdefaults__ or {}).values()
    for name in names & f.__globals__.keys():
        value = f.__globals__[name]
        is_code = isinstance(value, (types.FunctionType, type))
        if not is_code or value.__module__ == f.__module__:  # those of other modules are too many
            yield value


def _attributes(value: object, names: frozenset[str]) -> Iterator[Any]:
    """The attributes of these names, and for properties the functions."""
    cls = value if isinstance(value, type) else type(value)
    tables = [] if value is cls else [getattr(value, "__dict__", {})]
    if isinstance(value, torch.nn.Module):
        tables += [value._parameters, value._buffers, value._modules]
    for table in tables:
        yield from (table[name] for name in names & table.keys())
    for owner in cls.__mro__:
        for name in (names | {"__call__"}) & vars(owner).keys():
            attribute = vars(owner)[name]
            if isinstance(attribute, property):
                attribute = attribute.fget
            if isinstance(attribute, (staticmethod, classmethod)):
                attribute = attribute.__func__
            if isinstance(attribute, types.MemberDescriptorType):  # of __slots__
                attribute = getattr(value, name, None)
            is_method = isinstance(attribute, types.FunctionType) and value is not cls
            yield types.MethodType(attribute, value) if is_method else attribute


def _names(code: types.CodeType | None) -> frozenset[str]:
    """The names of globals and attributes in code, that of inner functions included."""
    if code is None:
        return frozenset()
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


_EMPTY = types.CellType()
_LIBRARIES = ("keras.", "torch.")
