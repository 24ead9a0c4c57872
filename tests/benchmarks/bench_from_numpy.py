"""Host engines: beside a hand-written embedding, beside NumPy alone, and by two processes.

    python -m pytest -s tests/benchmarks/bench_from_numpy.py

What takes turns calls the same engine. It prints the medians of the ratios to the first,
turn by turn.
"""

import multiprocessing
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import engine_functions as engines
import sgtrick
from sgtrick._tensorflow import numpy_function

CHAINS, DIMENSIONS = 8, 10
LEAPFROGS = 50
X = tf.constant(np.random.default_rng(0).normal(size=(CHAINS, DIMENSIONS)))


_random = np.random.default_rng(0)
COVARIATES = _random.normal(size=(DIMENSIONS, 500))
OUTCOMES = _random.uniform(size=500) < 0.5


def nothing(x):
    """A normal density, which costs a few microseconds: what is left is overhead."""
    return -0.5 * np.sum(x**2, -1), -x


def logistic(x):
    """The posterior of a logistic regression on 500 observations, for one chain and for many."""
    logits = x @ COVARIATES
    value = logits @ OUTCOMES - np.logaddexp(0, logits).sum(-1) - 0.5 * np.sum(x**2, -1)
    return value, (OUTCOMES - 1 / (1 + np.exp(-logits))) @ COVARIATES.T - x


def logistic_of_tensorflow(x):
    """The same of one chain, differentiated by TensorFlow."""
    logits = tf.linalg.matvec(COVARIATES, x, transpose_a=True)
    likelihood = tf.reduce_sum(tf.where(OUTCOMES, logits, 0)) - tf.reduce_sum(
        tf.math.softplus(logits)
    )
    return likelihood - 0.5 * tf.reduce_sum(x**2)


ENGINES = {"logistic regression": logistic, "normal density": nothing}


def one_by_one(engine):
    def engine_of_all(x):
        values, gradients = zip(*map(engine, x), strict=True)
        return np.stack(values), np.stack(gradients)

    return engine_of_all


def by_hand(engine):
    """What one writes without sgtrick, and without its checks."""

    @tf.custom_gradient
    def log_prob(x):
        value, gradient = tf.numpy_function(engine, [x], [x.dtype, x.dtype])
        value.set_shape(x.shape[:-1])
        gradient.set_shape(x.shape)
        return value, lambda upstream: upstream[..., tf.newaxis] * gradient

    return log_prob


def hmc(log_prob):
    kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.1, num_leapfrog_steps=10)

    @tf.function
    def run(x):
        return tfp.mcmc.sample_chain(LEAPFROGS // 10, x, kernel=kernel, trace_fn=None, seed=[1, 2])

    return run


@pytest.mark.parametrize("vectorized", [True, False], ids=["one call", "a call per chain"])
@pytest.mark.parametrize("name", ENGINES)
def test_hmc(take_turns, name, vectorized):
    engine = ENGINES[name]
    rivals = {
        "by hand": hmc(by_hand(engine if vectorized else one_by_one(engine))),
        "from_numpy": hmc(sgtrick.from_numpy(engine, vectorized=vectorized)),
    }
    calls = "one call" if vectorized else f"{CHAINS} calls"
    take_turns(f"{LEAPFROGS} leapfrogs, {name}, {calls}", rivals, (X,), 10_000)


def forward_model(x):
    """A value that is an array, `[chain, 500]`."""
    return np.tanh(x @ COVARIATES)


def vjp_of_forward_model(x, u):
    return (u * (1 - np.tanh(x @ COVARIATES) ** 2)) @ COVARIATES.T


@sgtrick.custom_vjp
def forward_model_by_hand(x):
    y = tf.numpy_function(forward_model, [x], x.dtype)
    y.set_shape([CHAINS, 500])

    def grad_fn(u):
        g = tf.numpy_function(vjp_of_forward_model, [x, u], x.dtype)
        g.set_shape(x.shape)
        return g

    return y, grad_fn


def test_hmc_of_an_array(take_turns):
    from_numpy = sgtrick.from_numpy(
        forward_model, vjp=vjp_of_forward_model, value_shape=(500,), vectorized=True
    )

    def posterior(f):
        return lambda x: -tf.reduce_sum((f(x) - OUTCOMES) ** 2, -1) - tf.reduce_sum(x**2, -1)

    rivals = {
        "by hand": hmc(posterior(forward_model_by_hand)),
        "from_numpy": hmc(posterior(from_numpy)),
    }
    take_turns(f"{LEAPFROGS} leapfrogs, an array of 500, one call", rivals, (X,), 10_000)


def test_one_call(take_turns):
    h = sgtrick.from_numpy(nothing, vectorized=True)
    x = X.numpy()
    rivals = {
        "NumPy alone": lambda: nothing(x),
        "eager": lambda: h(X),
        "tf.function": (lambda graph: lambda: graph(X))(tf.function(h)),
    }
    take_turns("one call", rivals, (), 500)


@pytest.mark.parametrize("chains", [1, CHAINS])
def test_host_part(take_turns, chains, monkeypatch):
    """What TensorFlow calls in a graph, with an engine that costs nothing: one call for each chain.

    Beside what one writes by hand, which checks nothing.
    """
    engine_of_one, asked = (lambda x: ANSWER), []
    x = X.numpy() if chains > 1 else X.numpy()[0]
    host_call = numpy_function.host_call

    def noting(callback, xs, dtypes):
        asked.append(callback)
        return host_call(callback, xs, dtypes)

    monkeypatch.setattr(numpy_function, "host_call", noting)
    tf.function(sgtrick.from_numpy(engine_of_one)).get_concrete_function(tf.constant(x))
    many = one_by_one(engine_of_one) if chains > 1 else lambda x: list(map(np.array, ANSWER))
    rivals = {"by hand": lambda: many(x), "from_numpy": lambda: asked[0](x)}
    of = f"{chains} chains" if chains > 1 else "one chain"
    take_turns(f"host part of a call, {of}", rivals, (), 500)


ANSWER = 1.0, np.ones(DIMENSIONS)


def test_mapped(take_turns):
    h = sgtrick.from_numpy(logistic, vectorized=True)

    def mapped(f):
        return lambda x: tf.vectorized_map(f, x)

    def with_gradient(f):
        return tf.function(lambda x: tfp.math.value_and_gradient(f, x))

    rivals = {
        "as a batch": with_gradient(h),
        "vectorized_map": with_gradient(mapped(h)),
        "in TensorFlow": with_gradient(mapped(logistic_of_tensorflow)),
    }
    take_turns(f"logistic regression, {CHAINS} chains", rivals, (X,), 10_000)


def test_two_processes(take_turns):
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(2, mp_context=context) as processes:
        spread = sgtrick.from_numpy(engines.slow_normal, executor=processes)
        rivals = {
            "sequential": tf.function(sgtrick.from_numpy(engines.slow_normal)),
            "2 processes": tf.function(spread),
            "2 processes, vectorized_map": tf.function(lambda x: tf.vectorized_map(spread, x)),
        }
        take_turns(f"{CHAINS} chains, 10 ms each", rivals, (X,), 50_000)
