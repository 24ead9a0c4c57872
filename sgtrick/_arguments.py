"""Calls of a function, in which the differentiated arguments are found by position or name."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick import _leaves


class Call(NamedTuple):
    """The arguments of one call: keywords turned into positions, defaults filled in."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, f: Callable[..., Any]) -> Any:
        """Calls `f`."""
        return f(*self.args, **self.kwargs)

    def get(self, keys: Sequence[int | str]) -> tuple[Any, ...]:
        """The arguments at these positions or keywords."""
        for key in keys:
            if isinstance(key, int) and not -len(self.args) <= key < len(self.args):
                raise ValueError(
                    f"argnums has {key}, but the call has {len(self.args)} positional arguments."
                )
            if isinstance(key, str) and key not in self.kwargs:
                raise ValueError(f"argnums has {key!r}, but the call has no such argument.")
        return tuple(self.args[k] if isinstance(k, int) else self.kwargs[k] for k in keys)

    def replace(self, keys: Sequence[int | str], values: Sequence[Any]) -> "Call":
        """The same call with other arguments there."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key, value in zip(keys, values, strict=True):
            if isinstance(key, int):
                args[key] = value
            else:
                kwargs[key] = value
        return Call(tuple(args), kwargs)


def bind(f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Arguments as `f` receives them."""
    signature = _signature(f)
    if signature is None:
        return Call(tuple(args), kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return Call(bound.args, bound.kwargs)


def resolve(f: Callable[..., Any], argnums: Any, name: str = "argnums") -> list[int | str]:
    """`argnums` as a list in which parameter names stand for keyword-only parameters alone.

    Raises:
        TypeError: Not ints and names.
        ValueError: No parameter of that name.
    """
    keys: list[int | str] = []
    for key in argnums if isinstance(argnums, (list, tuple)) else [argnums]:
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise TypeError(f"{name} must be ints or parameter names, got {key!r}.")
        signature = _signature(f)
        if isinstance(key, str) and signature is not None:
            parameters = signature.parameters
            if key not in parameters:
                if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                    keys.append(key)
                    continue
                raise ValueError(f"{name} has {key!r}, but the parameters are {list(parameters)}.")
            if parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY:
                key = list(parameters).index(key)
        keys.append(key)
    return keys


def stopped(structure: Any) -> Any:
    """Every leaf that has derivatives as a tensor without them; the other leaves as they are."""
    return tf.nest.map_structure(
        lambda leaf: (
            tf.stop_gradient(_leaves.to_tensor(leaf, "argument")) if has_derivatives(leaf) else leaf
        ),
        structure,
    )


def has_derivatives(leaf: Any) -> bool:
    """Whether a leaf is a floating or complex number, array, tensor or variable."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    try:
        return dtype is not None and _leaves.is_differentiable(tf.as_dtype(dtype))
    except TypeError:  # a dtype that TensorFlow does not know
        return False


def _signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):  # some builtins have none
        return None
