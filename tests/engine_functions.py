"""Engines of NumPy alone, with closed-form gradients, that worker processes can load quickly."""

import os
import time

import numpy as np


def scalar(x):
    a, b, c = x
    e = np.exp(b / 2)
    return np.sin(a) * e + a * c**2, np.array([np.cos(a) * e + c**2, np.sin(a) * e / 2, 2 * a * c])


def two(x, y):
    """`[..., 2, 2]` and `[...]`, for one call and for many."""
    total, s = np.sum(x**3, axis=(-2, -1)), np.sin(y)
    return total * s, (3 * x**2 * s[..., None, None], total * np.cos(y))


def normal(x):
    return -0.5 * np.sum(x**2), -x


def slow_normal(x):
    time.sleep(0.01)
    return normal(x)


def noise(x):
    return np.random.default_rng().normal(), np.zeros_like(x)


def dies_beyond_one(x):
    """Takes its process with it, as a segmentation fault would."""
    if np.max(x) > 1:
        os._exit(1)
    return normal(x)


def fails_beyond_one(x):
    if np.max(x) > 1:
        raise ArithmeticError(f"no solution at {x[0]}")
    return normal(x)


def many_fail_beyond_one(x):
    if np.max(x) > 1:
        raise ArithmeticError("no solution")
    return -0.5 * np.sum(x**2, -1), -x


class NoSolutionError(Exception):
    """Takes two arguments, of which pickle passes one on."""

    def __init__(self, at, why):
        super().__init__(at)


def raises_what_cannot_be_unpickled(x):
    raise NoSolutionError(x, "why")


def square(x):
    return np.sum(x**2)


def square_gradient(x):
    return 2 * x


class DiesOnce:
    """Takes its process with it the first time."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self, x):
        if not os.path.exists(self.mark):
            with open(self.mark, "w"):
                os._exit(1)
        return normal(x)


def square_hessp(x, v):
    return 2 * v
