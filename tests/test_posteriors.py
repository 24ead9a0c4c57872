"""Real posteriors, sampled with engines outside TensorFlow, beside published reference values.

The eight schools of Rubin (1981): effects of coaching, `y`, with standard errors `sigma`. The
reference is that of posteriordb (BSD-3-Clause), posteriors eight_schools-eight_schools_noncentered
for the means and eight_schools-eight_schools_centered, the same distribution, for the squares.
"""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from sgtrick.tfp import Factor, LogDensity

tfb, tfd = tfp.bijectors, tfp.distributions

Y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
SIGMA = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])

# theta[1] to theta[8], mu, tau
MEAN = np.array([6.1505, 4.9396, 3.9059, 4.7960, 3.6144, 4.0511, 6.3172, 4.8840, 4.4105, 3.6021])
MCSE = np.array([0.0557, 0.0462, 0.0542, 0.0475, 0.0461, 0.0485, 0.0499, 0.0543, 0.0330, 0.0319])
SQUARE = np.array(
    [69.3635, 45.9787, 43.1392, 45.7614, 34.3576, 39.4135, 64.9327, 52.1285, 30.4030, 23.2041]
)
SD = np.sqrt(SQUARE - MEAN**2)


def check(mu, tau, theta_tilde):
    """Draws `[draw, chain]` and `[draw, chain, school]` agree with the reference."""
    theta = mu[..., None] + tau[..., None] * theta_tilde
    draws = np.concatenate([theta, mu[..., None], tau[..., None]], -1)
    ess = tfp.mcmc.effective_sample_size(
        draws, cross_chain_dims=1, filter_beyond_positive_pairs=True
    )
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    z = (mean - MEAN) / np.hypot(sd / np.sqrt(ess), MCSE)
    assert np.min(ess) > 400
    assert np.abs(z).max() < 4
    assert np.abs(sd / SD - 1).max() < 0.2
    assert np.max(tfp.mcmc.potential_scale_reduction(draws, split_chains=True)) < 1.05


def nuts(model, draws=100, chains=32, **observed):
    @tf.function(autograph=False)
    def run():
        return tfp.experimental.mcmc.windowed_adaptive_nuts(
            draws, model, n_chains=chains, num_adaptation_steps=80, seed=[3, 4], **observed
        )

    return run()[0]


@sgtrick.from_numpy(vectorized=True)
def log_likelihood(theta):
    z = (Y - theta) / SIGMA
    return -0.5 * np.sum(z**2, -1), z / SIGMA


def test_an_autobatched_model_with_a_vectorized_engine():
    zero = tf.constant(0.0, tf.float64)

    @tfd.JointDistributionCoroutineAutoBatched
    def model():
        mu = yield tfd.Normal(zero, 5.0, name="mu")
        tau = yield tfd.HalfCauchy(zero, 5.0, name="tau")
        theta_tilde = yield tfd.Normal(tf.zeros([8], tf.float64), 1.0, name="theta_tilde")
        yield Factor(log_likelihood(mu + tau * theta_tilde), name="data")

    draws = nuts(model, data=tf.zeros([0], tf.float64))
    check(draws.mu.numpy(), draws.tau.numpy(), draws.theta_tilde.numpy())
    assert log_likelihood.nonfinite == 0


def log_posterior(x):
    """Of `[mu, tau, theta_tilde...]`, for one chain and for many, without TensorFlow."""
    mu, tau, tilde = x[..., :1], x[..., 1:2], x[..., 2:]
    z = (Y - mu - tau * tilde) / SIGMA
    value = -0.5 * np.sum(z**2, -1) - 0.5 * np.sum(tilde**2, -1)
    value -= 0.5 * (mu[..., 0] / 5) ** 2 + np.log1p((tau[..., 0] / 5) ** 2)
    by_mu = np.sum(z / SIGMA, -1, keepdims=True) - mu / 25
    by_tau = np.sum(z / SIGMA * tilde, -1, keepdims=True) - 2 * tau / (25 + tau**2)
    return value, np.concatenate([by_mu, by_tau, z / SIGMA * tau - tilde], -1)


def test_a_log_density_with_a_bijector():
    bijector = tfb.Blockwise([tfb.Identity(), tfb.Exp(), tfb.Identity()], [1, 1, 8])
    h = sgtrick.from_numpy(log_posterior, vectorized=True)
    density = LogDensity(h, [10], tf.float64, bijector, name="x")
    draws = nuts(tfd.JointDistributionSequential([density]))[0].numpy()
    check(draws[..., 0], draws[..., 1], draws[..., 2:])


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


@pytest.mark.filterwarnings("ignore")  # of aiohttp, by which PyStan talks to its compiler
def test_a_program_of_stan():
    """The unconstrained log density that PyStan has compiled, as in docs/host.md."""
    stan = pytest.importorskip("stan", reason="PyStan is not installed: pip install pystan")
    httpstan = pytest.importorskip("httpstan.models")
    data = {"J": 8, "y": Y.tolist(), "sigma": SIGMA.tolist()}
    name = stan.build(STAN, data=data).model_name
    model = httpstan.import_services_extension_module(name)

    # Stan's automatic differentiation belongs to the thread that loaded it, and crashes elsewhere.
    executor = sgtrick.MainThreadExecutor()

    @sgtrick.from_numpy(executor=executor)
    def log_prob(x):  # [mu, log(tau), theta_tilde...], with the Jacobian of the logarithm
        x = x.tolist()
        return model.log_prob(data, x, True), np.array(model.log_prob_grad(data, x, True))

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
    draws = executor.run(nuts, tfd.JointDistributionSequential([density]))[0].numpy()
    flat = [model.write_array(data, row.tolist(), False, False) for row in draws.reshape(-1, 10)]
    draws = np.reshape(flat, draws.shape)  # constrained by Stan's own transforms
    check(draws[..., 0], draws[..., 1], draws[..., 2:])
