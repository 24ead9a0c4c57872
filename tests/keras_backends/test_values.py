"""The contract of `sgtrick.keras.custom_gradient` on the backend of this process."""

import keras
import numpy as np
import pytest
from keras import ops
from transformations import (
    BACKEND,
    FIRST,
    MAPPED,
    MAPPED_SECOND,
    OF,
    SECOND,
    THIRD,
    TWICE,
    array,
    check,
    gradient,
    pulled,
    tensor,
)

import sgtrick.keras

NAN, INF = np.nan, np.inf
embed = sgtrick.keras.custom_gradient
random = np.random.default_rng(7)
POINTS, MATRICES, NUMBERS = (random.normal(size=s) for s in ((4, 3), (4, 2, 2), (4,)))


def constant(value):
    """A value with no derivative of its own, so that a lost one is seen."""
    return ops.stop_gradient(value)


def scalar(x):
    return ops.sum(x**4, -1) / 4 + ops.prod(x, -1)


def scalar_gradient(x):
    a, b, c = ops.split(x, 3, -1)
    return x**3 + ops.concatenate([b * c, a * c, a * b], -1)


def scalar_hessian(x):
    a, b, c = (x[..., i] for i in range(3))
    rows = [[3 * a**2, c, b], [c, 3 * b**2, a], [b, a, 3 * c**2]]
    return ops.stack([ops.stack(row, -1) for row in rows], -2)


def vector(x):
    return ops.stack([scalar(x), ops.sum(x**2, -1)], -1)


def two(x, y):
    return ops.sum(x * x * y[..., None, None], (-2, -1)) + y**2


def two_gradients(x, y):
    return {"a": [2 * x * y[..., None, None]], "b": ops.sum(x**2, (-2, -1)) + 2 * y}


def two_vector(x, y):
    return ops.stack([two(x, y), ops.sum(x, (-2, -1)) * y], -1)


def two_jacobians(x, y):
    gradients, wide = two_gradients(x, y), ops.ones_like(x) * y[..., None, None]
    return {
        "a": [ops.stack([gradients["a"][0], wide], -3)],
        "b": ops.stack([gradients["b"], ops.sum(x, (-2, -1))], -1),
    }


def chains(x):
    return embed(constant(scalar(x)), scalar_gradient(x), x)


def elementwise(x):
    return embed(constant(x**3), 3 * x**2, x)


def jacobian(x):
    gx = ops.stack([scalar_gradient(x), 2 * x], -2)
    return embed(constant(vector(x)), gx, x, batch_ndims=len(x.shape) - 1)


def structure(x, y):
    return embed(constant(two(x, y)), two_gradients(x, y), {"a": [x], "b": y})


def jacobians(x, y):
    fx = constant(two_vector(x, y))
    return embed(fx, two_jacobians(x, y), {"a": [x], "b": y}, batch_ndims=len(y.shape))


def blocks(x):
    return embed(constant(scalar(x)), scalar_gradient(x), x, hx=scalar_hessian(x))


def product(x, y):
    gx, gy = (ops.stop_gradient(g) for g in (x, y))

    def hx(v):
        (vx,), vy = v["a"], v["b"]
        wide = (..., None, None)
        by_x = 2 * gy[wide] * vx + 2 * gx * vy[wide]
        return {"a": [by_x], "b": ops.sum(2 * gx * vx, (-2, -1)) + 2 * vy}

    return embed(constant(two(x, y)), two_gradients(x, y), {"a": [x], "b": y}, hx=hx)


FORMS = {
    "chains": (chains, scalar, [POINTS]),
    "elementwise": (elementwise, lambda x: x**3, [NUMBERS]),
    "Jacobian": (jacobian, vector, [POINTS]),
    "structure": (structure, two, [MATRICES, NUMBERS]),
    "structure of Jacobians": (jacobians, two_vector, [MATRICES, NUMBERS]),
    "Hessian blocks": (blocks, scalar, [POINTS]),
    "Hessian product": (product, two, [MATRICES, NUMBERS]),
}
SECOND_ORDER = ["Hessian blocks", "Hessian product"]


class TestTransformations:
    """Forms and true functions are alike under everything that the backend does with functions."""

    @pytest.mark.parametrize("transformation", FIRST)
    def test_of_a_batch(self, transformation):
        form, truth, args = FORMS["structure of Jacobians"]
        check(FIRST[transformation], form, truth, args)

    @pytest.mark.parametrize("name", ["chains", "Hessian product"])
    @pytest.mark.parametrize("transformation", MAPPED)
    def test_that_map_members(self, transformation, name):
        form, truth, args = FORMS[name]
        check(MAPPED[transformation], form, truth, args)

    @pytest.mark.parametrize("name", FORMS)
    def test_of_every_form(self, name):
        form, truth, args = FORMS[name]
        check(list(FIRST.values())[1], form, truth, args)

    @pytest.mark.parametrize("name", SECOND_ORDER)
    @pytest.mark.parametrize("of", OF)
    @pytest.mark.parametrize("transformation", SECOND)
    def test_of_second_order(self, transformation, of, name):
        form, truth, args = FORMS[name]
        check(SECOND[transformation], OF[of](form), OF[of](truth), args)

    @pytest.mark.parametrize("name", SECOND_ORDER)
    @pytest.mark.parametrize("transformation", MAPPED_SECOND)
    def test_of_second_order_that_map_members(self, transformation, name):
        form, truth, args = FORMS[name]
        check(MAPPED_SECOND[transformation], form, truth, args)


class TestShapes:
    @pytest.mark.parametrize(
        ("batch", "range_", "domain", "stated"),
        [
            ((), (), (), False),
            ((), (), (3, 2), False),
            ((4, 2), (), (3,), False),
            ((4, 2), (), (), False),
            ((), (2,), (3,), False),
            ((), (2, 1), (3, 2), False),
            ((4,), (2,), (3,), True),
            ((4, 1), (2, 3), (2, 2), True),
            ((2,), (3,), (), True),
            ((0,), (), (3,), False),
            ((4,), (), (0,), False),
        ],
    )
    def test_the_jacobian_is_gx(self, batch, range_, domain, stated):
        b, r, d = (int(np.prod(s)) for s in (batch, range_, domain))
        gx, u = random.normal(size=(b, r, d)), random.normal(size=(b, r))
        fx, x = random.normal(size=batch + range_), random.normal(size=batch + domain)

        def form(x):
            options = {"batch_ndims": len(batch) if stated else None}
            return embed(tensor(fx), tensor(gx.reshape(batch + range_ + domain)), x, **options)

        (g,) = gradient(form, [tensor(x)], tensor(u.reshape(batch + range_)))
        np.testing.assert_array_equal(array(form(tensor(x))), fx)
        expected = np.einsum("br,brd->bd", u, gx).reshape(batch + domain)
        np.testing.assert_allclose(array(g), expected, rtol=1e-12)

    def test_rank_0_gx_of_a_scalar_is_the_same_partial_everywhere(self):
        (g,) = gradient(lambda x: embed(1.0, 3.0, x), [tensor([[1.0], [2.0]])], tensor(2.0))
        np.testing.assert_array_equal(array(g), [[6.0], [6.0]])

    @pytest.mark.parametrize(
        ("shapes", "options", "message"),
        [
            (((4,), (4, 2), (4, 3)), {}, r"fx \[4\], gx \[4, 2\] and x \[4, 3\] do not fit"),
            (((2,), (3,), (3,)), {}, r"gx \[2, 3\] \(the full Jacobian\)"),
            (((4,), (4, 3), (4, 3)), {"batch_ndims": 2}, "need at least 2 dimensions"),
            (((4,), (4, 3), (4, 3)), {"batch_ndims": -1}, "batch_ndims must be None or an int"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, shapes, options, message):
        with pytest.raises(ValueError, match=message):
            embed(*map(np.ones, shapes), **options)


class TestStructures:
    def test_a_leaf_without_gradient(self):
        args = [tensor(1.0), tensor(2.0)]

        def form(x, y):
            return embed(0.0, [3.0, None], [x, y])

        options = {"allow_unused": True} if BACKEND == "torch" else {}
        by_x, by_y = gradient(form, args, tensor(1.0), **options)
        assert array(by_x) == 3.0
        assert by_y is None if BACKEND != "jax" else array(by_y) == 0.0

    def test_no_gradient_at_all(self):
        h = embed(1.0, None, tensor(2.0))
        assert array(h) == 1.0
        if BACKEND == "torch":
            assert not embed(1.0, None, tensor(2.0).requires_grad_()).requires_grad

    def test_a_leaf_without_derivatives(self):
        i, x = ops.convert_to_tensor(np.array([1, 2])), tensor(2.0)
        (g,) = gradient(lambda x: embed(0.0, [None, 3.0], [i, x]), [x], tensor(2.0))
        assert array(g) == 6.0

    def test_a_list_of_one_is_its_leaf(self):
        (g,) = gradient(lambda x: embed(0.0, [3.0], x), [tensor(1.0)], tensor(2.0))
        assert array(g) == 6.0

    def test_other_structures_are_refused_naming_both(self):
        with pytest.raises(ValueError, match=r"(?s)structure of x.*x: x\['a'\]\n.*gx: gx\['b'\]"):
            embed(0.0, {"b": 1.0}, {"a": 1.0})


class TestValues:
    """The value is `fx`; the gradient is `u gx`, and zero where `u` is."""

    @pytest.mark.parametrize("fx", [INF, NAN, 1.5])
    @pytest.mark.parametrize("gx", [INF, NAN, 2.0])
    @pytest.mark.parametrize("u", [0.0, 3.0])
    def test_anything_may_be_not_finite(self, fx, gx, u):
        def form(x):
            return embed(tensor(fx), tensor(gx), x)

        (g,) = gradient(form, [tensor(0.5)], tensor(u))
        np.testing.assert_array_equal(array(form(tensor(0.5))), fx)
        np.testing.assert_array_equal(array(g), 0.0 if u == 0 else u * gx)

    @pytest.mark.parametrize("bad", [INF, NAN])
    @pytest.mark.parametrize("second", [False, True])
    def test_a_bad_point_harms_no_other_member(self, bad, second):
        x = POINTS.copy()
        x[1, 0] = bad
        hx = np.zeros((4, 3, 3)) if second else None
        fx, gx = np.arange(4.0), np.ones((4, 3))

        def form(x):
            return embed(tensor(fx), tensor(gx), x, hx=hx)

        (g,) = gradient(form, [tensor(x)], tensor(np.full(4, 2.0)))
        np.testing.assert_array_equal(array(form(tensor(x))), fx)
        np.testing.assert_array_equal(array(g)[[0, 2, 3]], 2.0)
        assert not np.isnan(array(g)).any()

    def test_infinite_partials_harm_no_other_entry(self):
        gx = np.array([[1.0, INF, NAN], [1.0, 2.0, 3.0]])
        u = tensor([2.0, 0.0])
        (g,) = gradient(lambda x: embed(np.zeros(2), gx, x), [tensor(np.ones((2, 3)))], u)
        np.testing.assert_array_equal(array(g), [[2.0, INF, NAN], [0.0, 0.0, 0.0]])


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_floats(self, dtype):
        x = ops.cast(np.array([1.0, 2.0]), dtype)
        (g,) = gradient(lambda x: embed(ops.cast(3.0, dtype), x * 2, x), [x], ops.cast(2.0, dtype))
        h = embed(ops.cast(3.0, dtype), x * 2, x)
        assert keras.backend.standardize_dtype(h.dtype) == dtype
        assert keras.backend.standardize_dtype(g.dtype) == dtype
        np.testing.assert_array_equal(array(ops.cast(g, "float32")), [4.0, 8.0])

    @pytest.mark.parametrize(("fx", "x"), [("float64", "float16"), ("float32", "float64")])
    def test_each_gradient_has_the_dtype_of_its_leaf(self, fx, x):
        point = ops.cast(np.array([1.0, 2.0]), x)

        def form(x):
            return embed(ops.cast(3.0, fx), np.array([5.0, 7.0]), x)

        (g,) = gradient(form, [point], ops.cast(2.0, fx))
        assert keras.backend.standardize_dtype(form(point).dtype) == fx
        assert keras.backend.standardize_dtype(g.dtype) == x
        np.testing.assert_array_equal(array(g), [10.0, 14.0])

    @pytest.mark.parametrize("x_dtype", ["complex128", "float64"])
    def test_complex_as_native_code(self, x_dtype):
        x = tensor(np.array([1.0 + 2.0j, 3.0 - 1.0j]) if "c" in x_dtype else [1.0, 3.0], x_dtype)
        u = tensor(np.array([1.0 - 1.0j, 0.5 + 2.0j]), "complex128")
        factor = tensor(np.array(2.0 + 1.0j), "complex128")

        def truth(x):
            return factor * ops.cast(x, "complex128") ** 2

        def form(x):
            gx = 2 * factor * ops.cast(x, "complex128")
            return embed(constant(truth(x)), gx, x)

        (came,), (expected,) = gradient(form, [x], u), gradient(truth, [x], u)
        np.testing.assert_allclose(array(came), array(expected), rtol=1e-12)

    def test_a_bare_float_takes_the_precision_of_x(self):
        assert keras.backend.standardize_dtype(embed(0.1, 1.0, tensor(2.0)).dtype) == "float64"
        assert array(embed(0.1, 1.0, tensor(2.0))) == 0.1

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((np.array(1), 1.0, np.array(1.0)), "fx has dtype int.*no derivatives"),
            ((1.0, 1.0, np.array(1)), "x has dtype int.*gx is not None"),
            ((1.0, np.array(1j), np.array(1.0)), "gx has dtype complex.*Pass its real part"),
            ((1.0, np.array(True), np.array(1.0)), "gx has dtype bool, expected float"),
            ((object(), 1.0, np.array(1.0)), "fx must be a tensor, variable, array or number"),
        ],
    )
    def test_what_has_no_derivatives_is_refused(self, args, message):
        with pytest.raises(TypeError, match=message):
            embed(*args)


class TestStopping:
    def test_nothing_else_gets_a_gradient(self):
        def form(x, y):
            return embed(x * y, y, x)

        options = {"allow_unused": True} if BACKEND == "torch" else {}
        _, by_y = gradient(form, [tensor(2.0), tensor(3.0)], tensor(1.0), **options)
        assert by_y is None if BACKEND != "jax" else array(by_y) == 0.0

    def test_manually_stopped(self):
        """The gradient by `y` is that of `fx`; that of `gx` by `y` is the mixed second derivative."""

        def form(x, y):
            s = ops.stop_gradient(x)
            return embed(s**2 * y, 2 * s * y, x, True)

        def truth(x, y):
            return x**2 * y

        args = [np.array(2.0), np.array(3.0)]
        check(FIRST["value"], form, truth, args)
        check(list(FIRST.values())[1], form, truth, args)
        x, y = map(tensor, args)
        u = tensor(1.0)
        if BACKEND == "torch":
            x, y = x.requires_grad_(), y.requires_grad_()
            import torch

            (first,) = torch.autograd.grad(form(x, y), x, create_graph=True)
            (mixed,) = torch.autograd.grad(first, y)
        else:
            (mixed,) = gradient(lambda y: gradient(lambda x: form(x, y), [x], u)[0], [y], u)
        assert array(mixed) == 4.0


class TestSecondOrder:
    @pytest.mark.parametrize("of", OF)
    @pytest.mark.parametrize("transformation", [*SECOND, *MAPPED_SECOND])
    def test_is_never_zero_without_a_word(self, transformation, of):
        form, _, args = FORMS["structure"]
        u, args = tensor(np.ones(4)), [tensor(a) for a in args]
        with pytest.raises(LookupError, match=r"(?s)second derivative.*hx.*hx=0"):
            (SECOND | MAPPED_SECOND)[transformation](OF[of](form), args, u, args)

    @pytest.mark.parametrize("hx", [0, 0.0, [[None]]])
    @pytest.mark.parametrize("transformation", SECOND)
    def test_is_zero_where_that_is_said(self, transformation, hx):
        def form(x):
            fx, gx = constant(ops.sum(3 * x, -1)), ops.full_like(x, 3.0)
            return embed(fx, [gx], [x], hx=hx) ** 2

        def truth(x):
            return ops.sum(3 * x, -1) ** 2

        check(SECOND[transformation], form, truth, [POINTS])

    @pytest.mark.parametrize("transformation", SECOND)
    def test_of_blocks_the_symmetric_part_counts(self, transformation):
        matrix = random.normal(size=(3, 3))

        def truth(x):
            return ops.sum(ops.matmul(x, tensor(matrix)) * x, -1) / 2

        def form(x):
            gx = ops.matmul(x, tensor(matrix + matrix.T)) / 2
            return embed(constant(truth(x)), gx, x, hx=np.broadcast_to(matrix, (*x.shape, 3)))

        check(SECOND[transformation], form, truth, [POINTS])

    def test_a_bare_number_keeps_its_digits(self):
        def form(x):
            return embed(constant(0.05 * x**2), 0.1 * x, x, hx=0.1)

        (g,) = TWICE(form, [tensor(2.0)], tensor(1.0), [tensor(1.0)])
        assert array(g) == 0.1

    @pytest.mark.parametrize("name", ["blocks", "product"])
    @pytest.mark.parametrize("transformation", THIRD)
    def test_third_derivatives_are_refused(self, transformation, name):
        hessian = (
            scalar_hessian
            if name == "blocks"
            else lambda x: lambda v: ops.sum(scalar_hessian(x) * v, -1)
        )

        def form(x):
            return embed(constant(scalar(x)), scalar_gradient(x), x, hx=hessian(x))

        with pytest.raises(LookupError, match="third derivative"):
            THIRD[transformation](form, tensor(POINTS[0]))

    def test_a_product_is_computed_only_for_a_second_derivative(self):
        calls = []

        def form(x):
            def hx(v):
                calls.append(x)
                return ops.sinh(ops.ones_like(v)) * v

            return embed(constant(scalar(x)), scalar_gradient(x), x, hx=hx)

        x = tensor(POINTS)
        if BACKEND == "jax":
            import jax

            # It is traced, but of what is computed it is no part.
            first, second = jax.grad(pulled(form, 1.0)), jax.hessian(pulled(form, 1.0))
            assert "sinh" not in str(jax.make_jaxpr(first)(x))
            assert "sinh" in str(jax.make_jaxpr(second)(x))
        else:
            gradient(form, [x], tensor(np.ones(4)))
            assert not calls
            TWICE(form, [x], tensor(np.ones(4)), [x])
            assert calls

    @pytest.mark.skipif(BACKEND != "torch", reason="other backends take it")
    @pytest.mark.parametrize("name", ["chains", "Hessian product"])
    def test_forward_over_forward_is_refused(self, name):
        from torch.func import jacfwd

        form, _, args = FORMS[name]
        with pytest.raises(NotImplementedError, match="forward mode over forward mode"):
            jacfwd(jacfwd(form))(*[tensor(a) for a in args])

    @pytest.mark.skipif(BACKEND == "tensorflow", reason="tapes tell")
    def test_derivatives_by_something_else_are_none_of_its_business(self):
        """`w` enters by the upstream gradient: `d/dw d/dx w^2 h(x) = 2 w gx`."""
        x = tensor(POINTS[0])

        def h(w):
            (g,) = gradient_of_scalar(lambda x: w**2 * chains(x), x)
            return ops.sum(g)

        def gradient_of_scalar(f, x):
            if BACKEND == "torch":
                import torch

                return (torch.func.grad(f)(x),)
            import jax

            return (jax.grad(f)(x),)

        (by_w,) = gradient_of_scalar(h, tensor(3.0))
        np.testing.assert_allclose(array(by_w), 6 * array(scalar_gradient(x)).sum(), rtol=1e-12)

    @pytest.mark.parametrize(
        ("hx", "message"),
        [
            (np.ones((3, 3)), "do not fit together"),
            ([[np.ones((4, 3, 3))]], "structure like x for each leaf of x"),
            (lambda v: v[:2], r"hx\(v\) has shape \[2, 3\], expected \[4, 3\]"),
            pytest.param(
                lambda v: ops.ones_like(v),
                r"hx\(v\) is not connected to v",
                marks=pytest.mark.skipif(BACKEND == "tensorflow", reason="taken at its word"),
            ),
            (lambda v: None, r"hx\(v\) is not connected to v"),
        ],
    )
    def test_a_hessian_that_is_none_is_refused(self, hx, message):
        x = tensor(POINTS)
        form = lambda x: embed(scalar(x), scalar_gradient(x), x, hx=hx)  # noqa: E731
        with pytest.raises((ValueError, LookupError), match=message):
            TWICE(form, [x], tensor(np.ones(4)), [x])


class TestVariables:
    def test_a_variable_as_the_point(self):
        v = keras.Variable(np.array([1.0, 2.0]), dtype="float64")
        h = embed(3.0, np.array([5.0, 7.0]), v)
        assert array(h) == 3.0
        if BACKEND == "torch":
            h.backward()
            np.testing.assert_array_equal(array(v.value.grad), [5.0, 7.0])
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                h = embed(3.0, np.array([5.0, 7.0]), v)
            np.testing.assert_array_equal(tape.gradient(h, v.value), [5.0, 7.0])


class TestSymbolic:
    def inputs(self, *shapes):
        return [keras.Input(shape, dtype="float64") for shape in shapes]

    def check(self, model, form, args, seed=0):
        u = tensor(np.random.default_rng(seed).normal(size=tuple(form(*args).shape)))
        for came, expected in zip(
            gradient(lambda *a: model(list(a)), args, u), gradient(form, args, u), strict=True
        ):
            np.testing.assert_allclose(array(came), array(expected), rtol=1e-12)

    def test_a_functional_model(self, tmp_path):
        (x,) = inputs = self.inputs((3,))
        model = keras.Model(inputs, embed(scalar(x), scalar_gradient(x), x))
        assert model.output.shape == (None,)
        assert model.output.dtype == scalar(x).dtype
        self.check(model, chains, [tensor(POINTS)])
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        self.check(loaded, chains, [tensor(POINTS)])

    def test_structures_blocks_and_options(self, tmp_path):
        x, y = inputs = self.inputs((3,), (3,))
        block = x[:, None, :, None] * x[:, None, None, :]
        h = embed(
            ops.stop_gradient(x[..., :2]),
            {"a": ops.stack([2 * x, 3 * y], 1), "b": None},
            {"a": x, "b": y},
            batch_ndims=1,
            name="rule",
            hx={
                "a": {"a": ops.concatenate([block, block], 1), "b": None},
                "b": {"a": None, "b": None},
            },
        )
        model = keras.Model(inputs, h)
        assert model.layers[-1].name == "rule" or "rule" in [o.name for o in model.operations]
        model.save(tmp_path / "model.keras")

        def form(x, y):
            gx = ops.stack([2 * x, 3 * y], 1)
            return embed(
                constant(x[..., :2]), {"a": gx, "b": None}, {"a": x, "b": y}, batch_ndims=1
            )

        u = tensor(random.normal(size=(4, 2)))
        args = [tensor(POINTS), tensor(POINTS + 1)]
        for m in (model, keras.models.load_model(tmp_path / "model.keras")):
            (came,) = gradient(lambda x, m=m: m([x, args[1]]), args[:1], u)
            (expected,) = gradient(lambda x: form(x, args[1]), args[:1], u)
            np.testing.assert_allclose(array(came), array(expected), rtol=1e-12)

    def test_what_is_known_is_checked_at_once(self):
        x, y = self.inputs((3,), (2,))
        with pytest.raises(ValueError, match=r"fx \[.*\], gx \[.*, 2\] and x \[.*, 3\] do not fit"):
            embed(ops.sum(x, -1), y, x)
        with pytest.raises(TypeError, match="fx has dtype int32"):
            embed(ops.cast(x, "int32"), x, x)
        with pytest.raises(ValueError, match="must have the structure of x"):
            embed(ops.sum(x, -1), [x, x], x)
