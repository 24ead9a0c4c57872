"""What a rule of `custom_vjp` returns: each gradient reaches its own argument, in its dtype."""

import collections
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
import sgtrick.keras
from asinh_forms import OF_SLOPE
from matrix import spread
from shared import (
    EXECUTED,
    WRAPS,
    compiled,
    derivative,
    forward_derivative,
    gradient,
    gradients,
    mapped,
)

DECORATORS = {"sgtrick": sgtrick.custom_vjp, "keras": sgtrick.keras.custom_vjp}
decorated = pytest.mark.parametrize("custom_vjp", DECORATORS.values(), ids=DECORATORS)

A = tf.constant([0.3, 0.7, 1.1], tf.float64)
B = tf.constant([2.0, -3.0, 5.0], tf.float64)


def of_map(h, *xs):
    return gradients(mapped(h), *xs)


WAYS = {
    "eager": gradients,
    "in tf.function": lambda h, *xs: tf.function(lambda *xs: gradients(h, *xs))(*xs),
    "around tf.function": lambda h, *xs: gradients(tf.function(h), *xs),
    "XLA": lambda h, *xs: compiled(lambda *xs: gradients(h, *xs))(*xs),
    "vectorized_map": of_map,
    "vectorized_map in tf.function": lambda h, *xs: tf.function(lambda *xs: of_map(h, *xs))(*xs),
}

Sizes = collections.namedtuple("Sizes", ["rows", "columns"])

# The arguments of a call, and what the rule returns.
RETURNED = {
    "for each argument": (
        lambda a, b: ((6, 7), a, b, True),
        lambda ga, gb: (None, ga, gb, None),
    ),
    "for each argument, in its structure": (
        lambda a, b: (Sizes(6, 7), a, b, True),
        lambda ga, gb: (Sizes(None, None), ga, gb, None),
    ),
    "for each leaf": (
        lambda a, b: ((6, 7), a, b, True),
        lambda ga, gb: (None, None, ga, gb, None),
    ),
    "dictionary": (lambda a, b: ({"a": a, "b": b},), lambda a, b: {"b": b, "a": a}),
    "leaves of a dictionary": (lambda a, b: ({"a": a, "b": b},), lambda a, b: (a, b)),
    "pair": (lambda a, b: ((a, b),), lambda a, b: (a, b)),
    "pair in a list": (lambda a, b: ((a, b),), lambda a, b: [(a, b)]),
    "leaves of a tree": (lambda a, b: (((a,), {"b": b}),), lambda a, b: [a, b]),
}


@pytest.mark.parametrize(
    ("decorator", "way", "returned"),
    [*spread(DECORATORS, WAYS, RETURNED, together=1), *spread(DECORATORS, ["eager"], RETURNED)],
)
def test_a_gradient_reaches_its_own_argument(decorator, way, returned):
    """Beside arguments that are structures of numbers, of which none is wanted; and of one alone."""
    arguments, returned = RETURNED[returned]

    def f(*args):
        a, b = (t for t in tf.nest.flatten(args) if tf.is_tensor(t))
        return tf.stop_gradient(a * b), lambda u: returned(u * b, u * a)

    h = DECORATORS[decorator](f)
    by_a, by_b = WAYS[way](lambda a, b: h(*arguments(a, b)), A, B)
    np.testing.assert_allclose(by_a, B)
    np.testing.assert_allclose(by_b, A)


MISCOUNTED = {
    "as for the arguments, but one": lambda u: (None, u, u),
    "one too many": lambda u: (None, u, u, None, None, None),
    "none": lambda u: [],
    "a single None": lambda u: None,
    "a single tensor": lambda u: u,
    "in another structure": lambda u: ((None, None, None), u, u, None),
    "by name": lambda u: {"dims": (None, None), "a": u, "b": u, "training": None},
    "by name, in another order": lambda u: (u, u, {"a": None, "b": None}, None),
    "a name in the place of an index": lambda u: ({"0": None, "1": None}, u, u, None),
}


@pytest.mark.parametrize(
    ("decorator", "returned", "wrap"), spread(DECORATORS, MISCOUNTED, EXECUTED, together=1)
)
def test_any_other_number_is_an_error(decorator, returned, wrap):
    def f(dims, a, b, training):
        return a * b, MISCOUNTED[returned]

    h = DECORATORS[decorator](f)
    with pytest.raises(
        ValueError,
        match=r"of f returned \d gradients?, expected one for each argument, None or in its "
        r"structure: dims, a, b, training; or one for each leaf: dims\[0\], dims\[1\], a, b, train",
    ):
        EXECUTED[wrap](lambda a, b: gradients(lambda a, b: h((6, 7), a, b, True), a, b))(A, B)


@decorated
def test_errors_name_the_arguments(custom_vjp):
    @custom_vjp
    def h(a, *rest, c=None, **others):
        return a + 0, lambda u: (u,) * 9

    names = "a, rest[0], c, d; or one for each leaf: a, rest[0]['p'][0]"
    with pytest.raises(ValueError, match=re.escape(names)):
        gradient(lambda a: h(a, {"p": [B]}, d=B), A)


@decorated
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "bool"),
        ("mean", "str"),
        (None, "NoneType"),
        (np.arange(3), "of dtype int64"),
        (tf.constant([1, 2, 3]), "of dtype int32"),
        (tf.constant("mean"), "of dtype string"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_derivatives_has_no_gradient(custom_vjp, value, kind):
    """It was meant for something else."""
    h = custom_vjp(lambda a, n: (a + 0, lambda u: (u, 1 + 0 * u)))
    with pytest.raises(TypeError, match=f"gradient for n, which has no derivatives: it is {kind}"):
        gradient(lambda a: h(a, value), A)
    h = custom_vjp(lambda a, n: (a + 0, lambda u: (3 * u, None)))
    np.testing.assert_allclose(gradient(lambda a: h(a, value), A), [3, 3, 3])


N, NO_FLOATS = tf.constant([2, 3, 4]), tf.zeros([3], tf.int32)
ZEROS = {
    "float0": lambda u: np.zeros(3, np.dtype([("float0", "V")])),
    "zeros": lambda u: tf.zeros([3], tf.int32),
    "floats": lambda u: tf.zeros_like(u),
    "like it": lambda u: tf.zeros_like(N),
    "filled": lambda u: tf.zeros(tf.shape(u)),
    "array": lambda u: np.zeros(3),
    "closed over": lambda u: NO_FLOATS,
}


@pytest.mark.parametrize("kind", ZEROS)
@pytest.mark.parametrize("known", [[3], [None]], ids=str)
def test_zeros_of_integers_are_no_gradient(kind, known):
    """As JAX has it; of another shape, they were meant for something else."""
    h = sgtrick.custom_vjp(lambda a, n: (a + 0, lambda u: (3 * u, ZEROS[kind](u))))
    run = lambda a, n: gradient(lambda a: h(a, n), a)  # noqa: E731
    specs = [tf.TensorSpec(known, tf.float64), tf.TensorSpec(known, tf.int32)]
    for found in (run(A, N), run(A, N > 2), tf.function(run, input_signature=specs)(A, N)):
        np.testing.assert_allclose(found, [3, 3, 3])
    for n in (N[:2], 3, "text", None):
        with pytest.raises(TypeError, match="gradient for n, which has no derivatives"):
            run(A, n)


@decorated
@WRAPS
def test_none_among_outputs(custom_vjp, wrap):
    """Its upstream gradient is None."""

    def f(x):
        def grad_fn(*us):
            assert [u is None for u in us] == [True, False, True]
            return 2 * x * us[1]

        return {"a": None, "b": (x**2, None)}, grad_fn

    h = custom_vjp(f)
    y = wrap(h)(A)
    assert y["a"] is y["b"][1] is None
    run = lambda x: h(x)["b"][0]  # noqa: E731
    np.testing.assert_allclose(wrap(run)(A), A**2)
    for of, expected in (
        (derivative(run), 2 * A),
        (forward_derivative(run), 2 * A),
        (derivative(lambda x: tf.vectorized_map(run, x)), 2 * A),
        (derivative(derivative(run)), [2, 2, 2]),
    ):
        np.testing.assert_allclose(wrap(of)(A), expected)


@decorated
@pytest.mark.parametrize(
    "value", [2.0, 1j, np.float32(2), np.ones(3)], ids=lambda v: type(v).__name__
)
def test_numbers_may_have_a_gradient(custom_vjp, value):
    """Which nobody can request, as in the examples of `tf.custom_gradient`."""
    h = custom_vjp(lambda a, c: (a + 0, lambda u: (3 * u, 5 * u)))
    np.testing.assert_allclose(gradient(lambda a: h(a, value), A), [3, 3, 3])


@decorated
def test_what_can_be_understood_in_two_ways_is_an_error(custom_vjp):
    """One for each of `empty`, `a` and `pair`; or one for each of `a` and the two of `pair`."""
    h = custom_vjp(lambda empty, a, pair: (a * pair[0] * pair[1], lambda u: (None, u, None)))
    with pytest.raises(ValueError, match=r"understood in two ways.* each of empty, a, pair, or as"):
        gradients(lambda a, b, c: h([], a, (b, c)), A, B, B)


class TestDefaults:
    """What a call leaves out is an argument like any other, whose name errors have."""

    @pytest.mark.parametrize(("decorator", "way"), spread(DECORATORS, WAYS, together=1))
    def test_have_gradients(self, decorator, way):
        def f(a, b, power=2, *, shift=1.0, mode="mean"):
            assert mode == "mean"
            value = tf.stop_gradient((a * b) ** power + shift)
            slope = power * (a * b) ** (power - 1)
            return value, lambda u: (u * slope * b, u * slope * a, None, tf.reduce_sum(u), None)

        h = DECORATORS[decorator](f)
        for call in (
            h,
            lambda a, b: h(b=b, a=a, mode="mean"),
            lambda a, b: h(a, b, 2, shift=tf.constant(1.0, tf.float64)),
        ):
            by_a, by_b = WAYS[way](call, A, B)
            np.testing.assert_allclose(by_a, 2 * A * B**2)
            np.testing.assert_allclose(by_b, 2 * A**2 * B)

    @decorated
    @pytest.mark.parametrize("default", [2, 2.0, None, "mean", (1, 2)], ids=str)
    def test_without_a_gradient_may_be_left_out_by_the_rule(self, custom_vjp, default):
        """As in `tf.custom_gradient`, which counts what was passed."""

        def f(a, b, option=default):
            return a * b, lambda u: (u * b, u * a)

        h, is_nested = custom_vjp(f), isinstance(default, tuple)
        for of in (h, tf.function(h)):  # which passes the default
            by_a, by_b = gradients(of, A, B)
            np.testing.assert_allclose(by_a, B)
            np.testing.assert_allclose(by_b, A)
        passed = r"option; or one for each leaf" if is_nested else "option"
        with pytest.raises(ValueError, match=f"returned 2 gradients.*: a, b, {passed}"):
            gradients(lambda a, b: h(a, b, (3, 4) if is_nested else "sum"), A, B)

    @WRAPS
    @pytest.mark.parametrize("passed", ["1e-12", "float('nan')", "(1, 'a')"])
    def test_are_told_by_their_value(self, passed, wrap):
        """It is up to Python whether two equal literals are one object."""

        default, same = eval(passed), eval(passed)

        def f(a, option=default):
            return a + 0, lambda u: 3 * u

        h = sgtrick.custom_vjp(f)
        np.testing.assert_allclose(gradient(wrap(lambda a: h(a, same)), A), [3, 3, 3])
        with pytest.raises(ValueError, match=r"returned 1 gradient.*: a, option"):
            gradient(wrap(lambda a: h(a, 2e-12)), A)

    @decorated
    def test_that_are_tensors_may_not(self, custom_vjp):
        """Their gradients may be requested."""
        h = custom_vjp(lambda a, w=B: (tf.stop_gradient(a * w), lambda u: (u * w, u * a)))
        np.testing.assert_allclose(gradients(lambda a, w: h(a), A, B), [B, A])
        h = custom_vjp(lambda a, w=B: (a * w, lambda u: u * w))
        with pytest.raises(ValueError, match=r"returned 1 gradient, expected 2, .*: a, w"):
            gradient(h, A)


def mask(u):
    return u > 0


def mask_of_real(u):
    return tf.math.real(u) > 0


# Three times the upstream gradient of one, or one time.
CONSTANTS = {
    "int": (lambda u: 3, 3),
    "float": (lambda u: 3.0, 3),
    "bool": (lambda u: True, 1),
    "int of NumPy": (lambda u: np.int64(3), 3),
    "array of ints": (lambda u: np.array(3), 3),
    "int32": (lambda u: tf.constant(3), 3),
    "mask": (mask, 1),
    "tenth": (lambda u: 0.1, 0.1),
    "float64": (lambda u: 3 * tf.cast(u, tf.float64), 3),
    "float32": (lambda u: 3 * tf.cast(u, tf.float32), 3),
    "float16": (lambda u: 3 * tf.cast(u, tf.float16), 3),
}


DTYPES = ["float16", "bfloat16", "float32", "float64"]


class TestDtypes:
    """A gradient has the dtype of its argument, also where it is added to others."""

    @pytest.mark.parametrize(
        ("decorator", "way", "dtype", "constant"),
        [
            *spread(DECORATORS, WAYS, DTYPES, CONSTANTS, together=1),
            *spread(["sgtrick"], ["eager"], DTYPES, CONSTANTS),
        ],
    )
    def test_of_numbers(self, decorator, way, dtype, constant):
        returned, expected = CONSTANTS[constant]
        h = DECORATORS[decorator](lambda x: (tf.stop_gradient(3 * x), returned))
        x = tf.constant([1.0, 2.0] if "map" in way else 1.0, dtype)
        (g,) = WAYS[way](lambda x: h(x) + x, x)
        assert g.dtype == dtype
        # A Python number to the last digit.
        assert tf.reduce_all(g == tf.constant(expected, dtype) + 1)

    @WRAPS
    def test_of_forward_mode(self, wrap):
        """Which transposes the rule, the cast included."""
        h = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: 3 * tf.cast(u, tf.float64)))
        run = forward_derivative(lambda x: h(x) + x)
        np.testing.assert_array_equal(wrap(run)(tf.constant([1.0, 2.0])), [4, 4])

    @pytest.mark.parametrize(("decorator", "way"), spread(DECORATORS, WAYS, together=1))
    def test_of_second_order(self, decorator, way):
        h = DECORATORS[decorator](
            lambda x: (
                tf.stop_gradient(x**3),
                lambda u: tf.cast(u, tf.float64) * 3 * tf.cast(x, tf.float64) ** 2,
            )
        )
        x = tf.constant([1.0, 2.0])
        (g,) = WAYS[way](derivative(lambda x: h(x) + x), x)
        assert g.dtype == tf.float32
        np.testing.assert_allclose(g, 6 * x)

    @decorated
    @pytest.mark.parametrize(
        "returned",
        [tf.math.real, lambda u: np.ones(2), lambda u: np.ones(2, int), mask_of_real],
        ids=["real", "array", "ints", "mask"],
    )
    def test_of_complex_arguments(self, custom_vjp, returned):
        z = tf.constant([1 + 2j, 3 - 1j], tf.complex64)
        h = custom_vjp(lambda z: (z + 0, returned))
        g = gradient(lambda z: h(z) + z, z)
        assert g.dtype == tf.complex64
        np.testing.assert_allclose(g, [2, 2])

    @decorated
    @WRAPS
    @pytest.mark.parametrize(
        ("returned", "error", "message"),
        [
            (lambda u: tf.complex(u, u), TypeError, r"gradient of x .* has dtype complex128, expected float64, since x is"),
            (lambda u: "three", TypeError, r"gradient of x .* expected float64|must be a tensor"),
            (lambda u: 3, ValueError, r"shape \[\] for x, expected \[3\]"),
        ],
        ids=["complex", "text", "one number for several entries"],
    )  # fmt: skip
    def test_errors(self, custom_vjp, wrap, returned, error, message):
        h = custom_vjp(lambda x: (3 * x, returned))
        with pytest.raises(error, match=message):
            wrap(derivative(lambda x: h(x) + x))(A)

    @WRAPS
    @pytest.mark.parametrize("constant", ["int", "bool", "int of NumPy", "float64"])
    def test_of_variables_that_are_read(self, constant, wrap):
        returned, expected = CONSTANTS[constant]
        v = tf.Variable(2.0)
        h = sgtrick.custom_vjp(lambda x: (x * v, lambda u, variables: (u * v, [returned(u)])))
        g = wrap(lambda x: gradients(lambda x: h(x) + v, x, by=v))(tf.constant(1.0))
        assert g.dtype == tf.float32
        assert g.numpy() == expected + 1

    @WRAPS
    def test_of_some_rows_of_a_variable(self, wrap):
        table = tf.Variable(tf.ones([4, 2]))

        def rows(u, variables):
            values = tf.cast(u[tf.newaxis], tf.float64)
            return None, [tf.IndexedSlices(values, tf.constant([2]), tf.constant([4, 2]))]

        h = sgtrick.custom_vjp(lambda x: (table[2] * x, rows))
        g = wrap(lambda x: gradients(lambda x: h(x) + table[2], x, by=table))(tf.constant(3.0))
        assert g.dtype == tf.float32
        np.testing.assert_array_equal(g, [[0, 0], [0, 0], [2, 2], [0, 0]])


@WRAPS
@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_a_variable_that_is_returned_is_one_that_is_read(make, wrap):
    v = make([1.0, 2.0])
    h = sgtrick.custom_vjp(lambda x: (v, lambda u, variables: (None, [3 * u])))
    run = wrap(lambda x: gradients(h, x, by=getattr(v, "_value", v)))
    np.testing.assert_array_equal(run(tf.constant(1.0)), [3, 3])


def by_jvp(returned):
    form = sgtrick.custom_vjp(lambda x: (x + 0, lambda u: u))
    form.defjvp(lambda primals, tangents: (None, returned(tangents[0])))
    return form


def rows_of_a_table(returned):
    """A gradient of only some rows, of another length."""

    def f(x):
        def row(u):
            return tf.IndexedSlices(returned(u[0])[tf.newaxis], tf.constant([0]), tf.shape(x))

        return x + 0, row

    return lambda x: sgtrick.custom_vjp(f)(tf.stack([x, x]))


# Forms, from what makes a gradient or tangent of something like the argument.
OF_UNKNOWN_SHAPES = {
    name: lambda g, make=make: make(lambda x: x + 0, lambda x: g(tf.ones_like(x)))
    for name, make in OF_SLOPE.items()
} | {
    "custom_vjp, rows": rows_of_a_table,
    "custom_vjp, jvp": by_jvp,
    "custom_gradient": lambda g: (
        lambda x: sgtrick.custom_gradient(x + 0, g(tf.ones_like(x)), x, batch_ndims=1)
    ),
}
ONE_MODE = {"custom_vjp, rows": derivative, "custom_vjp, jvp": forward_derivative}


@pytest.mark.parametrize(
    ("name", "jit_compile", "mode"),
    spread(
        OF_UNKNOWN_SHAPES,
        [False, True],
        [derivative, forward_derivative],
        valid=lambda name, jit_compile, mode: mode is ONE_MODE.get(name, mode),
    ),
)
def test_shapes_that_are_unknown_while_tracing_are_checked_when_run(name, jit_compile, mode):
    """A gradient `[3]` of an argument `[1]` is an error, as in eager execution."""

    def run(times):
        def f(x):
            return mode(OF_UNKNOWN_SHAPES[name](lambda t: tf.tile(t, [times])))(x)

        spec = tf.TensorSpec([None], tf.float64)
        return tf.function(f, input_signature=[spec], jit_compile=jit_compile)

    assert np.isfinite(run(1)(A)).all()
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="must be non-negative"
        if jit_compile
        else "has shape|of shape|requested shape|do not fit together",
    ):
        run(3)(A[:1])
