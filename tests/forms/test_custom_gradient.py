"""The contract of the value form: structures, shapes, values, dtypes, variables, orders."""

import functools
import inspect
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from matrix import functions as fn
from matrix import spread
from shared import constant, derivative, gradient, value_and_gradients

NAN, INF = np.nan, np.inf
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
EMBEDDED = ["eager", "formula alone", "XLA"]
IN_XLA_TOO = pytest.mark.parametrize("embedded", EMBEDDED, indirect=True)


@pytest.fixture(params=EMBEDDED[:2])
def embedded(request):
    """Value and gradient of the value form, by each of the ways it is computed."""
    if request.param == "formula alone":
        request.getfixturevalue("formula_alone")

    def value_and_gradient(fx, gx, x, upstream=None, **options):
        def run(fx, gx, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                h = sgtrick.custom_gradient(fx, gx, x, **options)
            return h, tape.gradient(h, x, upstream)

        if "eager" not in request.param:
            run = tf.function(run, jit_compile=request.param == "XLA")
        return run(fx, gx, x)

    return value_and_gradient


def chains(dtype=tf.float64):
    """`fx [2]`, `gx [2, 3]`, `x [2, 3]` and a non-uniform upstream."""
    x = constant([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]], dtype)
    return fn.scalar(x), fn.scalar_gradient(x), x, constant([2.0, -3.0], dtype)


AT_LEAST = r"\[unknown rank\].* do not fit together.* fx and x need at least 2 dimensions"


class TestShapes:
    """`fx: B + R`, `x: B + D`, `gx: B + R + D`."""

    @pytest.mark.parametrize(
        ("batch", "range_", "domain", "stated"),
        [
            ((), (), (), False),
            ((), (), (3,), False),
            ((4,), (), (3,), False),
            ((4, 2), (), (), False),
            ((), (2,), (3,), False),
            ((), (2, 1), (3, 2), False),
            ((4,), (2,), (3,), True),
            ((4, 1), (2, 3), (2, 2), True),
            ((3,), (3,), (3,), True),
            ((2,), (3,), (), True),
            ((0,), (), (3,), False),
            ((4,), (), (0,), False),
            ((), (0,), (3,), False),
        ],
    )
    def test_the_jacobian_is_gx(self, embedded, batch, range_, domain, stated):
        random = np.random.default_rng(0)
        b, r, d = (int(np.prod(s)) for s in (batch, range_, domain))
        gx, u = random.normal(size=(b, r, d)), random.normal(size=(b, r))
        fx, x = random.normal(size=batch + range_), random.normal(size=batch + domain)
        h, g = embedded(
            constant(fx),
            constant(gx.reshape(batch + range_ + domain)),
            constant(x),
            constant(u.reshape(batch + range_)),
            batch_ndims=len(batch) if stated else None,
        )
        np.testing.assert_array_equal(h, fx)
        expected = np.einsum("br,brd->bd", u, gx).reshape(batch + domain)
        np.testing.assert_allclose(g, expected, rtol=1e-12)

    def test_a_parameter_shared_by_the_batch_has_a_jacobian(self, embedded):
        fx, gx, x, u = chains()
        shared = constant([1.0, 2.0])
        by_shared = constant([[1.0, 2.0], [3.0, 4.0]])  # fx.shape + shared.shape
        _, (g, g_shared) = embedded(fx, (gx, by_shared), (x, shared), u)
        np.testing.assert_allclose(g, u[:, None] * gx)
        np.testing.assert_allclose(g_shared, tf.linalg.matvec(by_shared, u, transpose_a=True))

    def test_graph_stays_small(self):
        """And what is known when tracing is not checked again."""
        fx, gx, x, _ = chains()
        # Without a Hessian, operations are added that make second derivatives unknown.
        for options, count in (({"hx": 0}, 21), ({}, 28)):
            run = tf.function(lambda *a, o=options: sgtrick.custom_gradient(*a, **o))
            graph = run.get_concrete_function(fx, gx, x).graph
            kinds = [op.type for op in graph.get_operations()]
            assert len(kinds) <= count
            assert {"Assert", "Shape", "Rank", "Size"}.isdisjoint(kinds)

    @pytest.mark.parametrize(("known", "jit_compile"), [("nothing", False), ("ranks", True)])
    def test_unknown_shapes_are_checked_at_run_time(self, known, jit_compile):
        fx, gx, x, _ = chains()
        specs = [
            tf.TensorSpec([None] * t.shape.rank if known == "ranks" else None, t.dtype)
            for t in (fx, gx, x)
        ]
        run = tf.function(
            sgtrick.custom_gradient, input_signature=specs, jit_compile=jit_compile, autograph=False
        )
        np.testing.assert_array_equal(run(fx, gx, x), fx)
        # XLA leaves assertion messages out.
        message = (
            "must be non-negative" if jit_compile else r"gx, fx and x.*\[3 2\]\s*\[2\]\s*\[2 3\]"
        )
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
            run(fx, tf.transpose(gx), x)

    @pytest.mark.parametrize(
        ("shape", "of_point", "jit_compile"),
        [
            ([1], [3], True),
            ([1, 1], [None], False),
            (None, [None], True),
            (None, None, False),
            ([None], [3], True),
            ([None, 1], [3], False),
            ([None, None], [None], False),
        ],
        ids=str,
    )
    def test_a_value_of_one_entry(self, shape, of_point, jit_compile):
        """It has the gradient of a scalar, also where shapes are unknown while tracing."""
        fx = tf.reshape(constant(5.0), [n or 1 for n in shape or [1]])
        x, gx, u = constant([1.0, 2.0, 3.0]), constant([4.0, 5.0, 6.0]), 2 * tf.ones_like(fx)
        specs = [tf.TensorSpec(s, tf.float64) for s in (shape, of_point, of_point)]

        def run(fx, gx, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                h = sgtrick.custom_gradient(fx, gx, x)
            return h, tape.gradient(h, x, tf.reshape(u, tf.shape(h)))

        run = tf.function(run, input_signature=specs, jit_compile=jit_compile)
        h, g = run(fx, gx, x)
        np.testing.assert_array_equal(h, fx)
        np.testing.assert_array_equal(g, 2 * gx)
        if of_point != [3]:
            with pytest.raises(tf.errors.InvalidArgumentError):
                run(fx, gx[:2], x)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_a_batch_that_might_be_a_value_of_one_entry(self, jit_compile):
        specs = [tf.TensorSpec(s, tf.float64) for s in ([None], [3])]

        @tf.function(input_signature=specs, jit_compile=jit_compile)
        def run(fx, x):
            return value_and_gradients(lambda x: sgtrick.custom_gradient(fx, 4 * x, x), x)

        x = constant([1.0, 2.0, 3.0])
        y, (g,) = run(5 * x, x)
        np.testing.assert_array_equal(y, 5 * x)
        np.testing.assert_array_equal(g, 4 * x)
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(x[:2], x)

    def test_the_hessian_of_a_value_of_one_entry(self):
        x, hx = constant([1.0, 2.0]), constant([[[2.0, 3.0], [3.0, 5.0]]])
        second = derivative(derivative(lambda x: sgtrick.custom_gradient([7.0], 2 * x, x, hx=hx)))
        np.testing.assert_array_equal(second(x), [5.0, 8.0])
        with pytest.raises(ValueError, match=r"hx must have the shape \[1, 2, 2\]"):
            sgtrick.custom_gradient([7.0], x, x, hx=hx[0])

    @pytest.mark.parametrize(
        ("shapes", "batch_ndims", "message"),
        [
            (([None], [None, 2], [None, 3]), None, r"fx \[\?\], gx \[\?, 2\] and x \[\?, 3\] do not fit"),
            (([4], None, None), 2, AT_LEAST),
            ((None, None, [4]), 2, AT_LEAST),
        ],
    )  # fmt: skip
    def test_what_is_known_is_checked_while_tracing(self, shapes, batch_ndims, message):
        specs = [tf.TensorSpec(shape, tf.float64) for shape in shapes]
        run = tf.function(functools.partial(sgtrick.custom_gradient, batch_ndims=batch_ndims))
        with pytest.raises(ValueError, match=message):
            run.get_concrete_function(*specs)

    def test_the_result_keeps_the_static_shape(self):
        specs = [tf.TensorSpec(s, tf.float64) for s in ([4], None, None)]
        run = tf.function(sgtrick.custom_gradient, input_signature=specs)
        assert run.get_concrete_function().output_shapes == [4]


# `gx`, `x` and the gradient for an upstream gradient of 2.
STRUCTURES = {
    "dictionary": (
        {"a": 1.0, "b": [10.0, constant([20.0, 30.0])]},
        {"b": [constant(2.0), constant([3.0, 4.0])], "a": constant(5.0)},
        {"a": 2, "b": [20, np.array([40, 60])]},
    ),
    "None for a leaf": ([3.0, None], [constant(1.0), constant(2.0)], [6, None]),
    "list for a tuple": ([1.0, 2.0], (constant(1.0), constant(2.0)), (2, 4)),
    "leaf for a list of one": (2.0, [constant(1.0)], [4]),
    "number for several entries": (3.0, constant([[1.0], [2.0]]), np.array([[6], [6]])),
    "numbers in a dictionary": (
        {"a": ((0.1, constant(0.2)),)},
        {"a": constant([[2.0, 3.0]])},
        {"a": np.array([[0.2, 0.4]])},
    ),
    "integers": (tf.constant([2, 3]), constant([1.0, 1.0]), np.array([4, 6])),
}


class TestStructures:
    @pytest.mark.parametrize(("gx", "x", "expected"), STRUCTURES.values(), ids=STRUCTURES)
    def test_gradients_reach_every_leaf(self, embedded, gx, x, expected):
        _, found = embedded(constant(0.5), gx, x, constant(2.0))
        tf.nest.assert_same_structure(found, x)
        for g, e in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            assert g is None if e is None else np.array_equal(g, e)

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_all_none_stops(self, by_hand, embedded):
        h, g = embedded(1.0, None, constant(2.0), fx_gx_manually_stopped=by_hand)
        assert h.numpy() == 1.0
        assert g is None

    @pytest.mark.parametrize(
        ("x", "gx", "x_leaves", "gx_leaves"),
        [
            ([1.0, 2.0], [1.0], r"x\[0\], x\[1\]", r"gx\[0\]"),
            ({"a": 1.0}, [1.0], r"x\['a'\]", r"gx\[0\]"),
            (1.0, [1.0, 2.0], "x", r"gx\[0\], gx\[1\]"),
            ([1.0], [], r"x\[0\]", "none"),
        ],
    )
    def test_other_structures_are_refused_naming_both(self, x, gx, x_leaves, gx_leaves):
        message = rf"(?s)structure of x.*of x: +{x_leaves}\n.*of gx: +{gx_leaves}(\nA list is a structure.*array\.)?$"
        with pytest.raises(ValueError, match=message):
            sgtrick.custom_gradient(0.0, gx, x)


def ones(fx, gx, x, **options):
    return sgtrick.custom_gradient(tf.ones(fx), tf.ones(gx), tf.ones(x), **options)


def one(fx=1.0, gx=1.0, x=1.0, **options):
    return sgtrick.custom_gradient(fx, gx, x, **options)


COUNT = r"batch_ndims must be None or an int of at least 0, got"
NO_DERIVATIVES = r"fx has dtype \w+, which has no derivatives"
MISUSE = [
    (lambda: ones([], [2], [3]), ValueError, r"fx \[\], gx \[2\] and x \[3\] do not fit.*gx \[3\] \(the gradient of a scalar"),
    (lambda: ones([4], [4, 2], [4, 3]), ValueError, r"Expected one of: gx \[4, 3\] \(the gradient of each batch member\); gx \[4, 4, 3\]"),
    (lambda: ones([5], [4, 3], [4, 3]), ValueError, r"gx \[5, 4, 3\] \(the full Jacobian\); fx \[\] or \[4\] or \[4, 3\]"),
    (lambda: ones([4], [], [4, 3]), ValueError, r"gx \[\].*do not fit"),
    (lambda: ones([4, 2], [4, 2, 3], [4, 3]), ValueError, r"pass batch_ndims"),
    (lambda: ones([4, 2], [4, 3], [4, 3], batch_ndims=1), ValueError, r"batch_ndims=1, gx must have the shape \[4, 2, 3\]"),
    (lambda: ones([4], [4, 3], [5, 3], batch_ndims=1), ValueError, r"leading dimensions of fx and x must be equal, got \[4\] and \[5\]"),
    (lambda: ones([4], [4, 3], [4, 3], batch_ndims=2), ValueError, r"need at least 2 dimensions\. In tf\.vectorized_map.*leave batch_ndims out"),
    (lambda: ones([2], [2], [2], batch_ndims=-1), ValueError, COUNT),
    (lambda: ones([2], [2], [2], batch_ndims="1"), ValueError, COUNT),
    (lambda: ones([2], [2], [2], batch_ndims=True), ValueError, COUNT),
    (lambda: one(1.0, {"a": [1.0, tf.ones([4])]}, {"a": [1.0, tf.ones([2])]}), ValueError, r"gx\['a'\]\[1\] \[4\] and x\['a'\]\[1\] \[2\]"),
    (lambda: one(1), TypeError, NO_DERIVATIVES),
    (lambda: one("a"), TypeError, NO_DERIVATIVES),
    (lambda: one(None), TypeError, r"fx must be .* got NoneType"),
    (lambda: one(gx=True), TypeError, r"gx has dtype bool, expected float32"),
    (lambda: one(gx=1j), TypeError, r"gx has dtype complex128, expected float32, since fx is float32 and x is float32"),
    (lambda: one(gx=object()), TypeError, r"gx must be a tensor, variable, array or number, got object"),
    (lambda: one(x=tf.ragged.constant([[1.0], [2.0, 3.0]])), TypeError, r"x must be .* got RaggedTensor"),
    (lambda: one(device=[]), ValueError, r"device=\[\] is not present"),
    (lambda: one(device="banana"), ValueError, r"device='banana' is not a device name"),
    (lambda: one(device=3), TypeError, r"device must be a name such as 'GPU:0'.* got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), MISUSE)
def test_misuse(call, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("x", [1, True, "a", np.int64(3), tf.constant([1, 2])])
def test_arguments_without_derivatives(x):
    h = lambda y: one(constant(1.0), [None, 2.0], [x, y])  # noqa: E731
    assert gradient(h, constant(1.0)) == 2
    message = r"x\[0\] has dtype \w+, which has no derivatives, but gx\[0\] is not None"
    with pytest.raises(TypeError, match=message):
        one(1.0, [1.0, 2.0], [x, 1.0])


OPTIONS = {
    "first order": {},
    "second order": {"hx": fn.scalar_hessian(tf.ones([4, 3], tf.float64))},
    "stopped by hand": {"fx_gx_manually_stopped": True},
}


@IN_XLA_TOO
class TestValues:
    """`h == fx` whatever the rest holds, and no NaN in a gradient that is not one."""

    @pytest.mark.long
    def test_the_value_survives(self, embedded):
        kinds = [1.0, -0.0, INF, -INF, NAN], [1.0, INF, -INF, NAN], [0.0, 1e308, INF, -INF, NAN]
        fx, gx, x = np.array(list(itertools.product(*kinds))).T
        g, z = (np.stack([t, np.full_like(t, 2.0)], -1) for t in (gx, x))
        h, _ = embedded(*map(constant, (fx, g, z)))
        np.testing.assert_array_equal(h, fx)
        for i in range(0, len(fx), 17):  # members alone, with all values of each
            h, _ = embedded(constant(fx[i]), constant(g[i]), constant(z[i]))
            np.testing.assert_array_equal(h, fx[i])

    def test_zero_upstream_means_zero(self, embedded):
        gx = constant([[INF, 1.0], [-INF, 1.0], [NAN, 1.0], [INF, 2.0]])
        fx, u = constant(range(4)), constant([0.0, 0.0, 0.0, 2.0])
        h, g = embedded(fx, gx, tf.ones_like(gx), u)
        np.testing.assert_array_equal(h, fx)
        np.testing.assert_array_equal(g, [[0.0, 0.0]] * 3 + [2 * gx[3]])

    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_members_at_non_finite_points_harm_no_other(self, embedded, options):
        x = constant([[bad, 1.0, 2.0] for bad in (INF, -INF, NAN, 0.5)])
        fx, gx, u = constant(range(4)), 3 * tf.ones_like(x), constant([2.0, -3.0, 4.0, 5.0])
        h, g = embedded(fx, gx, x, u, **options)
        np.testing.assert_array_equal(h, fx)
        np.testing.assert_array_equal(g[3], u[3] * gx[3])
        bad, exact = g[:3].numpy(), u[:3, tf.newaxis] * gx[:3]
        assert np.all((bad == 0) | (bad == exact))

    def test_non_finite_hessian_leaves_value_and_gradient_alone(self, embedded):
        h, g = embedded(constant(1.0), constant(2.0), constant(3.0), hx=constant(INF))
        assert (h.numpy(), g.numpy()) == (1.0, 2.0)


# With derivatives in the sense of dL = Re(gx dx). test_complex.py has those of holomorphic ones.
OF_COMPLEX = {
    "real": (lambda x: tf.abs(x) ** 2, lambda x: 2 * tf.math.conj(x), tf.complex128),
    "of a real argument": (
        lambda x: tf.cast(x, tf.complex128) ** 2 * (1 + 2j),
        lambda x: 2 * (1 + 2j) * tf.cast(x, tf.complex128),
        tf.float64,
    ),
}


class TestDtypes:
    @pytest.mark.parametrize(
        ("embedded", "fx_dtype", "x_dtype"),
        spread(EMBEDDED, FLOATS, FLOATS),
        indirect=["embedded"],
        ids=lambda of: getattr(of, "name", of),
    )
    def test_mixed_precision(self, embedded, fx_dtype, x_dtype):
        fx, gx, x, u = (tf.cast(t, tf.float64) for t in chains())
        h, g = embedded(tf.cast(fx, fx_dtype), gx, tf.cast(x, x_dtype), tf.cast(u, fx_dtype))
        assert h.dtype == fx_dtype
        assert g.dtype == x_dtype
        coarse = max(tf.experimental.numpy.finfo(d.as_numpy_dtype).eps if d != tf.bfloat16 else 2**-8
                     for d in (fx_dtype, x_dtype))  # fmt: skip
        np.testing.assert_allclose(tf.cast(g, tf.float64), u[:, None] * gx, rtol=2 * float(coarse))

    @IN_XLA_TOO
    @pytest.mark.parametrize(("f", "slope", "dtype"), OF_COMPLEX.values(), ids=OF_COMPLEX)
    def test_complex_ones(self, embedded, f, slope, dtype):
        x = tf.cast([[0.3 + 1j, -1.0 + 0.2j], [0.5 - 2j, 1j]], dtype)
        y = f(x)
        u = y * (1 - 2j) + 1 if y.dtype.is_complex else y
        h, g = embedded(y, slope(x), x, u)
        assert g.dtype == dtype
        np.testing.assert_array_equal(h, y)
        np.testing.assert_allclose(g, gradient(f, x, u), rtol=1e-5)

    @IN_XLA_TOO
    def test_complex_zero_upstream_means_zero(self, embedded):
        x = constant([1j, 2.0], tf.complex128)
        gx = constant([complex(INF, NAN), 1j], tf.complex128)
        h, g = embedded(constant([1.0, 1j], tf.complex128), gx, x, constant([0, 2], tf.complex128))
        np.testing.assert_array_equal(h, [1.0, 1j])
        np.testing.assert_array_equal(g, [0, -2j])

    @pytest.mark.parametrize("fx", [0.1, [0.1]])
    def test_python_numbers_lose_no_digits(self, embedded, fx):
        """test_numbers.py says which dtype they have."""
        h, g = embedded(fx, 0.1, constant(1.0))
        assert h.dtype == g.dtype == tf.float64
        assert (h.numpy(), g.numpy()) == (fx, 0.1)


class TestSources:
    """Variables, arrays and what else carries a value."""

    def test_a_tensor_from_outside_of_the_graph_that_nothing_else_uses(self):
        x = constant(2.0)
        first = derivative(lambda x: sgtrick.custom_gradient(1.0, 3.0, x, hx=5.0))
        assert tf.function(lambda: (first(x), derivative(first)(x)))() == (3, 5)

    def test_variables_that_are_not_in_x_are_stopped(self, embedded):
        x, other = constant([1.0, 2.0]), tf.Variable(3.0, dtype=tf.float64)
        with tf.GradientTape() as tape:
            h, g = embedded(tf.reduce_sum(x * other), tf.ones_like(x) * other, x)
        np.testing.assert_array_equal(g, [3.0, 3.0])
        assert tape.gradient(h, other) is None

    @pytest.mark.parametrize("x", [3.0, NAN])
    def test_where_it_is_stopped_by_hand_other_inputs_keep_their_gradients(self, embedded, x):
        # h(x, y) = 2 y, and y by x: the derivative by y is that of the value, whatever x is.
        x, y = constant([[x, 1.0], [1.0, 2.0]]), constant(5.0)
        with tf.GradientTape() as tape:
            tape.watch(y)
            fx, gx = constant([2.0, 3.0]) * y, tf.ones_like(x) * y
            h, g = embedded(fx, gx, x, fx_gx_manually_stopped=True)
        np.testing.assert_array_equal(g[1], [5.0, 5.0])
        assert tape.gradient(h, y) == 5.0


class TestDropIn:
    """What `tfp.math.custom_gradient` answers correctly is answered the same."""

    @pytest.mark.parametrize(
        "arguments",
        [
            (constant(2.0), constant([1.0, 2.0]), constant([3.0, 4.0])),
            (constant(2.0), [constant([1.0, 2.0]), constant(3.0)], [constant([3.0, 4.0]), constant(1.0)]),
            (constant(2.0), [constant(1.0)], constant(3.0)),
            (constant(2.0), constant(1.0), constant([3.0, 4.0])),
            (constant([2.0, 3.0]), constant([1.0, 5.0]), constant([3.0, 4.0])),
            (constant(2.0), constant([1.0, 2.0]), constant([3.0, 4.0]), True, "a_name"),
            ([2.0], constant([1.0, 2.0]), constant([3.0, 4.0])),
            ([[2.0]], constant([1.0, 2.0]), constant([3.0, 4.0])),
            ([2.0], constant([[1.0, 2.0]]), constant([[3.0, 4.0]])),
            ([2.0], constant(1.0), constant([3.0, 4.0])),
            ([2.0], constant([1.0]), constant(3.0)),
            (constant(2.0), [3.0, [4.0, 5.0]], [constant(1.0), constant([3.0, 4.0])]),
            (constant(2.0), [[3.0, 4.0]], constant([3.0, 4.0])),
        ],
        ids=["vector", "list", "list of one", "rank-0 gx", "elementwise", "all positional",
             "fx [1]", "fx [1, 1]", "one member", "fx [1], rank-0 gx", "Jacobian [1]",
             "numbers in a list", "numbers in a list of one"],
    )  # fmt: skip
    def test_same_answers(self, arguments):
        arguments = [tf.constant(arguments[0], tf.float64), *arguments[1:]]

        def run(custom_gradient):
            x = arguments[2]
            with tf.GradientTape() as tape:
                tape.watch(x)
                h = custom_gradient(*arguments)
            return [h, *tf.nest.flatten(tape.gradient(h, x))]

        for ours, theirs in zip(
            run(sgtrick.custom_gradient), run(tfp.math.custom_gradient), strict=True
        ):
            np.testing.assert_allclose(ours, theirs)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)

    def test_signature(self):
        ours = list(inspect.signature(sgtrick.custom_gradient).parameters)
        assert ours[:5] == list(inspect.signature(tfp.math.custom_gradient).parameters)

    def test_the_name_prefixes_the_ops(self):
        with tf.Graph().as_default() as graph:
            sgtrick.custom_gradient(constant(1.0), constant(2.0), constant(3.0), name="mine")
            sgtrick.custom_gradient(constant(1.0), constant(2.0), constant(3.0))
        names = [
            op.name.split("/")[0] for op in graph.get_operations() if op.type == "StopGradient"
        ]
        assert set(names) == {"mine", "custom_gradient"}


@pytest.mark.parametrize(
    "device", ["CPU:1", "/CPU:1", "/device:CPU:1", tf.DeviceSpec(device_type="CPU", device_index=1),
               ["GPU", "CPU:1", "CPU:0"], "/job:localhost/replica:0/task:0/device:CPU:1"],
    ids=str,
)  # fmt: skip
def test_names_of_devices(device):
    assert one(device=device).device.endswith("CPU:1")
