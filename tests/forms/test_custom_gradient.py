"""The contract of the value form: structures, shapes, values, dtypes, variables, orders."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from matrix import functions as fn
from matrix import spread
from shared import WRAPS, constant

NAN, INF = np.nan, np.inf
FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
COMPLEX = [tf.complex64, tf.complex128]


EMBEDDED = ["eager", "formula alone", "tf.function", "XLA"]


@pytest.fixture(params=EMBEDDED)
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


class TestShapes:
    """`fx: B + R`, `x: B + D`, `gx: B + R + D`."""

    @pytest.mark.parametrize(
        ("batch", "range_", "domain", "stated"),
        [
            ((), (), (), False),
            ((), (), (3,), False),
            ((), (), (3, 2), False),
            ((4,), (), (3,), False),
            ((4, 2), (), (3,), False),
            ((4, 2), (), (), False),
            ((), (2,), (3,), False),
            ((), (2, 3), (), False),
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

    def test_rank_0_gx_of_a_scalar_is_the_same_partial_everywhere(self, embedded):
        _, g = embedded(constant(1.0), constant(3.0), constant([[1.0], [2.0]]), constant(2.0))
        assert g.shape == [2, 1]
        np.testing.assert_array_equal(g, [[6.0], [6.0]])

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

    @pytest.mark.parametrize("known", ["nothing", "ranks"])
    @pytest.mark.parametrize("jit_compile", [False, True])
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

    def test_what_is_known_is_checked_while_tracing(self):
        specs = [tf.TensorSpec(s, tf.float64) for s in ([None], [None, 2], [None, 3])]
        run = tf.function(sgtrick.custom_gradient, input_signature=specs)
        with pytest.raises(ValueError, match=r"fx \[\?\], gx \[\?, 2\] and x \[\?, 3\] do not fit"):
            run.get_concrete_function()

    def test_the_result_keeps_the_static_shape(self):
        specs = [tf.TensorSpec(s, tf.float64) for s in ([4], None, None)]
        run = tf.function(sgtrick.custom_gradient, input_signature=specs)
        assert run.get_concrete_function().output_shapes == [4]


class TestStructures:
    def test_gradients_reach_every_leaf(self, embedded):
        x = {"b": [constant(2.0), constant([3.0, 4.0])], "a": constant(5.0)}
        gx = {"a": constant(1.0), "b": [constant(10.0), constant([20.0, 30.0])]}
        _, g = embedded(constant(0.5), gx, x, constant(2.0))
        tf.nest.map_structure(
            np.testing.assert_array_equal, g, tf.nest.map_structure(lambda t: 2 * t, gx)
        )

    def test_none_leaves_get_no_gradient(self, embedded):
        x = [constant(1.0), constant(2.0)]
        _, g = embedded(constant(0.0), [constant(3.0), None], x)
        assert g[0].numpy() == 3.0
        assert g[1] is None

    @pytest.mark.parametrize("fx", [1.0, constant(1.0)], ids=["a number", "a tensor"])
    @pytest.mark.parametrize("by_hand", [False, True], ids=["stopped", "stopped by hand"])
    def test_all_none_stops(self, fx, by_hand, embedded):
        h, g = embedded(fx, None, constant(2.0), fx_gx_manually_stopped=by_hand)
        assert h.numpy() == 1.0
        assert g is None

    def test_lists_and_tuples_are_alike_and_a_list_of_one_is_its_leaf(self, embedded):
        a, b = constant(1.0), constant(2.0)
        _, g = embedded(constant(0.0), [a, b], (a, b))
        assert [t.numpy() for t in g] == [1.0, 2.0]
        _, g = embedded(constant(0.0), [b], a)
        assert g.numpy() == 2.0
        _, g = embedded(constant(0.0), b, [a])
        assert g[0].numpy() == 2.0

    @pytest.mark.parametrize(
        ("x", "gx", "x_leaves", "gx_leaves"),
        [
            ([1.0, 2.0], [1.0], r"x\[0\], x\[1\]", r"gx\[0\]"),
            ({"a": 1.0}, {"b": 1.0}, r"x\['a'\]", r"gx\['b'\]"),
            ({"a": 1.0}, [1.0], r"x\['a'\]", r"gx\[0\]"),
            ({"a": [1.0, 2.0]}, {"a": 1.0}, r"x\['a'\]\[0\], x\['a'\]\[1\]", r"gx\['a'\]"),
            (1.0, [1.0, 2.0], "x", r"gx\[0\], gx\[1\]"),
            ([1.0], [], r"x\[0\]", "none"),
        ],
    )
    def test_other_structures_are_refused_naming_both(self, x, gx, x_leaves, gx_leaves):
        message = rf"(?s)structure of x.*of x: +{x_leaves}\n.*of gx: +{gx_leaves}(\nA list is a structure.*array\.)?$"
        with pytest.raises(ValueError, match=message):
            sgtrick.custom_gradient(0.0, gx, x)


class TestBadShapes:
    @pytest.mark.parametrize(
        ("fx", "gx", "x", "options", "message"),
        [
            ([], [2], [3], {}, r"fx \[\], gx \[2\] and x \[3\] do not fit.*gx \[3\] \(the gradient of a scalar"),
            ([4], [4, 2], [4, 3], {}, r"Expected one of: gx \[4, 3\] \(the gradient of each batch member\); gx \[4, 4, 3\]"),
            ([5], [4, 3], [4, 3], {}, r"gx \[5, 4, 3\] \(the full Jacobian\); fx \[\] or \[4\] or \[4, 3\]"),
            ([4], [], [4, 3], {}, r"gx \[\].*do not fit"),
            ([4, 2], [4, 2, 3], [4, 3], {}, r"pass batch_ndims"),
            ([4, 2], [4, 3], [4, 3], {"batch_ndims": 1}, r"batch_ndims=1, gx must have the shape \[4, 2, 3\]"),
            ([4], [4, 3], [5, 3], {"batch_ndims": 1}, r"leading dimensions of fx and x must be equal, got \[4\] and \[5\]"),
            ([4], [4, 3], [4, 3], {"batch_ndims": 2}, r"need at least 2 dimensions\. In tf\.vectorized_map.*leave batch_ndims out"),
        ],
    )  # fmt: skip
    def test_the_three_shapes_and_those_that_would_fit(self, fx, gx, x, options, message):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            sgtrick.custom_gradient(tf.ones(fx), tf.ones(gx), tf.ones(x), **options)

    @pytest.mark.parametrize(
        ("fx", "x"), [([4], None), (None, [4])], ids=["of the point", "of the value"]
    )
    def test_an_unknown_rank(self, fx, x):
        """What is known already contradicts `batch_ndims`."""
        shapes = [tf.TensorSpec(shape) for shape in (fx, None, x)]
        run = tf.function(lambda fx, gx, x: sgtrick.custom_gradient(fx, gx, x, batch_ndims=2))
        message = r"\[unknown rank\].* do not fit together.* fx and x need at least 2 dimensions"
        with pytest.raises(ValueError, match=message):
            run.get_concrete_function(*shapes)

    @pytest.mark.parametrize("batch_ndims", [-1, 1.0, "1", True])
    def test_batch_ndims_is_a_count(self, batch_ndims):
        with pytest.raises(
            ValueError, match=r"batch_ndims must be None or an int of at least 0, got"
        ):
            sgtrick.custom_gradient(
                tf.ones([2]), tf.ones([2]), tf.ones([2]), batch_ndims=batch_ndims
            )

    def test_the_leaf_is_named(self):
        x = {"a": [tf.ones([3]), tf.ones([2])]}
        gx = {"a": [tf.ones([3]), tf.ones([4])]}
        with pytest.raises(ValueError, match=r"gx\['a'\]\[1\] \[4\] and x\['a'\]\[1\] \[2\]"):
            sgtrick.custom_gradient(1.0, gx, x)


class TestValues:
    """`h == fx` whatever the rest holds, and no NaN in a gradient that is not one."""

    def test_the_value_survives(self, embedded):
        kinds = [1.0, -0.0, INF, -INF, NAN], [1.0, INF, -INF, NAN], [0.0, 1e308, INF, -INF, NAN]
        fx, gx, x = np.array(list(itertools.product(*kinds))).T
        g, z = (np.stack([t, np.full_like(t, 2.0)], -1) for t in (gx, x))
        h, _ = embedded(*map(constant, (fx, g, z)))
        np.testing.assert_array_equal(h, fx)
        for i in range(0, len(fx), 7):  # members alone, with all values of each
            h, _ = embedded(constant(fx[i]), constant(g[i]), constant(z[i]))
            np.testing.assert_array_equal(h, fx[i])

    @pytest.mark.parametrize("gx", [INF, -INF, NAN])
    def test_zero_upstream_means_zero(self, embedded, gx):
        gx = constant([[gx, 1.0], [gx, 2.0]])
        h, g = embedded(constant([1.0, 2.0]), gx, tf.ones_like(gx), constant([0.0, 2.0]))
        np.testing.assert_array_equal(h, [1.0, 2.0])
        np.testing.assert_array_equal(g, [[0.0, 0.0], 2 * gx[1]])

    @pytest.mark.parametrize("bad", [INF, -INF, NAN])
    def test_a_member_at_a_non_finite_point_harms_no_other(self, embedded, bad):
        fx, gx, x, u = chains()
        x = tf.concat([[[bad, 1.0, 2.0]], x[1:]], 0)
        h, g = embedded(fx, gx, x, u)
        np.testing.assert_array_equal(h, fx)
        np.testing.assert_array_equal(g[1], u[1] * gx[1])
        assert np.all((g[0].numpy() == 0) | (g[0].numpy() == (u[0] * gx[0]).numpy()))

    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_the_same_with_live_and_second_order_coefficients(self, embedded, bad):
        fx, gx, x, u = chains()
        x = tf.concat([[[bad, 1.0, 2.0]], x[1:]], 0)
        hessian = fn.scalar_hessian(chains()[2])
        for options in ({"hx": hessian}, {"fx_gx_manually_stopped": True}):
            h, g = embedded(fx, gx, x, u, **options)
            np.testing.assert_array_equal(h, fx)
            np.testing.assert_array_equal(g[1], u[1] * gx[1])
            assert not np.any(np.isnan(g[0]))

    def test_non_finite_hessian_leaves_value_and_gradient_alone(self, embedded):
        h, g = embedded(constant(1.0), constant(2.0), constant(3.0), hx=constant(INF))
        assert (h.numpy(), g.numpy()) == (1.0, 2.0)


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

    @pytest.mark.parametrize("dtype", COMPLEX, ids=lambda d: d.name)
    @pytest.mark.parametrize(
        ("f", "derivative"),
        [
            (lambda x: tf.reduce_sum(x**3, -1), lambda x: 3 * x**2),
            (tf.exp, tf.exp),
        ],
        ids=["batch", "elementwise"],
    )
    def test_holomorphic(self, embedded, dtype, f, derivative):
        x = constant([[0.3 + 1j, -1.0 + 0.2j], [0.5 - 2j, 1j]], dtype)
        u = f(x) * (1 - 2j) + 1
        h, g = embedded(f(x), derivative(x), x, u)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        np.testing.assert_array_equal(h, y)
        np.testing.assert_allclose(g, tape.gradient(y, x, u), rtol=1e-5)

    def test_real_function_of_a_complex_argument(self, embedded):
        x = constant([1 + 2j, -3 + 0.5j], tf.complex128)
        # The Jacobian in the sense of dL = Re(gx dx).
        _, g = embedded(tf.reduce_sum(tf.abs(x) ** 2), 2 * tf.math.conj(x), x, constant(3.0))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.abs(x) ** 2)
        np.testing.assert_allclose(g, tape.gradient(y, x, constant(3.0)))

    def test_complex_function_of_a_real_argument(self, embedded):
        x, c = constant([1.0, -2.0]), constant([1 + 2j, 3 - 1j], tf.complex128)
        u = constant(2 - 3j, tf.complex128)

        def f(x):
            return tf.reduce_sum(c * tf.cast(x, tf.complex128) ** 2)

        _, g = embedded(f(x), 2 * c * tf.cast(x, tf.complex128), x, u)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        assert g.dtype == tf.float64
        np.testing.assert_allclose(g, tape.gradient(y, x, u))

    def test_complex_zero_upstream_means_zero(self, embedded):
        x = constant([1j, 2.0], tf.complex128)
        gx = constant([complex(INF, NAN), 1j], tf.complex128)
        h, g = embedded(constant([1.0, 1j], tf.complex128), gx, x, constant([0, 2], tf.complex128))
        np.testing.assert_array_equal(h, [1.0, 1j])
        np.testing.assert_array_equal(g, [0, -2j])

    def test_python_numbers_lose_no_digits(self, embedded):
        h, g = embedded(0.1, 0.1, constant(1.0))
        assert h.dtype == g.dtype == tf.float64
        assert (h.numpy(), g.numpy()) == (0.1, 0.1)

    def test_a_python_number_beside_complex_points_is_real(self, embedded):
        x = constant([1 + 2j, -3j], tf.complex64)
        h, g = embedded(1.0, tf.math.conj(x), x)
        assert (h.dtype, g.dtype) == (tf.float32, tf.complex64)

    def test_integer_gx_is_cast(self, embedded):
        _, g = embedded(constant(1.0), tf.constant([2, 3]), constant([1.0, 1.0]))
        np.testing.assert_array_equal(g, [2.0, 3.0])

    @pytest.mark.parametrize("x", [1, True, "a", np.int64(3), tf.constant([1, 2])])
    def test_arguments_without_derivatives(self, x):
        y = constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(y)
            h = sgtrick.custom_gradient(constant(1.0), [None, 2.0], [x, y])
        assert tape.gradient(h, y).numpy() == 2.0
        message = r"x\[0\] has dtype \w+, which has no derivatives, but gx\[0\] is not None"
        with pytest.raises(TypeError, match=message):
            sgtrick.custom_gradient(1.0, [1.0, 2.0], [x, y])

    @pytest.mark.parametrize("fx", [1, True, "a", tf.constant([1, 2])])
    def test_values_without_derivatives(self, fx):
        with pytest.raises(TypeError, match=r"fx has dtype \w+, which has no derivatives"):
            sgtrick.custom_gradient(fx, 1.0, 1.0)

    @pytest.mark.parametrize(
        ("fx", "gx", "x", "message"),
        [
            (1.0, True, 1.0, r"gx has dtype bool, expected float32"),
            (1.0, "a", 1.0, r"gx has dtype string, expected float32"),
            (1.0, 1j, 1.0, r"gx has dtype complex128, expected float32, since fx is float32 and x is float32"),
            (1.0, object(), 1.0, r"gx must be a tensor, variable, array or number, got object"),
            (1.0, 1.0, tf.ragged.constant([[1.0], [2.0, 3.0]]), r"x must be .* got RaggedTensor"),
            (None, 1.0, 1.0, r"fx must be .* got NoneType"),
        ],
    )  # fmt: skip
    def test_what_is_no_number(self, fx, gx, x, message):
        with pytest.raises(TypeError, match=message):
            sgtrick.custom_gradient(fx, gx, x)


class TestSources:
    """Variables, arrays and what else carries a value."""

    def test_a_tensor_from_outside_of_the_graph_that_nothing_else_uses(self):
        x = constant(2.0)

        @tf.function
        def run():
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    h = sgtrick.custom_gradient(1.0, 3.0, x, hx=5.0)
                g = tape.gradient(h, x)
            return g, outer.gradient(g, x)

        assert [t.numpy() for t in run()] == [3.0, 5.0]

    def test_variables_that_are_not_in_x_are_stopped(self, embedded):
        x, other = constant([1.0, 2.0]), tf.Variable(3.0, dtype=tf.float64)
        with tf.GradientTape() as tape:
            h, g = embedded(tf.reduce_sum(x * other), tf.ones_like(x) * other, x)
        np.testing.assert_array_equal(g, [3.0, 3.0])
        assert tape.gradient(h, other) is None


class TestManuallyStopped:
    def test_other_inputs_keep_their_gradients(self, embedded):
        # h(x, y) = x^2 y: its derivative by x comes from gx, the one by y from autodiff.
        x, y = constant(3.0), constant(5.0)
        with tf.GradientTape() as tape:
            tape.watch(y)
            x_ = tf.stop_gradient(x)
            h, g = embedded(x_**2 * y, 2 * x_ * y, x, fx_gx_manually_stopped=True)
        assert (h.numpy(), g.numpy()) == (45.0, 30.0)
        assert tape.gradient(h, y).numpy() == 9.0

    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_other_inputs_keep_them_where_a_point_is_not_finite(self, embedded, bad):
        # The derivative by y is that of the value alone, whatever x is: gx adds y times zero.
        x, y = constant([[bad, 1.0], [1.0, 2.0]]), constant(5.0)
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
        ],
        ids=["vector", "list", "list of one", "rank-0 gx", "elementwise", "all positional"],
    )  # fmt: skip
    @WRAPS
    def test_same_answers(self, arguments, wrap):
        def run(custom_gradient):
            x = arguments[2]
            with tf.GradientTape() as tape:
                tape.watch(x)
                h = wrap(lambda *a: custom_gradient(*a, *arguments[3:]))(*arguments[:3])
            return [h, *tf.nest.flatten(tape.gradient(h, x))]

        for ours, theirs in zip(
            run(sgtrick.custom_gradient), run(tfp.math.custom_gradient), strict=True
        ):
            np.testing.assert_allclose(ours, theirs)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)

    def test_signature(self):
        import inspect

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


class TestDevices:
    """How they are named: tests/forms/test_placement.py says what runs on them."""

    @pytest.mark.parametrize(
        "device", ["CPU:1", "/CPU:1", "/device:CPU:1", tf.DeviceSpec(device_type="CPU", device_index=1),
                   ["GPU", "CPU:1", "CPU:0"], "/job:localhost/replica:0/task:0/device:CPU:1"],
        ids=str,
    )  # fmt: skip
    def test_present_ones(self, device):
        fx, gx, x, _ = chains()
        assert sgtrick.custom_gradient(fx, gx, x, device=device).device.endswith("CPU:1")

    @pytest.mark.parametrize(
        ("device", "error", "message"),
        [
            ("CPU:7", ValueError, r"device='CPU:7' is not present. Available devices: \['CPU:0', 'CPU:1'"),
            (["TPU", "CPU:9"], ValueError, r"device=\['TPU', 'CPU:9'\] is not present"),
            ([], ValueError, r"device=\[\] is not present"),
            ("banana", ValueError, r"device='banana' is not a device name"),
            (3, TypeError, r"device must be a name such as 'GPU:0'.* got 3"),
        ],
    )  # fmt: skip
    def test_others(self, device, error, message):
        with pytest.raises(error, match=message):
            sgtrick.custom_gradient(1.0, 1.0, 1.0, device=device)
