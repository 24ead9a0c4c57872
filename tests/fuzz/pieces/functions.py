"""Functions of a point with any number of dimensions, or of one.

Each with its Jacobian `R + D`, what multiplies that from both sides, the product of its Hessian and
a vector, and the same in NumPy.
"""

import numpy as np
import tensorflow as tf


def conj(t):
    return tf.math.conj(t) if t.dtype.is_complex else t


class Asinh:
    """Entry by entry."""

    ranks = (0, 1, 2)

    @staticmethod
    def true(x):
        return tf.asinh(x)

    @staticmethod
    def jacobian(x):
        return (1 + x**2) ** -0.5

    @staticmethod
    def pull(j, u):
        return conj(j) * u

    @staticmethod
    def push(j, t):
        return j * t

    @staticmethod
    def engine(x):
        return np.arcsinh(x), (1 + x**2) ** -0.5

    @staticmethod
    def hessp(x, v):
        return -x * (1 + x**2) ** -1.5 * v


class ToNumber:
    @staticmethod
    def pull(j, u):
        return conj(j) * u

    @staticmethod
    def push(j, t):
        return tf.reduce_sum(j * t)


class Sum(ToNumber):
    ranks = (0, 1, 2)

    @staticmethod
    def true(x):
        return tf.reduce_sum(tf.sin(x))

    @staticmethod
    def jacobian(x):
        return tf.cos(x)

    @staticmethod
    def engine(x):
        return np.sin(x).sum(), np.cos(x)

    @staticmethod
    def hessp(x, v):
        return -np.sin(x) * v


class LogSoftmax:
    """With a Jacobian that is full, and not symmetric."""

    ranks = (1,)

    @staticmethod
    def true(x):
        return tf.nn.log_softmax(x)

    @staticmethod
    def jacobian(x):
        return tf.eye(tf.size(x), dtype=x.dtype) - tf.nn.softmax(x)

    @staticmethod
    def pull(j, u):
        return tf.linalg.matvec(j, u, transpose_a=True)

    @staticmethod
    def push(j, t):
        return tf.linalg.matvec(j, t)


class Logdet(ToNumber):
    """Linear algebra: of a matrix to a number."""

    ranks = (2,)

    @staticmethod
    def true(x):
        return tf.linalg.logdet(
            tf.matmul(x, x, transpose_a=True) + 3 * tf.eye(x.shape[1], dtype=x.dtype)
        )

    @staticmethod
    def jacobian(x):
        a = tf.matmul(x, x, transpose_a=True) + 3 * tf.eye(x.shape[1], dtype=x.dtype)
        return 2 * tf.matmul(x, tf.linalg.inv(a))

    @staticmethod
    def engine(x):
        a = x.T @ x + 3 * np.eye(x.shape[1], dtype=x.dtype)
        return np.linalg.slogdet(a)[1].astype(x.dtype), 2 * x @ np.linalg.inv(a)

    @staticmethod
    def hessp(x, v):
        b = np.linalg.inv(x.T @ x + 3 * np.eye(x.shape[1], dtype=x.dtype))
        return 2 * (v - x @ b @ (v.T @ x + x.T @ v)) @ b


FUNCTIONS = (Asinh, Sum, LogSoftmax, Logdet)


def hessian(function, x):
    """Blocks `R + D + D`, or `R` where the function is one entry by entry."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        j = function.jacobian(x)
    if function is Asinh:
        return conj(tape.gradient(j, x))
    return conj(tape.jacobian(j, x, experimental_use_pfor=False))


def hessian_times(function, x, v):
    """Each entry's Hessian times a vector."""
    if function is LogSoftmax:
        return tf.linalg.matvec(hessian(function, x), v)
    with tf.GradientTape() as tape:
        tape.watch(x)
        along = tf.reduce_sum(function.jacobian(x) * v)
    return conj(tape.gradient(along, x))
