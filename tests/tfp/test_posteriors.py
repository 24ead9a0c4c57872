"""Real posteriors, sampled with engines outside TensorFlow, beside published reference values.

The models, data and references are those of posteriordb (BSD-3-Clause): eight_schools and
hudson_lynx_hare. A reference is the mean and the standard deviation of ten
thousand draws, and the standard error of that mean.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from pages import section
from sgtrick.tfp import Factor, LogDensity

tfb, tfd = tfp.bijectors, tfp.distributions


def check(draws, mean, sd, mcse):
    """Draws `[draw, chain, parameter]` agree with a reference."""
    ess = tfp.mcmc.effective_sample_size(
        draws, cross_chain_dims=1, filter_beyond_positive_pairs=True
    )
    our_mean, our_sd = draws.mean((0, 1)), draws.std((0, 1))
    z = (our_mean - mean) / np.hypot(our_sd / np.sqrt(ess), mcse)
    assert np.min(ess) > 400
    assert np.abs(z).max() < 4
    assert np.abs(our_sd / sd - 1).max() < 0.2
    assert np.max(tfp.mcmc.potential_scale_reduction(draws, split_chains=True)) < 1.05


# The eight schools of Rubin (1981): effects of coaching, and their standard errors. The reference
# is eight_schools_noncentered for the means and eight_schools_centered, the same distribution, for
# the squares: theta[1] to theta[8], mu, tau.
Y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
SIGMA = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
MEAN = np.array([6.1505, 4.9396, 3.9059, 4.7960, 3.6144, 4.0511, 6.3172, 4.8840, 4.4105, 3.6021])
MCSE = np.array([0.0557, 0.0462, 0.0542, 0.0475, 0.0461, 0.0485, 0.0499, 0.0543, 0.0330, 0.0319])
SQUARE = np.array(
    [69.3635, 45.9787, 43.1392, 45.7614, 34.3576, 39.4135, 64.9327, 52.1285, 30.4030, 23.2041]
)


def check_schools(mu, tau, theta_tilde):
    """Draws `[draw, chain]` and `[draw, chain, school]`."""
    theta = mu[..., None] + tau[..., None] * theta_tilde
    draws = np.concatenate([theta, mu[..., None], tau[..., None]], -1)
    check(draws, MEAN, np.sqrt(SQUARE - MEAN**2), MCSE)


@sgtrick.from_numpy(vectorized=True)
def log_likelihood(theta):
    z = (Y - theta) / SIGMA
    return -0.5 * np.sum(z**2, -1), z / SIGMA


@sgtrick.from_value_and_gradient
def log_normal(x):
    return -0.5 * tf.reduce_sum(x**2, -1), -x


@pytest.mark.long
def test_an_autobatched_model_with_a_vectorized_engine():
    """And another density with a gradient of its own."""
    zero = tf.constant(0.0, tf.float64)

    @tfd.JointDistributionCoroutineAutoBatched
    def model():
        mu = yield tfd.Normal(zero, 5.0, name="mu")
        tau = yield tfd.HalfCauchy(zero, 5.0, name="tau")
        theta_tilde = yield LogDensity(log_normal, [8], tf.float64, name="theta_tilde")
        yield Factor(log_likelihood(mu + tau * theta_tilde), name="data")

    posterior = model.experimental_pin(data=tf.zeros([0], tf.float64))
    steps = [np.float64(step) for step in (1.5, 0.4, 0.4)]
    kernel = tfp.mcmc.TransformedTransitionKernel(
        tfp.mcmc.HamiltonianMonteCarlo(posterior.unnormalized_log_prob, steps, 6),
        [tfb.Identity(), tfb.Exp(), tfb.Identity()],
    )
    sample = tf.function(tfp.mcmc.sample_chain, autograph=False)
    start = [tf.ones(shape, tf.float64) for shape in ([64], [64], [64, 8])]
    draws = sample(100, start, kernel=kernel, num_burnin_steps=50, trace_fn=None, seed=[3, 4])
    check_schools(*(part.numpy() for part in draws))
    assert log_likelihood.nonfinite == 0


LYNX_HARE = Path(__file__).parents[2] / "examples" / "data" / "hudson_lynx_hare.json"
PELTS = json.loads(LYNX_HARE.read_text())
STEPS = 2  # a year


@sgtrick.from_numpy(vectorized=True, on_error=-np.inf)
@np.errstate(over="raise", invalid="raise")
def log_likelihood_of_pelts(x):
    """Of the logs `[chain, parameter]` of theta, the populations in 1900, and sigma.

    Lotka and Volterra's equations for the logs of the populations, in column 0, and for their
    derivatives with respect to the first six parameters, by Runge and Kutta's method.
    """
    theta = np.exp(x[:, :4].T)

    def slope(y):
        eaten, fed = theta[1] * np.exp(y[1, 0]), theta[3] * np.exp(y[0, 0])
        by_y = np.stack([-eaten * y[1], fed * y[0]])
        by_y[:, 0] = theta[0] - eaten, fed - theta[2]
        by_y[0, 1:3] += theta[0], -eaten
        by_y[1, 3:5] += -theta[2], fed
        return by_y

    y = np.zeros([2, 7, len(x)])
    y[:, 0] = x[:, 4:6].T
    y[0, 5] = y[1, 6] = 1
    path, h = [y], 1 / STEPS
    for _ in range(STEPS * (len(PELTS["year"]) - 1)):
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        y = y + h / 6 * (k1 + 2 * (k2 + k3) + slope(y + h * k3))
        path.append(y)
    path, sigma = np.stack(path[::STEPS]), np.exp(x[:, 6:].T)
    residual = (np.log(PELTS["pelts"])[..., None] - path[:, :, 0]) / sigma
    value = -np.sum(residual**2 / 2 + np.log(sigma), (0, 1))
    by_path = np.einsum("tkc,tkjc->cj", residual / sigma, path[:, :, 1:])
    return value, np.concatenate([by_path, np.sum(residual**2 - 1, 0).T], 1)


@pytest.mark.long
def test_an_ode_that_overflows_for_some_chains():
    theta = tfd.TruncatedNormal(np.array([1, 0.05, 1, 0.05]), [0.5, 0.05, 0.5, 0.05], 0, np.inf)
    rest = tfd.MultivariateNormalDiag(np.log([10, 10, np.exp(-1), np.exp(-1)]))
    prior = tfd.Blockwise([tfd.Independent(tfb.Log()(theta), 1), rest])
    # What the data tell well: averages and frequency of the cycle. In these coordinates the
    # posterior is about as wide in all directions.
    to_z = np.diag([0, 0, 0, 0, 2.0, 2, 1, 1])
    to_z[:4, :4] = [[2, -2, 0, 0], [0, 0, 2, -2], [5, 0, 5, 0], [0.7, 0, -0.7, 0]]
    to_x = np.linalg.inv(to_z)

    def log_density(z):
        x = tf.linalg.matvec(to_x, z)
        return log_likelihood_of_pelts(x) + prior.log_prob(x)

    hares, lynxes = np.mean(PELTS["pelts"], 0)
    rate = 2 * np.pi / 10  # a cycle takes ten years
    x = np.log([rate, rate / lynxes, rate, rate / hares, 30, 4, 0.4, 0.4])
    chains = x + 0.1 * np.random.default_rng(1).normal(size=(48, 8))
    np.testing.assert_array_equal(
        np.isfinite(log_likelihood_of_pelts(np.stack([x, x + 5, x]))), [True, False, True]
    )
    assert log_likelihood_of_pelts.failures == 1
    compiled = tf.function(log_density, autograph=False)
    sgtrick.check_gradient(compiled, tf.constant([x @ to_z.T]), rtol=1e-5)

    kernel = tfp.mcmc.DualAveragingStepSizeAdaptation(
        tfp.mcmc.HamiltonianMonteCarlo(log_density, np.float64(0.05), num_leapfrog_steps=6),
        num_adaptation_steps=40,
        target_accept_prob=np.float64(0.8),
    )
    sample = tf.function(tfp.mcmc.sample_chain, autograph=False)
    start = tf.constant(chains @ to_z.T)
    z = sample(50, start, kernel=kernel, num_burnin_steps=50, trace_fn=None, seed=[5, 6])
    rows = PELTS["reference_posterior"]["parameters"].values()
    check(np.exp(z @ to_x.T), *([row[key] for row in rows] for key in ("mean", "sd", "mcse_mean")))


def log_posterior(x):
    """Of `[mu, tau, theta_tilde...]`, without TensorFlow."""
    mu, tau, tilde = x[..., :1], x[..., 1:2], x[..., 2:]
    z = (Y - mu - tau * tilde) / SIGMA
    value = -0.5 * np.sum(z**2, -1) - 0.5 * np.sum(tilde**2, -1)
    value -= 0.5 * (mu[..., 0] / 5) ** 2 + np.log1p((tau[..., 0] / 5) ** 2)
    by_mu = np.sum(z / SIGMA, -1, keepdims=True) - mu / 25
    by_tau = np.sum(z / SIGMA * tilde, -1, keepdims=True) - 2 * tau / (25 + tau**2)
    return value, np.concatenate([by_mu, by_tau, z / SIGMA * tau - tilde], -1)


STAN = """
data { int<lower=0> J; vector[J] y; vector<lower=0>[J] sigma; }
parameters { real mu; real<lower=0> tau; vector[J] theta_tilde; }
model {
  mu ~ normal(0, 5);
  tau ~ cauchy(0, 5);
  theta_tilde ~ normal(0, 1);
  y ~ normal(mu + tau * theta_tilde, sigma);
}
"""


def nuts(model):
    @tf.function(autograph=False)
    def run():
        return tfp.experimental.mcmc.windowed_adaptive_nuts(
            100, model, n_chains=32, num_adaptation_steps=80, seed=[3, 4]
        )

    return run()[0]


@pytest.mark.filterwarnings("ignore")  # of aiohttp, by which PyStan talks to its compiler
def test_a_program_of_stan():
    """By the code of docs/engines.md, as it stands there."""
    pytest.importorskip("stan", reason="PyStan is not installed: pip install '.[stan]'")
    namespace = {"np": np, "sgtrick": sgtrick}
    exec(section("stan"), namespace)
    data = {"J": 8, "y": Y.tolist(), "sigma": SIGMA.tolist()}
    # Of [mu, log(tau), theta_tilde...], with the Jacobian of the logarithm.
    log_prob, write_array = namespace["log_prob_of"](STAN, data)

    x = np.random.default_rng(0).normal(size=(4, 10))
    constrained = np.insert(np.delete(x, 1, 1), 1, np.exp(x[:, 1]), 1)
    value, gradient = log_posterior(constrained)
    gradient[:, 1] = gradient[:, 1] * constrained[:, 1] + 1
    with tf.GradientTape() as tape:
        points = tf.constant(x)
        tape.watch(points)
        y = log_prob(points)
    np.testing.assert_allclose(y, value + x[:, 1], rtol=1e-9)
    np.testing.assert_allclose(tape.gradient(y, points), gradient, rtol=1e-9)

    density = LogDensity(log_prob, [10], tf.float64, name="x")
    draws = namespace["executor"].run(nuts, tfd.JointDistributionSequential([density]))[0].numpy()
    flat = [write_array(data, row.tolist(), False, False) for row in draws.reshape(-1, 10)]
    draws = np.reshape(flat, draws.shape)  # constrained by Stan's own transforms
    check_schools(draws[..., 0], draws[..., 1], draws[..., 2:])
