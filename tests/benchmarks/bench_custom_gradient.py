"""The value form beside `tfp.math.custom_gradient` and `tf.custom_gradient`, in one run.

    python -m pytest -s tests/benchmarks/bench_custom_gradient.py

`fx` and `gx` are given, float32. The three take turns, so that whatever else the machine does hits
them alike; It prints the medians of the ratios to `tfp.math.custom_gradient`.
"""

import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick


def tf_custom_gradient(fx, gx, x):
    @tf.custom_gradient
    def embed(x):
        return tf.identity(fx), lambda u: u * gx

    return embed(x)


LIBRARIES = {
    "tfp.math.custom_gradient": tfp.math.custom_gradient,
    "sgtrick.custom_gradient": sgtrick.custom_gradient,
    "tf.custom_gradient": tf_custom_gradient,
}


def forward_and_backward(form):
    """By the last argument."""

    def run(*args):
        with tf.GradientTape() as tape:
            tape.watch(args[-1])
            y = form(*args)
        return y, tape.gradient(y, args[-1])

    return run


MODES = {
    "eager": forward_and_backward,
    "eager, forward alone": lambda form: form,
    "tf.function": lambda form: tf.function(forward_and_backward(form)),
    "XLA": lambda form: tf.function(forward_and_backward(form), jit_compile=True),
}


@pytest.mark.parametrize("n", [1_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("mode", MODES)
def test_scalar_function(take_turns, mode, n):
    x = tf.random.stateless_normal([n], [0, 1])
    runs = {library: MODES[mode](embed) for library, embed in LIBRARIES.items()}
    take_turns(f"{mode}, {n:,} entries", runs, (tf.reduce_sum(x**2), 2 * x, x), n)
