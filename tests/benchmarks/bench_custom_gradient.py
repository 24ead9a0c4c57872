"""The value form beside `tfp.math.custom_gradient` and `tf.custom_gradient`, in one run.

    python -m pytest tests/benchmarks/bench_custom_gradient.py

`fx` and `gx` are given, float32. conftest.py prints the ratios to `tfp.math.custom_gradient` in
the same run. They are ratios of minima, which other work on the machine disturbs least.
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
    "tfp": tfp.math.custom_gradient,
    "tf": tf_custom_gradient,
    "sgtrick": sgtrick.custom_gradient,
}


def forward_and_backward(embed):
    def run(fx, gx, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = embed(fx, gx, x)
        return y, tape.gradient(y, x)

    return run


MODES = {
    "eager": forward_and_backward,
    "eager, forward alone": lambda embed: embed,
    "tf.function": lambda embed: tf.function(forward_and_backward(embed)),
    "XLA": lambda embed: tf.function(forward_and_backward(embed), jit_compile=True),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("n", [1_000, 1_000_000, 20_000_000])
@pytest.mark.parametrize("mode", MODES)
def test_scalar_function(benchmark, mode, n, library):
    x = tf.random.stateless_normal([n], [0, 1])
    fx, gx = tf.reduce_sum(x**2), 2 * x
    run = MODES[mode](LIBRARIES[library])
    benchmark.group = f"{mode}, n = {n:.0e}"
    benchmark.extra_info["library"] = library

    iterations = max(1, 100_000 // n)
    benchmark.pedantic(run, (fx, gx, x), rounds=40, iterations=iterations, warmup_rounds=3)
