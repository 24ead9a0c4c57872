"""Calls of a function, and the arguments with respect to which they are differentiated."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._core import shapes, structures
from sgtrick._core._tensorflow import tapes
from sgtrick._core._tensorflow.autograph import unconverted
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.structures import Leaf
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Argnums, Args, Function, Kwargs, Structure, Tensor


@dataclasses.dataclass(frozen=True)  # AutoGraph does not convert __call__ of named tuples
class Call:
    """The arguments of one call, with keywords turned into positions and defaults filled in.

    Attributes:
        args: Those by position.
        kwargs: Those by keyword.
        defaults: The names of those that the caller left out.
    """

    args: Args
    kwargs: Kwargs
    defaults: frozenset[str] = frozenset()

    def __call__(self, f: Function) -> Structure:
        """Calls `f`."""
        return f(*self.args, **self.kwargs)

    def leaves(self) -> list[Any]:
        """The leaves of all arguments."""
        return [leaf for _, leaf in structures.flatten([*self.args, *self.kwargs.values()])]

    def replace(self, keys: Sequence[int | str], values: Sequence[Structure]) -> "Call":
        """The same call with the arguments at `keys` replaced."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, value in zip(keys, values, strict=True):
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        return dataclasses.replace(self, args=tuple(args), kwargs=kwargs)


class Selection:
    """The arguments of a call that a rule covers; all others keep their autodiff gradient.

    Attributes:
        call: The call.
        xs: The leaves of these arguments that have derivatives, as tensors.
        stopped_xs: The same, stopped.
        stopped: The call with the stopped leaves.
    """

    def __init__(
        self,
        call: Call,
        keys: Sequence[int | str],
        parameters: Sequence[str],
        differentiated: Callable[[object], bool] = structures.has_derivatives,
    ) -> None:
        self.call, self._keys = call, keys
        self._arguments = [call.args[k] if isinstance(k, int) else call.kwargs[k] for k in keys]
        self._parameters = parameters
        leaves = [
            leaf
            for parameter, argument in zip(parameters, self._arguments, strict=True)
            for leaf in structures.flatten(argument, parameter)
        ]
        self._nested = any(tf.nest.is_nested(argument) for argument in self._arguments)
        self._places = [i for i, (_, leaf) in enumerate(leaves) if differentiated(leaf)]
        self._flat = [leaf for _, leaf in leaves]
        self.xs = [
            tapes.own(structures.to_tensor(leaves[i][1], leaves[i][0])) for i in self._places
        ]
        self.stopped_xs = [tapes.unrecorded(x) for x in self.xs]
        self.stopped = self.at(self.stopped_xs)

    def others(self) -> "Selection":
        """The other arguments of the stopped call whose gradient may be requested."""
        call = self.stopped
        keys = [k for k in (*range(len(call.args)), *call.kwargs) if k not in self._keys]
        return Selection(call, keys, [str(key) for key in keys], structures.may_be_recorded)

    @property
    def own(self) -> Call:
        """The call with its own copies of tensors: the function may close over the same ones."""
        leaves = [self._flat[i] for i in self._places]
        return self.at(
            [x if tf.is_tensor(leaf) else leaf for x, leaf in zip(self.xs, leaves, strict=True)]
        )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, and the copies of them."""
        return [*(t for t in self._flat if isinstance(t, tf.Tensor)), *self.xs]

    def on(self, call: Call, xs: Sequence[Tensor]) -> Call:
        """Another call, with the leaves `xs` in these arguments."""
        return call.replace(self._keys, self._pack(xs, self._flat))

    def read(self) -> Call:
        """The call with the current values of variables, which may be assigned later."""
        call = self.at(self.xs)
        if len(self._keys) == len(self.call.args) + len(self.call.kwargs):
            return call
        return Call(
            *tf.nest.map_structure(
                lambda leaf: (
                    here(structures.as_tensor(leaf)) if structures.is_dense(leaf) else leaf
                ),
                (call.args, call.kwargs),
            )
        )

    def check_numbers(self, name: str) -> None:
        """Checks that the arguments, unless they are empty, hold something numeric."""
        if self._flat and not any(map(structures.is_number, self._flat)):
            raise TypeError(
                f"argnums selects {', '.join(self._parameters)} of {name}, for which there is no "
                f"derivative: {', '.join(type(leaf).__name__ for leaf in self._flat)}. Select the "
                "arguments that the gradient is with respect to."
            )

    def at(self, xs: Sequence[Tensor]) -> Call:
        """The call with other leaves instead of its own `xs`."""
        return self.call.replace(self._keys, self._pack(xs, self._flat))

    def primals(self, call: Call) -> Args:
        """These arguments, of a call that `at` returned."""
        return tuple(call.args[k] if isinstance(k, int) else call.kwargs[k] for k in self._keys)

    def tangents(self, z: Sequence[Tensor]) -> Args:
        """`z` in the structure of the arguments, with None where there is no derivative."""
        return tuple(self._pack(z, [None] * len(self._flat)))

    def _pack(self, values: Sequence[Tensor], others: Sequence[Any]) -> list[Structure]:
        flat = list(others)
        for i, value in zip(self._places, values, strict=True):
            flat[i] = value
        return list(tf.nest.pack_sequence_as(self._arguments, flat)) if self._nested else flat

    def jacobians(
        self, gradients: Sequence[Structure], y: Tensor, batch_ndims: int | None
    ) -> list[Leaf | None]:
        """Returns for each of `xs` a checked `Leaf`, or None where it has no gradient."""
        found = []
        xs = iter(self.xs)
        for parameter, argument, gradient in zip(
            self._parameters, self._arguments, gradients, strict=True
        ):
            by = f"the gradient with respect to {parameter}"
            for path, x, gx in structures.pair(argument, gradient, parameter, by):
                names = shapes.Names("the value", f"{by}{path}", f"{parameter}{path}")
                if structures.has_derivatives(x):
                    x = next(xs)
                    leaf = gx is not None and TENSORFLOW.leaf(path, x, gx, y, batch_ndims, names)
                    found.append(leaf or None)
                elif gx is not None:
                    raise TypeError(
                        f"{names.x} has no derivatives, but {names.gx} is not None. Return None "
                        f"there, or pass {names.x} as a tensor of a floating dtype."
                    )
        return found


class Callee:
    """A function whose signature is looked up once.

    Attributes:
        f: The function itself.
        name: Its name in errors.
        form: The function that is called in its place.
        is_held_by: Whether it is a method of a class.
    """

    def __init__(self, f: Function) -> None:
        self.f = f
        self.name = name_of(f)
        self.form: Function | None = None
        self._signature = signature_of(f)
        self._parameters = list(self._signature.parameters.values()) if self._signature else []
        kinds = {parameter.kind for parameter in self._parameters}
        self._positional = kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._body = getattr(f, "__qualname__", "").rpartition(".")[0]
        self._function = getattr(f, "__func__", f)  # of a bound method
        self.is_held_by: Callable[[type], bool] = self._is_held_by

    def __call__(self, *args: Structure, **kwargs: Structure) -> Structure:
        """Calls the function."""
        return self.f(*args, **kwargs)

    def own(self, args: Sequence[Structure]) -> int:
        """How many of the arguments are the instance or class: 1 in the call of a method.

        Python passes it to a function that its class holds, whatever the parameter is called.
        """
        if not args or isinstance(args[0], tf.Tensor):
            return 0
        return int(self.is_held_by(args[0] if isinstance(args[0], type) else args[0].__class__))

    def _is_held_by(self, owner: type) -> bool:
        held = [a for c in owner.__mro__ for a in vars(c).values() if unbound(a) is self.form]
        if not held:  # under its name it may be in another decorator
            bodies = [vars(c) for c in owner.__mro__ if c.__qualname__ == self._body]
            held = [body[self.name] for body in bodies if self.name in body]
            held = [a for a in held if unbound(a) is not self._function]
        return any(not isinstance(a, staticmethod) for a in held)

    def bind(self, args: Sequence[Structure], kwargs: Kwargs) -> Call:
        """The arguments as the function receives them."""
        complete = self._positional and not kwargs and len(args) == len(self._parameters)
        if self._signature is None or complete:
            return Call(tuple(args), dict(kwargs))
        bound = bind(self._signature, args, kwargs, self.name)
        passed = set(bound.arguments)
        bound.apply_defaults()
        return Call(bound.args, bound.kwargs, frozenset(bound.arguments) - passed)

    def names(self, call: Call) -> list[str]:
        """The names of the arguments of a call, in errors: `x`, `args[0]`."""
        by_kind: dict[Any, list[str]] = {}
        for parameter in self._parameters:
            by_kind.setdefault(parameter.kind, []).append(parameter.name)
        named = [
            *by_kind.get(inspect.Parameter.POSITIONAL_ONLY, []),
            *by_kind.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, []),
        ]
        (rest,) = by_kind.get(inspect.Parameter.VAR_POSITIONAL, ["args"])
        named += [f"{rest}[{i}]" for i in range(len(call.args) - len(named))]
        return [*named[: len(call.args)], *call.kwargs]

    def takes(self, keyword: str) -> bool:
        """Whether there is a parameter of this name that can be passed by keyword."""
        return any(p.name == keyword and p.kind is not p.POSITIONAL_ONLY for p in self._parameters)

    def select(self, argnums: Argnums, args: Sequence[Structure], kwargs: Kwargs) -> Selection:
        """The arguments of a call that `argnums`, ints or parameter names, select.

        Raises:
            TypeError: `argnums` holds something else, or the call does not fit the signature.
            ValueError: There is no such argument.
        """
        call = self.bind(args, kwargs)
        own = self.own(call.args)
        parameters = [parameter.name for parameter in self._parameters]
        keys, names = [], []
        for key in argnums if isinstance(argnums, (list, tuple)) else [argnums]:
            if not (shapes.is_int(key) or isinstance(key, str)):
                raise TypeError(f"argnums must be ints or parameter names, got {key!r}.")
            if isinstance(key, int) and key >= 0:
                key += own
            if isinstance(key, str) and key in parameters and key not in call.kwargs:
                self._check_single(key)
                key = parameters.index(key)  # a positional parameter by its name
            count = len(call.args)
            there = key in call.kwargs if isinstance(key, str) else own - count <= key < count
            if not there:
                raise ValueError(
                    f"argnums has {key!r}, but the call of {self.name} has {count - own} "
                    f"positional arguments and the keywords {list(call.kwargs)}; its parameters "
                    f"are {parameters}."
                )
            if isinstance(key, int):
                key %= count
            if key in keys:
                raise ValueError(f"argnums={argnums!r} names an argument of {self.name} twice.")
            keys.append(key)
            named = isinstance(key, int) and key < len(parameters)
            names.append(
                key if isinstance(key, str) else parameters[key] if named else f"args[{key}]"
            )
        return Selection(call, keys, names)

    def _check_single(self, key: str) -> None:
        """Checks that a parameter does not stand for any number of arguments."""
        kind = next(parameter.kind for parameter in self._parameters if parameter.name == key)
        if kind is inspect.Parameter.VAR_POSITIONAL:
            stars, these = "*", "positions"
        elif kind is inspect.Parameter.VAR_KEYWORD:
            stars, these = "**", "names"
        else:
            return
        raise ValueError(
            f"argnums has {key!r}, but {stars}{key} of {self.name} stands for any number of "
            f"arguments. Pass the {these} of those that the gradients are with respect to."
        )


def imitate(form: Any, f: Function) -> Any:
    """`functools.update_wrapper` without `__wrapped__`; returns `form`.

    If a function with `__wrapped__` is passed to a `tf.function`, TensorFlow uses the wrapped
    function instead, and the custom derivative would be silently lost.
    """
    # If f is itself a form, its attributes would replace those of this one.
    functools.update_wrapper(form, f, updated=())
    del form.__wrapped__
    signature = signature_of(f)
    if signature is not None:
        form.__signature__ = signature
    return form


@unconverted
def as_form(f: Function, make: Callable[[Callee], Function], *attributes: str) -> Function:
    """Returns `make` of `f`, under a class method or static method if `f` is one."""
    if not isinstance(f, (classmethod, staticmethod)):
        function = Callee(f)
        form: Function = imitate(make(function), f)
        function.form = form
        if form.__name__ == "<lambda>":  # Keras stores a lambda's code, here the code of the form
            form.__name__ = "sgtrick(<lambda>)"
        return form
    inside = as_form(f.__func__, make)
    method = type(f)(inside)
    for attribute in attributes:
        setattr(method, attribute, getattr(inside, attribute))
    return method


def unbound(f: Function) -> Function:
    """The function inside a class method or static method; any other `f` unchanged."""
    return f.__func__ if isinstance(f, (classmethod, staticmethod)) else f


def name_of(f: Function) -> str:
    """The name of a function in errors."""
    return str(getattr(f, "__name__", type(f).__name__))


def bind(
    signature: inspect.Signature, args: Sequence[Structure], kwargs: Kwargs, name: str
) -> inspect.BoundArguments:
    """`signature.bind`, whose errors name the function."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def signature_of(f: Function) -> inspect.Signature | None:
    """The signature of `f`, None if Python cannot find it."""
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):  # some builtins have none
        return None
