"""Functions drawn at random for `from_jax` and `from_torch`, and what they give by TensorFlow.

Each is written once, in operations that the three have. The oracle is a loop over the members, with
plain tapes of TensorFlow in float64.
"""

import dataclasses
import importlib
from typing import Any

import numpy as np
import tensorflow as tf

import sgtrick
from fuzz.calls import LOUD, Call, named

FORMS = {"jax": sgtrick.from_jax, "torch": sgtrick.from_torch}


class TensorFlow:
    """What `jax.numpy` and `torch` have under one name."""

    sin, tanh, exp, reshape = tf.sin, tf.tanh, tf.exp, tf.reshape
    log1p, eye, einsum, sum = tf.math.log1p, tf.eye, tf.einsum, tf.reduce_sum

    @staticmethod
    def where(condition: Any, one: Any, other: Any) -> Any:
        one, other = tf.cast(one, tf.float64), tf.cast(other, tf.float64)
        return tf.where(condition, one, other)

    class linalg:  # noqa: N801 - the name of a module
        solve, cholesky = tf.linalg.solve, tf.linalg.cholesky
        slogdet = tf.linalg.slogdet


# Entry by entry, smooth enough to have second derivatives at the points that are drawn.
MAPS = {
    "sin": lambda np, x: np.sin(x),
    "cubic": lambda np, x: x**3 / 3 - x,
    "bell": lambda np, x: np.exp(-(x**2)) * x,
    "log1p": lambda np, x: np.log1p(x**2 / 2),
    "where": lambda np, x: np.where(x > 0.05, np.tanh(x), x * x / 2),
    "quotient": lambda np, x: x / (2 + np.sin(x)),
}


def outer(np: Any, x: Any) -> Any:
    """A matrix that is not symmetric, and has an inverse."""
    n = x.shape[0]
    return np.einsum("i,j->ij", x, np.sin(x + 1)) / 4 + np.eye(n, dtype=x.dtype) * (2 + x * x)


def square(np: Any, x: Any) -> Any:
    """A positive matrix."""
    a = outer(np, x)
    return np.einsum("ki,kj->ij", a, a)


# Of a vector to a number.
REDUCTIONS = {
    "sum": lambda np, x: np.sum(x),
    "norm": lambda np, x: (1 + np.sum(x**2)) ** 0.5,
    "product of sums": lambda np, x: np.sum(np.sin(x)) * np.sum(np.exp(x / 3)),
    "softmax": lambda np, x: np.sum(np.exp(x) * x) / (1 + np.sum(np.exp(x))),
    "slogdet": lambda np, x: np.linalg.slogdet(outer(np, x))[1],
    "solve": lambda np, x: np.sum(np.linalg.solve(outer(np, x), x[:, None])[:, 0] * np.sin(x)),
    "cholesky": lambda np, x: np.sum(np.sin(np.linalg.cholesky(square(np, x)))),
}
LINEAR_ALGEBRA = ("slogdet", "solve", "cholesky")

# Of numbers to a number.
LAST = {
    "square": lambda np, t: t + t * t / 2,
    "sin": lambda np, t: np.sin(t),
    "log": lambda np, t: np.log1p(t * t),
    "tanh": lambda np, t: np.tanh(t / 2) * 3,
}


@dataclasses.dataclass(frozen=True)
class Foreign(Call):
    """A call of `from_jax` or `from_torch`.

    Attributes:
        framework: `jax` or `torch`.
        terms: For each leaf a name out of `MAPS` and of `REDUCTIONS`.
        pairs: Whether each two neighbours are multiplied, entry by entry with every other.
        last: A name out of `LAST`.
        jit: As the option of `from_jax`.
        above: The function fails where `t` is larger, which takes a value that is not traced.
    """

    framework: str = "jax"
    terms: tuple[tuple[str, str], ...] = ()
    pairs: bool = False
    last: str = "square"
    jit: bool = True
    above: float = float("inf")

    def function(self, np: Any, *arguments: Any) -> Any:
        """The value and another number, of one member."""
        t, before = 0.0, None
        for k, (leaf, x) in enumerate(zip(self.leaves, tf.nest.flatten(arguments), strict=True)):
            x = np.reshape(x, (-1,))
            if not leaf.live:
                t = t + np.sum(np.where(x == 0, 0.25, 0.0))
                continue
            by_entry, reduction = self.terms[k % len(self.terms)]
            if not x.shape[0] and reduction in LINEAR_ALGEBRA:
                reduction = "sum"
            x = MAPS[by_entry](np, x)
            t = t + (0.5 + k) * REDUCTIONS[reduction](np, x)
            if self.pairs and before is not None:
                t = t + np.sum(np.sin(np.einsum("i,j->ij", before, x)))
            before = x
        return LAST[self.last](np, t), t

    def foreign(self, *arguments: Any) -> Any:
        """The same in the framework."""
        np = importlib.import_module({"jax": "jax.numpy"}.get(self.framework, self.framework))
        y, t = self.function(np, *arguments)
        if self.above < float("inf") and t > self.above:
            raise ArithmeticError("no solution")
        return (y, np.stack([t, 2 * t])) if self.has_aux else y

    def form(self) -> Any:
        options = {"jit": self.jit} if self.framework == "jax" else {}
        return FORMS[self.framework](
            named(self.foreign, "xyz"[: len(self.arguments)]),
            event_ndims=self.event_ndims,
            value_shape=(),
            vmap=self.vectorized,
            has_aux=self.has_aux,
            dtype=self.dtype,
            on_error=self.on_error,
            name="engine",
            **options,
        )

    def member(self, arrays: list[np.ndarray], vs: list[np.ndarray]) -> Any:
        """By tapes."""
        xs = [tf.constant(a, tf.float64 if self.leaves[k].live else tf.int32)
              for k, a in enumerate(arrays)]  # fmt: skip
        live = [xs[k] for k in self.live]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(live)
            with tf.GradientTape() as inner:
                inner.watch(live)
                y, t = self.function(TensorFlow, *tf.nest.pack_sequence_as(self.arguments, xs))
            gradients = inner.gradient(y, live, unconnected_gradients="zero")
            along = tf.add_n(
                [tf.reduce_sum(g * vs[k]) for g, k in zip(gradients, self.live, strict=True)]
            )
        if t > self.above:
            return None
        return y, (t, 2 * t), gradients, tape.gradient(along, live, unconnected_gradients="zero")

    def verdict(self) -> str:
        """`right`, or what is wrong."""
        expected = self.expected()
        try:
            came = self._came(self.form())
        except LOUD as error:
            is_due = expected is None and "engine" in str(error)
            return "right" if is_due else f"{error!r}, expected {expected}"
        if expected is None:
            return f"no error, but {came}"
        return self._compared(came, expected) or "right"
