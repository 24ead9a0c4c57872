"""Linear systems of `implicit_root`: singular ones, batches of them, and members that depend on each other."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from matrix import spread
from sgtrick import implicit_reparameterize, implicit_root
from sgtrick._core import systems
from shared import (
    EXECUTED,
    FIRST_WAYS,
    WAYS,
    WRAPS,
    WRAPS_AND_XLA,
    Way,
    by_jacobian,
    compiled,
    derivative,
    forward_derivative,
    gradients,
)
from shared import gradient as grad


@WRAPS_AND_XLA
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.long)])
def test_singular_members_get_nan_and_harm_no_other(n, wrap):
    """At 0 a square has no slope, and with it the root no derivative."""

    def run(theta):
        star = tf.sqrt(tf.stop_gradient(theta))
        h = lambda theta: implicit_root(lambda x, t: x**2 - t, star, theta, batch_ndims=1)  # noqa: E731
        return h(theta), grad(h, theta)

    theta = np.array([[4.0] * n, [0.0] * n, [9.0] * n])
    x, g = wrap(run)(tf.constant(theta))
    np.testing.assert_array_equal(x, np.sqrt(theta))
    np.testing.assert_allclose(g, [[1 / 4] * n, [np.nan] * n, [1 / 6] * n])


@pytest.mark.long
@pytest.mark.parametrize(
    ("slope", "upstream"), [(0.0, 0.0), (0.0, 1.0), (np.inf, 1.0), (np.nan, 0.0)]
)
def test_second_derivatives_beside_singular_members(slope, upstream):
    """Of `x = theta / slope`, which says nothing of `x` where the slope is 0 or not finite."""

    def run(slope):
        h = lambda s: implicit_root(lambda x, s: s * x - 2.0, star, s, batch_ndims=1)  # noqa: E731
        return grad(lambda s: grad(h, s, weights), slope)

    star, weights = tf.constant([0.5, 0.5]), tf.constant([1.0, upstream])
    for second in (run(tf.constant([4.0, slope])), tf.function(run)(tf.constant([4.0, slope]))):
        np.testing.assert_allclose(second, [2 * 2.0 / 4.0**3, np.nan], rtol=1e-6)


@WRAPS
@pytest.mark.parametrize("n", [8, 9])
def test_systems_around_the_size_that_is_mapped(n, wrap):
    """Roots of coupled cubic equations, with the Jacobian that NumPy finds for them."""
    random = np.random.default_rng(n)
    matrix, star = random.normal(size=(n, n)), random.normal(size=(2, n))

    def residual(x, theta):
        return tf.linalg.matvec(matrix, x) + x**3 - theta

    theta = star @ matrix.T + star**3
    weights = random.normal(size=(2, n))
    run = lambda t: grad(lambda t: implicit_root(residual, star, t, batch_ndims=1), t, weights)  # noqa: E731
    expected = [
        np.linalg.solve((matrix + np.diag(3 * x**2)).T, w)
        for x, w in zip(star, weights, strict=True)
    ]
    np.testing.assert_allclose(wrap(run)(tf.constant(theta)), expected, rtol=1e-9)


class TestDependentMembers:
    """Members that depend on each other, although they were stated not to."""

    MESSAGE = "was stated to return independent equations"

    @staticmethod
    def root(theta, batch_ndims, coupling=0.01):
        """Of cubic equations, where each member depends on all members before it."""
        n = theta.shape[-1]
        star = tf.stop_gradient(tf.sin(theta))

        def residual(x, theta):
            before = tf.cumsum(x**2, 0, exclusive=True)
            sin = tf.sin(theta)
            return x - sin + coupling * (before - tf.cumsum(sin**2, 0, exclusive=True)) / n

        return implicit_root(residual, star, theta, batch_ndims=batch_ndims)

    @pytest.mark.long
    @pytest.mark.parametrize("n", [1, 9])
    def test_raise(self, n):
        theta = tf.constant(np.linspace(0.1, 1, 3 * n).reshape(3, n))
        run = lambda theta: grad(lambda t: self.root(t, 1), theta)  # noqa: E731
        with pytest.raises(LookupError, match=self.MESSAGE):
            run(theta)
        with pytest.raises(tf.errors.InvalidArgumentError, match=self.MESSAGE):
            tf.function(run)(theta)
        anyhow = grad(tf.function(lambda t: self.root(t, 1)), theta)
        assert not np.isfinite(anyhow).any()
        if n == 1:  # XLA has no pfor of QR
            assert not np.isfinite(compiled(run)(theta)).any()

    @pytest.mark.parametrize("mode", [derivative, forward_derivative])
    def test_raise_where_all_are_equal(self, mode):
        """The matrix that is a sum over the members does what the products do."""
        root = lambda t: self.root_of_mean(t, 1)  # noqa: E731
        theta = tf.constant([[0.5]] * 3, tf.float64)
        errors = (LookupError, tf.errors.InvalidArgumentError)
        with pytest.raises(errors, match=self.MESSAGE):
            mode(root)(theta)
        one_system = mode(lambda t: self.root_of_mean(t, 0))
        np.testing.assert_allclose(one_system(theta), tf.cos(theta), rtol=1e-9)

    @staticmethod
    def root_of_mean(theta, batch_ndims):
        def residual(x, theta):
            off = x - tf.sin(theta)
            return off + tf.reduce_mean(off)

        return implicit_root(residual, tf.sin(theta), theta, batch_ndims=batch_ndims)

    @WRAPS
    def test_are_right_as_one_system(self, wrap):
        theta = tf.constant(np.linspace(0.1, 1, 6).reshape(3, 2))
        run = wrap(lambda theta: grad(lambda t: self.root(t, 0), theta))
        np.testing.assert_allclose(run(theta), tf.cos(theta), rtol=1e-9)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_independent_ones_are_no_error(self, dtype):
        theta = tf.cast(np.linspace(0.1, 1, 40).reshape(20, 2), dtype)
        found = grad(lambda t: self.root(t, 1, coupling=0), theta)
        np.testing.assert_allclose(
            tf.cast(found, tf.float64), tf.cast(tf.cos(theta), tf.float64), rtol=2e-2
        )

    def test_a_member_that_is_not_finite_is_no_error(self):
        theta = tf.constant([[0.1], [0.5], [np.nan]])
        root = lambda t: implicit_root(lambda x, t: x**3 - t, tf.sin(t), t, batch_ndims=1)  # noqa: E731
        found = grad(root, theta)
        np.testing.assert_allclose(found[:2], (3 * tf.sin(theta) ** 2)[:2] ** -1, rtol=1e-5)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("power", "batch_ndims", "way"),
        [(1, 0, "eager"), (2, 1, "tf.function"), (1, 1, "around"), (2, 0, "XLA")],
    )
    def test_to_a_higher_order_only_are_right(self, power, batch_ndims, way):
        """Around 0 each system is that of one member, and its derivatives are not."""

        def root(a):
            def residual(x, a):
                total = tf.reduce_sum(x)
                return x - a + x * (total if power == 1 else total * total)

            return implicit_root(residual, tf.zeros_like(a), a, batch_ndims=batch_ndims)

        a, unit = tf.constant([0.0, 0.0], tf.float64), tf.constant([1.0, 0.0], tf.float64)
        first = lambda root: lambda a: grad(root, a, unit)  # noqa: E731
        second = lambda root: lambda a: grad(first(root), a, unit)  # noqa: E731
        np.testing.assert_array_equal(first(root)(a), unit)
        wrap = EXECUTED | {"around": lambda f: f, "XLA": compiled}
        run = wrap[way](second(tf.function(root) if way == "around" else root))
        np.testing.assert_allclose(run(a), [-2, -1] if power == 1 else [0, 0], atol=1e-15)

    @WRAPS
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_higher_derivatives_of_independent_ones(self, dtype, wrap):
        """Also where the equation is not defined everywhere around the roots."""
        a = tf.constant(np.linspace(0.01, 0.999, 30), dtype)

        def root(a):
            residual = lambda x, a: tf.sqrt(1 - x) - tf.sqrt(1 - a)  # noqa: E731
            return implicit_root(residual, a, a, batch_ndims=1)

        second = wrap(lambda a: grad(lambda a: grad(root, a), a))
        np.testing.assert_allclose(second(a), np.zeros(30), atol=0.1)

    def test_a_sample_without_its_event_ndims(self):
        """The conditional distribution function of a correlated normal."""
        sample = tf.constant([[0.3, -0.5], [1.2, 0.4]])

        def cdf(x, loc):
            z = x - loc
            return tfp.distributions.Normal(0.0, 1.0).cdf(
                z - 0.5 * tf.cumsum(z, -1, exclusive=True)
            )

        loc = tf.constant([0.1, 0.2])
        with pytest.raises(LookupError, match="larger event_ndims"):
            grad(lambda loc: implicit_reparameterize(cdf, sample, loc), loc)
        moved = lambda loc: implicit_reparameterize(cdf, sample, loc, event_ndims=1)  # noqa: E731
        np.testing.assert_allclose(grad(moved, loc), [2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("matrix", "regular"),
    [
        ([[1.0, 2.0], [2.0, 4.0]], False),
        ([[0.1, 0.3], [0.3, 0.9]], False),
        ([[0.1, 0.7], [0.3, 2.1]], False),  # 0.1 * 2.1 and 0.7 * 0.3, up to rounding
        ([[1e-200, 0.0], [0.0, 1e200]], True),
        ([[1e-20, 1e-20], [1e20, 2e20]], True),
        ([[1e-9, 1.0], [0.0, 1e-9]], True),
        ([[np.inf, 0.0], [0.0, 1.0]], False),
    ],
)
def test_what_counts_as_singular(matrix, regular):
    inverse = systems._inverse(tf.constant([matrix, np.eye(2)], tf.float64))
    np.testing.assert_array_equal(inverse[1], np.eye(2))
    if regular:
        np.testing.assert_allclose(inverse[0], np.linalg.inv(matrix), rtol=1e-6)
    else:
        assert np.isnan(inverse[0]).all()


def ragged(v):
    return tf.RaggedTensor.from_row_lengths(v, [1, 1])


def sparse(v):
    return tf.SparseTensor([[0], [1]], v, [2])


def normal(v):
    return tfp.distributions.Normal(v, tf.ones_like(v))


# Objects made of tensors, and the tensors in them.
OBJECTS = {
    "ragged": (ragged, lambda t: t.flat_values),
    "sparse": (sparse, lambda t: t.values),
    "distribution": (normal, lambda t: t.loc),
    "distribution in a dictionary": (lambda v: {"p": normal(v)}, lambda t: t["p"].loc),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("of", "root", "wrap"),
    spread(
        OBJECTS,
        [implicit_root, implicit_reparameterize],
        [*EXECUTED.values(), compiled],
        together=1,
    ),
)
def test_with_respect_to_what_an_object_holds(of, root, wrap):
    """The residual is differentiated by it, as by what it closes over."""
    (make, numbers), a = OBJECTS[of], tf.constant([2.0, 3.0], tf.float64)

    def cube(v):
        return root(lambda x, t: x - numbers(t) ** 3, tf.stop_gradient(v) ** 3, make(v))

    np.testing.assert_allclose(wrap(derivative(cube))(a), 3 * a**2)
    np.testing.assert_allclose(wrap(derivative(derivative(cube)))(a), 6 * a)
    np.testing.assert_allclose(derivative(wrap(cube))(a), 3 * a**2)


@WRAPS
@pytest.mark.parametrize("root", [implicit_root, implicit_reparameterize])
def test_with_respect_to_the_variables_of_a_layer(root, wrap):
    layer = keras.layers.Dense(1, use_bias=False, dtype="float64")
    layer.build([None, 1])
    kernel, one = layer.trainable_variables[0], tf.ones([1, 1], tf.float64)

    def cube():
        star = tf.stop_gradient(layer(one)) ** 3
        return root(lambda x, layer: x - layer(one) ** 3, star, layer)

    found = wrap(lambda: gradients(cube, by=kernel.value))()
    np.testing.assert_allclose(found, 3 * kernel.numpy() ** 2)


def by_elimination(matvec, b):
    columns = [matvec(row) for row in tf.unstack(tf.eye(b.shape[0], dtype=b.dtype))]
    return tf.linalg.solve(tf.stack(columns, 1), b[:, tf.newaxis])[:, 0]


def closing_over(a, x):
    """A residual that is traced, and knows `a` only by what it closes over."""
    residual = tf.function(lambda x: tf.math.igamma(2 * a / 2, x))
    return implicit_reparameterize(residual, x)


def by_solve(a, x):
    a, x = tf.reshape(a, [-1]), tf.reshape(x, [-1])
    u = tf.math.igamma(tf.stop_gradient(a), x)
    residual = tf.function(lambda x, a: tf.math.igamma(a, x) - u)
    return implicit_root(residual, x, a, solve=by_elimination)


GAMMA_SAMPLES = {
    "plain": lambda a, x: implicit_reparameterize(lambda x, a: tf.math.igamma(a, x), x, a),
    "traced": lambda a, x: implicit_reparameterize(
        tf.function(lambda x, a: tf.math.igamma(a, x)), x, a
    ),
    "in a branch": lambda a, x: implicit_reparameterize(
        lambda x, a: tf.cond(tf.size(x) > 0, lambda: tf.math.igamma(a, x), lambda: x), x, a
    ),
    "chi2": lambda a, x: implicit_reparameterize(
        lambda x, a: tfp.distributions.Chi2(2 * a).cdf(2 * x), x, a
    ),
    "inverse gamma": lambda a, x: (
        1
        / implicit_reparameterize(
            tf.function(lambda y, a: tfp.distributions.InverseGamma(a, 1.0).cdf(y)), 1 / x, a
        )
    ),
    "a closure": closing_over,
    "events": lambda a, x: tf.reshape(
        implicit_reparameterize(
            tf.function(lambda x, a: tf.math.igamma(a, x)),
            tf.reshape(x, [-1]),
            tf.reshape(a, [-1]),
            event_ndims=1,
        ),
        tf.shape(x),
    ),
    "solve": lambda a, x: tf.reshape(by_solve(a, x), tf.shape(x)),
}


def by_map_fn(f):
    return lambda a, x: tf.map_fn(lambda one: f(*one), (a, x), fn_output_signature=a.dtype)


def by_scan(f):
    return lambda a, x: tf.scan(lambda _, one: f(*one), (a, x), 0 * a[0])


def in_a_branch(f):
    return lambda a, x: tf.cond(a[0] > 0, lambda: f(a, x), lambda: x)


def by_loop(f):
    return by_jacobian(f, experimental_use_pfor=False)


UNASKED = {
    "jacobian": Way(modes=(by_jacobian,)),
    "jacobian in tf.function": Way(around=tf.function, modes=(by_jacobian,)),
    "jacobian by a loop, in tf.function": Way(around=tf.function, modes=(by_loop,)),
    "in vectorized_map": WAYS["in vectorized_map"],
    "around vectorized_map": WAYS["around vectorized_map"],
    "map_fn": Way(inside=by_map_fn, around=tf.function),
    "scan": Way(inside=by_scan, around=tf.function),
    "cond": Way(inside=in_a_branch, around=tf.function),
    "around tf.function": FIRST_WAYS["around tf.function"],
    # TensorFlow itself cannot push through a function or a branch with igamma.
    "forward": FIRST_WAYS["forward"],
    "forward in tf.function": FIRST_WAYS["forward in tf.function"],
}


def is_possible(kind, way):
    if way.startswith("forward"):
        return kind in ("plain", "chi2")
    # Nor can it map the second branch of a tf.cond.
    return kind != "in a branch" or not ("jacobian" in way or "vectorized_map" in way)


QUICK = [("traced", "jacobian"), ("a closure", "cond"), ("chi2", "forward")]


class TestDistributionFunctionsThatAreDifferentiatedOnce:
    """TensorFlow has the derivative of `igamma` by its parameter, and not a second one.

    It traces second derivatives that nobody asks for. Its own sampler is the oracle.
    """

    @pytest.mark.parametrize(
        ("kind", "way"),
        [
            pytest.param(*case, marks=[pytest.mark.long] * (case not in QUICK))
            for case in sorted(
                {*QUICK, *spread(GAMMA_SAMPLES, UNASKED, together=1, valid=is_possible)}
            )
        ],
    )
    def test_are_differentiated_by_their_parameter(self, kind, way):
        a, x = tf.constant([0.7, 2.0, 3.5], tf.float64), tf.constant([0.5, 1.5, 4.0], tf.float64)
        expected = tf.raw_ops.RandomGammaGrad(alpha=a, sample=x)
        found = UNASKED[way](GAMMA_SAMPLES[kind])(a, x)
        np.testing.assert_allclose(found, expected, rtol=1e-7)

    @pytest.mark.parametrize("kind", ["traced", "solve"])
    def test_a_second_derivative_is_loud(self, kind):
        sample = GAMMA_SAMPLES[kind]
        a, x = tf.constant([2.0], tf.float64), tf.constant([1.5], tf.float64)
        with pytest.raises(LookupError, match="IgammaGradA"):
            derivative(derivative(sample))(a, x)
