"""The contract of `sgtrick.keras.custom_gradient` on the backend of this process."""

import itertools

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
    check_reverse,
    dtype_of,
    first_with_all,
    gradient,
    in_turn,
    pulled,
    tensor,
    variable_gradient,
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


def structure(x, y):
    return embed(constant(two(x, y)), two_gradients(x, y), {"a": [x], "b": y})


def jacobians(x, y):
    fx = constant(two_vector(x, y))
    return embed(fx, two_jacobians(x, y), {"a": [x], "b": y}, batch_ndims=len(y.shape))


def with_hessian(hx):
    return lambda x: embed(constant(scalar(x)), scalar_gradient(x), x, hx=hx(x))


def product(x, y):
    gx, gy = (ops.stop_gradient(g) for g in (x, y))

    def hx(v):
        (vx,), vy = v["a"], v["b"]
        wide = (..., None, None)
        by_x = 2 * gy[wide] * vx + 2 * gx * vy[wide]
        return {"a": [by_x], "b": ops.sum(2 * gx * vx, (-2, -1)) + 2 * vy}

    return embed(constant(two(x, y)), two_gradients(x, y), {"a": [x], "b": y}, hx=hx)


def said_to_be_constant(hx):
    def form(x):
        return embed(constant(ops.sum(3 * x, -1)), [ops.full_like(x, 3.0)], [x], hx=hx) ** 2

    return form, lambda x: ops.sum(3 * x, -1) ** 2, [POINTS]


MATRIX = random.normal(size=(3, 3))


def bilinear(x):
    return ops.sum(ops.matmul(x, tensor(MATRIX)) * x, -1) / 2


def one(x, y):
    return ops.reshape(ops.sum(x**2) + ops.sum(y), [1, 1])


def one_entry(x, y):
    """With the gradient of a scalar, part of it as a list of numbers in a list."""
    return embed(constant(one(x, y)), [2 * x, [1.0] * len(NUMBERS)], [x, y])


def asymmetric(x):
    gx = ops.matmul(x, tensor(MATRIX + MATRIX.T)) / 2
    return embed(constant(bilinear(x)), gx, x, hx=np.broadcast_to(MATRIX, (*x.shape, 3)))


def manually_stopped(x, y):
    """The gradient by `y` is that of `fx`; that of `gx` by `y` is the mixed second derivative."""
    s = ops.stop_gradient(x)
    return embed(s**2 * y, 2 * s * y, x, True, hx=2 * y)


HESSIANS = {
    "blocks": scalar_hessian,
    "product": lambda x: lambda v: ops.sum(scalar_hessian(x) * v[..., None, :], -1),
}
FORMS = {
    "chains": (chains, scalar, [POINTS]),
    "structure": (structure, two, [MATRICES, NUMBERS]),
    "structure of Jacobians": (jacobians, two_vector, [MATRICES, NUMBERS]),
    "one entry": (one_entry, one, [POINTS, NUMBERS]),
    "Hessian blocks": (with_hessian(scalar_hessian), scalar, [POINTS]),
    "Hessian product": (product, two, [MATRICES, NUMBERS]),
    "asymmetric blocks": (asymmetric, bilinear, [POINTS]),
    "hx=0": said_to_be_constant(0),
    "hx=[[None]]": said_to_be_constant([[None]]),
    "manually stopped": (manually_stopped, lambda x, y: x**2 * y, [NUMBERS, NUMBERS + 1]),
}
# With what second derivatives are taken of.
OTHERS = ["asymmetric blocks", "hx=0", "hx=[[None]]", "manually stopped"]
SECOND_ORDER = [
    [
        ("Hessian blocks", "its square"),
        ("Hessian blocks", "itself"),
        *((n, "itself") for n in OTHERS),
    ],
    [("Hessian product", of) for of in ("a sum with native terms", "its square", "itself")],
    [("Hessian blocks", "a sum with native terms"), ("Hessian product", "itself")],
]


@pytest.mark.skipif(BACKEND == "tensorflow", reason="there it is sgtrick.custom_gradient")
class TestTransformations:
    """Forms and true functions are alike under everything that the backend does with functions."""

    @pytest.mark.parametrize("transformation", FIRST)
    def test_of_a_batch(self, transformation):
        check(FIRST[transformation], *FORMS["structure of Jacobians"])

    @pytest.mark.parametrize("name", ["chains", "Hessian product"])
    @pytest.mark.parametrize("transformation", MAPPED)
    def test_that_map_members(self, transformation, name):
        check(MAPPED[transformation], *FORMS[name])

    @pytest.mark.parametrize("name", FORMS)
    def test_of_every_form(self, name):
        form, truth, args = FORMS[name]
        check_reverse(form, truth, *args)

    @pytest.mark.parametrize(
        ("transformation", "name", "of"),
        dict.fromkeys(
            (transformation, *case)
            for cases in SECOND_ORDER
            for transformation, case in first_with_all(SECOND, cases)
        ),
    )
    def test_of_second_order(self, transformation, name, of):
        form, truth, args = FORMS[name]
        check(SECOND[transformation], OF[of](form), OF[of](truth), args)

    @pytest.mark.parametrize("name", ["Hessian blocks", "Hessian product"])
    @pytest.mark.parametrize("transformation", MAPPED_SECOND)
    def test_of_second_order_that_map_members(self, transformation, name):
        check(MAPPED_SECOND[transformation], *FORMS[name])

    @pytest.mark.parametrize(
        ("transformation", "of"), first_with_all([*SECOND, *MAPPED_SECOND], OF)
    )
    def test_of_second_order_without_hx(self, transformation, of):
        form, truth, args = FORMS["structure"]
        with pytest.raises(LookupError, match=r"(?s)second derivative.*hx.*hx=0"):
            check((SECOND | MAPPED_SECOND)[transformation], OF[of](form), truth, args)

    @pytest.mark.parametrize(("transformation", "hx"), in_turn(THIRD, HESSIANS))
    def test_of_third_order(self, transformation, hx):
        with pytest.raises(LookupError, match="third derivative"):
            THIRD[transformation](with_hessian(HESSIANS[hx]), tensor(POINTS[0]))

    @pytest.mark.skipif(BACKEND != "torch", reason="other backends take it")
    @pytest.mark.parametrize("name", ["chains", "Hessian product"])
    def test_forward_over_forward_is_refused(self, name):
        from torch.func import jacfwd

        form, _, args = FORMS[name]
        with pytest.raises(NotImplementedError, match="forward mode over forward mode"):
            jacfwd(jacfwd(form))(*[tensor(a) for a in args])

    def test_derivatives_by_something_else_are_none_of_its_business(self):
        """`w` enters by the upstream gradient: `d/dw d/dx w^2 h(x) = 2 w gx`."""
        from transformations import fn

        def total(w):
            return ops.sum(fn.grad(lambda x: w**2 * chains(x))(tensor(POINTS[0])))

        by_w = fn.grad(total)(tensor(3.0))
        expected = 6 * array(scalar_gradient(tensor(POINTS[0]))).sum()
        np.testing.assert_allclose(array(by_w), expected, rtol=1e-12)

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


class TestValues:
    """The value is `fx`; the gradient is `u gx`, and zero where `u` is."""

    @pytest.mark.parametrize(
        ("batch", "range_", "domain", "stated"),
        [
            ((), (), (), False),
            ((4, 2), (), (3,), False),
            ((4, 2), (), (), False),
            ((), (2, 1), (3, 2), False),
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

    def test_anything_may_be_not_finite(self):
        grid = itertools.product([INF, NAN, 1.5], [INF, NAN, 2.0], [0.0, 3.0])
        fx, gx, u = np.array([*grid]).T
        gx = np.stack([gx, np.ones(18), -gx], -1)

        def form(x):
            return embed(tensor(fx), tensor(gx), x)

        x = tensor(np.ones((18, 3)))
        (g,) = gradient(form, [x], tensor(u))
        np.testing.assert_array_equal(array(form(x)), fx)
        with np.errstate(invalid="ignore"):
            expected = np.where(u[:, None] == 0, 0, u[:, None] * gx)
        np.testing.assert_array_equal(array(g), expected)

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

    def test_second_derivatives_may_be_not_finite(self):
        """They are `u z hx`, and zero where `u` or `z` is, whatever `gx` is."""
        grid = itertools.product([INF, 2.0], [INF, NAN, 3.0], [0.0, 5.0], [0.0, 7.0])
        gx, hessian, u, z = np.array([*grid]).T

        def form(x):
            return embed(ops.zeros_like(x), tensor(gx), x, hx=hessian)

        x = tensor(np.ones(len(u)))
        (came,) = TWICE(form, [x], tensor(u), [tensor(z)])
        with np.errstate(invalid="ignore"):
            expected = np.where((u == 0) | (z == 0), 0, u * z * hessian)
        np.testing.assert_array_equal(array(came), expected)

    @pytest.mark.parametrize(
        "form", [lambda x, y: embed(0.0, [3.0, None], [x, y]), lambda x, y: embed(x * y, y, x)]
    )
    def test_nothing_else_gets_a_gradient(self, form):
        by_x, by_y = gradient(form, [tensor(2.0), tensor(3.0)], tensor(1.0))
        assert array(by_x) == 3.0
        assert by_y is None if BACKEND != "jax" else array(by_y) == 0.0

    def test_a_variable_as_the_point(self):
        v = keras.Variable(np.array([1.0, 2.0]), dtype="float64")
        g = variable_gradient(lambda: embed(3.0, np.array([5.0, 7.0]), v), v)
        np.testing.assert_array_equal(array(g), [5.0, 7.0])


class TestDtypes:
    @pytest.mark.parametrize(
        ("fx", "x"),
        [
            *[(dtype, dtype) for dtype in ("float16", "bfloat16", "float32", "float64")],
            *[("float64", "float16"), ("float32", "float64")],
        ],
    )
    def test_each_gradient_has_the_dtype_of_its_leaf(self, fx, x):
        point = ops.cast(np.array([1.0, 2.0]), x)

        def form(x):
            return embed(ops.cast(3.0, fx), np.array([5.0, 7.0]), x)

        (g,) = gradient(form, [point], ops.cast(2.0, fx))
        assert (dtype_of(form(point)), dtype_of(g)) == (fx, x)
        np.testing.assert_array_equal(array(ops.cast(g, "float32")), [10.0, 14.0])

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

    def test_bare_numbers_take_the_precision_of_x(self):
        h = embed(0.1, 1.0, tensor(2.0))
        assert (dtype_of(h), array(h)) == ("float64", 0.1)

        def form(x):
            return embed(constant(0.05 * x**2), 0.1 * x, x, hx=0.1)

        (g,) = TWICE(form, [tensor(2.0)], tensor(1.0), [tensor(1.0)])
        assert array(g) == 0.1


def symbols(*shapes):
    return [keras.Input(shape, dtype="float64") for shape in shapes]


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (map(np.ones, [(4,), (4, 2), (4, 3)]), r"gx \[4, 2\] and x \[4, 3\] do not fit"),
            ((1.0, np.array(1j), np.array(1.0)), "gx has dtype complex.*Pass its real part"),
            ((object(), 1.0, np.array(1.0)), "fx must be a tensor, variable, array or number"),
            (symbols((), (2,), (3,)), r"fx \[.*\], gx \[.*, 2\] and x \[.*, 3\] do not fit"),
            ((1, *symbols((3,), (3,))), "fx has dtype int"),
        ],
    )
    def test_arguments_that_do_not_fit(self, args, message):
        with pytest.raises((TypeError, ValueError), match=message):
            embed(*args)

    @pytest.mark.parametrize("rule", [False, True])
    def test_symbols_have_the_same_message(self, rule):
        """Without advice to implement something else."""

        @sgtrick.keras.custom_vjp
        def refusing(x):
            raise ValueError("gx [2] and x [3] do not fit")

        (x,) = symbols((3,))
        with pytest.raises(ValueError, match=r"^[fg]x .* do not fit") as caught:
            refusing(x) if rule else embed(ops.sum(x, -1), x[:, :2], x)
        assert "Could not automatically" not in str(caught.value)
        assert "when calling Call" not in str(caught.value)

    @pytest.mark.parametrize(
        ("hx", "message"),
        [
            (np.ones((3, 3)), "do not fit together"),
            (lambda v: v[:2], r"hx\(v\) has shape \[2, 3\], expected \[4, 3\]"),
            pytest.param(
                lambda v: ops.ones_like(v),
                r"hx\(v\) is not connected to v",
                marks=pytest.mark.skipif(BACKEND == "tensorflow", reason="taken at its word"),
            ),
            (lambda v: None, r"hx\(v\) is not connected to v"),
        ],
    )
    def test_a_hessian_that_is_none(self, hx, message):
        x = tensor(POINTS)
        with pytest.raises((ValueError, LookupError), match=message):
            TWICE(with_hessian(lambda x: hx), [x], tensor(np.ones(4)), [x])


@keras.saving.register_keras_serializable("values")
def twice(v):
    return {"a": 2 * v["a"], "b": None}


VARIABLE = keras.Variable(np.array(3.0), dtype="float64")


def squares(x):
    """With a function and a variable beside symbols."""
    gx = {"a": 2 * x, "b": None}
    return embed(constant(ops.sum(x**2, -1)), gx, {"a": x, "b": VARIABLE}, hx=twice)


def closing_over_a_symbol(x):
    kept = ops.stop_gradient(x)
    return embed(ops.sum(x**4, -1), 4 * x**3, x, hx=lambda v: 12 * kept**2 * v)


def test_a_product_that_closes_over_a_symbol():
    """It would be called where this has no value."""
    (x,) = symbols((3,))
    with pytest.raises(TypeError, match=r"hx closes over a symbolic tensor.*in the `call`"):
        closing_over_a_symbol(x)

    class Quartic(keras.layers.Layer):
        def call(self, x):
            return closing_over_a_symbol(x)

    model = keras.Model(x, Quartic(dtype="float64")(x))
    check(TWICE, lambda x: model(x), lambda x: ops.sum(x**4, -1), [POINTS])


def test_a_product_beside_symbols():
    (x,) = symbols((3,))
    model = keras.Model(x, squares(x))
    check(TWICE, OF["its square"](lambda x: model(x)), lambda x: ops.sum(x**2, -1) ** 2, [POINTS])


def options_and_blocks(x, y):
    block = x[:, None, :, None] * x[:, None, None, :]
    zero = {"a": None, "b": None}
    return embed(
        ops.stop_gradient(x[..., :2]),
        {"a": ops.stack([2 * x, 3 * y], 1), "b": None},
        {"a": x, "b": y},
        batch_ndims=1,
        name="rule",
        hx={"a": {"a": ops.concatenate([block, block], 1), "b": None}, "b": zero},
    )


@pytest.mark.parametrize(
    ("form", "shape", "n"), [(chains, (None,), 1), (options_and_blocks, (None, 2), 2)]
)
def test_a_functional_model(form, shape, n, tmp_path):
    inputs = symbols(*[(3,)] * n)
    h = form(*inputs)
    model = keras.Model(inputs, h)
    assert model.output.shape == shape
    if form is options_and_blocks:
        assert model.output.dtype == "float64"
        assert "rule" in [operation.name for operation in model.operations]
    model.save(tmp_path / "model.keras")
    for m in (model, keras.models.load_model(tmp_path / "model.keras")):

        def run(*args, m=m):
            return m([*args]) + sum(map(ops.sum, args[1:]))

        def eager(*args):
            return form(*args) + sum(map(ops.sum, args[1:]))

        check_reverse(run, eager, *[POINTS, POINTS + 1][:n])
