"""Engines whose value is an array: by a Jacobian, or by products with it.

The model is `a sin(W x)` of a vector `x` and a number `a`, and the oracle autodiff of the same model
in TensorFlow.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from array_model import (
    OPTIONS,
    A,
    U,
    X,
    added,
    by_forward_mode,
    engines,
    engines_of_pair,
    gradients,
    jacobian,
    jvp,
    mapped,
    true,
    true_pair,
    value,
    vjp,
)
from matrix import traced
from shared import WRAPS, derivative, forward_derivative

tfd = tfp.distributions
RAISED = (RuntimeError, TypeError, ValueError, tf.errors.OpError)


ENGINES = {f"{name}, one by one": h for name, h in engines().items()} | {
    f"{name}, vectorized": h for name, h in engines(vectorized=True).items()
}
# With the true function of each.
MODELS = {name: (h, true) for name, h in ENGINES.items()} | {
    f"{name}, {how}": (added(h), added(true_pair))
    for how, options in (("one by one", {}), ("vectorized", {"vectorized": True}))
    for name, h in engines_of_pair(**options).items()
}


def jacobians(f):
    x, a = tf.constant(X[0]), tf.constant(A[0])
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        y = f(x, a)
    return tape.jacobian(y, [x, a])


def posterior_gradient(f):
    """Of a likelihood of TFP around the engine."""

    def log_prob(x, a):
        return tfd.MultivariateNormalDiag(f(x, a), [0.1, 0.2, 0.3]).log_prob(U)

    return gradients(log_prob, upstream=None)


LAWS = [gradients, jacobians, by_forward_mode, posterior_gradient]
WAYS = {
    "eager": lambda law, f: law(f),
    "in tf.function": lambda law, f: traced(lambda: law(f))(),
    "around tf.function": lambda law, f: law(tf.function(f)),
    "around vectorized_map": lambda law, f: law(mapped(f)),
}


SLOW = (by_forward_mode, "around vectorized_map")


@pytest.mark.parametrize(
    ("law", "way"),
    [
        pytest.param(law, way, marks=[pytest.mark.long] * ((law, way) == SLOW))
        for law in LAWS
        for way in WAYS
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_equals_autodiff(name, law, way):
    h, native = MODELS[name]
    if law is jacobians and "vectorized_map" in way:
        pytest.skip("of one point: there is nothing to map")
    run = WAYS[way](law, h)
    if law is by_forward_mode and "products" in name and way == "around vectorized_map":
        assert all(np.isnan(came).all() for came in run)  # the mapped rule has no jvp
        return
    for came, expected in zip(run, law(native), strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ENGINES)
def test_arguments_that_members_share(name):
    a = A[0]
    for came, expected in zip(
        gradients(ENGINES[name], (X, a)), gradients(true, (X, a)), strict=True
    ):
        np.testing.assert_allclose(came, expected, rtol=1e-12)


@pytest.mark.parametrize("on_error", ["raise", -np.inf])
@pytest.mark.parametrize("name", engines())
def test_dtypes_and_static_shapes(name, on_error):
    h = engines(vectorized=True, on_error=on_error)[name]
    run = tf.function(lambda x, a: gradients(h, (x, a), tf.cast(U, tf.float32)))
    spec = [tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.float32)]
    y, by_x, by_a = run.get_concrete_function(*spec).structured_outputs
    assert [y.dtype, by_x.dtype, by_a.dtype] == [tf.float32] * 3
    assert [y.shape.as_list(), by_x.shape.as_list()] == [[None, 3], [None, 2]]
    along = tf.function(forward_derivative(h)).get_concrete_function(*spec).structured_outputs
    assert along.shape.as_list() == [None, 3]
    came = run(X.astype("float32"), A.astype("float32"))
    for got, expected in zip(came, gradients(true), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@WRAPS
def test_products_are_computed_on_request(wrap):
    h = engines(vectorized=True)["products"]
    counts = lambda: (h.calls, h.vjp_calls, h.jvp_calls)  # noqa: E731
    wrap(h)(X, A)
    assert counts() == (1, 0, 0)
    wrap(lambda: gradients(h))()
    assert counts() == (2, 1, 0)
    wrap(lambda: forward_derivative(h)(tf.constant(X), tf.constant(A)))()
    calls = 3 if wrap is not tf.function else 2  # TensorFlow drops what nobody uses
    assert counts() == (calls, 1, 1)
    wrap(lambda: gradients(mapped(h)))()
    assert counts() == (calls + 1, 2, 1)
    assert f": calls {calls + 1}, vjp_calls 2, jvp_calls 1, hess_calls 0, " in repr(h)


@pytest.mark.parametrize("name", ENGINES)
def test_an_empty_batch_makes_no_call(name):
    h, calls = ENGINES[name], ENGINES[name].calls
    for wrap in (lambda f: f, traced):
        y, by_x, by_a = wrap(lambda: gradients(h, (X[:0], A[:0]), U[:0]))()
        assert [y.shape, by_x.shape, by_a.shape] == [[0, 3], [0, 2], [0]]
    assert h.calls == calls


def test_of_a_structure_and_of_a_matrix():
    """The value is a matrix, the argument a dictionary."""
    outer = lambda p: p["b"][..., None] * p["a"][..., None, :]  # noqa: E731

    def vjp(p, u):
        return {"a": np.sum(u * p["b"][:, None], 0), "b": np.sum(u * p["a"], 1)}

    h = sgtrick.from_numpy(outer, vjp=vjp, value_shape=(3, 2))
    a, b = X[0], U[0]
    u = np.outer(U[1], X[1])

    def run(f):
        p = {"a": tf.constant(a), "b": tf.constant(b)}
        with tf.GradientTape() as tape:
            tape.watch(p)
            y = f(p)
        return tape.gradient(y, p, u)

    expected = run(lambda p: p["b"][:, tf.newaxis] * p["a"])
    for key, came in run(h).items():
        np.testing.assert_allclose(came, expected[key], rtol=1e-12)


@pytest.mark.parametrize("name", engines())
def test_by_an_executor(name):
    with ThreadPoolExecutor(2) as executor:
        h = engines(executor=executor)[name]
        for came, expected in zip(gradients(h), gradients(true), strict=True):
            np.testing.assert_allclose(came, expected, rtol=1e-12)


class TestHMC:
    @staticmethod
    def draws(f):
        def log_prob(x, a):
            return tfd.MultivariateNormalDiag(f(x, a), [1.0, 1.0, 1.0]).log_prob(U[0]) - (
                tf.reduce_sum(x**2, -1) + a**2
            )

        hmc = tfp.mcmc.HamiltonianMonteCarlo(log_prob, tf.constant(0.2, tf.float64), 3)
        sample = tf.function(tfp.mcmc.sample_chain, autograph=False)
        return sample(10, [X, A], kernel=hmc, trace_fn=None, seed=[1, 2])

    @pytest.mark.parametrize("name", engines())
    def test_draws_are_those_of_the_model_in_tensorflow(self, name):
        came, expected = self.draws(ENGINES[f"{name}, vectorized"]), self.draws(true)
        for got, want in zip(came, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-7)


def test_in_an_autobatched_joint_distribution():
    h = engines(vectorized=True)["products"]

    def joint(f):
        @tfd.JointDistributionCoroutineAutoBatched
        def model():
            x = yield tfd.MultivariateNormalDiag(tf.zeros(2, tf.float64), name="x")
            a = yield tfd.Normal(tf.zeros([], tf.float64), 1.0, name="a")
            yield tfd.MultivariateNormalDiag(f(x, a), tf.ones(3, tf.float64), name="y")

        return lambda x, a: model.log_prob(x=x, a=a, y=U)

    for came, expected in zip(
        gradients(joint(h), upstream=None), gradients(joint(true), upstream=None), strict=True
    ):
        np.testing.assert_allclose(came, expected, rtol=1e-12)
    assert (h.calls, h.vjp_calls) == (2, 1)  # one sample tells the shapes


class TestFailures:
    @staticmethod
    def failing(f):
        def engine(x, *rest):
            if np.any(x == X[1]):
                raise ArithmeticError("no solution")
            return f(x, *rest)

        return engine

    @pytest.mark.parametrize("vectorized", [True, False])
    @pytest.mark.parametrize("products", [True, False])
    def test_of_the_value(self, products, vectorized):
        options = OPTIONS | {"on_error": -7.0, "vectorized": vectorized}
        given = {"vjp": self.failing(vjp)} if products else {"grad": jacobian}
        h = sgtrick.from_numpy(self.failing(value), **given, **options)
        y, by_x, by_a = gradients(h)
        for came, expected, instead in zip(
            (y, by_x, by_a), gradients(true), (-7.0, 0, 0), strict=True
        ):
            want = expected.numpy()
            want[1] = instead
            np.testing.assert_allclose(came, want, rtol=1e-12)

    @pytest.mark.parametrize("vectorized", [True, False])
    def test_of_the_vjp_alone(self, vectorized):
        options = OPTIONS | {"on_error": -np.inf, "vectorized": vectorized}
        h = sgtrick.from_numpy(value, vjp=self.failing(vjp), **options)
        _, by_x, _ = gradients(h)
        want = gradients(true)[1].numpy()
        want[1] = np.nan
        np.testing.assert_allclose(by_x, want, rtol=1e-12)

    def test_raise(self):
        h = sgtrick.from_numpy(value, vjp=self.failing(vjp), **OPTIONS)
        message = r"(?s)vjp of value raised ArithmeticError: no solution.*x = .*u = "
        with pytest.raises(RAISED, match=message):
            gradients(h)


class TestWithoutGradient:
    """`grad=False`: for samplers that need none."""

    @staticmethod
    def log_prob(x):
        return -0.5 * np.sum(x**2, -1)

    @WRAPS
    def test_a_gradient_is_an_error(self, wrap):
        h = sgtrick.from_numpy(self.log_prob, grad=False, vectorized=True)
        np.testing.assert_allclose(wrap(h)(X), self.log_prob(X))
        np.testing.assert_allclose(wrap(mapped(h))(X), self.log_prob(X))
        message = (
            r"asked for a gradient, but its engine has none, grad=False\. Return \(value, grad"
        )
        with pytest.raises((LookupError, tf.errors.OpError), match=message):
            wrap(derivative(h))(tf.constant(X))
        with pytest.raises(NotImplementedError, match=r"forward mode, .* its engine has no jvp="):
            wrap(forward_derivative(h))(tf.constant(X))

    def test_samplers(self):
        h = sgtrick.from_numpy(self.log_prob, grad=False, vectorized=True)

        def sample(kernel):
            return tf.function(tfp.mcmc.sample_chain, autograph=False)(
                300, tf.zeros([4, 2], tf.float64), kernel=kernel, trace_fn=None, seed=[1, 2]
            )

        walk = sample(tfp.mcmc.RandomWalkMetropolis(h))
        native = sample(tfp.mcmc.RandomWalkMetropolis(lambda x: -0.5 * tf.reduce_sum(x**2, -1)))
        np.testing.assert_allclose(walk, native, rtol=1e-12)
        with pytest.raises(
            tf.errors.OpError, match="asked for a gradient, but its engine has none"
        ):
            sample(tfp.mcmc.HamiltonianMonteCarlo(h, 0.1, 2))

    def test_none_instead_of_a_gradient(self):
        h = sgtrick.from_numpy(lambda x: (np.sum(x), None))
        with pytest.raises(TypeError, match="return the value alone and pass grad=False"):
            h(X)


class TestErrors:
    @WRAPS
    def test_what_was_not_given(self, wrap):
        h = sgtrick.from_numpy(value, vjp=vjp, **OPTIONS)
        with pytest.raises(NotImplementedError, match=r"has no jvp=\. Pass jvp="):
            wrap(lambda: by_forward_mode(h))()
        h = sgtrick.from_numpy(value, jvp=jvp, **OPTIONS)
        with pytest.raises((LookupError, tf.errors.OpError), match=r"has only jvp=\. Pass vjp="):
            wrap(lambda: gradients(h))()

    @pytest.mark.parametrize("name", engines())
    @WRAPS
    def test_second_derivatives(self, wrap, name):
        h = ENGINES[f"{name}, vectorized"]

        second = derivative(derivative(lambda x: h(x, A)))
        with pytest.raises((LookupError, tf.errors.OpError), match="asked for a second derivative"):
            wrap(second)(tf.constant(X))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"value_shape": 3}, r"value_shape must be a tuple of ints, such as \(3,\), .* got 3"),
            ({"value_shape": {"a": (3,), "b": 3}}, r"value_shape\['b'\] must be a tuple of ints"),
            ({"value_shape": ((3,), (-1,))}, r"value_shape\[1\]\[0\] must be a tuple of ints"),
            ({"value_shape": (3,), "hess": vjp}, "hess is the Hessian of one number, but"),
            ({"grad": False, "hess": "3-point"}, "grad=False says .* no gradient: leave out hess"),
            ({"grad": False, "vjp": vjp}, "grad=False says .* no gradient: leave out vjp"),
            ({"jvp": jvp, "hess": "3-point"}, "takes differences of the gradient: pass vjp= too"),
            ({"value_shape": None}, "value_shape must be a tuple of ints, .* got None"),
            ({"grad": "3-point", "hess": "3-point"}, "those of grad='3-point' would be noise"),
            ({"grad": True}, "grad must be a function, got bool"),
            ({"grad": jacobian, "vjp": vjp}, "grad and vjp were both given. Pass one of them"),
            ({"grad": jacobian, "jvp": jvp}, "grad gives all first derivatives: leave jvp out"),
            ({"vjp": 4}, "vjp must be a function, got int"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(TypeError, match=message):
            sgtrick.from_numpy(value, **options)

    def test_a_number_instead_of_a_value_of_unknown_shape(self):
        with pytest.raises(
            ValueError, match=r"its shape must be known, but value_shape is \(None,\)"
        ):
            sgtrick.from_numpy(value, vjp=vjp, value_shape=(None,), on_error=-np.inf)

    @pytest.mark.parametrize(
        ("engine", "options", "message"),
        [
            (
                lambda x: (np.ones(3), np.ones([3, 2])),
                {},
                r"the value of f must have the shape \[\], got \[3\]. If the value is an array, "
                r"pass its shape, value_shape=\(3,\)",
            ),
            (
                lambda x: (x, np.eye(2)),
                {},
                r"That is the shape of the point. If .*value_shape=\(2,\); if it is one number, sum",
            ),
            (
                lambda x: (np.ones(3), np.ones(2)),
                {"value_shape": (3,)},
                r"gradient of f with respect to x must have the shape \[3, 2\], got \[2\]",
            ),
            (
                lambda x: (np.ones(3), np.ones([3, 2])),
                {"value_shape": (3,), "vectorized": True},
                r"must return one value for each batch member",
            ),
            (
                lambda x: (np.ones(n := 3 if x[0] == X[0, 0] else 2), np.ones([n, 2])),
                {"value_shape": (None,)},
                r"the value of f must have the same shape for all members .*, got \[3\] and \[2\]",
            ),
            (
                lambda x: (np.ones(3), np.ones([3, 2])),
                {"value_shape": (3,), "vjp": vjp},
                r"the value of f must (be an array of real numbers|have the shape \[3\])",
            ),
        ],
    )
    def test_replies(self, engine, options, message):
        h = sgtrick.from_numpy(engine, name="f", **options)
        with pytest.raises((TypeError, ValueError), match=message):
            h(tf.constant(X))

    @pytest.mark.parametrize(
        ("product", "message"),
        [
            (lambda x, a, u: None, "the VJP of value must be like the arguments, got None"),
            (
                lambda x, a, u: x,
                r"the VJP of value must be a tuple of 2, got ndarray of shape \[2\]",
            ),
            (
                lambda x, a, u: (u, a),
                r"the VJP of value with respect to x must have the shape \[2\]",
            ),
        ],
    )
    def test_products(self, product, message):
        h = sgtrick.from_numpy(value, vjp=product, **OPTIONS)
        with pytest.raises((TypeError, ValueError), match=message):
            gradients(h)
