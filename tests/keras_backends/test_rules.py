"""`sgtrick.keras.custom_vjp` on the backend of this process."""

import doctest
import functools
import types

import keras
import numpy as np
import pytest
import transformations
from keras import ops
from transformations import (
    BACKEND,
    OF,
    TWICE,
    array,
    check,
    gradient,
    in_turn,
    misled,
    reverse,
    tensor,
)

from sgtrick.keras import _values, _vjp, custom_vjp

POINTS = np.random.default_rng(3).normal(size=(4,))
MATRIX = np.outer(POINTS, [1.0, 2.0, 3.0])

_ALL = [getattr(transformations, name) for name in ("FIRST", "MAPPED", "SECOND", "MAPPED_SECOND")]
FIRST, MAPPED, SECOND, MAPPED_SECOND = map(reverse, _ALL)
FORWARD = {name: t for some in _ALL for name, t in some.items() if name not in reverse(some)}
REVERSE = list(FIRST.values())[1]


@custom_vjp
def cube(x):
    return misled(x**3), lambda u: u * 3 * x**2


@custom_vjp
def product(x, y):
    return misled(x * y), lambda u: (u * y, u * x)


FORMS = {
    "one argument": (cube, lambda x: x**3, [POINTS]),
    "two arguments": (product, lambda x, y: x * y, [POINTS, POINTS + 1]),
}


@custom_vjp
def stopped(x, y):
    return misled(x**3 * y), lambda u: (
        u * 3 * ops.stop_gradient(x**2 * y),
        u * ops.stop_gradient(x) ** 3,
    )


class TestStopped:
    """A gradient that is cut off from the arguments has no derivative, but is one itself."""

    MESSAGE = "of stopped was differentiated again, but .*(not connected to the arg|no connection)"

    @staticmethod
    def native(x, y):
        return x**3 * y

    @pytest.mark.parametrize("transformation", FIRST)
    def test_of_first_order(self, transformation):
        check(FIRST[transformation], stopped, self.native, [POINTS, POINTS + 1])

    @pytest.mark.parametrize("transformation", MAPPED)
    def test_that_map_members(self, transformation):
        check(MAPPED[transformation], stopped, self.native, [MATRIX, MATRIX + 1])

    @pytest.mark.parametrize(("transformation", "of"), in_turn(SECOND, OF))
    def test_of_second_order(self, transformation, of):
        with pytest.raises(LookupError, match=self.MESSAGE):
            check(SECOND[transformation], OF[of](stopped), self.native, [POINTS, POINTS + 1])

    @pytest.mark.parametrize("transformation", MAPPED_SECOND)
    def test_of_second_order_that_map_members(self, transformation):
        with pytest.raises(LookupError, match=self.MESSAGE):
            check(MAPPED_SECOND[transformation], stopped, self.native, [MATRIX, MATRIX + 1])

    @pytest.mark.parametrize(
        "stop",
        [
            ops.ones_like,
            lambda x: ops.cond(
                ops.sum(x) < 1e9, lambda: ops.stop_gradient(x), lambda: ops.stop_gradient(2 * x)
            ),
            pytest.param(
                lambda x: tensor(ops.convert_to_numpy(x)),
                marks=pytest.mark.skipif(BACKEND == "jax", reason="jax raises its own error"),
            ),
        ],
        ids=["a constant", "in a branch", "NumPy"],
    )
    def test_in_other_ways(self, stop):
        form = custom_vjp(
            lambda x: (misled(x**3), lambda u: u * 3 * ops.cast(stop(x), u.dtype) ** 2)
        )
        message = r"not connected to the arg|no connection|cannot trace"
        with pytest.raises(LookupError, match=message):
            check(TWICE, OF["a sum with native terms"](form), lambda x: x**3, [POINTS])

    @pytest.mark.parametrize("transformation", SECOND)
    def test_by_what_does_not_move_the_arguments(self, transformation):
        """Of `stopped(c, c) * x`, where the gradient is not differentiated again."""
        check(
            SECOND[transformation],
            lambda x: stopped(tensor(POINTS), tensor(POINTS + 1)) * x**2,
            lambda x: self.native(tensor(POINTS), tensor(POINTS + 1)) * x**2,
            [POINTS],
        )

    @pytest.mark.parametrize("transformation", SECOND)
    def test_one_argument(self, transformation):
        """The derivative by the other is not lost."""

        @custom_vjp
        def half(x, y):
            return misled(x * y**2), lambda u: (u * ops.stop_gradient(x * 0 + y**2), u * 2 * x * y)

        check(
            SECOND[transformation],
            lambda y: half(tensor(POINTS), y),
            lambda y: tensor(POINTS) * y**2,
            [POINTS + 1],
        )


class TestTransformations:
    """Those of first order are laws of `stopped`, too."""

    @pytest.mark.parametrize("transformation", SECOND)
    def test_of_second_order(self, transformation):
        # By two, TensorFlow's are unconnected where the truth is zero.
        name = "one argument" if BACKEND == "tensorflow" else "two arguments"
        check(SECOND[transformation], *FORMS[name])

    @pytest.mark.parametrize("transformation", MAPPED_SECOND)
    def test_of_second_order_that_map_members(self, transformation):
        form, truth, _ = FORMS["two arguments"]
        check(MAPPED_SECOND[transformation], form, truth, [MATRIX, MATRIX + 1])

    @pytest.mark.parametrize("transformation", FORWARD)
    def test_forward_mode_is_an_error_on_jax_and_torch(self, transformation):
        with pytest.raises((NotImplementedError, TypeError), match=r"forward.mode|custom_lin"):
            check(FORWARD[transformation], *FORMS["two arguments"][:2], [MATRIX, MATRIX + 1])

    @pytest.mark.parametrize("transformation", [*FIRST, *MAPPED])
    def test_a_function_that_closes_over_another_argument(self, transformation):
        """What it closes over may itself be mapped or traced, as long as it gets no derivative."""

        def form(x, y):
            kept = ops.stop_gradient(y)
            inner = custom_vjp(lambda x: (misled(kept * x**3), lambda u: u * kept * 3 * x**2))
            return inner(x) + y

        def truth(x, y):
            return ops.stop_gradient(y) * x**3 + y

        check((FIRST | MAPPED)[transformation], form, truth, [POINTS, POINTS + 1])


class TestProtocol:
    def test_nested_arguments_and_outputs(self):
        @custom_vjp
        def polar(point, scale):
            x, (y,) = point["x"], point["y"]
            s, p = misled(scale * (x + y)), misled(x * y)

            def grad(u_p, u_s):  # in the order of the leaves of the output
                return u_s * scale + u_p * y, u_s * scale + u_p * x, u_s * (x + y)

            return {"sum": s, "product": p}, grad

        def form(x, y, scale):
            out = polar({"x": x, "y": [y]}, scale)
            assert set(out) == {"sum", "product"}
            return out["sum"] + 2 * out["product"]

        def truth(x, y, scale):
            return scale * (x + y) + 2 * x * y

        check(REVERSE, form, truth, [POINTS, POINTS + 1, POINTS - 1])

    def test_keyword_arguments(self):
        @custom_vjp
        def f(x, y, power=2, *, shift):
            value = misled(x**power * y + shift)
            return value, lambda u: (u * power * x ** (power - 1) * y, u * x**power, None, u)

        def form(x, y, s):
            return f(y=y, x=x, shift=s, power=3)

        def truth(x, y, s):
            return x**3 * y + s

        check(REVERSE, form, truth, [POINTS, POINTS + 1, POINTS - 1])

    def test_the_order_of_keywords(self):
        @custom_vjp
        def declared(x, *, b, a):
            return misled(x + 2 * b + 3 * a), lambda u: (u, 2 * u, 3 * u)

        @custom_vjp
        def passed(x, **others):
            return misled(x + 2 * others["b"] + 3 * others["a"]), lambda u: (u, 3 * u, 2 * u)

        for f in (declared, passed):

            def form(x, b, a, f=f):
                return f(x, a=a, b=b)

            check(REVERSE, form, lambda x, b, a: x + 2 * b + 3 * a, [POINTS, POINTS, POINTS])

    def test_methods_of_every_kind(self):
        def rule(factor, x):
            return misled(factor * x), lambda u: u * factor

        class Base:
            factor = 3.0

            @custom_vjp
            def method(self, x):
                return rule(self.factor, x)

            @classmethod
            @custom_vjp
            def inside(cls, x):
                return rule(cls.factor, x)

            @custom_vjp
            @classmethod
            def outside(cls, x):
                return rule(cls.factor, x)

            @staticmethod
            @custom_vjp
            def free_inside(x):
                return rule(3.0, x)

            @custom_vjp
            @staticmethod
            def free_outside(x):
                return rule(3.0, x)

        class Scale(Base):
            def method(self, x):
                return super().method(x)

        for name in ("method", "inside", "outside", "free_inside", "free_outside"):
            check(REVERSE, getattr(Scale(), name), lambda x: 3 * x, [POINTS])
        for name in ("inside", "outside", "free_inside", "free_outside"):
            check(REVERSE, getattr(Scale, name), lambda x: 3 * x, [POINTS])

    @pytest.mark.parametrize(
        ("f", "name"),
        [
            (lambda x: (misled(2 * x), lambda u: 2 * u), "sgtrick(<lambda>)"),
            (functools.partial(lambda a, x: (misled(a * x), lambda u: a * u), 2.0), "partial"),
        ],
    )
    def test_it_is_a_plain_function_with_a_name(self, f, name):
        """Keras stores these by name, instances not at all, and of a `<lambda>` the bytecode."""
        h = custom_vjp(f)
        assert isinstance(h, types.FunctionType)
        assert h.__name__ == name
        assert custom_vjp()(f).__name__ == name
        check(REVERSE, h, lambda x: 2 * x, [POINTS])

    @pytest.mark.parametrize(("of", "came"), [("float32", "float64"), ("float16", "float32")])
    def test_a_gradient_has_the_dtype_of_its_argument(self, of, came):
        @custom_vjp
        def f(x):
            return misled(2 * x), lambda u: ops.cast(2 * u, came)

        x = ops.cast(POINTS, of)
        (g,) = gradient(lambda x: f(x) * x, [x], ops.ones_like(x))
        assert keras.backend.standardize_dtype(g.dtype) == of
        np.testing.assert_allclose(array(g), 4 * array(x), rtol=1e-3)

    def test_arguments_without_gradients(self):
        i = ops.convert_to_tensor(np.array([2, 3, 4, 5]))

        @custom_vjp
        def f(x, i, flag):
            assert flag
            value = misled(x * ops.cast(i, "float64"))
            return value, lambda u: (u * ops.cast(i, "float64"), None, None)

        check(REVERSE, lambda x: f(x, i, True), lambda x: x * ops.cast(i, "float64"), [POINTS])

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            (lambda u: 3, 3),
            (lambda u: np.float64(3), 3),
            (lambda u: np.array(3), 3),
            (lambda u: u > 0, 1),
            (lambda u: ops.cast(3 * u, "int32"), 3),
        ],
        ids=["int", "float of NumPy", "array of ints", "mask", "int32"],
    )
    def test_gradients_that_are_not_of_a_floating_dtype(self, returned, expected):
        f = custom_vjp(lambda x: (misled(3 * x), returned))
        x = ops.cast(2.0, "float32")
        (g,) = gradient(lambda x: f(x) + x, [x], ops.ones_like(x))
        assert keras.backend.standardize_dtype(g.dtype) == "float32"
        assert float(array(g)) == expected + 1

    def test_outputs_without_derivatives(self):
        @custom_vjp
        def f(x):
            def grad(u_sign, u):
                assert u_sign is None or BACKEND == "tensorflow"
                return 2 * u

            return {"a": ops.cast(ops.sign(x), "int32"), "b": misled(2 * x)}, grad

        check(REVERSE, lambda x: f(x)["b"], lambda x: 2 * x, [POINTS])

    def test_the_upstream_gradient_may_be_clipped(self):
        """Reverse mode calls `grad` as it is, linear or not."""

        @custom_vjp
        def clipped(x):
            return x + 0, lambda u: ops.clip(u, -1.0, 1.0)

        (g,) = gradient(clipped, [tensor([1.0, 2.0])], tensor([0.5, 3.0]))
        np.testing.assert_array_equal(array(g), [0.5, 1.0])

    def test_grad_is_called_only_for_a_gradient(self):
        calls = []

        @custom_vjp
        def f(x):
            return x + 0, lambda u: calls.append(u) or u

        f(tensor(POINTS))
        # jax traces it at once, but computes nothing.
        assert calls == [] or BACKEND == "jax"

    def test_values_that_are_not_finite(self):
        @custom_vjp
        def f(x):
            return 1 / x, lambda u: -u / x**2

        x = tensor([0.0, np.inf, 2.0])
        np.testing.assert_array_equal(array(f(x)), [np.inf, 0.0, 0.5])
        (g,) = gradient(f, [x], tensor([1.0, 1.0, 1.0]))
        np.testing.assert_array_equal(array(g), [-np.inf, 0.0, -0.25])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision(self, dtype):
        x = ops.cast(np.array([1.0, 2.0]), dtype)
        (g,) = gradient(cube, [x], ops.cast(np.array([1.0, 2.0]), dtype))
        assert keras.backend.standardize_dtype(g.dtype) == dtype
        np.testing.assert_array_equal(array(ops.cast(g, "float32")), [3.0, 24.0])


class TestRefusals:
    @pytest.mark.parametrize(
        ("f", "error", "message"),
        [
            (lambda x: x, TypeError, r"must return \(y, grad\)"),
            (
                lambda x: (x + 0, lambda u: ops.cast(u, "complex64")),
                TypeError,
                "of x that grad of <lambda> returned has dtype complex64, expected float64",
            ),
            (lambda x: (x + 0, lambda u: u[:2]), ValueError, r"shape \[2\] for x, expected"),
        ],
    )
    def test_a_function_that_breaks_the_protocol(self, f, error, message):
        with pytest.raises(error, match=message):
            gradient(custom_vjp(f), [tensor(POINTS)], tensor(POINTS))

    def test_variables_that_are_no_arguments(self):
        v = keras.Variable(2.0, dtype="float64", name="weight")
        state = keras.Variable(2.0, dtype="float64", trainable=False)

        @custom_vjp
        def reads(x):
            return x * v, lambda u: u * v

        @custom_vjp
        def assigns(x):
            state.assign(3.0)
            return x, lambda u: u

        with pytest.raises(TypeError, match=r"reads reads the variables \['weight.*as arguments"):
            reads(tensor(POINTS))
        with pytest.raises(TypeError, match="assigns assigns the variables"):
            assigns(tensor(POINTS))
        assert array(state) == 2.0

        frozen = custom_vjp(lambda x: (misled(x * state), lambda u: u * state))
        check(REVERSE, frozen, lambda x: 2 * x, [POINTS])

    def test_a_variable_as_an_argument(self):
        v = keras.Variable(np.array(3.0), dtype="float64")
        x = tensor(POINTS)
        if BACKEND == "torch":
            ops.sum(scaled(x, v)).backward()
            g = v.value.grad
        elif BACKEND == "jax":
            import jax

            def loss(value):
                with keras.StatelessScope([(v, value)]):
                    return ops.sum(scaled(x, v))

            g = jax.grad(loss)(v.value)
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                y = ops.sum(scaled(x, v))
            g = tape.gradient(y, v.value)
        np.testing.assert_allclose(array(g), POINTS.sum())

    @pytest.mark.skipif(BACKEND != "tensorflow", reason="values of jax do not change")
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("library", ["keras", "tensorflow"])
    def test_the_rule_has_the_values_that_variables_had_at_the_call(self, library, compiled):
        import tensorflow as tf

        v = (keras if library == "keras" else tf).Variable(3.0, dtype="float64")

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = scaled(x, v)
            v.assign(5.0)
            return tape.gradient(y, [x, getattr(v, "_value", v)])

        by_x, by_v = (tf.function(run) if compiled else run)(tensor(POINTS))
        np.testing.assert_array_equal(by_x, np.full_like(POINTS, 3.0))
        np.testing.assert_allclose(by_v, POINTS.sum())

    @pytest.mark.skipif(BACKEND != "torch", reason="values of jax do not change")
    def test_a_variable_that_is_assigned_too_early_is_an_error_of_torch(self):
        v = keras.Variable(3.0, dtype="float64")
        y = ops.sum(scaled(tensor(POINTS), v))
        v.assign(5.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    def test_a_closed_over_tensor_that_is_differentiated(self):
        x = tensor(POINTS)

        def form(w):
            return custom_vjp(lambda x: (x * w, lambda u: u * w))(x)

        with pytest.raises(LookupError, match=r"(reads a|with respect to a) tensor that"):
            gradient(form, [tensor(POINTS)], x)


@custom_vjp
def scaled(x, factor):
    return misled(x * factor), lambda u: (u * factor, ops.sum(u * x))


class TestSymbolic:
    def test_a_functional_model(self, tmp_path):
        registered = keras.saving.register_keras_serializable("tests")(cube)
        x = keras.Input((), dtype="float64")
        model = keras.Model(x, registered(2 * x))  # which Keras takes for sparse
        model.save(tmp_path / "model.keras")
        for m in (model, keras.models.load_model(tmp_path / "model.keras")):
            check(REVERSE, m, lambda x: (2 * x) ** 3, [POINTS])


@pytest.mark.parametrize("module", [_values, _vjp], ids=lambda module: module.__name__)
def test_the_docstrings_say_what_comes_out(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 4
    assert failed == 0
