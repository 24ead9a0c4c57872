"""JAX functions as operations of the graph, beside the same density in TensorFlow, and host calls.

    python -m pytest -s tests/benchmarks/bench_native_jax.py

It prints the medians of the ratios to the first, turn by turn.
"""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from bench_from_numpy import CHAINS, COVARIATES, DIMENSIONS, LEAPFROGS, OUTCOMES

import sgtrick
from shared import derivative

jax = pytest.importorskip("jax")
jnp = jax.numpy
X = tf.constant(np.random.default_rng(0).normal(size=(CHAINS, DIMENSIONS)))


def of_jax(x):
    logits = x @ COVARIATES
    return jnp.where(OUTCOMES, logits, 0).sum() - jnp.logaddexp(0, logits).sum() - (x**2).sum() / 2


def of_tensorflow(x):
    logits = x @ COVARIATES
    likelihood = tf.where(OUTCOMES, logits, 0) - tf.math.softplus(logits)
    return tf.reduce_sum(likelihood, -1) - tf.reduce_sum(x**2, -1) / 2


def hmc(log_prob, **options):
    kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.01, num_leapfrog_steps=10)

    @tf.function(autograph=False, **options)
    def run(x):
        return tfp.mcmc.sample_chain(LEAPFROGS // 10, x, kernel=kernel, trace_fn=None, seed=[1, 2])

    return run


def test_hmc(take_turns):
    rivals = {
        "TensorFlow, XLA": hmc(of_tensorflow, jit_compile=True),
        "native, XLA": hmc(sgtrick.from_jax(of_jax, native=True), jit_compile=True),
        "TensorFlow": hmc(of_tensorflow),
        "native": hmc(sgtrick.from_jax(of_jax, native=True)),
        "from_jax": hmc(sgtrick.from_jax(of_jax)),
    }
    take_turns(f"{LEAPFROGS} leapfrogs, logistic regression", rivals, (X,), 10_000)


def test_one_call(take_turns):
    batch = jax.jit(jax.vmap(jax.value_and_grad(of_jax)))
    native, host = sgtrick.from_jax(of_jax, native=True), sgtrick.from_jax(of_jax)

    x = X.numpy().astype(np.float32)
    rivals = {
        "JAX alone": lambda _: batch(x)[1].block_until_ready(),
        "from_jax": derivative(host),
        "native": derivative(native),
        "native in tf.function": tf.function(derivative(native)),
        "native, XLA": tf.function(derivative(native), jit_compile=True),
    }
    take_turns("value and gradient, eager", rivals, (tf.constant(x),), 10_000)
