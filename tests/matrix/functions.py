"""True functions with their derivatives in closed form, and forward computations that mislead.

`misled(f)` has the value of `f` and twice its derivative. A form built on it shows where TensorFlow
drops the custom derivative: the answer is double.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def misled(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f(*(2 * x - tf.stop_gradient(x) for x in map(tf.convert_to_tensor, args)))


def scalar(x: Any) -> Any:
    """`[..., 3]` to `[...]`."""
    a, b, c = tf.unstack(x, 3, -1)
    return tf.sin(a) * tf.exp(b / 2) + a * c**2


def scalar_gradient(x: Any) -> Any:
    a, b, c = tf.unstack(x, 3, -1)
    e = tf.exp(b / 2)
    return tf.stack([tf.cos(a) * e + c**2, tf.sin(a) * e / 2, 2 * a * c], -1)


def scalar_hessian(x: Any) -> Any:
    a, b, c = tf.unstack(x, 3, -1)
    e, zero = tf.exp(b / 2), tf.zeros_like(a)
    rows = [
        [-tf.sin(a) * e, tf.cos(a) * e / 2, 2 * c],
        [tf.cos(a) * e / 2, tf.sin(a) * e / 4, zero],
        [2 * c, zero, 2 * a],
    ]
    return tf.stack([tf.stack(row, -1) for row in rows], -2)


def vector(x: Any) -> Any:
    """`[..., 3]` to `[..., 2]`."""
    a, b, c = tf.unstack(x, 3, -1)
    return tf.stack([a * tf.sin(b), b * c**2], -1)


def vector_jacobian(x: Any) -> Any:
    a, b, c = tf.unstack(x, 3, -1)
    zero = tf.zeros_like(a)
    rows = [[tf.sin(b), a * tf.cos(b), zero], [zero, c**2, 2 * b * c]]
    return tf.stack([tf.stack(row, -1) for row in rows], -2)


def vector_hessian(x: Any) -> Any:
    """`[..., 2, 3, 3]`."""
    a, b, c = tf.unstack(x, 3, -1)
    zero = tf.zeros_like(a)
    first = [[zero, tf.cos(b), zero], [tf.cos(b), -a * tf.sin(b), zero], [zero] * 3]
    second = [[zero] * 3, [zero, zero, 2 * c], [zero, 2 * c, 2 * b]]
    return tf.stack(
        [tf.stack([tf.stack(row, -1) for row in rows], -2) for rows in (first, second)], -3
    )


def elementwise(x: Any) -> Any:
    return tf.sin(x) * x


def elementwise_gradient(x: Any) -> Any:
    return tf.cos(x) * x + tf.sin(x)


def two(x: Any, y: Any) -> Any:
    """`[..., 2, 2]` and `[...]` to `[...]`."""
    return tf.reduce_sum(x**3, [-2, -1]) * tf.sin(y)


def two_gradients(x: Any, y: Any) -> tuple[Any, Any]:
    s = tf.sin(y)
    return 3 * x**2 * s[..., tf.newaxis, tf.newaxis], tf.reduce_sum(x**3, [-2, -1]) * tf.cos(y)


def two_hessian_times(x: Any, y: Any, v: Any, w: Any) -> tuple[Any, Any]:
    s, c = (t[..., tf.newaxis, tf.newaxis] for t in (tf.sin(y), tf.cos(y)))
    mixed = 3 * x**2 * c
    return (
        6 * x * s * v + mixed * w[..., tf.newaxis, tf.newaxis],
        tf.reduce_sum(mixed * v, [-2, -1]) - tf.reduce_sum(x**3, [-2, -1]) * tf.sin(y) * w,
    )
