"""Hessians that the value form and engines are given: exact second derivatives, loud third ones."""

import functools
import math

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import verdict
from matrix import LOUD, spread
from shared import (
    EXECUTED,
    WRAPS,
    WRAPS_AND_XLA,
    compiled,
    constant,
    derivative,
    forward_derivative,
    gradient,
    on_host,
    pushed,
)


def value_form(hx):
    """A number with the gradient one by each leaf."""
    return lambda x: sgtrick.custom_gradient(
        constant(1.0), tf.nest.map_structure(tf.ones_like, x), x, hx=hx
    )


def hessian(hx, x):
    """That which comes out, block by block."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        g = gradient(value_form(hx), x)
    return tf.nest.map_structure(lambda row: outer.jacobian(row, x, experimental_use_pfor=False), g)


class TestBlocks:
    def test_as_jax_hessian_returns_them(self):
        x = {"a": constant([1.0, 2.0]), "b": constant(3.0)}
        hx = {
            "a": {"a": constant([[1.0, 2.0], [2.0, 5.0]]), "b": constant([7.0, 8.0])},
            "b": {"a": constant([7.0, 8.0]), "b": constant(9.0)},
        }
        tf.nest.map_structure(np.testing.assert_allclose, hessian(hx, x), hx)

    def test_only_the_symmetric_part_matters(self):
        """Also of blocks of different precision."""
        x, u = ([constant([1.0, 10.0], tf.float32), constant(100.0)] for _ in range(2))
        blocks = [[[1.0, 2.0], [4.0, 5.0]], [7.0, 8.0], [9.0, 0.0], 6.0]
        dtypes = 2 * [tf.float32] + 2 * [tf.float64]
        a, b, c, d = map(constant, blocks, dtypes)
        form = value_form([[a, b], [c, d]])
        for by_first, by_second in (
            gradient(lambda x: gradient(form, x), x, u),
            pushed(lambda x: gradient(form, x), x, u),
        ):
            np.testing.assert_array_equal(by_first, [1 + 30 + 800, 3 + 50 + 400])
            np.testing.assert_array_equal(by_second, 8 + 40 + 600)

    @pytest.mark.parametrize(
        "hx", [[[3.0, None], [None, None]], lambda v: [3.0 * v[0], None]], ids=["block", "product"]
    )
    def test_none_is_zero(self, hx):
        (by_first, first_by_second), by_rest = hessian(hx, [constant(1.0), constant(3.0)])
        assert by_first.numpy() == 3.0
        assert not first_by_second
        assert not any(tf.nest.flatten(by_rest))

    @pytest.mark.parametrize("hx", [-4.0, lambda v: -4.0 * v], ids=["block", "product"])
    def test_of_a_number(self, hx):
        assert hessian(hx, constant(2.0)).numpy() == -4.0

    @WRAPS
    def test_zero_by_statement(self, wrap):
        twice = derivative(derivative(lambda x: value_form(0)(x) ** 2))
        assert wrap(twice)(constant(3.0)).numpy() == 2.0

    @pytest.mark.parametrize(
        ("gx", "hx", "message"),
        [
            ([1.0, 1.0], [[1.0, 2.0]], r"(?s)hx\[0\]\[0\], hx\[0\]\[1\], hx\[1\]\[0\], hx\[1\]\[1\]\n.*got: +hx\[0\]\[0\], hx\[0\]\[1\]$"),
            ([1.0, 1.0], [[1.0, 2.0], [None, 1.0]], r"hx\[1\]\[0\] is None but its transpose hx\[0\]\[1\] is not"),
            ([1.0, 1.0], [[1.0, None], [None, [1.0, 2.0]]], r"got: +hx\[0\]\[0\], hx\[0\]\[1\], hx\[1\]\[0\], hx\[1\]\[1\]\[0\]"),
            ([1.0, 1.0], [[tf.ones([2]), None], [None, 1.0]], r"gx\[0\] \[\], hx\[0\]\[0\] \[2\] and x\[0\] \[\]"),
            ([1.0, 1.0], [["a", None], [None, 1.0]], r"hx\[0\]\[0\] has dtype string"),
            ([1.0, None], [[1.0, 2.0], [2.0, None]], r"hx\[0\]\[1\] is given, but gx\[1\] is None"),
        ],
    )  # fmt: skip
    def test_bad_ones(self, gx, hx, message):
        x = [constant(1.0), constant(2.0)]
        with pytest.raises((ValueError, TypeError), match=message):
            sgtrick.custom_gradient(constant(1.0), gx, x, hx=hx)

    def test_a_real_function_of_complex_arguments_has_no_single_hessian(self):
        x = constant(1j, tf.complex128)
        message = r"real fx .* with respect to a complex x is not a single matrix"
        with pytest.raises(TypeError, match=message):
            sgtrick.custom_gradient(constant(1.0), x, x, hx=x)

    @pytest.mark.parametrize(
        ("hx", "message"),
        [
            (lambda v: [v[0]], r"hx\(v\) must have the structure of x"),
            (lambda v: [v[0], tf.ones([2])], r"hx\(v\)\[1\] has shape \[2\], expected \[\]"),
            (lambda v: [None, None], r"hx\(v\) is not connected to v"),
        ],
    )
    @WRAPS
    def test_bad_products_when_they_are_asked_for(self, wrap, hx, message):
        form, x = value_form(hx), [constant(1.0), constant(2.0)]
        np.testing.assert_array_equal(wrap(lambda x: gradient(form, x))(x), [1.0, 1.0])
        errors = (ValueError, TypeError, LookupError, tf.errors.InvalidArgumentError)
        with pytest.raises(errors, match=message):
            wrap(lambda x: gradient(lambda x: gradient(form, x), x))(x)

    @pytest.mark.parametrize(("manually", "expected"), [(False, None), (True, 6.0)])
    def test_what_it_was_computed_from(self, manually, expected):
        x, a = constant(3.0), constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(a)
            form = lambda x: sgtrick.custom_gradient(1.0, 1.0, x, manually, hx=6 * a)  # noqa: E731
            second = gradient(lambda x: gradient(form, x), x)
        assert second.numpy() == 12.0
        found = tape.gradient(second, a)
        assert (found if found is None else found.numpy()) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("outer", "middle", "wrap", "product"),
    spread(
        [derivative, forward_derivative],
        [derivative, forward_derivative],
        [*EXECUTED.values(), compiled],
        [False, True],
    ),
)
def test_third_derivatives_are_refused(outer, middle, wrap, product):
    def cube(x):
        h = tf.stop_gradient(6 * x)
        return sgtrick.custom_gradient(x**3, 3 * x**2, x, hx=(lambda v: h * v) if product else h)

    second, x = middle(derivative(cube)), constant(2.0)
    assert second(x) == 12
    if wrap is compiled or (outer, middle) == (derivative, forward_derivative):  # nothing can raise
        assert np.isnan(wrap(outer(second))(x))
        return
    with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="third derivative"):
        wrap(outer(second))(x)


@WRAPS
@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
def test_row_by_row_in_a_loop(shape, wrap):
    """TensorFlow's optimizer loses the sum of a constant and its transpose in such a loop."""
    x = constant(np.linspace(0.3, 0.7, math.prod(shape)).reshape(shape))

    @wrap
    def hessian(x):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            g = derivative(
                lambda x: sgtrick.custom_gradient(tf.sin(x), tf.cos(x), x, hx=-tf.sin(x))
            )(x)
        return outer.jacobian(g, x, experimental_use_pfor=False)

    expected = np.diag(np.ravel(-np.sin(x))).reshape(2 * shape)
    np.testing.assert_allclose(hessian(x), expected, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_product", "is_rank_known", "wrap"),
    spread([False, True], [True, False], EXECUTED.values()),
)
def test_of_a_batch_that_shares_a_leaf(is_product, is_rank_known, wrap):
    """What each member adds to the derivative by what is shared is summed."""

    def h(x, w):
        return tf.reshape(tf.reduce_sum(x**2 * w**2, -1), [3])

    def form(x, w):
        xx, xw, ww = 2 * w**2 + 0 * x, 4 * x * w, 2 * x**2
        blocks = [
            [tf.linalg.diag(xx), tf.linalg.diag(xw)],
            [tf.linalg.diag(xw), tf.linalg.diag(ww)],
        ]
        product = lambda v: [xx * v[0] + xw * v[1], xw * v[0] + ww * v[1]]  # noqa: E731
        gx = [2 * x * w**2, 2 * x**2 * w]
        return sgtrick.custom_gradient(h(x, w), gx, [x, w], hx=product if is_product else blocks)

    if not is_rank_known:
        specs = [tf.TensorSpec(None, tf.float64), tf.TensorSpec([2], tf.float64)]
        form = tf.function(form, input_signature=specs)
    at = [constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), constant([2.0, 3.0])]
    ts, u = [tf.cos(x) for x in at], constant([1.0, 2.0, -3.0])

    def second(h):
        return lambda at: gradient(lambda at: gradient(lambda at: h(*at), at, u), at, ts)

    found, expected = wrap(second(form))(at), second(h)(at)
    tf.nest.map_structure(
        functools.partial(np.testing.assert_allclose, rtol=1e-12), found, expected
    )


@pytest.mark.long
@pytest.mark.parametrize(("direction", "order"), [(1 + 0j, 1), (1j, 2), (1 - 1j, 1), (2 + 1j, 2)])
def test_complex_ones_by_the_formula_alone_are_not_finite(direction, order, formula_alone):
    """The next ones after those that are known."""

    def form(t):
        z = tf.complex(1 + t * direction.real, 1 + t * direction.imag)
        hx = 6 * z if order == 2 else None
        return tf.math.real(sgtrick.custom_gradient(z**3, 3 * z**2, z, hx=hx))

    known = functools.reduce(lambda f, _: derivative(f), range(order), form)
    t = constant(0.0)
    assert np.isfinite(tf.function(known)(t))
    assert not np.isfinite(tf.function(derivative(known))(t))


class TestStoppedByHand:
    """Of `h(x, y) = x^2 y`, where the coefficients keep their derivatives by `y`."""

    @pytest.mark.parametrize("hx", ["unknown", "a block", "a function"])
    @WRAPS
    def test_second_derivatives(self, wrap, hx):
        def h(x, y):
            x_, known = tf.stop_gradient(x), {"a block": 2 * y, "a function": lambda v: 2 * y * v}
            return sgtrick.custom_gradient(x_**2 * y, 2 * x_ * y, x, True, hx=known.get(hx))

        def by_x(x, y):
            return gradient(lambda x: h(x, y), x)

        x, y = constant(3.0), constant(5.0)
        assert wrap(lambda x, y: gradient(lambda y: by_x(x, y), y))(x, y).numpy() == 6.0
        by_y = lambda x, y: gradient(lambda y: h(x, y), y)  # noqa: E731
        assert wrap(lambda x, y: gradient(lambda x: by_y(x, y), x))(x, y).numpy() == 6.0
        if hx != "unknown":
            assert wrap(lambda x, y: gradient(lambda x: by_x(x, y), x))(x, y).numpy() == 10.0

    def test_in_forward_mode(self):
        def along_y(x):
            x_ = tf.stop_gradient(x)
            h = lambda y: sgtrick.custom_gradient(x_**2 * y, 2 * x_ * y, x, True, hx=2 * y)  # noqa: E731
            return pushed(h, constant(5.0), constant(1.0))

        assert gradient(along_y, constant(3.0)).numpy() == 6.0


class TestOfSeveralValues:
    """A Hessian for each entry of the range, by a function for the product with a vector."""

    SEVERAL = np.random.default_rng(1).normal(size=[3, 2, 2])
    SEVERAL += SEVERAL.swapaxes(1, 2)

    @staticmethod
    def second(hx):
        def run(x):
            fx, gx = tf.ones([3], x.dtype), tf.ones([3, 2], x.dtype)
            form = lambda x: sgtrick.custom_gradient(fx, gx, x, hx=hx)  # noqa: E731
            first = lambda x: gradient(form, x, constant([1.0, 10.0, 100.0], x.dtype))  # noqa: E731
            return gradient(first, x, constant([1.0, -2.0], x.dtype))

        return run

    @WRAPS_AND_XLA
    def test_that_is_linear(self, wrap):
        several = constant(self.SEVERAL, tf.float32)
        second = wrap(self.second(lambda v: tf.linalg.matvec(several, v)))
        expected = np.einsum("r,rij,j->i", [1.0, 10.0, 100.0], self.SEVERAL, [1.0, -2.0])
        np.testing.assert_allclose(second(constant([1.0, 2.0], tf.float32)), expected, rtol=1e-5)

    @WRAPS_AND_XLA
    def test_that_is_not(self, wrap):
        several = constant(self.SEVERAL)
        second = wrap(self.second(lambda v: tf.linalg.matvec(several, tf.abs(v))))
        assert verdict(second, np.zeros(2), np.ones(2)) in LOUD

    @pytest.mark.parametrize("part", [False, True])
    @WRAPS
    def test_that_the_host_computes(self, wrap, part):
        """TensorFlow has to differentiate it."""

        def hx(v):
            hv = tf.numpy_function(lambda v: self.SEVERAL @ v, [v], tf.float64)
            hv.set_shape([3, 2])
            return hv + tf.linalg.matvec(self.SEVERAL, v) if part else hv

        errors = (LookupError, tf.errors.InvalidArgumentError)
        with pytest.raises(errors, match=r"hx\(v\) is not connected to v"):
            wrap(self.second(hx))(constant([0.0, 0.0]))  # where H x, too, is zero


def host_hessian(kind):
    """`sum(sin(x))`, whose Hessian is computed outside TensorFlow, all of it or half."""
    if kind == "hessp":
        return sgtrick.from_numpy(
            lambda x: (np.sum(np.sin(x)), np.cos(x)), hessp=lambda x, v: -np.sin(x) * v
        )

    def h(x):
        c = tf.stop_gradient(-tf.sin(x))

        def hx(v):
            hosted = on_host(np.multiply)(c, v)
            return c * v / 2 + hosted / 2 if kind == "half" else hosted

        return sgtrick.custom_gradient(tf.reduce_sum(tf.sin(x)), tf.cos(x), x, hx=hx)

    return h


class TestHessiansOfTheHost:
    """Their product with `v`, computed outside TensorFlow, is still linear and symmetric in `v`."""

    X, V = tf.constant([0.3, 0.7], tf.float64), tf.constant([1.0, 2.0], tf.float64)
    CURVED = -np.sin([0.3, 0.7])

    def ways(self, h, v):
        """Second derivatives along `v`, in every mode."""

        along = lambda g: tf.reduce_sum(g * v)  # noqa: E731
        return {
            "reverse over reverse": lambda x: gradient(lambda x: along(gradient(h, x)), x),
            "forward over reverse": lambda x: pushed(lambda x: gradient(h, x), x, v),
            "reverse over forward": lambda x: gradient(lambda x: pushed(h, x, v), x),
            "forward over forward": lambda x: pushed(lambda x: pushed(h, x, v), x, v),
        }

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("kind", "wrap"),
        [("function", tf.function), ("half", lambda f: f), ("hessp", tf.function)],
    )
    def test_in_every_mode(self, kind, wrap):
        dtype, rtol = ("float64", 1e-12) if kind == "half" else ("float32", 1e-6)
        x, v = tf.cast(self.X, dtype), tf.cast(self.V, dtype)
        *products, curvature = map(wrap, self.ways(host_hessian(kind), v).values())
        for run in products:
            np.testing.assert_allclose(run(x), self.CURVED * self.V, rtol=rtol)
        np.testing.assert_allclose(curvature(x), np.sum(self.CURVED * self.V**2), rtol=rtol)

    @pytest.mark.parametrize("kind", ["function", "hessp"])
    def test_third_derivatives_are_loud(self, kind):
        ways = self.ways(host_hessian(kind), self.V)
        for run in (
            lambda x: pushed(ways["reverse over reverse"], x, self.V),
            lambda x: gradient(ways["forward over reverse"], x),
            lambda x: pushed(ways["forward over reverse"], x, self.V),
        ):
            assert verdict(run, -np.cos(self.X), self.X) in LOUD
