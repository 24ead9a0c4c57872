"""Products of an engine's Hessian with a vector, beside autodiff of the true function."""

import multiprocessing
import threading
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from hanging import HANGS
from matrix import spread
from shared import WRAPS, derivative, mapped

RAISED = (RuntimeError, TypeError, ValueError, tf.errors.OpError)
RANDOM = np.random.default_rng(11)
POINTS, VECTORS = RANDOM.normal(size=(2, 4, 3))


def hessian_times(h, args, vs):
    """The host call, as the forms use it."""
    call, xs, _, _ = h._prepared(*h._arguments(args, {}))
    return call.hessian_times(xs, [tf.convert_to_tensor(v) for v in vs])


def exact(f, xs, vs):
    """Forward over reverse by TensorFlow."""
    with tf.autodiff.ForwardAccumulator(xs, vs) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = tf.reduce_sum(f(*xs))
        gradients = tape.gradient(y, xs, unconnected_gradients="zero")
    found = [accumulator.jvp(g) for g in gradients]
    return [tf.zeros_like(x) if d is None else d for x, d in zip(xs, found, strict=True)]


def close(came, want):
    for a, b in zip(came, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def native(x):
    return tf.sin(x[..., 0]) * tf.exp(x[..., 1] / 2) + x[..., 0] * x[..., 2] ** 2


def value(x):
    return np.sin(x[..., 0]) * np.exp(x[..., 1] / 2) + x[..., 0] * x[..., 2] ** 2


def gradient(x):
    a, b, c = np.moveaxis(x, -1, 0)
    e = np.exp(b / 2)
    return np.stack([np.cos(a) * e + c**2, np.sin(a) * e / 2, 2 * a * c], -1)


def hess(x):
    a, b, c = np.moveaxis(x, -1, 0)
    e, zero = np.exp(b / 2), 0 * a
    rows = [
        [-np.sin(a) * e, np.cos(a) * e / 2, 2 * c],
        [np.cos(a) * e / 2, np.sin(a) * e / 4, zero],
        [2 * c, zero, 2 * a],
    ]
    return np.moveaxis(np.array(rows), [0, 1], [-2, -1])


def hessp(x, v):
    return np.einsum("...ij,...j->...i", hess(x), v)


KINDS = pytest.mark.parametrize("second", [{"hess": hess}, {"hessp": hessp}], ids=["hess", "hessp"])


@WRAPS
@KINDS
@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_argument(wrap, second, vectorized, dtype):
    h = sgtrick.from_numpy(value, grad=gradient, vectorized=vectorized, **second)
    x, v = tf.constant(POINTS, dtype), tf.constant(VECTORS, dtype)
    (came,) = wrap(lambda x, v: hessian_times(h, [x], [v]))(x, v)
    (want,) = exact(native, [tf.cast(x, tf.float64)], [tf.cast(v, tf.float64)])
    np.testing.assert_allclose(
        came, tf.cast(want, dtype), rtol=1e-6 if dtype == "float32" else 1e-12
    )
    assert (came.dtype, came.shape) == (dtype, [4, 3])
    assert (h.calls, h.hess_calls, h.failures) == (0, 1 if vectorized else 4, 0)
    assert h.seconds > 0


@KINDS
def test_static_shapes(second):
    """Loops of TensorFlow need them."""
    h, seen = sgtrick.from_numpy(value, grad=gradient, **second), []

    @tf.function
    def run(x, v):
        seen.extend(came.shape for came in hessian_times(h, [x], [v]))

    run(tf.constant(POINTS), tf.constant(VECTORS))
    assert seen == [[4, 3]]


@WRAPS
@KINDS
@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("over", ["x", "v", "both", "nested"])
def test_mapped(wrap, second, vectorized, over):
    h = sgtrick.from_numpy(value, grad=gradient, vectorized=vectorized, **second)
    x = tf.constant(POINTS if over in ("x", "both", "nested") else POINTS[0])
    v = tf.constant(VECTORS if over in ("v", "both", "nested") else VECTORS[0])

    def run(x, v):
        def one(a):
            return hessian_times(h, [a.get("x", x)], [a.get("v", v)])[0]

        def mapped(f, a):
            return tf.vectorized_map(f, a, fallback_to_while_loop=False)

        if over == "nested":
            return mapped(lambda x: mapped(lambda v: one({"x": x, "v": v}), v), x)
        named = {"x": {"x": x}, "v": {"v": v}, "both": {"x": x, "v": v}}[over]
        return mapped(one, named)

    came = wrap(run)(x, v)
    if over == "nested":
        x, v = (tf.broadcast_to(t, [4, 4, 3]) for t in (x[:, tf.newaxis], v))
    x, v = (tf.broadcast_to(t, came.shape) for t in (x, v))
    close([came], exact(native, [x], [v]))
    assert h.hess_calls == (1 if vectorized else len(tf.reshape(came, [-1, 3])))


class TestSeveralArguments:
    """`sum(x**2) * exp(a) * sum(y)`, with `n`, which has no derivatives, as a factor."""

    @staticmethod
    def native(x, a, n, y):
        factor = tf.cast(n, tf.float64) * tf.exp(a) * tf.reduce_sum(y, [-2, -1])
        return tf.reduce_sum(x**2, -1) * factor

    @staticmethod
    def engine(x, a, n, y):
        s, e, t = np.sum(x**2, -1), np.exp(a), np.sum(y, (-2, -1))
        gradients = (2 * x * _at(n * e * t, 1), n * s * e * t, None, _at(n * s * e, 2) + 0 * y)
        return n * s * e * t, gradients

    @staticmethod
    def hessp(x, a, n, y, v):
        vx, va, vn, vy = v
        assert vn is None
        s, e, t = np.sum(x**2, -1), np.exp(a), np.sum(y, (-2, -1))
        ds, dt = np.sum(2 * x * vx, -1), np.sum(vy, (-2, -1))
        by_x = 2 * vx * _at(n * e * t, 1) + 2 * x * _at(n * e * (va * t + dt), 1)
        by_a = n * e * (ds * t + s * va * t + s * dt)
        return by_x, by_a, None, _at(n * e * (ds + s * va), 2) + 0 * y

    @staticmethod
    def hess(x, a, n, y):
        s, e, t = np.sum(x**2, -1), np.exp(a), np.sum(y, (-2, -1))
        xx = 2 * np.eye(3) * _at(n * e * t, 2)
        xa = 2 * x * _at(n * e * t, 1)
        ones = np.ones_like(y)
        xy = 2 * x[..., None, None] * _at(n * e, 3) * ones[..., None, :, :]
        ya = _at(n * s * e, 2) * ones
        yy = np.zeros((*y.shape, *y.shape[-2:]))
        yx = np.moveaxis(xy, -3, -1)
        return (xx, xa, None, xy), (xa, n * s * e * t, None, ya), None, (yx, ya, None, yy)

    @WRAPS
    @pytest.mark.parametrize("second", ["hess", "hessp"])
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_mixed_blocks(self, wrap, second, vectorized):
        h = sgtrick.from_numpy(
            self.engine,
            event_ndims=(1, 0, 0, 2),
            vectorized=vectorized,
            **{second: getattr(self, second)},
        )
        shapes = [[4, 3], [4], [4, 2, 2]]
        x, a, y = (tf.constant(RANDOM.normal(size=s)) for s in shapes)
        vs = [tf.constant(RANDOM.normal(size=s)) for s in shapes]
        n = tf.constant([1, 2, 3, 4])
        came = wrap(lambda x, a, y, vs: hessian_times(h, [x, a, n, y], vs))(x, a, y, vs)
        close(came, exact(lambda x, a, y: self.native(x, a, n, y), [x, a, y], vs))
        # What members share.
        vs = [vs[0], vs[1], vs[2]]
        came = wrap(lambda x, vs: hessian_times(h, [x, a[0], n, y[0]], vs))(x, vs)
        repeated = [x, tf.broadcast_to(a[0], [4]), tf.broadcast_to(y[0], [4, 2, 2])]
        close(came, exact(lambda x, a, y: self.native(x, a, n, y), repeated, vs))

    @pytest.mark.parametrize("second", ["hess", "hessp"])
    def test_structures(self, second):
        def engine(p):
            return p["a"] ** 2 * p["b"], {"a": 2 * p["a"] * p["b"], "b": p["a"] ** 2}

        def hessp(p, v):
            return {
                "a": 2 * p["b"] * v["a"] + 2 * p["a"] * v["b"],
                "b": 2 * p["a"] * v["a"],
            }

        def hess(p):
            return {"a": {"a": 2 * p["b"], "b": 2 * p["a"]}, "b": {"a": 2 * p["a"], "b": 0.0}}

        h = sgtrick.from_numpy(engine, event_ndims=0, **{second: locals()[second]})
        a, b, va, vb = (tf.constant(RANDOM.normal(size=4)) for _ in range(4))
        want = exact(lambda a, b: a**2 * b, [a, b], [va, vb])
        close(hessian_times(h, [{"a": a, "b": b}], [va, vb]), want)

    @WRAPS
    def test_blocks_that_are_not_known_are_nan_unless_the_vector_is_zero_there(self, wrap):
        h = sgtrick.from_numpy(
            lambda x, data: (np.sum(x**2), (2 * x, None)),
            hess=lambda x, data: ((2 * np.eye(3), None), (None, None)),
        )
        x = tf.constant(POINTS)
        zero = tf.zeros_like(x)
        by_x, by_data = wrap(lambda v, w: hessian_times(h, [x, x], [v, w]))(x, zero)
        np.testing.assert_array_equal(by_x, 2 * POINTS)
        assert np.isnan(by_data).all()
        by_x, by_data = wrap(lambda v, w: hessian_times(h, [x, x], [v, w]))(zero, zero)
        np.testing.assert_array_equal([by_x, by_data], np.zeros([2, 4, 3]))
        by_x, _ = wrap(lambda v, w: hessian_times(h, [x, x], [v, w]))(x, x)
        assert np.isnan(by_x).all()


def _at(a, n):
    return np.reshape(a, np.shape(a) + (1,) * n)


class TestExecutors:
    @KINDS
    @WRAPS
    def test_threads_at_once(self, second, wrap):
        meeting = threading.Barrier(4)
        ((name, f),) = second.items()

        def meets(*args):
            meeting.wait(timeout=HANGS)
            return f(*args)

        with futures.ThreadPoolExecutor(4) as threads:
            h = sgtrick.from_numpy(value, grad=gradient, executor=threads, **{name: meets})
            (came,) = wrap(lambda x, v: hessian_times(h, [x], [v]))(POINTS, VECTORS)
        close([came], exact(native, [tf.constant(POINTS)], [tf.constant(VECTORS)]))

    def test_processes(self):
        context = multiprocessing.get_context("spawn")
        with futures.ProcessPoolExecutor(2, mp_context=context) as processes:
            h = sgtrick.from_numpy(
                engines.square, grad=engines.square_gradient, hessp=engines.square_hessp,
                executor=processes,
            )  # fmt: skip
            (came,) = hessian_times(h, [tf.constant(POINTS)], [tf.constant(VECTORS)])
            with pytest.raises(TypeError, match="the engine cannot be sent"):
                sgtrick.from_numpy(engines.normal, hessp=lambda x, v: v, executor=processes)
        np.testing.assert_array_equal(came, 2 * VECTORS)


@pytest.mark.parametrize("package", ["torch", "jax"])
class TestFrameworks:
    @pytest.fixture(autouse=True)
    def _form(self, package):
        self.np = pytest.importorskip("torch" if package == "torch" else "jax.numpy")
        self.form = getattr(sgtrick, f"from_{package}")

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_exact_and_only_when_asked_for(self, wrap, vectorized):
        traced = []

        def f(x):
            traced.append(x)
            return self.np.sin(x[0]) * self.np.exp(x[1] / 2) + x[0] * x[2] ** 2

        h = self.form(f, vmap=vectorized)
        x, v = tf.constant(POINTS), tf.constant(VECTORS)
        np.testing.assert_allclose(h(x), native(x))
        first = len(traced)
        (came,) = wrap(lambda x, v: hessian_times(h, [x], [v]))(x, v)
        assert len(traced) > first
        close([came], exact(native, [x], [v]))
        calls = 1 if vectorized else 4
        assert (h.calls, h.hess_calls) == (calls, calls)

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_mixed_blocks_of_structures(self, wrap, vectorized):
        def f(p, n):
            return (p["x"] ** 2).sum() * self.np.exp(p["a"]) * n

        def native(a, x):
            return tf.reduce_sum(x**2, -1) * tf.exp(a) * 3

        h = self.form(f, event_ndims=({"a": 0, "x": 1}, 0), vmap=vectorized)
        a, x = tf.constant(POINTS[:, 0]), tf.constant(POINTS)
        vs = [tf.constant(VECTORS[:, 0]), tf.constant(VECTORS)]
        came = wrap(lambda a, x: hessian_times(h, [{"a": a, "x": x}, tf.constant(3)], vs))(a, x)
        close(came, exact(native, [a, x], vs))

    def test_aux_and_linear_functions(self):
        h = self.form(lambda x: (3 * x.sum(), x), has_aux=True)
        (came,) = hessian_times(h, [tf.constant(POINTS)], [tf.constant(VECTORS)])
        np.testing.assert_array_equal(came, np.zeros([4, 3]))

    def test_mapped_over_the_vectors_alone(self):
        h = self.form(lambda x: self.np.sin(x[0]) * self.np.exp(x[1] / 2) + x[0] * x[2] ** 2)
        x = tf.constant(POINTS[0])
        rows = tf.vectorized_map(
            lambda v: hessian_times(h, [x], [v])[0], tf.eye(3, dtype=tf.float64)
        )
        np.testing.assert_allclose(rows, hess(POINTS[0]), rtol=1e-12, atol=1e-14)
        assert h.hess_calls == 1


class TestSymmetry:
    """A Hessian is symmetric, so that reverse mode may use rows and forward mode columns."""

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    def test_of_one_triangle_is_refused(self, wrap, vectorized, on_error):
        h = sgtrick.from_numpy(
            value, grad=gradient, hess=lambda x: np.triu(hess(x)),
            vectorized=vectorized, on_error=on_error,
        )  # fmt: skip
        message = (
            r"the Hessian of value with respect to x and x must be symmetric, got .* and, with rows "
            r"and columns exchanged, 0\. Return all of it, not one triangle"
        )
        with pytest.raises((ValueError, tf.errors.OpError), match=message):
            wrap(lambda x, v: hessian_times(h, [x], [v]))(POINTS, VECTORS)

    @pytest.mark.parametrize("zero", [0.0, None])
    def test_of_blocks(self, zero):
        """A block that is unknown is not one that is zero."""
        h = sgtrick.from_numpy(
            lambda x, a: (x @ x * a, (2 * a * x, x @ x)),
            hess=lambda x, a: ((2 * a * np.eye(3), 2 * x), (zero if zero is None else 0 * x, 0.0)),
            event_ndims=(1, 0),
        )
        x, a = tf.constant(POINTS[0]), tf.constant(2.0, tf.float64)
        v = tf.constant(VECTORS[0])
        if zero is None:
            by_x, by_a = hessian_times(h, [x, a], [v, a])
            close([by_x], exact(lambda x, a: tf.reduce_sum(x**2) * a, [x, a], [v, a])[:1])
            assert np.isnan(by_a)
        else:
            message = "the Hessian of .* with respect to x and a must be symmetric"
            with pytest.raises(ValueError, match=message):
                hessian_times(h, [x, a], [v, a])

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_up_to_rounding_the_symmetric_part_counts(self, wrap, vectorized):
        """A large entry of one member does not excuse those of the others."""
        scales = np.array([1.0, 1e6, 1e-6, 1.0])[:, np.newaxis]
        noise = RANDOM.normal(size=(3, 3)) * 1e-5

        def hess(x):
            size = x[..., 0, np.newaxis, np.newaxis]
            return size * (np.ones((3, 3)) + noise)

        h = sgtrick.from_numpy(
            lambda x: (x[..., 0], 0 * x), hess=hess, vectorized=vectorized, event_ndims=1
        )
        x = tf.constant(scales * np.ones((4, 3)))
        (came,) = wrap(lambda x, v: hessian_times(h, [x], [v]))(x, VECTORS)
        part = np.ones((3, 3)) + (noise + noise.T) / 2
        np.testing.assert_allclose(came, scales * (VECTORS @ part), rtol=1e-12)

        noise[0, 1] += 0.01
        with pytest.raises(RAISED, match="must be symmetric"):
            wrap(lambda x, v: hessian_times(h, [x], [v]))(x, VECTORS)

    def test_of_integers_and_of_what_is_not_finite(self):
        both = np.array([[0, 1], [1, 0]], np.uint8), np.array([[np.nan, np.inf], [np.inf, 1.0]])
        x = tf.ones([2], tf.float64)
        for found, want in zip(both, ([1.0, 1.0], [np.nan, np.inf]), strict=True):
            h = sgtrick.from_numpy(lambda x: (x[0], x), hess=lambda x, found=found: found)
            np.testing.assert_array_equal(hessian_times(h, [x], [x])[0], want)


class TestWhereTheEngineFailed:
    """Its value is replaced by a constant there, so `hessp` is the Hessian of something else."""

    X = tf.constant([[0.5, 2.0], [2.0, 3.0], [1.0, -1.0]], tf.float64)
    HESSIANS = np.array([np.diag([3.0, 12.0]), np.full([2, 2], np.nan), np.diag([6.0, -6.0])])

    @pytest.fixture(params=spread([True, False], [True, False], ["hess", "hessp"]), ids=str)
    def h(self, request):
        vectorized, has_aux, second = request.param

        def cubes(x):
            if np.any(x[..., 0] > 1):
                raise ArithmeticError
            y = np.sum(x**3, -1)
            return (y, x) if has_aux else y, 3 * x**2

        functions = {
            "hess": lambda x: 6 * x[..., np.newaxis] * np.eye(2),
            "hessp": lambda x, v: 6 * x * v,
        }
        h = sgtrick.from_numpy(
            cubes, on_error=-1e3, vectorized=vectorized, has_aux=has_aux,
            **{second: functions[second]},
        )  # fmt: skip
        return (lambda x: h(x)[0]) if has_aux else h

    @staticmethod
    def by_tapes(f, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            g = tape.gradient(y, x)
        return outer.batch_jacobian(g, x)

    @staticmethod
    def forward_over_reverse(f, x):
        columns = []
        for v in tf.unstack(tf.eye(2, dtype=tf.float64)):
            with tf.autodiff.ForwardAccumulator(x, tf.zeros_like(x) + v) as accumulator:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = f(x)
                g = tape.gradient(y, x)
            columns.append(accumulator.jvp(g))
        return tf.stack(columns, -1)

    @WRAPS
    @pytest.mark.parametrize("inside", [lambda f: f, tf.function], ids=["", "around"])
    @pytest.mark.parametrize("mode", ["by_tapes", "forward_over_reverse"])
    def test_second_derivatives_are_nan(self, h, wrap, inside, mode):
        came = wrap(lambda x: getattr(self, mode)(inside(h), x))(self.X)
        np.testing.assert_array_equal(came, self.HESSIANS)

    @WRAPS
    def test_beside_something_else(self, h, wrap):
        came = wrap(lambda x: self.by_tapes(lambda x: h(x) + tf.reduce_sum(x**2, -1), x))(self.X)
        np.testing.assert_array_equal(came, self.HESSIANS + 2 * np.eye(2))

    @WRAPS
    def test_mapped(self, h, wrap):
        came = wrap(mapped(derivative(derivative(h))))(self.X)
        np.testing.assert_array_equal(came, self.HESSIANS.sum(-1))

    @pytest.mark.parametrize("shape", [[None, None], None])
    def test_of_unknown_shape(self, h, shape):
        second = derivative(derivative(h))
        came = tf.function(second, input_signature=[tf.TensorSpec(shape, tf.float64)])(self.X)
        np.testing.assert_array_equal(came, self.HESSIANS.sum(-1))

    def test_first_derivatives_are_zero(self, h):
        with tf.GradientTape() as tape:
            tape.watch(self.X)
            y = h(self.X)
        np.testing.assert_array_equal(y, [8.125, -1000.0, 0.0])
        np.testing.assert_array_equal(tape.gradient(y, self.X), [[0.75, 12], [0, 0], [3, 3]])


class TestErrors:
    @WRAPS
    @pytest.mark.parametrize(
        ("second", "error", "message"),
        [
            ({"hessp": lambda x, v: v[:2]}, ValueError, r"the Hessian times v of normal with respect to x must have the shape \[3\], got \[2\]"),
            ({"hessp": lambda x, v: None}, TypeError, "the Hessian times v of normal must be like the arguments, got None"),
            ({"hessp": lambda x, v: (v, v)}, ValueError, r"must have the shape \[3\], got \[2, 3\]"),
            ({"hess": lambda x: x}, ValueError, r"the Hessian of normal with respect to x and x must have the shape \[3, 3\], got \[3\]"),
            ({"hess": lambda x: None}, TypeError, "hess of normal must return the Hessian, got None"),
            ({"hess": lambda x: "no"}, TypeError, "the Hessian of normal with respect to x and x must be real numbers"),
        ],
    )  # fmt: skip
    def test_wrong_replies(self, wrap, second, error, message):
        h = sgtrick.from_numpy(engines.normal, on_error=-np.inf, **second)
        with pytest.raises((error, tf.errors.OpError), match=message):
            wrap(lambda x, v: hessian_times(h, [x], [v]))(POINTS, VECTORS)

    @WRAPS
    def test_an_engine_that_raises(self, wrap):
        def hessp(x, v):
            raise ArithmeticError("no second derivative")

        h = sgtrick.from_numpy(engines.normal, hessp=hessp)
        message = (
            r"(?s)hessp of normal raised ArithmeticError: no second derivative.*x = \[.*v of x = \["
        )
        with pytest.raises(RAISED, match=message):
            wrap(lambda x, v: hessian_times(h, [x], [v]))(POINTS, VECTORS)
        assert (h.hess_calls, h.failures) == (1, 1)

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_failures_are_nan_where_they_are(self, wrap, vectorized):
        def hessp(x, v):
            if np.any(x[..., 0] > 1):
                raise ArithmeticError
            return -v

        h = sgtrick.from_numpy(engines.normal, hessp=hessp, on_error=-np.inf, vectorized=vectorized)
        x = tf.constant([[0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
        (came,) = wrap(lambda x: hessian_times(h, [x], [x]))(x)
        np.testing.assert_array_equal(came, [[0, -1], [np.nan, np.nan], [-1, -1]])
        assert (h.failures, h.nonfinite) == (1, 0)

    def test_both(self):
        with pytest.raises(TypeError, match="hessp and hess were both given"):
            sgtrick.from_numpy(engines.normal, hessp=hessp, hess=hess)
