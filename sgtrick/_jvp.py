"""JAX's `custom_jvp` protocol, which TensorFlow does not have."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from sgtrick import _arguments, _functions, _leaves, _trick


def custom_jvp(f: Callable[..., Any], *, nondiff_argnums: Any = (), order: int = 1) -> Any:
    """Gives a function a rule for Jacobian-vector products, by the protocol of `jax.custom_jvp`.

    The rule is linear in the tangents, so it serves forward and reverse mode alike.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.custom_jvp
        ... def log1pexp(x):
        ...     return tf.where(x > 50, x, tf.math.log(1 + tf.exp(x)))
        >>> @log1pexp.defjvp
        ... def _(primals, tangents):
        ...     (x,), (t,) = primals, tangents
        ...     return log1pexp(x), tf.sigmoid(x) * t
        >>> x = tf.constant([0.0, 100.0])
        >>> with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        ...     y = log1pexp(x)
        >>> accumulator.jvp(y).numpy()
        array([0.5, 1. ], dtype=float32)

    Args:
        f: The function: positional arguments and outputs of any structure. On methods, `self` is
            no argument, and the rule is called as a method too.
        nondiff_argnums: Positions of arguments that have no derivatives. The rule gets them first.
        order: Through which order derivatives are exact, as in `with_gradient`.

    Returns:
        The function, with the decorator `defjvp` for its rule
        `jvp(*nondiff, primals, tangents) -> (primal_out, tangent_out)`. `primals` is a tuple of the
        other arguments, keywords as positions and defaults filled in; `tangents` has their
        structure, with None for what has no derivatives (int, bool, string); `tangent_out` has the
        structure, shapes and dtypes of the output, with None where there is no derivative. The
        value is that of `f`; `primal_out` is not used. Under every transformation the function has
        the derivatives of ::

            f(s) + sum_i w_i jvp(s + c_i z, z),    s = stop(x), z = x - s

        with nodes `c_i` and weights `w_i` as in `with_gradient`. Variables that `f` reads keep
        autodiff. An output whose tangent is NaN for zero tangents, say by `0 / 0`, keeps its value
        and has no derivative there.

    Raises:
        TypeError: `nondiff_argnums` holds no ints, the function is called before there is a rule or
            with keyword-only arguments, or the rule does not return a pair or the dtypes of the
            output.
        ValueError: A position that is no argument, or tangents without the structure or shapes of
            the output.
    """
    if not isinstance(nondiff_argnums, (list, tuple)):
        nondiff_argnums = (nondiff_argnums,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in nondiff_argnums):
        raise TypeError(f"nondiff_argnums must be positions, got {nondiff_argnums!r}.")
    return CustomJvp(f, None, tuple(nondiff_argnums), _functions.Order(order))


class CustomJvp:
    """A function with a JVP rule; made by `custom_jvp`."""

    def __init__(
        self,
        f: Callable[..., Any],
        jvp: Callable[..., Any] | None,
        nondiff_argnums: tuple[int, ...],
        order: _functions.Order,
    ) -> None:
        _arguments.imitate(self, f)
        self._f, self._jvp = _arguments.Function(f), jvp
        self._nondiff_argnums, self._order = nondiff_argnums, order

    def defjvp(self, jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule `jvp(*nondiff, primals, tangents) -> (primal_out, tangent_out)`."""
        self._jvp = jvp
        return jvp

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds `f` and the rule as methods."""
        if instance is None:
            return self
        f = _arguments.bound(self._f.f, instance, owner)
        jvp = _arguments.bound(self._jvp, instance, owner)
        return CustomJvp(f, jvp, self._nondiff_argnums, self._order)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value of `f`, with the derivatives of the rule."""
        name, jvp = self._f.name, self._jvp
        if jvp is None:
            raise TypeError(
                f"{name} has no JVP rule. Define it with the decorator @{name}.defjvp: a function "
                "jvp(primals, tangents) that returns (primal_out, tangent_out)."
            )
        call = self._f.bind(args, kwargs)
        if call.kwargs:
            raise TypeError(
                f"{name} has the keyword-only arguments {list(call.kwargs)}, for which the "
                "protocol of JVP rules has no place. Make them positional."
            )
        for i in self._nondiff_argnums:
            if not -len(call.args) <= i < len(call.args):
                raise ValueError(
                    f"nondiff_argnums has {i}, but the call of {name} has {len(call.args)} "
                    "positional arguments."
                )
        nondiff = sorted(i % len(call.args) for i in self._nondiff_argnums)
        argnums = [i for i in range(len(call.args)) if i not in nondiff]
        point = self._f.point(argnums, call.args, {})
        y = point.stopped(self._f)
        order = self._order.now()
        if order == 0:
            return tf.nest.map_structure(
                lambda y: self._order.ended(tf.convert_to_tensor(y), point.xs, name), y
            )
        z = [_trick.zero(x, guard=True) for x in point.xs]
        outputs = list(_leaves.flatten(y, f"{name}(...)"))
        terms: list[list[Any]] = [[] for _ in outputs]
        for node, weight in _functions.nodes(point, z, order):
            before = [node.args[i] for i in nondiff]
            with self._order.inside_rule(order):
                result = jvp(*before, point.primals(node), point.tangents(z))
            tangents = _tangents(result, y, name)
            for i, ((path, y_i), tangent) in enumerate(zip(outputs, tangents, strict=True)):
                if tangent is not None:
                    terms[i].append(weight * _checked(tangent, y_i, path))
        return tf.nest.pack_sequence_as(
            y, [_trick.with_linear(y_i, t) for (_, y_i), t in zip(outputs, terms, strict=True)]
        )


def _tangents(result: Any, y: Any, name: str) -> list[Any]:
    """The leaves of `tangent_out`."""
    if not (isinstance(result, (list, tuple)) and len(result) == 2):
        raise TypeError(
            f"The JVP rule of {name} must return (primal_out, tangent_out), got "
            f"{type(result).__name__}."
        )
    return [t for _, _, t in _leaves.pair(y, result[1], f"{name}(...)", "tangent_out")]


def _checked(tangent: Any, y: Any, path: str) -> Any:
    """A tangent like its output."""
    tangent, y = _leaves.to_tensor(tangent, f"the tangent of {path}"), tf.convert_to_tensor(y)
    if tangent.dtype != y.dtype or not _leaves.is_differentiable(y.dtype):
        raise TypeError(
            f"The tangent of {path} has dtype {tangent.dtype.name}, the output {y.dtype.name}. "
            "They must be equal and floating or complex; where there is no derivative, return None."
        )
    return _leaves.shaped_like(tangent, y, f"The tangent of {path}", "the output")
