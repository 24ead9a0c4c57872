"""Calls of a function with any signature, and functions that stand for others."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._types import Argnums, Function, Kwargs, Structure


@dataclasses.dataclass  # AutoGraph does not convert __call__ of named tuples
class Call:
    """The arguments of one call, with keywords turned into positions and defaults filled in.

    Attributes:
        values: The arguments by position, followed by those by keyword.
        keywords: The names of the arguments by keyword.
        left_out: The names of the arguments that the caller left out.
        parameters: The parameters that the arguments were matched with.
    """

    values: Sequence[Structure]
    keywords: Sequence[str] = ()
    left_out: frozenset[str] = frozenset()
    parameters: Sequence[inspect.Parameter] = ()
    _flat: list[list[tuple[str, Any]]] | None = dataclasses.field(default=None, init=False)

    @property
    def positional(self) -> int:
        """How many arguments are passed by position."""
        return len(self.values) - len(self.keywords)

    def __call__(self, f: Function) -> Structure:
        """Calls `f`."""
        n = self.positional
        named = zip(self.keywords, self.values[n:], strict=True)
        return f(*self.values[:n], **dict(named))

    @property  # a cached_property has a lock, which torch.compile cannot trace
    def flat(self) -> list[list[tuple[str, Any]]]:
        """The leaves of each argument with their places, from before a function changed a list."""
        if self._flat is None:
            self._flat = [list(structures.flatten(value)) for value in self.values]
        return self._flat

    @property
    def leaves(self) -> list[Any]:
        """The leaves of all arguments."""
        return [leaf for argument in self.flat for _, leaf in argument]

    def is_leaf(self, k: int) -> bool:
        """Whether an argument is a leaf, and no structure."""
        return [place for place, _ in self.flat[k]] == [""]

    def with_arguments(self, others: Mapping[int, Structure]) -> "Call":
        """This call with other arguments in some positions."""
        if not others:
            return self
        flat = self.flat.copy()
        for k, value in others.items():
            flat[k] = list(structures.flatten(value))
        values = [others.get(k, value) for k, value in enumerate(self.values)]
        call = dataclasses.replace(self, values=values)
        call._flat = flat
        return call


class Callee:
    """A function whose signature is looked up once.

    Attributes:
        f: The function itself.
        name: Its name in errors.
        defaults: The defaults of its parameters, by name.
        form: The function that is called in its place.
        is_held_by: Whether it is a method of a class.
    """

    def __init__(self, f: Function) -> None:
        self.f = f
        self.name = name_of(f)
        self.form: Function | None = None
        self._signature = signature_of(f)
        self._parameters = list(self._signature.parameters.values()) if self._signature else []
        self.defaults = {p.name: p.default for p in self._parameters if p.default is not p.empty}
        kinds = {parameter.kind for parameter in self._parameters}
        self._positional = kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        self._body = getattr(f, "__qualname__", "").rpartition(".")[0]
        self._function = getattr(f, "__func__", f)  # of a bound method
        self.is_held_by: Callable[[type], bool] = self._is_held_by

    def __call__(self, *args: Structure, **kwargs: Structure) -> Structure:
        """Calls the function."""
        return self.f(*args, **kwargs)

    def receivers(self, args: Sequence[Structure]) -> int:
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
            return Call([*args, *kwargs.values()], list(kwargs), parameters=self._parameters)
        try:
            bound = bind(self._signature, args, kwargs, self.name)
        except TypeError:
            if not is_open(self.f):
                raise
            # A wrapper may pass the function inside arguments of its own.
            own = inspect.signature(self.f, follow_wrapped=False)
            bound = bind(own, args, kwargs, self.name)
        passed = set(bound.arguments)
        bound.apply_defaults()
        left_out = frozenset(bound.arguments) - passed
        parameters = list(bound.signature.parameters.values())
        return Call([*bound.args, *bound.kwargs.values()], list(bound.kwargs), left_out, parameters)

    def names(self, call: Call) -> list[str]:
        """The names of the arguments of a call, in errors: `x`, `args[0]`."""
        named = [p.name for p in call.parameters if p.kind in _SINGLE]
        rest = next((p.name for p in call.parameters if p.kind is p.VAR_POSITIONAL), "args")
        named += [f"{rest}[{i}]" for i in range(call.positional - len(named))]
        return [*named[: call.positional], *call.keywords]

    def takes(self, keyword: str) -> bool:
        """Whether there is a parameter of this name that can be passed by keyword."""
        return any(p.name == keyword and p.kind is not p.POSITIONAL_ONLY for p in self._parameters)

    def takes_keyword(self, keyword: str) -> bool:
        """Whether an argument of this name can be passed by keyword."""
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        return takes_all or self._signature is None or self.takes(keyword)

    def defaulted(self, call: Call) -> set[str]:
        """The names of the arguments that have their default in a call, passed or not.

        `tf.function` passes the defaults of what it calls, so that nobody can tell the two apart.
        """
        if not self.defaults:
            return set()
        pairs = zip(self.names(call), call.values, strict=True)
        same = {k for k, v in pairs if k in self.defaults and _are_same(v, self.defaults[k])}
        return same | call.left_out

    def for_rule(self, rule: "Callee", call: Call, defaulted: set[str]) -> Call:
        """A call of this function as a call of its `rule`, without the defaults it cannot take.

        Args:
            rule: Is called like the function. A parameter that is called like another parameter of
                the function, or that is for the names of operations, gets no default by position.
            call: The call.
            defaulted: The names of the arguments that have their default.

        Raises:
            TypeError: The rule cannot take another argument.
        """
        single = [p for p in rule._parameters if p.kind in _SINGLE]
        names, n = self.names(call), call.positional
        if rule._signature is None or [p.name for p in single] == names:
            return call
        kinds = {p.kind for p in rule._parameters}

        def fits(i: int) -> bool:
            if i < len(single):  # TensorFlow's functions end in `name=None`, for nothing but names
                return single[i].name == names[i] or single[i].name not in (*names, "name")
            return inspect.Parameter.VAR_POSITIONAL in kinds

        while n and names[n - 1] in defaulted and not fits(n - 1):
            n -= 1
        filled, takes_all = {p.name for p in single[:n]}, inspect.Parameter.VAR_KEYWORD in kinds
        taken = {k for k in names[n:] if takes_all or (rule.takes(k) and k not in filled)}
        keywords = [k for k in names[n:] if k in taken or k not in defaulted]
        by_name = dict(zip(names, call.values, strict=True))
        values = [*call.values[:n], *(by_name[k] for k in keywords)]
        misplaced = [k for i, k in enumerate(names[:n]) if not fits(i)]
        try:
            if misplaced and len(values) < len(names):
                raise TypeError(f"no place for {misplaced[0]}")
            rule._signature.bind(*values[:n], **{k: by_name[k] for k in keywords})
        except TypeError as error:
            if is_open(rule.f):
                return Call(values, keywords)
            is_short = str(error).startswith("missing")
            raise TypeError(
                f"The gradient function of {self.name} is called with the same arguments, "
                f"{', '.join(names)}, but cannot take them: {error}. It may leave out those that "
                f"have their default ({', '.join(k for k in names if k in defaulted) or 'none'}); "
                "tf.function passes a default that is a tensor or an array like any other tensor."
                + " A rule that takes the upstream gradient is one of custom_vjp."
                * is_short
            ) from None
        return Call(values, keywords)

    def positions(self, argnums: Argnums, call: Call, option: str = "argnums") -> list[int]:
        """Where the arguments of a call are that `argnums`, ints or parameter names, select.

        Args:
            argnums: The value of the option.
            call: The call.
            option: The name of the option in errors.

        Raises:
            ValueError: There is no such argument, or it is selected twice.
        """
        own, count, names = self.receivers(call.values), call.positional, self.names(call)
        found: list[int] = []
        for key in as_keys(argnums, option):
            if isinstance(key, str):
                place = names.index(key) if key in names else -1
            else:
                place = key + (own if key >= 0 else count)
                place = place if place < count else -1
            if place < own:
                raise ValueError(
                    f"{option} has {key!r}, which is no argument of this call of {self.name}. Pass "
                    f"one of the names {names[own:]}, or a position: {_range(count - own)}."
                )
            if place in found:
                raise ValueError(f"{option}={argnums!r} names an argument of {self.name} twice.")
            found.append(place)
        return found


_SINGLE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _are_same(value: Structure, default: Structure) -> bool:
    """Whether an argument is its default: the same object, or the same Python value.

    Whether equal literals are one object is up to Python.
    """
    pairs = [list(structures.flatten(structure)) for structure in (value, default)]
    return len(pairs[0]) == len(pairs[1]) and all(
        p == q and (s is t or (type(s) is type(t) in _LITERALS and repr(s) == repr(t)))
        for (p, s), (q, t) in zip(*pairs, strict=True)
    )


_LITERALS = (bool, int, float, complex, str, bytes)  # their repr tells -0.0 from 0.0


def as_keys(argnums: Argnums, option: str) -> Sequence[int | str]:
    """The value of an option like `argnums` as a sequence, checked to hold ints and names."""
    keys: Sequence[Any] = [*argnums] if structures.is_sequence(argnums) else [argnums]
    for key in keys:
        if not (shapes.is_int(key) or isinstance(key, str)):
            raise TypeError(f"{option} must be ints or parameter names, got {key!r}.")
    return keys


def _range(count: int) -> str:
    """The positions of so many arguments, in errors."""
    return f"from {-count} to {count - 1}" if count else "there are none"


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


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def as_form(f: Function, make: Callable[[Callee], Function], *attributes: str) -> Function:
    """Returns `make` of `f`, under a class method or static method if `f` is one."""
    check_function(f, "f")
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


def check_function(f: object, name: str) -> None:
    """Checks that the argument called `name` can be called, perhaps as a method."""
    if not callable(f) and not hasattr(f, "__get__"):
        raise TypeError(f"{name} must be a function, got {type(f).__name__}.")


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
    """The signature of `f`, None if Python cannot find it.

    A wrapper with `*args` or `**kwargs` has that of the function inside, as `functools.wraps` says.
    """
    try:
        return inspect.signature(f, follow_wrapped=is_open(f))
    except (TypeError, ValueError):  # some builtins have none
        return None


def is_open(f: Function) -> bool:
    """Whether `f` itself takes `*args` or `**kwargs`, which may be for a function inside."""
    try:
        own = inspect.signature(f, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own)
