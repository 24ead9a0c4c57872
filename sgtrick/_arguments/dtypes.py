"""The dtype contract between a value, its Jacobian and the point, and its errors.

dtypes are given by name. This module does not depend on TensorFlow.
"""

from collections.abc import Iterable

from sgtrick._arguments.shapes import Names


def is_differentiable(dtype: str) -> bool:
    """Whether values of this dtype have derivatives."""
    return dtype.startswith(("float", "bfloat", "complex"))


def of_jacobian(fx: str, gx: str, x: str, names: Names) -> str:
    """Returns the dtype in which a Jacobian is multiplied, and the products are added up.

    It is the widest of the three. In half precision, a sum over a batch would stop at 2,048.

    Raises:
        TypeError: `x` has no derivatives.
    """
    if not is_differentiable(x):
        raise TypeError(
            f"{names.x} has dtype {x}, which has no derivatives, but {names.gx} is not "
            f"None. Pass None there, or cast {names.x} to a floating dtype."
        )
    is_double = not {"float64", "complex128"}.isdisjoint((fx, gx, x))
    if is_complex(fx) or is_complex(x):
        return "complex128" if is_double else "complex64"
    return "float64" if is_double else "float32"


def of_number(value: object, beside: Iterable[str]) -> str | None:
    """Returns the dtype in which a number of Python is read, which has none of its own.

    It is the widest dtype beside it, real for a real number. None: this is no such number, or
    nothing beside it has derivatives.
    """
    if type(value) not in (float, complex):
        return None
    dtype = widest(map(real_of, beside))
    if type(value) is complex and dtype is not None:
        return "complex128" if dtype == "float64" else "complex64"
    return dtype


def widest(dtypes: Iterable[str]) -> str | None:
    """The smallest floating dtype that holds all floating ones of these, None if there are none."""
    found = {dtype for dtype in dtypes if is_differentiable(dtype)}
    if "float64" in found:
        return "float64"
    return "float32" if len(found) > 1 else next(iter(found), None)


def real_of(dtype: str) -> str:
    """The dtype of the real part."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def check_differentiable(dtype: str, name: str) -> None:
    """Checks that the argument called `name` has derivatives."""
    if not is_differentiable(dtype):
        raise TypeError(
            f"{name} has dtype {dtype}, which has no derivatives. Cast it to a floating dtype."
        )


def check_cast(came: str, expected: str, name: str, why: str, *, masks: bool = False) -> None:
    """Checks that a cast is between numbers, or `masks` (bool), and drops no imaginary part."""
    is_mask = masks and came == "bool"
    if not (is_differentiable(came) or came.startswith(("int", "uint")) or is_mask):
        raise TypeError(f"{name} has dtype {came}, expected {expected}. Pass numbers.")
    if is_complex(came) and not is_complex(expected):
        raise TypeError(
            f"{name} has dtype {came}, expected {expected}, since {why}. Pass its real part."
        )


def check_hessian(fx: str, xs: Iterable[str]) -> None:
    """Checks that second derivatives are matrices."""
    if not is_complex(fx) and any(map(is_complex, xs)):
        raise TypeError(
            f"hx: the second derivative of a real fx ({fx}) with respect to a complex x is not a "
            "single matrix. Pass the real and imaginary parts of x as two leaves."
        )


def is_complex(dtype: str) -> bool:
    """Whether this is a complex dtype."""
    return dtype.startswith("complex")
