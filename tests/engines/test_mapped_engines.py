"""Host engines under `tf.vectorized_map`: a batch arrives as a batch"""

import functools
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from array_model import MODELS, A, X, joint
from matrix import traced
from shared import WRAPS, derivative, value_and_gradients

ARRAY = MODELS["array"]
CHAINS, DIMENSIONS = 8, 3
POINTS = np.random.default_rng(7).normal(size=(CHAINS, DIMENSIONS))
DATA = np.random.default_rng(8).normal(size=(5,))

# Not a loop in the place of a map: without the converter this raises.
mapped = functools.partial(tf.vectorized_map, fallback_to_while_loop=False)


def native(x, data):
    return tf.reduce_sum(tf.sin(x), -1) * tf.reduce_sum(data**2, -1)


def close(came, want):
    for a, b in zip(tf.nest.flatten(came), tf.nest.flatten(want), strict=True):
        a = tf.convert_to_tensor(a)  # some come in slices
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def over_x(f):
    """Mapped over the first argument; all members share the other one."""
    return lambda x, data: mapped(lambda x: f(x, data), x)


@pytest.fixture(params=[True, False], ids=["vectorized", "by member"])
def engine(request):
    """An engine, a function that tells how often it was called, and the shapes it was called with."""
    shapes = []

    def f(x, data):
        shapes.append((x.shape, data.shape))
        s, t = np.sum(np.sin(x), -1), np.sum(data**2, -1)
        return s * t, (np.cos(x) * t[..., None], 2 * s[..., None] * data)

    h = sgtrick.from_numpy(f, vectorized=request.param)

    def calls(batches, members):
        """Whether there was one call for each batch, or for each member."""
        return h.calls == (batches if request.param else members)

    return h, calls, shapes


NESTED = {
    "x": lambda h, x, data: mapped(lambda x: h(x, data), x),
    "data": lambda h, x, data: mapped(lambda d: h(x, d), data),
    "neither": lambda h, x, data: mapped(lambda k: h(x, data) * k, tf.ones([2], tf.float64)),
}


class TestCalls:
    def test_tape_around(self, engine):
        h, calls, shapes = engine
        x, data = tf.constant(POINTS), tf.constant(DATA)
        close(value_and_gradients(over_x(h), x, data), value_and_gradients(native, x, data))
        assert calls(1, CHAINS)
        assert set(shapes) <= {((8, 3), (8, 5)), ((3,), (5,))}

    @WRAPS
    def test_tape_within(self, engine, wrap):
        h, calls, _ = engine
        x, data = tf.constant(POINTS), tf.constant(DATA)
        y, (by_x, by_data) = wrap(mapped)(lambda x: value_and_gradients(h, x, data), x)
        want = value_and_gradients(native, x, data)
        close([y, by_x], [want[0], want[1][0]])
        close(tf.reduce_sum(by_data, 0), want[1][1])  # of each member its own
        assert calls(1, CHAINS)

    @pytest.mark.parametrize("inner", NESTED)
    def test_nested(self, engine, inner):
        """The outer map over `x`, the inner one over what is named."""
        h, calls, _ = engine
        x = tf.constant(POINTS[:, None] * np.ones([8, 2, 1]) if inner == "x" else POINTS)
        data = tf.constant(DATA * np.ones([2, 1]) if inner == "data" else DATA)

        def whole(x, data):
            x = x if inner == "x" else x[:, tf.newaxis]
            return native(x, data) * tf.ones([2], tf.float64)

        of_one = over_x(lambda x, d: NESTED[inner](h, x, d))
        run = tf.function(lambda *args: value_and_gradients(of_one, *args))
        close(run(x, data), value_and_gradients(whole, x, data))
        assert calls(1, 8 if inner == "neither" else 16)

    @WRAPS
    def test_a_batch_of_its_own_within(self, engine, wrap):
        h, calls, shapes = engine
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 2, 3)))  # [member, batch, event]
        data = tf.constant(np.random.default_rng(1).normal(size=(6, 1, 5)))  # [batch, 1, event]
        run = wrap(lambda x, d: value_and_gradients(over_x(h), x, d))
        want = value_and_gradients(lambda x, d: native(x[:, tf.newaxis], d), x, data)
        close(run(x, data), want)
        assert shapes[0] in [((4, 6, 2, 3), (4, 6, 2, 5)), ((3,), (5,))]
        assert calls(1, 48)

    def test_unknown_shapes(self, engine):
        h, calls, _ = engine
        run = tf.function(
            lambda x, d: value_and_gradients(over_x(h), x, d),
            input_signature=[tf.TensorSpec(shape, tf.float64) for shape in ([None, None], [5])],
            autograph=False,
        )
        for n in (8, 1, 5, 0):
            x, data = tf.constant(POINTS[:n]), tf.constant(DATA)
            close(run(x, data), value_and_gradients(native, x, data))
        assert calls(3, 14)

    @pytest.mark.long
    def test_within_functions_and_loops(self, engine):
        h, calls, _ = engine

        def one(x, data):
            y = tf.while_loop(
                lambda i, y: i < 3,
                lambda i, y: (i + 1, y + h(x, data)),
                (0, tf.zeros([], tf.float64)),
            )[1]
            return y + tf.function(h)(x, data)

        close(tf.function(over_x(one))(POINTS, DATA), 4 * native(POINTS, DATA))
        assert calls(4, 4 * CHAINS)

    def test_members_that_branch_are_called_in_their_branch(self, engine):
        h, calls, _ = engine

        def one(x):
            return tf.cond(x[0] > 0, lambda: h(x, DATA), lambda: h(2 * x, DATA))

        want = native(np.where(POINTS[:, :1] > 0, 1, 2) * POINTS, DATA)
        close(tf.function(lambda x: tf.vectorized_map(one, x))(POINTS), want)
        assert calls(2, CHAINS)

    def test_jacobians_call_once(self, engine):
        h, calls, _ = engine
        x = tf.constant(POINTS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = over_x(h)(x, DATA)[:, tf.newaxis]
        close(tape.batch_jacobian(y, x)[:, 0], np.cos(POINTS) * np.sum(DATA**2))
        assert calls(1, CHAINS)

    @WRAPS
    def test_what_has_no_derivatives_and_text(self, wrap):
        seen = []

        def f(x, k, text):
            seen.append((x.shape, k.shape, text.shape, text.item(0)))
            return np.sum(x, -1) * k, (k[..., None] + 0 * x, None, None)

        h = sgtrick.from_numpy(f, event_ndims=(1, 0, 0), vectorized=True)
        x, k = tf.constant(POINTS), tf.range(8)
        y = wrap(lambda: mapped(lambda a: h(*a, tf.constant(b"ab\0")), (x, k)))()
        close(y, np.sum(POINTS, -1) * k.numpy())
        assert seen == [((8, 3), (8,), (8,), b"ab\0")]


def in_a_loop(f):
    def run(x, a):
        def body(i, y):
            return i + 1, y + f(x, a * tf.cast(i + 1, a.dtype))

        return tf.while_loop(lambda i, _: i < 2, body, (0, f(x, a)))[1]

    return run


def in_a_branch(f):
    return lambda x, a: tf.cond(x[0, 0] < 9, lambda: f(x, a), lambda: f(2 * x, a))


def jacobian(f, *, batched=False):
    """Of the array by the vectors."""

    def run(x, a):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x, a)
        return tape.batch_jacobian(y, x) if batched else tape.jacobian(y, x)

    return traced(run)


def mapped_gradient(f):
    """The loop is within the map, and the tape too."""

    def of_one(x, a):
        x, a = x[tf.newaxis], a[tf.newaxis]
        return derivative(f)(x, a)[0]

    return traced(lambda x, a: tf.vectorized_map(lambda args: of_one(*args), (x, a)))


def of_a_root(f):
    """Around a map of roots of a residual with an engine in it."""

    def root(x, a):
        def total(x):
            return tf.reduce_sum(f(x[tf.newaxis], a[tf.newaxis]))

        z = tf.stop_gradient(total(x) / 2)
        return sgtrick.implicit_root(lambda z, x: 2 * z - total(x), z, x)

    return traced(derivative(lambda x, a: tf.vectorized_map(lambda args: root(*args), (x, a))))


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "loop", "way"),
    [
        ("with the value", in_a_loop, jacobian),
        ("grad", in_a_branch, functools.partial(jacobian, batched=True)),
        ("products", in_a_loop, jacobian),
        ("products", in_a_loop, mapped_gradient),
        ("products", lambda f: f, of_a_root),
        ("3-point", in_a_loop, jacobian),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "__name__", "batch_jacobian"),
)
def test_in_loops(given, loop, way):
    """In loops and branches, derivatives are mapped, and differentiated loops are."""
    h, f = ARRAY.engine(given, vectorized=True), ARRAY.true
    x, a = tf.constant(X[:2]), tf.constant(A[:2])
    came, expected = (way(loop(g))(x, a) for g in (h, f))
    np.testing.assert_allclose(came, expected, rtol=1e-6, atol=1e-8)


class TestWhatIsShared:
    def test_takes_no_memory_and_cannot_be_written_to(self):
        seen = []

        def f(x, data):
            seen.append(data)
            return x * data.sum(-1), (data.sum(-1), None)

        h = sgtrick.from_numpy(f, event_ndims=(0, 1), vectorized=True)
        x, data = tf.ones([1000], tf.float64), tf.ones([7], tf.float64)
        for run in (h, over_x(h)):
            close(run(x, data), 7 * x)
            assert seen[-1].shape == (1000, 7)
            assert seen[-1].strides[0] == 0
            assert not seen[-1].flags.writeable
        h(x, data * x[:, tf.newaxis])
        assert seen[-1].flags.writeable

    @pytest.mark.parametrize("executor", [None, "threads"])
    def test_members_have_their_own(self, executor):
        def f(x, data):
            data += x  # must not be seen by the next member
            return np.sum(data), (data.size, np.ones_like(data))

        with futures.ThreadPoolExecutor(2) as threads:
            h = sgtrick.from_numpy(f, event_ndims=(0, 1), executor=executor and threads)
            x = tf.constant([1.0, 2.0, 3.0])
            for run in (h, over_x(h)):
                close(run(x, tf.ones([2])), np.array([4, 6, 8]))

    def test_a_function_of_the_gradient_apart_gets_it_too(self):
        h = sgtrick.from_numpy(
            lambda x, d: np.sum(x * d, -1), grad=lambda x, d: (d + 0 * x, x), vectorized=True
        )
        x, d = tf.constant(POINTS), tf.constant(POINTS[0])
        want = value_and_gradients(lambda x, d: tf.reduce_sum(x * d, -1), x, d)
        close(value_and_gradients(over_x(h), x, d), want)


@pytest.mark.long
def test_hmc_of_an_autobatched_model():
    def draws(f):
        target = joint(f).experimental_pin(y=[0.3, -0.2, 0.5]).unnormalized_log_prob
        kernel = tfp.mcmc.HamiltonianMonteCarlo(target, tf.constant(0.2, tf.float64), 3)
        sample = tf.function(tfp.mcmc.sample_chain, autograph=False)
        start = [tf.constant(X), tf.constant(A)]
        return sample(6, start, kernel=kernel, trace_fn=None, seed=[1, 2])

    h = ARRAY.engine("products", vectorized=True)
    for came, want in zip(draws(h), draws(ARRAY.true), strict=True):
        np.testing.assert_allclose(came, want, atol=1e-10)
    assert h.vjp_calls == 1 + 6 * 3  # once for all chains
    assert h.calls - h.vjp_calls in (0, 1)  # a sample tells the shapes
