"""`sgtrick.keras.custom_vjp` under everything that the backend of this process does with functions."""

import doctest
import itertools

import numpy as np
import pytest
import transformations
from keras import ops
from protocols import RULES
from transformations import (
    BACKEND,
    OF,
    TWICE,
    check,
    first_with_all,
    in_turn,
    misled,
    reverse,
    tensor,
)

from sgtrick.keras import _values, _vjp, custom_vjp

MATRIX = np.outer(np.random.default_rng(3).normal(size=(4,)), [1.0, 2.0, 3.0])
ARGS = [MATRIX, MATRIX + 1]

FIRST = transformations.FIRST | transformations.MAPPED
SECOND = transformations.SECOND | transformations.MAPPED_SECOND
FORWARD = (FIRST | SECOND).keys() - reverse(FIRST | SECOND).keys()  # on torch alone


@custom_vjp
def product(x, y):
    return misled(x * y), lambda u: (u * y, u * x)


@custom_vjp
def stopped(x, y):
    """Its gradient is cut off from the arguments: it has no derivative, but is one itself."""
    return misled(x**3 * y), lambda u: (
        u * 3 * ops.stop_gradient(x**2 * y),
        u * ops.stop_gradient(x) ** 3,
    )


@custom_vjp
def half_stopped(x, y):
    return misled(x * y**2), lambda u: (u * ops.stop_gradient(x * 0 + y**2), u * 2 * x * y)


@custom_vjp
def cube(x):
    return misled(x**3), lambda *args, upstream: upstream * 3 * args[0] ** 2


def closing(x, y):
    """What it closes over may be mapped or traced, as long as it gets no derivative."""
    kept = ops.stop_gradient(y)
    inner = custom_vjp(lambda x: (misled(kept * x**3), lambda u: u * kept * 3 * x**2))
    return inner(x) + y


OF_FIRST_ORDER = {
    "product": (product, lambda x, y: x * y),
    "required upstream": RULES["required upstream"],
    "stopped": (stopped, lambda x, y: x**3 * y),
    "closing": (closing, lambda x, y: ops.stop_gradient(y) * x**3 + y),
}
OF_SECOND_ORDER = {
    "product": (product, lambda x, y: x * y),
    "arguments of grad": (cube, lambda x: x**3),
    # Where what is stopped is not differentiated again.
    "stopped": (
        lambda x: stopped(ops.full_like(x, 2.0), ops.full_like(x, 3.0)) * x**2,
        lambda x: 24 * x**2,
    ),
    "half stopped": (lambda y: half_stopped(ops.full_like(y, 2.0), y), lambda y: 2 * y**2),
}


@pytest.mark.parametrize(
    ("transformation", "form"),
    [
        *first_with_all(reverse(FIRST), ["product", "required upstream", "stopped"]),
        *itertools.product(reverse(FIRST), ["closing"]),
    ],
)
def test_of_first_order(transformation, form):
    check(FIRST[transformation], *OF_FIRST_ORDER[form], ARGS)


@pytest.mark.parametrize(
    ("transformation", "form"), first_with_all(reverse(SECOND), OF_SECOND_ORDER)
)
def test_of_second_order(transformation, form):
    f, truth = OF_SECOND_ORDER[form]
    check(SECOND[transformation], f, truth, ARGS[: truth.__code__.co_argcount])


@pytest.mark.parametrize(("transformation", "of"), in_turn(reverse(SECOND), OF))
def test_of_second_order_where_it_is_stopped(transformation, of):
    message = "of stopped was differentiated again, but .*(not connected to the arg|no connection)"
    with pytest.raises(LookupError, match=message):
        check(SECOND[transformation], OF[of](stopped), lambda x, y: x**3 * y, ARGS)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(
            ops.ones_like,
            marks=pytest.mark.skipif(
                BACKEND == "tensorflow", reason="linear rules are right there"
            ),
        ),
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
def test_of_second_order_where_it_is_stopped_in_other_ways(stop):
    form = custom_vjp(lambda x: (misled(x**3), lambda u: u * 3 * ops.cast(stop(x), u.dtype) ** 2))
    message = r"not connected to the arg|no connection|cannot trace"
    with pytest.raises(LookupError, match=message):
        check(TWICE, OF["a sum with native terms"](form), lambda x: x**3, [MATRIX])


@pytest.mark.skipif(BACKEND != "torch", reason="others have it")
@pytest.mark.parametrize("transformation", sorted(FORWARD))
def test_forward_mode_is_an_error_on_torch(transformation):
    with pytest.raises(NotImplementedError, match="no forward mode on torch"):
        check((FIRST | SECOND)[transformation], *OF_FIRST_ORDER["product"], ARGS)


# Reads of a tensor that is closed over, of which no derivative is lost.
WITHOUT_VALUES = {
    "shape": lambda z, x: ops.reshape(x, ops.shape(z)),
    "dtype": lambda z, x: ops.cast(x, z.dtype),
    "len": lambda z, x: x * len(z),
    "zeros_like": lambda z, x: x + ops.zeros_like(z),
    "a comparison": lambda z, x: ops.where(z > 1.5, x, 2 * x),
    "argmax": lambda z, x: x * ops.cast(ops.argmax(z), x.dtype),
    "stopped": lambda z, x: x * ops.stop_gradient(z),
}


@pytest.mark.parametrize(
    "transformation", [t for t in ("tape", "vjp", "autograd", "grad of vmap") if t in FIRST]
)
@pytest.mark.parametrize("read", WITHOUT_VALUES)
def test_a_tensor_that_is_closed_over_for_anything_but_its_values(read, transformation):
    reads = WITHOUT_VALUES[read]

    def closing(x, z):
        f = custom_vjp(lambda x: (misled(reads(z, x)), lambda u: reads(z, u)))
        return f(x) + z**2

    def truth(x, z):
        return reads(ops.stop_gradient(z), x) + z**2

    check(FIRST[transformation], closing, truth, ARGS)


def overwritten(x, z):
    y = x + 0
    y[:] = z
    return y


@pytest.mark.skipif(BACKEND != "torch", reason="tensors of others do not change")
@pytest.mark.parametrize("transformation", ["autograd", "grad", "grad of vmap"])
@pytest.mark.parametrize("read", [overwritten, lambda x, z: (x + 0).copy_(z), lambda x, z: x * z])
def test_a_tensor_that_is_closed_over_for_its_values(read, transformation):
    def closing(x, z):
        return custom_vjp(lambda x: (read(x, z), lambda u: u))(x) + z

    with pytest.raises(LookupError, match="reads a tensor that is being differentiated"):
        check(FIRST[transformation], closing, lambda x, z: x + 2 * z, ARGS)


def cubes(x):
    """Of the members of a map over `i`."""
    import jax

    return x**2 * jax.lax.psum(x, "i")


@custom_vjp
def mapped_cubes(x):
    import jax

    def grad(u):
        return u * 2 * x * jax.lax.psum(x, "i") + jax.lax.psum(u * x**2, "i")

    return misled(cubes(x)), grad


@custom_vjp
def mapped_shift(x):
    """Its sum is over what the axis shares."""
    import jax

    n = jax.lax.psum(1.0 + 0 * x, "i")
    return misled(n * x**2), lambda u: 2 * n * x * u


@pytest.mark.skipif(BACKEND != "jax", reason="axes have names there")
@pytest.mark.parametrize(
    ("transformation", "axis"),
    in_turn(["grad", "jvp", "jit of grad", "jacrev of jacrev"], [0, -1]),
)
def test_a_rule_with_the_name_of_an_axis(transformation, axis):
    """The derivative is taken outside the map that has the name."""
    import jax

    def over(f):
        return lambda x: jax.vmap(f, axis, axis, axis_name="i")(x)

    transform = (FIRST | SECOND)[transformation]
    check(transform, over(mapped_cubes), over(cubes), [MATRIX])


@pytest.mark.skipif(BACKEND != "jax", reason="axes have names there")
def test_a_rule_with_the_name_of_an_axis_over_which_nothing_is_mapped():
    import jax

    def over(f):
        return lambda x, y: jax.vmap(lambda y: f(x) * y, axis_name="i")(y)

    check(FIRST["grad"], over(mapped_shift), over(lambda x: 4 * x**2), [MATRIX[0], MATRIX])


@custom_vjp
def noisy(x, key, *, scale):
    import jax

    noise = jax.random.normal(key["a"], x.shape)
    new = jax.random.split(key["a"])[0]
    value = {"x": misled(scale * noise * x**2), "key": new}
    return value, lambda u_key, u: (2 * scale * noise * x * u, None, None)


@pytest.mark.skipif(BACKEND != "jax", reason="which has keys")
@pytest.mark.parametrize("transformation", ["jvp", "grad of vmap"])
def test_a_key_as_an_argument(transformation):
    import jax

    key = jax.random.key(1)

    def truth(x):
        return 3 * jax.random.normal(key, x.shape) * x**2

    def form(x):
        return noisy(x, {"a": key}, scale=3)["x"]

    check(FIRST[transformation], form, truth, [MATRIX])


NOT_LINEAR = {
    "clipped": lambda u: ops.clip(u, -1.0, 1.0),
    "a constant more": lambda u: u + 1e-6,
    "a mask": lambda u: u > 0,
    "whole numbers": lambda u: ops.cast(u, "int32"),
    "a stopped one": ops.stop_gradient,
}
OF_NUMBERS = ("a constant more", "whole numbers")  # what only these tell


@pytest.mark.skipif(BACKEND != "jax", reason="torch has none, tensorflow tests it elsewhere")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("grad", NOT_LINEAR)
def test_forward_mode_of_what_is_not_linear(grad, compiled):
    """An error, or NaN where it depends on numbers that only come when it is run."""
    import jax

    f = custom_vjp(lambda x: (misled(x), NOT_LINEAR[grad]))

    def push(x):
        return jax.jvp(f, (x,), (x,))[1]

    if compiled and grad in OF_NUMBERS:
        assert np.isnan(jax.jit(push)(tensor(MATRIX[0]))).all()
    else:
        with pytest.raises(NotImplementedError, match="not linear in its upstream gradients"):
            (jax.jit(push) if compiled else push)(tensor(MATRIX[0]))


@pytest.mark.parametrize("module", [_values, _vjp], ids=lambda module: module.__name__)
def test_the_docstrings_say_what_comes_out(module):
    failed, attempted = doctest.testmod(module)
    assert attempted > 4
    assert failed == 0
