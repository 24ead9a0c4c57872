"""`sgtrick.tfp.LogDensity` against native distributions, and in them."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
import sgtrick.tfp
from observed import points, value_and_gradient
from sgtrick.tfp import LogDensity
from shared import WRAPS

tfb, tfd, tfde = tfp.bijectors, tfp.distributions, tfp.experimental.distributions


def gaussian(**options):
    """A LogDensity in NumPy, and its native twin."""
    loc, sd = np.array([1.0, -2.0]), np.array([0.5, 2.0])

    def engine(x):
        z = (x - loc) / sd
        return -0.5 * np.sum(z**2 + np.log(2 * np.pi * sd**2), -1), -z / sd

    log_prob = sgtrick.from_numpy(engine, vectorized=True)
    twin = tfd.MultivariateNormalDiag(tf.constant(loc), tf.constant(sd))
    return LogDensity(log_prob, [2], tf.float64, **options), twin


class TestLogDensity:
    @pytest.mark.parametrize("shape", [[2], [3, 2], [4, 1, 2]])
    @WRAPS
    def test_value_and_gradient(self, shape, wrap):
        density, twin = gaussian()
        x = points(tf.float64, *shape)
        came = wrap(value_and_gradient)(density.log_prob, x)
        for a, b in zip(came, value_and_gradient(twin.log_prob, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
        assert (density.event_shape, density.batch_shape) == ([2], [])
        np.testing.assert_array_equal(density.event_shape_tensor(), [2])
        np.testing.assert_array_equal(density.batch_shape_tensor(), [])

    @pytest.mark.parametrize("event_shape", [2, np.int64(2), tf.TensorShape([2])], ids=repr)
    def test_event_shapes(self, event_shape):
        assert LogDensity(lambda x: x[..., 0], event_shape, tf.float32).event_shape == [2]

    @WRAPS
    def test_a_batch_of_densities(self, wrap):
        twin = tfd.Normal(tf.constant([0.0, 1.0, 2.0]), [[1.0], [2.0]])
        density = LogDensity(twin.log_prob, [], tf.float32, sample_fn=twin.sample)
        assert density.batch_shape == [2, 3]
        np.testing.assert_array_equal(density.batch_shape_tensor(), [2, 3])
        x = wrap(density.sample)(5, seed=[1, 2])
        np.testing.assert_array_equal(x, twin.sample(5, seed=[1, 2]))
        for value in (x, tf.constant(0.5), tf.ones([5, 1, 3])):
            np.testing.assert_array_equal(wrap(density.log_prob)(value), twin.log_prob(value))
        total = tfd.Independent(density, 2).log_prob(x)
        np.testing.assert_allclose(total, tfd.Independent(twin, 2).log_prob(x))

    def test_unknown_shapes(self):
        @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec(None)])
        def f(loc, x):
            twin = tfd.Normal(loc, 1.0)
            density = LogDensity(twin.log_prob, [], tf.float32, sample_fn=twin.sample)
            return density.batch_shape_tensor(), density.log_prob(x), density.sample(2, seed=[1, 2])

        batch, y, x = f(tf.constant([1.0, 2.0]), tf.zeros([3, 2]))
        np.testing.assert_array_equal(batch, [2])
        np.testing.assert_allclose(y, tfd.Normal([1.0, 2.0], 1.0).log_prob(tf.zeros([3, 2])))
        np.testing.assert_array_equal(x, tfd.Normal([1.0, 2.0], 1.0).sample(2, seed=[1, 2]))

    @pytest.mark.parametrize(
        ("f", "known", "x"),
        [
            (lambda x: tf.reduce_sum(x), [None, 2], [5, 2]),  # over the chains, too
            (lambda x: x, [None, None], [2, 2]),
            (lambda x: x, None, [2, 2]),
            (lambda x: tf.reduce_sum(x, -1), None, [5, 3]),
            (lambda x: x, None, []),
        ],
    )  # fmt: skip
    def test_unknown_shapes_that_do_not_fit(self, f, known, x):
        # Of a single event it is a density, of batch shape [], which is all that tracing sees.
        def density(x):
            return tf.cond(tf.rank(x) == 1, lambda: tf.reduce_sum(x), lambda: f(x))

        jd = tfd.JointDistributionSequential([LogDensity(density, [2], tf.float32, name="engine")])
        spec = tf.TensorSpec(known)
        run = tf.function(lambda x: jd.log_prob([x]), input_signature=[spec], autograph=False)
        message = r"(?s)engine\\*'.* must (sum over the event|have a shape that ends)"
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
            run(tf.ones(x))

    @pytest.mark.parametrize("known", [[None, 2], [None, None], None])
    def test_unknown_shapes_that_fit(self, known):
        def f(x):
            y = tf.reduce_sum(x, -1)
            return tf.cond(tf.size(x) > 0, lambda: y, lambda: tf.reshape(y, [-1]))

        log_prob = LogDensity(f, [2], tf.float32).log_prob
        run = tf.function(log_prob, input_signature=[tf.TensorSpec(known)])
        for n in (5, 1, 0):
            np.testing.assert_array_equal(run(tf.ones([n, 2])), np.full(n, 2))

    def test_seeds(self):
        seen = []

        def sample_fn(sample_shape, seed):
            seen.append(seed)
            return tf.random.stateless_normal([*sample_shape, 2], seed)

        density = LogDensity(lambda x: x[..., 0], [2], tf.float32, sample_fn=sample_fn)
        np.testing.assert_array_equal(
            density.sample([2, 3], seed=[1, 2]),
            tf.reshape(tf.random.stateless_normal([6, 2], [1, 2]), [2, 3, 2]),
        )
        density.sample(seed=7)
        density.sample()
        assert all(seed.shape == [2] for seed in seen)  # stateless, whatever came

    def test_integer_events(self):
        twin = tfd.Poisson(3.0)
        density = LogDensity(lambda x: twin.log_prob(tf.cast(x, tf.float32)), [], tf.int32)
        np.testing.assert_allclose(density.log_prob([1, 2]), twin.log_prob([1.0, 2.0]))
        with pytest.raises(TypeError, match="returned dtype int32, expected a floating dtype"):
            LogDensity(lambda x: x, [], tf.int32).log_prob([1])

    def test_copies_and_parameters(self):
        density, _ = gaussian(bijector=tfb.Exp(), name="a")
        other = density.copy(bijector=None)
        assert (other.name, other.event_shape, other.dtype) == ("a", [2], tf.float64)
        assert isinstance(density.experimental_default_event_space_bijector(), tfb.Exp)
        assert isinstance(other.experimental_default_event_space_bijector(), tfb.Identity)
        with pytest.raises(NotImplementedError, match="LogDensity cannot be sliced"):
            density[0]

    def test_variables_of_a_module(self):
        class Quadratic(tf.Module):
            def __init__(self):
                self.loc = tf.Variable(1.0)

            def __call__(self, x):
                return -tf.reduce_sum((x - self.loc) ** 2, -1)

        f = Quadratic()
        assert LogDensity(f, [2], tf.float32).trainable_variables == (f.loc,)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"log_prob_fn": 1.0}, TypeError, "log_prob_fn must be a function, got float"),
            ({"sample_fn": 1.0}, TypeError, "sample_fn must be a function or None, got float"),
            ({"bijector": tf.exp}, TypeError, "bijector must be a tfp.bijectors.Bijector or None"),
            ({"event_shape": {"a": 2}}, TypeError, "event_shape must be an int or ints, got {'a'"),
            ({"event_shape": [None]}, ValueError, r"event_shape must be fully defined, got \[None"),
        ],
    )
    def test_arguments_that_do_not_fit(self, options, error, message):
        arguments = {"log_prob_fn": lambda x: x, "event_shape": [2], "dtype": tf.float32}
        with pytest.raises(error, match=message):
            LogDensity(**(arguments | options))

    @pytest.mark.parametrize(
        ("f", "x", "error", "message"),
        [
            (lambda x: x, [5, 2], ValueError, r"shape \[5, 2\] for .* \[5, 2\], expected \[5\]. It must sum"),
            (tf.reduce_sum, [5, 2], ValueError, r"returned the shape \[\] for .*, expected \[5\]"),
            (lambda x: x[..., 0], [5, 3], ValueError, r"event_shape \[2\], got \[5, 3\]"),
            (lambda x: tf.cast(x[..., 0], tf.float64), [2], TypeError, r"float64, expected float32 like the event \(the value had float32\)"),
            (lambda x: 0.0, [2], TypeError, "must return a tensor, got float, which has no gradient.*sgtrick.from_numpy"),
        ],
    )  # fmt: skip
    def test_values_that_do_not_fit(self, f, x, error, message):
        density = LogDensity(f, [2], tf.float32, name="engine")
        with pytest.raises(error, match=message):
            density.log_prob(tf.ones(x))

    @pytest.mark.parametrize(
        ("sample_fn", "error", "message"),
        [
            (
                lambda shape, seed: tf.zeros(shape),
                ValueError,
                r"'a' returned float32 of shape \[3\], expected .*\[3, 2\]",
            ),
            (
                lambda shape, seed: tf.zeros([*shape, 2], tf.int32),
                ValueError,
                r"int32 of shape \[3, 2\], expected float32",
            ),
            (None, NotImplementedError, r"cannot be sampled\. Pass sample_fn"),
        ],
    )
    def test_draws_that_do_not_fit(self, sample_fn, error, message):
        density = LogDensity(lambda x: x[..., 0], [2], tf.float32, sample_fn=sample_fn, name="a")
        with pytest.raises(error, match=message):
            density.sample(3)
