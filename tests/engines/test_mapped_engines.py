"""Host engines under `tf.vectorized_map`: a batch arrives as a batch"""

import functools
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from array_model import MODELS, A, W, X
from matrix import traced
from sgtrick.tfp import Factor
from shared import WRAPS, derivative, value_and_gradients

tfd = tfp.distributions
Root = tfd.JointDistributionCoroutine.Root

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


class TestCalls:
    @WRAPS
    def test_tape_around(self, engine, wrap):
        h, calls, shapes = engine
        x, data = tf.constant(POINTS), tf.constant(DATA)
        run = wrap(lambda x, d: value_and_gradients(over_x(h), x, d))
        close(run(x, data), value_and_gradients(native, x, data))
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

    @pytest.mark.parametrize(
        ("inner", "wrap"),
        [("x", tf.function), ("data", lambda f: f), ("both", tf.function), ("none", lambda f: f)],
        ids=["x", "data", "both", "none"],
    )
    def test_nested(self, engine, wrap, inner):
        """The outer map over `x`, the inner one over what is named."""
        h, calls, _ = engine
        more = {"x": POINTS[:, None] * np.ones([8, 2, 1]), "data": DATA * np.ones([2, 1])}
        x = tf.constant(more["x"] if inner in ("x", "both") else POINTS)
        data = tf.constant(more["data"] if inner in ("data", "both") else DATA)

        def of_one(x, data):
            if inner == "x":
                return mapped(lambda x: h(x, data), x)
            if inner == "data":
                return mapped(lambda d: h(x, d), data)
            if inner == "both":
                return mapped(lambda a: h(*a), (x, data))
            # The call does not depend on what the inner one is over.
            return mapped(lambda k: h(x, data) * k, tf.ones([2], tf.float64))

        def whole(x, data):
            x = x if inner in ("x", "both") else x[:, tf.newaxis]
            return native(x, data) * tf.ones([2], tf.float64)

        run = wrap(lambda *a: value_and_gradients(over_x(of_one), *a))
        close(run(x, data), value_and_gradients(whole, x, data))
        assert calls(1, 8 if inner == "none" else 16)

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
    @WRAPS
    def test_within_functions_and_loops(self, engine, wrap):
        h, calls, _ = engine

        def one(x, data):
            y = tf.while_loop(
                lambda i, y: i < 3,
                lambda i, y: (i + 1, y + h(x, data)),
                (0, tf.zeros([], tf.float64)),
            )[1]
            return y + tf.function(h)(x, data)

        close(wrap(over_x(one))(tf.constant(POINTS), DATA), 4 * native(POINTS, DATA))
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

    def test_a_loop_in_the_place_of_a_map_without_the_converter(self, engine):
        """What happens should TensorFlow look for converters elsewhere: right, by members."""
        h, calls, _ = engine

        def one(x):
            y = h(x, DATA)
            for op in y.graph.get_operations():
                if hasattr(op, "pfor_converter"):
                    del op.pfor_converter
            return y

        close(tf.vectorized_map(one, tf.constant(POINTS)), native(POINTS, DATA))
        assert calls(CHAINS, CHAINS)

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


def in_a_map(f):
    return lambda x, a: tf.map_fn(lambda x: f(x, a), x)


def in_a_loop(f):
    def run(x, a):
        def body(i, y):
            return i + 1, y + f(x, a * tf.cast(i + 1, a.dtype))

        return tf.while_loop(lambda i, _: i < 2, body, (0, f(x, a)))[1]

    return run


def in_a_scan(f):
    return lambda x, a: tf.scan(lambda y, a: y + f(x, a), tf.stack([a, 2 * a]), f(x, a))[1]


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


def of_torch():
    torch = pytest.importorskip("torch")
    w = torch.tensor(W)
    return sgtrick.from_torch(
        lambda x, a: a * torch.sin(w @ x), value_shape=(3,), event_ndims=(1, 0)
    )


def of_jax():
    np = pytest.importorskip("jax.numpy")
    return sgtrick.from_jax(lambda x, a: a * np.sin(W @ x), event_ndims=(1, 0))


KINDS = {
    name: lambda name=name: MODELS["array"].engine(name, vectorized=True)
    for name in ("with the value", "grad", "products", "3-point")
} | {"torch": of_torch, "jax": of_jax}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "loop", "way"),
    [
        ("with the value", in_a_loop, jacobian),
        ("grad", in_a_branch, functools.partial(jacobian, batched=True)),
        ("products", in_a_scan, jacobian),
        ("products", in_a_loop, mapped_gradient),
        ("3-point", in_a_loop, mapped_gradient),
        ("torch", in_a_map, jacobian),
        ("jax", in_a_loop, jacobian),
        ("products", lambda f: f, of_a_root),
        ("jax", lambda f: f, of_a_root),
    ],
    ids=lambda part: part if isinstance(part, str) else getattr(part, "__name__", "batch_jacobian"),
)
def test_in_loops(kind, loop, way):
    """In loops and branches, derivatives are mapped, and differentiated loops are."""
    h, f = KINDS[kind](), MODELS["array"].true
    x, a = tf.constant(X[:2]), tf.constant(A[:2])
    if loop is in_a_map:
        h, f = (lambda x, a, g=g: tf.reshape(g(x, a[0]), [-1, 3]) for g in (h, f))
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


OBSERVED, SD = np.array([0.3, -1.0, 2.0]), 0.5


@np.errstate(over="ignore")
def likelihood(x):
    z = (OBSERVED - x) / SD
    return -0.5 * np.sum(z**2, -1), z / SD


def native_likelihood(x):
    return -0.5 * tf.reduce_sum(((OBSERVED - x) / SD) ** 2, -1)


def posterior(log_likelihood):
    @tfd.JointDistributionCoroutineAutoBatched
    def model():
        zeros = tf.zeros([3], tf.float64)
        x = yield tfd.MultivariateNormalDiag(zeros, zeros + 1, name="x")
        yield Factor(log_likelihood(x), name="data")

    return model.experimental_pin(data=tf.zeros([0], tf.float64)).unnormalized_log_prob


STEPS, LEAPFROGS = 6, 3


def hmc(target):
    return tfp.mcmc.HamiltonianMonteCarlo(target, tf.constant(0.2, tf.float64), LEAPFROGS)


def nuts(target):
    return tfp.mcmc.NoUTurnSampler(target, tf.constant(0.2, tf.float64), max_tree_depth=4)


def sample(target, kernel, trace_fn=None):
    @tf.function(autograph=False)
    def run():
        return tfp.mcmc.sample_chain(
            STEPS, tf.constant(POINTS), kernel=kernel(target), trace_fn=trace_fn, seed=[1, 2]
        )

    return run()


def from_torch():
    torch = pytest.importorskip("torch")
    observed = torch.tensor(OBSERVED)
    return sgtrick.from_torch(lambda x: -0.5 * (((observed - x) / SD) ** 2).sum())


def from_jax():
    pytest.importorskip("jax")
    return sgtrick.from_jax(lambda x: -0.5 * (((OBSERVED - x) / SD) ** 2).sum())


class TestAutoBatchedModels:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "form", [lambda: sgtrick.from_numpy(likelihood, vectorized=True), from_torch, from_jax],
        ids=["from_numpy", "from_torch", "from_jax"],
    )  # fmt: skip
    def test_hmc(self, form):
        h = form()
        draws = sample(posterior(h), hmc)
        np.testing.assert_allclose(draws, sample(posterior(native_likelihood), hmc), atol=1e-10)
        assert h.calls == calls_to_know_its_shapes() + 1 + STEPS * LEAPFROGS

    @pytest.mark.long
    def test_nuts(self):
        def leapfrogs(_, results):
            return results.leapfrogs_taken

        h = sgtrick.from_numpy(likelihood, vectorized=True)
        draws, taken = sample(posterior(h), nuts, leapfrogs)
        want = sample(posterior(native_likelihood), nuts)
        np.testing.assert_allclose(draws, want, atol=1e-10)
        # All chains go on until the last is done, doubling their trees.
        longest = np.max(taken, 1)
        assert h.calls == calls_to_know_its_shapes() + 1 + longest.sum()
        assert longest.min() > 1


@functools.cache
def calls_to_know_its_shapes():
    """A joint distribution draws from its model once."""
    h = sgtrick.from_numpy(likelihood, vectorized=True)
    tf.function(posterior(h))(tf.constant(POINTS))
    return h.calls - 1
