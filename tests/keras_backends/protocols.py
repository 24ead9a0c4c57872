"""Functions with custom derivatives in all that the protocols allow, beside the true functions."""

import functools
import itertools
from typing import NamedTuple

import keras
import numpy as np
from keras import ops
from transformations import BACKEND, misled

from sgtrick.keras import custom_gradient, custom_vjp

RULES = {}  # by name: the form and the true function


def law(truth, name=None):
    """Adds a form that is to be like `truth`."""

    def add(form):
        RULES[name or form.__name__] = form, truth
        return form

    return add


@law(lambda x: x**4)
def value(x):
    return custom_gradient(x**4, 4 * x**3, x)


@law(lambda x: x**4)
def value_with_a_hessian(x):
    kept = ops.stop_gradient(x)

    def hx(v):
        return {"a": [12 * kept**2 * v["a"][0]]}

    return custom_gradient(x**4, {"a": [4 * x**3]}, {"a": [x]}, hx=hx)


@custom_vjp
def polar(point, scale):
    x, (y,) = point["x"], point["y"]

    def grad(u_p, u_s):  # in the order of the leaves of the output
        return u_s * scale + u_p * y, u_s * scale + u_p * x, u_s * (x + y)

    return {"sum": misled(scale * (x + y)), "product": misled(x * y)}, grad


@law(lambda x, y, scale: scale * (x + y) + 2 * x * y)
def nested_arguments_and_outputs(x, y, scale):
    out = polar({"x": x, "y": [y]}, scale)
    return out["sum"] + 2 * out["product"]


@law(lambda x, y, s: x**3 * y + s)
def keyword_arguments(x, y, s):
    @custom_vjp
    def f(x, y, power=2, *, shift):
        value = misled(x**power * y + shift)
        return value, lambda u: (u * power * x ** (power - 1) * y, u * x**power, None, u)

    return f(y=y, x=x, shift=s, power=3)


@law(lambda x, b, a: x + 2 * b + 3 * a)
def keywords_in_the_order_of_the_signature(x, b, a):
    @custom_vjp
    def f(x, *, b, a):
        return misled(x + 2 * b + 3 * a), lambda u: (u, 2 * u, 3 * u)

    return f(x, a=a, b=b)


@law(lambda x, b, a: x + 2 * b + 3 * a)
def keywords_in_the_order_of_the_call(x, b, a):
    @custom_vjp
    def f(x, **others):
        return misled(x + 2 * others["b"] + 3 * others["a"]), lambda u: (u, 3 * u, 2 * u)

    return f(x, a=a, b=b)


@custom_vjp
def with_numbers(dims, x, y, training, power=1):
    value = misled(x**power * y * dims[0])
    return value, lambda u: (None, u * y * dims[0], u * x * dims[0], None, None)


@law(lambda x, y: 6 * x * y)
def numbers_in_a_structure(x, y):
    return with_numbers((6, 7), x, y, True)


@law(lambda x: 2 * x)
def integers(x):
    @custom_vjp
    def f(x, i):
        def grad(u_sign, u):
            assert u_sign is None or BACKEND == "tensorflow"
            return u * ops.cast(i, "float64"), None

        value = misled(x * ops.cast(i, "float64"))
        return {"a": ops.cast(ops.sign(x), "int32"), "b": value}, grad

    return f(x, ops.convert_to_tensor(2))["b"]


class Pair(NamedTuple):
    a: keras.KerasTensor
    b: keras.KerasTensor

    @staticmethod
    @custom_vjp
    def inside(pair):
        return misled(pair.a * pair.b), lambda u: (u * pair.b, u * pair.a)

    @custom_vjp
    @staticmethod
    def outside(pair):
        return misled(pair.a * pair.b), lambda u: (u * pair.b, u * pair.a)


class Derived(Pair):
    pass


# The first argument is no `self`, which would get no gradient.
for of, f in itertools.product([Pair, Derived], [Pair.inside, Pair.outside]):
    law(lambda x, y: x * y, f"static method {f.__name__} of its own {of.__name__}")(
        lambda x, y, of=of, f=f: f(of(x, y))
    )


def cube(factor, x):
    return misled(factor * x**3), lambda u: u * factor * 3 * x**2


class Base:
    factor = 3.0

    @custom_vjp
    def method(self, x):
        return cube(self.factor, x)

    @custom_vjp
    def without_self(*args):
        this, x = args
        return cube(this.factor, x)

    @custom_vjp
    @classmethod
    def of_the_class(cls, x):
        return cube(cls.factor, x)

    @custom_vjp
    @staticmethod
    def static(x):
        return cube(3.0, x)


class Scale(Base):
    def method(self, x):
        return super().method(x)


for name in ("method", "without_self", "of_the_class", "static"):
    law(lambda x: 3 * x**3, name)(getattr(Scale(), name))
for name in ("of_the_class", "static"):
    law(lambda x: 3 * x**3, f"{name}, by the class")(getattr(Scale, name))


@law(lambda x: 2 * x)
@custom_vjp
def by_their_own_names_without_a_default(x, factor=2):
    return misled(x * factor), lambda x, upstream: upstream * 2


@law(lambda x: 3 * x)
@custom_vjp
def with_a_default(x):
    return misled(3 * x), lambda u, factor=3.0: factor * u


def pulled(x, y, upstream):
    return upstream * y, upstream * x


def both_pulled(x, y, upstream):
    u, v = upstream
    return u * y + v, u * x + v


# Those that Keras documents, each for another backend, and names of arguments; here each has all.
SIGNATURES = {
    "alone": lambda pull, x, y: lambda upstream: pull(x, y, upstream),
    "optional": lambda pull, *_: lambda *args, upstream=None: pull(*args, upstream),
    "required": lambda pull, *_: lambda *args, upstream: pull(*args, upstream),
    "named": lambda pull, *_: lambda x, y, *, upstream: pull(x, y, upstream),
    "under all names": lambda pull, *_: pull,
}
DEFAULTS = {
    "one for each": lambda pull, x, y: lambda u, v, s=3: pull(x, y, (s * u / 3, s * v / 3)),
    "all in one": lambda pull, x, y: (
        lambda upstream, s=3: pull(x, y, [s * u / 3 for u in upstream])
    ),
    "a star": lambda pull, x, y: lambda *us, s=3: pull(x, y, [s * u / 3 for u in us]),
    "arguments": lambda pull, *_: (
        lambda x, y, upstream, s=3: pull(x, y, [s * u / 3 for u in upstream])
    ),
}


def product(grad):
    return custom_vjp(lambda x, y: (misled(x * y), grad(pulled, x, y)))


def product_and_sum(of, grad):
    f = custom_vjp(lambda x, y: (of([misled(x * y), misled(x + y)]), grad(both_pulled, x, y)))

    def form(x, y):
        product, total = f(x, y)
        return product + 2 * total

    return form


for name, grad in SIGNATURES.items():
    law(lambda x, y: x * y, f"{name} upstream")(product(grad))
    law(lambda x, y: x * y + 2 * (x + y), f"{name} upstream of two")(product_and_sum(tuple, grad))
for name, grad in DEFAULTS.items():
    law(lambda x, y: x * y + 2 * (x + y), f"a default beside {name}")(product_and_sum(list, grad))


@law(lambda x: x**3 + 2 * x)
def upstream_in_the_structure_of_the_value(x):
    @custom_vjp
    def f(x):
        def grad(*args, upstream):
            assert upstream["sign"] is None or BACKEND == "tensorflow"
            (u,), (v,) = upstream["b"], args
            return upstream["a"] * 3 * v**2 + u

        value = {"b": [misled(x)], "sign": ops.cast(ops.sign(x), "int32"), "a": misled(x**3)}
        return value, grad

    y = f(x)
    return y["a"] + 2 * y["b"][0]


@law(lambda x: x**3)
def a_sequence_of_one_output(x):
    """As Keras has it on torch: then `upstream` is a tensor."""

    @custom_vjp
    def f(x):
        return (misled(x**3),), lambda *args, upstream: upstream * 3 * args[0] ** 2

    return f(x)[0]


class Grad:
    def __call__(self, *args, upstream):
        return upstream * 3 * args[0] ** 2


@functools.wraps(lambda *args, upstream: None)
def wrapped(*args, **kwargs):
    return Grad()(*args, **kwargs)


GRADS = {
    "an object": Grad(),
    "wrapped": wrapped,
    "a partial": functools.partial(lambda f, *args, upstream: f * upstream * args[0] ** 2, 3.0),
}
for name, grad in GRADS.items():
    law(lambda x: x**3, f"grad is {name}")(custom_vjp(lambda x, grad=grad: (misled(x**3), grad)))


@law(lambda x: x**3)
@custom_vjp
def grad_is_a_partial_of_a_lambda(x):
    return misled(x**3), functools.partial(lambda x, u: 3 * x**2 * u, x)


@law(lambda x, y, s: 3 * x**2 * y + s)
def arguments_in_the_order_of_the_gradients(x, y, s):
    """Those that were passed by keyword too; the object of a method is not among them."""

    class Scale:
        factor = 3.0

        @custom_vjp
        def times(self, point, power, *, shift):
            def grad(*args, upstream):
                point, power, shift = args
                x, y = point["x"], point["y"]
                assert power == 2
                by_x = self.factor * upstream * power * x * y
                by_y = self.factor * upstream * x**power
                return by_x, by_y, None, upstream * shift / shift

            return misled(self.factor * point["x"] ** power * point["y"] + shift), grad

    return Scale().times(shift=s, power=2, point={"x": x, "y": y})


def arguments(truth):
    """A point of `truth`."""
    points = np.random.default_rng(3).normal(size=(4,))
    return [points + i for i in range(truth.__code__.co_argcount)]
