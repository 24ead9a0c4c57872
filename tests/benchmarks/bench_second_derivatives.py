"""Second derivatives by `custom_vjp` beside `tf.custom_gradient`, and roots beside their solver.

    python -m pytest -s tests/benchmarks/bench_second_derivatives.py

TFP's special functions, with `custom_vjp` in the place of `tf.custom_gradient`; and the gradient of
`implicit_root` around an eager `tf.vectorized_map`, beside that of the iteration. It prints the
medians of the ratios, turn by turn.
"""

import types

import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow_probability.python.internal import custom_gradient as of_tfp

import sgtrick
from shared import derivative

FUNCTIONS = {
    "betainc": lambda x: tfp.math.betainc(2.0, 3.0, x),
    "igammainv": lambda x: tfp.math.igammainv(2.0, x),
    "bessel_ive": lambda x: tfp.math.bessel_ive(0.5, x),
    "lambertw": tfp.math.lambertw,
    "StudentT.cdf": lambda x: tfp.distributions.StudentT(3.0, 0.0, 1.0).cdf(x),
}


class WithCustomVjp(types.ModuleType):
    """TensorFlow, for the module of TFP that decorates functions when they are called."""

    custom_gradient = staticmethod(sgtrick.custom_vjp)

    def __getattr__(self, name):
        return getattr(tf, name)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["eager", "traced, and called once"])
def test_special_functions(take_turns, monkeypatch, name, mode):
    second = derivative(derivative(FUNCTIONS[name]))
    x = tf.linspace(0.1, 0.9, 100)

    def once(x):
        return second(x) if mode == "eager" else tf.function(second)(x)

    def by_custom_vjp(x):
        with monkeypatch.context() as patch:
            patch.setattr(of_tfp, "tf", WithCustomVjp("tf"))
            return once(x)

    rivals = {"tf.custom_gradient": once, "custom_vjp": by_custom_vjp}
    take_turns(f"{name}, {mode}", rivals, (x,), 50_000, rounds=10)


def one(x, a):
    return x**3 + x - a


MATRIX = tf.constant([[2.0, 0.3, 0.1], [0.2, 1.5, 0.4], [0.1, 0.2, 3.0]])


def three(x, a):
    return tf.linalg.matvec(MATRIX, x) + tf.sin(x) - a


def solved(residual, a, steps=8):
    """The root by Newton's method."""
    x = tf.zeros_like(a)
    for _ in range(steps):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            r = residual(x, a)
            rows = tf.unstack(tf.reshape(r, [-1]))
        j = tf.stack([tf.reshape(tape.gradient(row, x), [-1]) for row in rows])
        x -= tf.reshape(tf.linalg.solve(j, tf.reshape(r, [-1, 1])), tf.shape(x))
    return x


@pytest.mark.parametrize(("residual", "shape"), [(one, [50]), (three, [50, 3])], ids=["1", "3"])
def test_roots_in_a_mapped_function(take_turns, residual, shape):
    a = tf.random.stateless_uniform(shape, [0, 1], 1.0, 2.0)

    def root(a):
        return sgtrick.implicit_root(residual, tf.stop_gradient(solved(residual, a)), a)

    def gradient(f):
        return derivative(lambda a: tf.vectorized_map(f, a))

    rivals = {"unrolled": gradient(lambda a: solved(residual, a)), "implicit_root": gradient(root)}
    take_turns(f"a root of {shape[1:] or [1]} unknowns", rivals, (a,), 50_000, rounds=8)
