"""What goes wrong in functions of PyTorch and JAX, and what our own message says."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import forward_derivative, gradient, value_and_gradients

X = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)


CUTS = {
    "detach": lambda torch, x: (x.detach() ** 2).sum(),
    "cast": lambda torch, x: x.long().sum().double(),
    "an operation before": lambda torch, x: (2 * x[0]).detach() + 0 * torch.ones(()).sum(),
}


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("cut", CUTS)
    def test_a_value_that_is_cut_off_raises(self, cut):
        h = sgtrick.from_torch(lambda x: CUTS[cut](self.torch, x), on_error=-np.inf, name="f")
        message = r"f returns a value that is cut off .*\.item\(\), .*torch\.no_grad\(\)"
        with pytest.raises(TypeError, match=message):
            h(X)
        assert h.failures == 0  # none that on_error hides

    def test_gradients_that_are_zero_indeed_are_no_cuts(self):
        """At a stationary point, of an argument that is not used, and of one whose shape is."""

        def f(x, unused, shaped):
            return (x**2).sum() * shaped.shape[0] * len(shaped)

        h = sgtrick.from_torch(f)
        y, gradients = value_and_gradients(h, 0 * X, X, X)
        np.testing.assert_array_equal(y, [0, 0])
        np.testing.assert_array_equal(gradients, np.zeros([3, 2, 2]))

    def test_in_place_operations(self):
        def f(x):
            x = x.clone()
            x *= 0.0
            return x.sum()

        _, (g,) = value_and_gradients(sgtrick.from_torch(f), X)
        np.testing.assert_array_equal(g, 0 * X)

    def test_modules_in_another_dtype(self):
        module = self.torch.nn.Linear(2, 1)

        def f(x):
            return module(x).sum()

        h = sgtrick.from_torch(f, on_error=-np.inf)
        with pytest.raises(
            TypeError, match=r'(?s)^f mixes dtypes.*dtype="float32".*RuntimeError: '
        ):
            h(X)
        h = sgtrick.from_torch(f, dtype="float32")
        weight = module.weight.detach().numpy()[0]
        np.testing.assert_allclose(value_and_gradients(h, X)[1][0], [weight, weight], rtol=1e-6)

    def test_control_flow_that_cannot_be_mapped(self):
        def f(x):
            return x.sum() if x.sum() > 4 else (x**2).sum()

        with pytest.raises(
            TypeError, match=r"(?s)^f has an if .* from_numpy with a gradient by tor"
        ):
            sgtrick.from_torch(f)(X)

    def test_numpy(self):
        def f(x):
            return self.torch.tensor(np.sum(np.asarray(x)))

        h = sgtrick.from_torch(f)
        with pytest.raises((TypeError, RuntimeError), match=r"(?s)^f .*(NumPy|numpy)"):
            h(X)

    def test_numbers_of_python(self):
        h = sgtrick.from_torch(lambda x: 3.0, name="f")
        with pytest.raises(
            TypeError, match=r"f must return a value with derivatives, got float\. A torch"
        ):
            h(X)


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self):
        self.jax = pytest.importorskip("jax")

    def test_numpy(self):
        h = sgtrick.from_jax(lambda x: np.sum(np.asarray(x) ** 2), name="f", on_error=-np.inf)
        with pytest.raises(TypeError, match=r"(?s)^f calls NumPy .*Use jax.numpy, or from_numpy"):
            h(X)

    def test_control_flow_that_cannot_be_traced(self):
        def f(x):
            return x.sum() if x.sum() > 4 else (x**2).sum()

        message = r"(?s)^f has an if.* from_numpy with jax.value_and_grad\(f\)"
        with pytest.raises(TypeError, match=message):
            sgtrick.from_jax(f)(X)
        with (
            self.jax.enable_x64(True)
            if hasattr(self.jax, "enable_x64")
            else self.jax.experimental.enable_x64()
        ):
            y, (g,) = value_and_gradients(sgtrick.from_numpy(self.jax.value_and_grad(f)), X)
        np.testing.assert_array_equal(y, [5, 7])
        np.testing.assert_array_equal(g, [[2, 4], [1, 1]])

    def test_it_is_compiled_once(self):
        traced = []

        def f(x):
            traced.append(x)
            return (x**2).sum()

        h = sgtrick.from_jax(f)
        for _ in range(3):
            np.testing.assert_array_equal(value_and_gradients(h, X)[1][0], 2 * X)
        assert len(traced) == 2  # once more for the shape of the value

    def test_large_integers_in_float32(self):
        h = sgtrick.from_jax(
            lambda x, k: x.sum() + (k - 2**40), event_ndims=(1, 0), dtype="float32"
        )
        assert h(tf.constant([1.0, 2.0]), tf.constant(2**40 + 1)) == 4

    @pytest.mark.parametrize("on", [True, False])
    def test_the_mode_is_left_as_it_is(self, on):
        enable_x64 = (
            self.jax if hasattr(self.jax, "enable_x64") else self.jax.experimental
        ).enable_x64
        seen = []

        def f(x):
            seen.append((str(x.dtype), bool(self.jax.config.jax_enable_x64)))
            return (x**2).sum()

        with enable_x64(on):
            assert sgtrick.from_jax(f, dtype="float32")(X).numpy().tolist() == [5, 25]
            assert sgtrick.from_jax(f)(X).numpy().tolist() == [5, 25]
            assert bool(self.jax.config.jax_enable_x64) == on
        # Each twice: for the shape of the value, and compiled.
        assert seen == [("float32", on)] * 2 + [("float64", True)] * 2


def without_setup_context(torch):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x**2

        @staticmethod
        def backward(ctx, u):
            raise AssertionError

    return lambda x: Square.apply(x).sum()


def in_place(torch):
    def f(x):
        y = torch.zeros(2, dtype=x.dtype)
        y[0] = x[1]
        return y.sum()

    return f


def iterated(jax):
    def f(x):
        return jax.lax.while_loop(lambda i: i[0] < 3, lambda i: (i[0] + 1, i[1] * x[0]), (0, x[1]))

    return lambda x: f(x)[1]


def with_wrong_jvp(jax):
    @jax.custom_jvp
    def f(x):
        return x.sum()

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


AT_NO_POINT = {
    "torch": {
        "shapes": lambda torch: lambda x: (x.reshape(3) ** 2).sum(),
        "shapes of weights": lambda torch: lambda x: torch.nn.Linear(3, 1).double()(x).sum(),
        "dropout": lambda torch: lambda x: torch.nn.functional.dropout(x).sum(),
        "a recurrent layer": lambda torch: lambda x: torch.nn.GRU(2, 2).double()(x[None])[0].sum(),
        "in place": in_place,
        "no setup_context": without_setup_context,
        "an argument": lambda torch: lambda x: x.sum(axes=0),
    },
    "jax": {
        "shapes": lambda jax: lambda x: (x.reshape(3) ** 2).sum(),
        "a loop": iterated,
        "a callback": lambda jax: (
            lambda x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), x.dtype), x)
        ),
        "a wrong JVP": with_wrong_jvp,
        "an argument": lambda jax: lambda x: x.sum(axes=0),
    },
}


@pytest.mark.parametrize(
    ("package", "kind", "on_error"),
    [
        (package, kind, on_error)
        for package, fs in AT_NO_POINT.items()
        for kind in fs
        for on_error in (-np.inf, *["raise"] * (kind == "shapes"))
    ],
)
def test_what_raises_at_every_point_is_no_failure_of_one(package, kind, on_error):
    """Which `on_error` would replace. PyTorch and JAX cannot trace, map or differentiate it."""
    f = AT_NO_POINT[package][kind](pytest.importorskip(package))
    h = getattr(sgtrick, f"from_{package}")(f, on_error=on_error, name="f")
    message = r"(?s)^f raised .*for all arguments of the shapes \[2\].*use from_numpy with"
    with pytest.raises(TypeError, match=message):
        h(X)
    assert h.failures == 0


class TestFailuresOfAPoint:
    """Of functions that can be differentiated elsewhere."""

    @staticmethod
    def check(h):
        y, (g,) = value_and_gradients(h, X)
        np.testing.assert_allclose(y, [np.log(2) / 2, -np.inf])
        np.testing.assert_allclose(g, [[0, 0.25], [0, 0]], atol=1e-12)
        assert h.failures == 1

    def test_torch(self):
        torch = pytest.importorskip("torch")

        def f(x):  # positive definite for x[0] < 2 alone
            matrix = torch.diag(torch.stack([2 - x[0], x[1]]))
            return torch.linalg.cholesky(matrix)[1, 1].log()

        self.check(sgtrick.from_torch(f, on_error=-np.inf))

    def test_jax(self):
        jax = pytest.importorskip("jax")

        def on_host(x):
            if np.any(x[..., 0] > 2):
                raise ArithmeticError
            return np.log(x[..., 1]) / 2

        @jax.custom_jvp
        def f(x):
            shape = jax.ShapeDtypeStruct((), x.dtype)
            return jax.pure_callback(on_host, shape, x, vmap_method="broadcast_all")

        f.defjvp(lambda x, t: (f(*x), t[0][1] / x[0][1] / 2))
        self.check(sgtrick.from_jax(f, on_error=-np.inf))


@pytest.mark.parametrize("package", ["torch", "jax"])
class TestBoth:
    @pytest.fixture(autouse=True)
    def _form(self, package):
        pytest.importorskip(package)
        self.form = getattr(sgtrick, f"from_{package}")

    def test_a_gradient_beside_the_value(self):
        h = self.form(lambda x: ((x**2).sum(), 2 * x), name="f", value_shape=())
        message = r"f must return one number, got tuple. The gradient is computed .* from_numpy"
        with pytest.raises(TypeError, match=message):
            h(X)
        for option in ("vmap", "jit", "executor", "has_aux", "static_argnums"):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'. [A-Z]"):
                self.form(lambda x: x.sum(), **{option: None})

    def test_results_in_bfloat16(self, package):
        xp = pytest.importorskip(package if package == "torch" else "jax.numpy")

        def squares(x):
            x = x.to(xp.bfloat16) if package == "torch" else x.astype(xp.bfloat16)
            return x**2

        _, (g,) = value_and_gradients(self.form(lambda x: squares(x).sum()), X)
        np.testing.assert_array_equal(g, 2 * X)
        h = self.form(squares, value_shape=(2,))
        y, (g,) = value_and_gradients(h, X)
        np.testing.assert_array_equal([y, g], [X**2, 2 * X])
        np.testing.assert_array_equal(forward_derivative(h)(X), 2 * X)

    @pytest.mark.parametrize("shape", [[], [2]])
    def test_dicts_with_floats_and_integers(self, shape):
        def f(p, x):
            return (p["x"] * p["n"]).sum() + x.sum()

        h = self.form(f, event_ndims=({"x": 1, "n": 0}, 1))
        x = tf.constant(np.ones([*shape, 2]))
        p = {"x": tf.identity(x), "n": tf.constant(3)}
        y, (by_p, by_x) = value_and_gradients(h, p, x)
        np.testing.assert_array_equal(y, np.full(shape, 8))
        np.testing.assert_array_equal(by_p["x"], np.full([*shape, 2], 3))
        np.testing.assert_array_equal(by_x, np.ones([*shape, 2]))
        assert by_p["n"] is None

    def test_what_members_share(self):
        seen = []

        def f(x, a):
            seen.append((x.shape, a.shape))
            return (x * a).sum()

        h = self.form(f)
        x = tf.constant(np.random.default_rng(0).normal(size=(4, 2, 3)))
        a = tf.constant(np.random.default_rng(1).normal(size=(5, 1, 1, 3)))
        came = value_and_gradients(h, x, a)
        want = value_and_gradients(lambda x, a: tf.reduce_sum(x * a, -1), x, a)
        for c, w in zip(tf.nest.flatten(came), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(c, w, rtol=1e-12)
        assert h.calls == 1
        assert {tuple(map(tuple, shapes)) for shapes in seen} == {((3,), (3,))}

    def test_argnums_from_the_end_count_defaults(self):
        h = self.form(lambda x, y, k=2: (x * y**k).sum(), argnums=-2, event_ndims=(1, 1, 0))
        (x, y), by_y = X, lambda y: h(x, y)
        np.testing.assert_allclose(gradient(by_y, y), 2 * x * y)

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_number_belongs_to_all_members(self, count):
        h = self.form(lambda x, a: a * (x**2).sum(), event_ndims=(1, 0))
        np.testing.assert_allclose(h(tf.ones([count, 2]), 2.0), 4 * np.ones(count))

    def test_values_without_derivatives(self):
        h = self.form(lambda x: 2 * x, argnums=(), value_shape=(2,))
        np.testing.assert_allclose(h(X), 2 * X)

    @pytest.mark.parametrize("nothing", [{}, []])
    def test_a_first_argument_without_leaves(self, nothing):
        h = self.form(lambda p, x: x / x.sum(), event_ndims=(0, 1), value_shape=(2,))
        y, (_, by_x) = value_and_gradients(h, nothing, X)
        np.testing.assert_allclose(y, X / tf.reduce_sum(X, -1, keepdims=True))
        np.testing.assert_allclose(by_x, np.zeros([2, 2]), atol=1e-15)

    def test_one_bad_member_does_not_reject_the_batch(self):
        h = self.form(lambda x: (x**2).sum(), on_error=-np.inf)
        engine = h._engine
        (evaluate,) = engine.functions["value and Jacobian"]

        def flaky(layout, leaves):
            if np.any(leaves[0] > 3):
                raise ArithmeticError
            return evaluate(layout, leaves)

        engine.functions = {"value and Jacobian": [flaky]}
        y, (g,) = value_and_gradients(h, X)
        np.testing.assert_array_equal(y, [5, -np.inf])
        np.testing.assert_array_equal(g, [[2, 4], [0, 0]])
        assert (h.calls, h.failures) == (3, 1)


@pytest.mark.parametrize(
    ("package", "form"), [("jax", sgtrick.from_jax), ("torch", sgtrick.from_torch)]
)
def test_a_missing_package_names_the_command(package, form, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as e:
        form(lambda x: x)
    assert f"Install the extra sgtrick[{package}]" in str(e.value)
    assert f"{sys.executable} -m pip install {package}" in str(e.value)
