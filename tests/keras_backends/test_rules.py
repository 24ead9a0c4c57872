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
