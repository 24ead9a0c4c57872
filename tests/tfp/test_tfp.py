"""`sgtrick.tfp`: host engines in joint distributions, MCMC and VI against native models"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
import sgtrick.tfp
from matrix import Case, judge, pairs, spread
from matrix import functions as fn
from matrix.values import POINTS
from observed import (
    OBSERVED,
    POSTERIOR_MEAN,
    POSTERIOR_VARIANCE,
    SD,
    native,
    points,
    value_and_gradient,
)
from sgtrick.tfp import Factor, LogDensity
from shared import EXECUTED, WRAPS

tfb, tfd, tfde = tfp.bijectors, tfp.distributions, tfp.experimental.distributions
Root = tfd.JointDistributionCoroutine.Root


@np.errstate(over="ignore")  # in trajectories that diverge
def engine(x):
    """Log likelihood of the observations, and its gradient. NumPy, in double precision."""
    z = (OBSERVED - x) / SD
    return -0.5 * np.sum(z**2 + np.log(2 * np.pi * SD**2), axis=-1), z / SD


host = sgtrick.from_numpy(engine, vectorized=True)


def prior(dtype):
    return tfd.Independent(tfd.Normal(tf.zeros([2], dtype), 1), 1, name="x")


def joint(kind, first, last):
    """A joint distribution of `first` and `last(x)`, by name or place."""

    def coroutine():
        x = yield Root(first)
        yield last(x)

    auto = getattr(tfd, f"JointDistribution{kind}")
    if kind.startswith("Coroutine"):
        return auto(coroutine)
    if kind.startswith("Sequential"):
        return auto([first, last])
    return auto({"x": first, "end": last})


def factor_of(f):
    return lambda x: Factor(f(x), name="end")


KINDS = [
    kind + auto for kind in ("Coroutine", "Sequential", "Named") for auto in ("", "AutoBatched")
]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def close(dtype):
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == tf.float32 else {"rtol": 1e-12, "atol": 1e-12}


def scalar(x):
    return sgtrick.custom_gradient(fn.misled(fn.scalar)(x), fn.scalar_gradient(x), x)


CASES = [
    Case("Factor", fn.scalar, lambda x: Factor(scalar(x)).log_prob(tf.zeros([0], x.dtype)), (POINTS,)),
    Case("LogDensity", fn.scalar, lambda x: LogDensity(scalar, 3, x.dtype).log_prob(x), (POINTS,)),
]  # fmt: skip


# What is of second order, and `scalar` itself in the other cells, is in test_value_matrix.py.
PAIRS = [p for p in pairs(CASES, everywhere=set()) if p.values[1].order == 1]


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_matrix(case, cell):
    assert judge(cell, case) == "right"


class TestJointDistributions:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("kind", "dtype", "wrap"),
        spread(KINDS, [tf.float32, tf.float64], EXECUTED.values()),
    )
    def test_factor(self, kind, dtype, wrap):
        jd = joint(kind, prior(dtype), factor_of(host))
        x, nothing = points(dtype, 3, 2), tf.zeros([0], dtype)
        name = jd._flat_resolve_names()[1]
        pinned = jd.experimental_pin(**{name: nothing})
        want = value_and_gradient(lambda x: prior(dtype).log_prob(x) + native(x), x)
        for f in (
            lambda x: jd.log_prob(**{"x": x, name: nothing}),
            lambda x: pinned.unnormalized_log_prob(x=x),
        ):
            came = wrap(value_and_gradient)(f, x)
            for a, b in zip(came, want, strict=True):
                np.testing.assert_allclose(a, b, **close(dtype))
        assert list(tf.nest.flatten(jd.dtype)) == [dtype, dtype]
        assert tf.nest.flatten(pinned.event_shape) == [2]

    @pytest.mark.long
    @EVERY_KIND
    def test_draws_are_the_prior_s(self, kind):
        jd = joint(kind, prior(tf.float64), factor_of(host))
        other = joint(kind, prior(tf.float64), lambda x: tfde.IncrementLogProb(native(x)))

        def draw(jd):
            tf.random.set_seed(3)
            x, nothing = tf.nest.flatten(tf.function(jd.sample)(5, seed=1))
            return (nothing, x) if kind.startswith("Named") else (x, nothing)

        x, nothing = draw(jd)
        assert (nothing.shape, nothing.dtype) == ((5, 0), tf.float64)
        np.testing.assert_array_equal(x, draw(other)[0])

    @pytest.mark.long
    @EVERY_KIND
    def test_log_density(self, kind):
        def density(x):
            return prior(tf.float64).log_prob(x)

        native_jd = joint(kind, prior(tf.float64), lambda x: tfd.Independent(tfd.Normal(x, SD), 1))
        name = native_jd._flat_resolve_names()[1]
        x = points(tf.float64, 4, 2)
        want = value_and_gradient(
            lambda x: native_jd.log_prob(**{"x": x, name: tf.constant(OBSERVED)}), x
        )

        def joint_of(**options):
            first = LogDensity(density, [2], tf.float64, name="x", **options)
            return joint(kind, first, lambda x: tfd.Independent(tfd.Normal(x, SD), 1))

        log_prob = joint_of().experimental_pin(**{name: OBSERVED}).unnormalized_log_prob
        came = value_and_gradient(log_prob, {"x": x} if kind.startswith("Named") else x)
        for a, b in zip(tf.nest.flatten(came), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        draws = joint_of(sample_fn=prior(tf.float64).sample).sample(3, seed=1)
        assert {tuple(t.shape) for t in tf.nest.flatten(draws)} == {(3, 2)}

    @pytest.mark.parametrize("kind", ["Sequential", "CoroutineAutoBatched"])
    def test_a_log_density_without_sample_fn(self, kind):
        first = LogDensity(prior(tf.float64).log_prob, [2], tf.float64, name="x")
        with pytest.raises(NotImplementedError, match=r"'(x|LogDensity)' cannot be sampled"):
            joint(kind, first, factor_of(native)).sample(2)

    def test_observations_of_a_batch_add_up_in_autobatched_models(self):
        jd = joint("CoroutineAutoBatched", tfd.Normal(0.0, 1.0, name="x"), factor_of(
            lambda x: tfd.Normal(x, 1.0).log_prob([1.0, 2.0, 3.0])
        ))  # fmt: skip
        x = tf.constant([0.0, 1.0])
        want = tfd.Normal(0.0, 1.0).log_prob(x) + [
            tf.reduce_sum(tfd.Normal(v, 1.0).log_prob([1.0, 2.0, 3.0])) for v in (0.0, 1.0)
        ]
        np.testing.assert_allclose(jd.log_prob(x, tf.zeros([2, 3, 0])), want, rtol=1e-6)

    def test_factors_come_out_of_vectorized_models(self):
        @tfd.JointDistributionCoroutineAutoBatched
        def model():
            x = yield tfd.Normal(0.0, 1.0, name="x")
            yield Factor(tf.sin(x), name="end")

        tf.random.set_seed(1)
        distributions, values = model.sample_distributions(4, seed=1)
        assert isinstance(distributions.end, Factor)
        np.testing.assert_allclose(distributions.end.log_factor, tf.sin(values.x))

    @pytest.mark.long
    def test_gradients_reach_what_feeds_the_host(self):
        scale, shift = tf.Variable(1.5, dtype=tf.float64), tf.Variable([0.1, 0.2], dtype=tf.float64)
        x = points(tf.float64, 3, 2)

        def gradients(f):
            @tfd.JointDistributionCoroutineAutoBatched
            def model():
                x = yield tfd.Normal(shift, 1.0, name="x")
                yield Factor(tf.cast(2, tf.float64) * f(tf.sin(x) * scale + shift), name="end")

            @tf.function
            def run():
                with tf.GradientTape() as tape:
                    y = tf.reduce_sum(tf.sin(model.log_prob(x, tf.zeros([3, 0], tf.float64))))
                return tape.gradient(y, [scale, shift])

            return run()

        for a, b in zip(gradients(host), gradients(native), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)

    def test_a_positive_parameter_keeps_its_default_bijector(self):
        @tfd.JointDistributionCoroutineAutoBatched
        def model():
            scale = yield tfd.Gamma(2.0, 2.0, name="scale")
            x = yield LogDensity(
                lambda x: -tf.reduce_sum(x / scale), [2], tf.float32, tfb.Exp(), name="x"
            )
            yield Factor(-tf.reduce_sum(x), name="end")

        bijector = model.experimental_default_event_space_bijector()
        event = model.dtype._replace(
            scale=tf.constant([1.0, 2.0]), x=tf.ones([2, 2]) * 3, end=tf.zeros([2, 0])
        )
        free = bijector.inverse(event)
        np.testing.assert_allclose(free.x, np.log(3) * np.ones([2, 2]), rtol=1e-6)
        np.testing.assert_allclose(bijector.forward(free).scale, event.scale, rtol=1e-6)
        want = tfb.Softplus().inverse_log_det_jacobian([1.0, 2.0], 0) - 2 * np.log(3)
        assert bijector.inverse_log_det_jacobian(event).shape == want.shape


class TestFactor:
    @WRAPS
    def test_shapes_broadcast(self, wrap):
        factor = Factor(tf.constant([[1.0], [2.0]]))
        assert (factor.batch_shape, factor.event_shape) == ([2, 1], [0])
        np.testing.assert_array_equal(factor.batch_shape_tensor(), [2, 1])
        np.testing.assert_array_equal(factor.event_shape_tensor(), [0])
        assert wrap(factor.sample)([5, 3], seed=[1, 2]).shape == (5, 3, 2, 1, 0)
        for batch in ([], [2, 1], [1, 3], [4, 2, 3]):
            y = wrap(factor.log_prob)(tf.zeros([*batch, 0]))
            np.testing.assert_array_equal(
                y, np.broadcast_to([[1.0], [2.0]], np.broadcast_shapes((2, 1), batch))
            )
        np.testing.assert_allclose(factor.prob([]), np.exp([[1.0], [2.0]]))

    def test_unknown_shapes(self):
        @tf.function(input_signature=[tf.TensorSpec(None)])
        def f(log_factor):
            factor = Factor(log_factor)
            x = factor.sample(3)
            return factor.batch_shape_tensor(), tf.shape(x), factor.log_prob(x)

        batch, shape, y = f(tf.constant([1.0, 2.0]))
        np.testing.assert_array_equal(batch, [2])
        np.testing.assert_array_equal(shape, [3, 2, 0])
        np.testing.assert_array_equal(y, [[1.0, 2.0]] * 3)

    @pytest.mark.parametrize("known", [None, [None, None]], ids=str)
    def test_a_value_of_unknown_shape_that_is_not_empty(self, known):
        run = tf.function(Factor([1.0, 2.0]).log_prob, input_signature=[tf.TensorSpec(known)])
        np.testing.assert_array_equal(run(tf.zeros([2, 0])), [1, 2])
        with pytest.raises(tf.errors.InvalidArgumentError, match="factor, whose event is empty"):
            run(tf.zeros([2, 3]))

    @pytest.mark.parametrize("number", [1, 1.0, np.float32(1), [1.0]], ids=repr)
    def test_numbers(self, number):
        assert Factor(number).dtype == tf.float32
        assert Factor(np.float64(1)).dtype == tf.float64

    @pytest.mark.parametrize(
        "make",
        [
            lambda v: v,
            lambda v: tfp.util.DeferredTensor(v, tf.exp),
            lambda v: tfp.util.TransformedVariable(2.0, tfb.Exp()),
            lambda v: keras.Variable(2.0),
        ],
        ids=["variable", "deferred", "transformed", "keras"],
    )
    def test_variables_are_read_when_used(self, make):
        reference = make(tf.Variable(2.0))
        factor = Factor(reference)
        with tf.GradientTape() as tape:
            y = factor.log_prob([])
        np.testing.assert_allclose(y, tf.convert_to_tensor(reference))
        (variable,) = tape.watched_variables()
        assert tape.gradient(y, variable) is not None
        variable.assign(1.0)
        np.testing.assert_allclose(factor.log_prob([]), tf.convert_to_tensor(reference))
        if not isinstance(reference, keras.Variable):
            assert [v is variable for v in factor.trainable_variables] == [True]

    def test_copies_and_slices(self):
        factor = Factor(tf.range(6.0), name="a")
        assert factor.parameters["name"] == "a"
        np.testing.assert_array_equal(factor[1:3].log_prob([]), [1.0, 2.0])
        other = factor.copy(log_factor=tf.constant(7.0))
        assert (other.name, other.batch_shape) == ("a", [])
        broadcast = factor._broadcast_parameters_with_batch_shape([2, 6])
        assert broadcast.batch_shape == [2, 6]
        assert tfd.Independent(factor, 1).log_prob([]).numpy() == 15

    def test_it_is_a_composite_tensor(self):
        @tf.function
        def twice(factor):
            return Factor(2 * factor.log_factor, name=factor.name)

        factor = twice(Factor(tf.constant([1.0, 2.0])))
        np.testing.assert_array_equal(factor.log_prob([]), [2.0, 4.0])
        _, (looped,) = tf.while_loop(
            lambda i, _: i < 3, lambda i, f: (i + 1, [twice(f[0])]), (0, [factor])
        )
        np.testing.assert_array_equal(looped.log_prob([]), [16.0, 32.0])
        mapped = tf.vectorized_map(lambda v: Factor(tf.stack([v, -v])), tf.range(3.0))
        np.testing.assert_array_equal(mapped.log_prob([]), [[0, 0], [1, -1], [2, -2]])

    @pytest.mark.parametrize(
        ("log_factor", "message"),
        [
            (tf.constant(1), "log_factor has dtype int32, expected a floating dtype. Cast it"),
            (tf.constant(1j), "log_factor has dtype complex128, expected a floating dtype"),
            (None, "log_factor must be a tensor, variable, array or number, got NoneType"),
        ],
    )
    def test_what_is_no_log_factor(self, log_factor, message):
        with pytest.raises(TypeError, match=message):
            Factor(log_factor)

    @pytest.mark.parametrize("shape", [[], [1], [3, 2]])
    def test_a_value_that_is_not_empty(self, shape):
        factor = Factor(tf.zeros([3]), name="likelihood")
        with pytest.raises(ValueError, match=r"'likelihood' is a factor.*such as tf.zeros\(\[0"):
            factor.log_prob(tf.zeros(shape))


class TestMCMC:
    @pytest.mark.long
    def test_hmc_draws_what_it_draws_natively(self):
        dtype = tf.float64
        jd = joint("Sequential", prior(dtype), factor_of(host))

        @tf.function(autograph=False)
        def draws(target):
            kernel = tfp.mcmc.HamiltonianMonteCarlo(target, np.float64(0.4), num_leapfrog_steps=4)
            state = [tf.zeros([16, 2], dtype), tf.zeros([16, 0], dtype)]  # it is not pinned
            return tfp.mcmc.sample_chain(
                60, state, kernel=kernel, num_burnin_steps=20, trace_fn=None, seed=[1, 2]
            )[0]

        def natively(x, nothing):
            return prior(dtype).log_prob(x) + native(x) + tf.reduce_sum(nothing, -1)

        came = draws(jd.log_prob)
        np.testing.assert_allclose(came, draws(natively), atol=1e-9)
        np.testing.assert_allclose(np.mean(came, (0, 1)), POSTERIOR_MEAN, atol=0.1)
        np.testing.assert_allclose(np.var(came, (0, 1)), POSTERIOR_VARIANCE, rtol=0.2)

    @pytest.mark.long
    def test_windowed_adaptation(self):
        density = LogDensity(prior(tf.float64).log_prob, [2], tf.float64, name="x")
        jd = joint("Coroutine", density, factor_of(host))

        @tf.function(autograph=False)
        def run():
            return tfp.experimental.mcmc.windowed_adaptive_hmc(
                30, jd, n_chains=32, num_adaptation_steps=60, num_leapfrog_steps=4, seed=[1, 2]
            )

        draws = run()[0]
        assert draws.end.shape == [30, 32, 0]  # the factor is not pinned
        np.testing.assert_allclose(np.mean(draws.x, (0, 1)), POSTERIOR_MEAN, atol=0.07)
        np.testing.assert_allclose(np.var(draws.x, (0, 1)), POSTERIOR_VARIANCE, rtol=0.2)


def posterior(f, kind="CoroutineAutoBatched"):
    """The unnormalised log posterior by a Factor of `f`."""
    jd = joint(kind, prior(tf.float64), factor_of(f))
    return jd.experimental_pin(end=tf.zeros([0], tf.float64)).unnormalized_log_prob


class TestVI:
    @staticmethod
    def gradients(target, samples, wrap):
        loc, scale = (tf.Variable(v, dtype=tf.float64) for v in ([0.5, 0.1], [0.7, 1.1]))
        surrogate = tfd.MultivariateNormalDiag(loc, scale)

        @wrap
        def run():
            with tf.GradientTape() as tape:
                loss = tfp.vi.monte_carlo_variational_loss(
                    target, surrogate, sample_size=4, importance_sample_size=samples, seed=[1, 2]
                )
            return tape.gradient(loss, [loc, scale])

        return run()

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("samples", "kind", "wrap"),
        spread([1, 5], ["CoroutineAutoBatched", "Sequential"], EXECUTED.values()),
    )
    def test_gradients_are_the_native_ones(self, samples, kind, wrap):
        came = self.gradients(posterior(host, kind), samples, wrap)
        exact = self.gradients(lambda x: prior(x.dtype).log_prob(x) + native(x), samples, wrap)
        for a, b in zip(came, exact, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10)

    def test_surrogates_made_from_the_model(self):
        jd = joint("CoroutineAutoBatched", prior(tf.float32), factor_of(host))
        pinned = jd.experimental_pin(end=tf.zeros([0]))
        for model in (jd, pinned):  # with and without the factor's empty part
            surrogate = tfp.experimental.vi.build_factored_surrogate_posterior(
                event_shape=model.event_shape,
                bijector=model.experimental_default_event_space_bijector(),
            )
            draws = surrogate.sample(6)
            assert model.unnormalized_log_prob(draws).shape == [6]
