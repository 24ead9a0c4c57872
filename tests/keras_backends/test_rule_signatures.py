"""The signatures of `grad` that Keras documents, for `sgtrick.keras.custom_vjp` on this backend."""

import functools

import numpy as np
import pytest
import transformations
from keras import ops
from transformations import BACKEND, array, check, gradient, in_turn, misled, reverse

from sgtrick.keras import custom_vjp

POINTS = np.random.default_rng(3).normal(size=(4,))
MATRIX = np.outer(POINTS, [1.0, 2.0, 3.0])
PRODUCT = lambda x, y: x * y, [POINTS, POINTS + 1]
FIRST, MAPPED, SECOND = map(
    reverse, (transformations.FIRST, transformations.MAPPED, transformations.SECOND)
)
REVERSE = list(FIRST.values())[1]


def log1pexp_on_all_backends(x):
    e = ops.exp(x)

    def grad(*args, upstream=None):
        if upstream is None:
            (upstream,) = args
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1, e))

    return ops.log(1 + e), grad


def log1pexp_on_tensorflow_and_jax(x):
    e = ops.exp(x)

    def grad(upstream):
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1, e))

    return ops.log(1 + e), grad


def log1pexp_on_torch(x):
    e = ops.exp(x)

    def grad(*args, upstream):
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1, e))

    return ops.log(1 + e), grad


def optional(x, y):
    def grad(*args, upstream=None):
        if upstream is None:
            (upstream,) = args
        return upstream * y, upstream * x

    return misled(x * y), grad


def required(x, y):
    def grad(*args, upstream):
        x, y = args
        return upstream * y, upstream * x

    return misled(x * y), grad


def named(x, y):
    def grad(x, y, *, upstream):
        return upstream * y, upstream * x

    return misled(x * y), grad


class TestSignaturesOfKeras:
    """Keras documents three signatures of `grad`, for different backends; here each has all."""

    @pytest.mark.parametrize(
        "f", [log1pexp_on_all_backends, log1pexp_on_tensorflow_and_jax, log1pexp_on_torch]
    )
    def test_the_examples_of_its_documentation(self, f):
        x = ops.convert_to_tensor(np.array([1.0, 2.0, 100.0], "float32"))
        (g,) = gradient(custom_vjp(f), [x], ops.ones_like(x))
        np.testing.assert_allclose(array(g), [0.7310586, 0.880797, 1.0], rtol=1e-6)

    @pytest.mark.parametrize("f", [required, named])
    @pytest.mark.parametrize("transformation", FIRST)
    def test_of_first_order(self, transformation, f):
        check(FIRST[transformation], custom_vjp(f), *PRODUCT)

    @pytest.mark.parametrize(("transformation", "f"), in_turn(MAPPED, [optional, required, named]))
    def test_that_map_members(self, transformation, f):
        truth = PRODUCT[0]
        check(MAPPED[transformation], custom_vjp(f), truth, [MATRIX, MATRIX + 1])

    @pytest.mark.parametrize("transformation", SECOND)
    def test_of_second_order(self, transformation):
        """What `grad` gets as arguments is what is differentiated."""

        @custom_vjp
        def form(x):
            def grad(*args, upstream):
                return upstream * 3 * args[0] ** 2

            return misled(x**3), grad

        check(SECOND[transformation], form, lambda x: x**3, [POINTS])

    @pytest.mark.parametrize("of", [tuple, list])
    def test_several_outputs(self, of):
        """`upstream` is then a sequence, one for each."""

        def pulled(x, y, upstream):
            u, v = upstream
            return u * y + v, u * x + v

        grads = [
            lambda x, y: lambda *args, upstream=None: pulled(x, y, upstream or args),
            lambda x, y: lambda upstream: pulled(x, y, upstream),
            lambda x, y: lambda *args, upstream: pulled(*args, upstream),
        ]
        for grad in grads:

            def form(x, y, grad=grad):
                f = custom_vjp(lambda x, y: (of([misled(x * y), misled(x + y)]), grad(x, y)))
                product, total = f(x, y)
                return product + 2 * total

            check(REVERSE, form, lambda x, y: x * y + 2 * (x + y), [POINTS, POINTS + 1])

    def test_nested_outputs(self):
        """`upstream` has the structure of the value, with None where there is no derivative."""

        @custom_vjp
        def f(x):
            def grad(*args, upstream):
                assert upstream["sign"] is None or BACKEND == "tensorflow"
                (u,), (v,) = upstream["b"], args
                return upstream["a"] * 3 * v**2 + u

            value = {"b": [misled(x)], "sign": ops.cast(ops.sign(x), "int32"), "a": misled(x**3)}
            return value, grad

        def form(x):
            y = f(x)
            return y["a"] + 2 * y["b"][0]

        check(REVERSE, form, lambda x: x**3 + 2 * x, [POINTS])

    def test_a_sequence_of_one_output(self):
        """As Keras has it on torch: then `upstream` is a tensor."""

        @custom_vjp
        def f(x):
            def grad(*args, upstream):
                return upstream * 3 * args[0] ** 2

            return (misled(x**3),), grad

        check(REVERSE, lambda x: f(x)[0], lambda x: x**3, [POINTS])

    def test_a_grad_that_is_not_a_plain_function(self):
        class Grad:
            def __call__(self, *args, upstream):
                return upstream * 3 * args[0] ** 2

            def method(self, *args, upstream):
                return self(*args, upstream=upstream)

        def more(factor, *args, upstream):
            return factor * upstream * args[0] ** 2

        @functools.wraps(log1pexp_on_torch(0.0)[1])
        def wrapped(*args, **kwargs):
            return Grad()(*args, **kwargs)

        for grad in (Grad(), Grad().method, functools.partial(more, 3.0), wrapped):
            f = custom_vjp(lambda x, grad=grad: (misled(x**3), grad))
            check(REVERSE, f, lambda x: x**3, [POINTS])

    def test_the_arguments_are_in_the_order_of_the_gradients(self):
        """Those that were passed by keyword too; the object of a method is not among them."""

        class Scale:
            factor = 3.0

            @custom_vjp
            def times(self, point, power, *, shift):
                def grad(*args, upstream):
                    point, power, shift = args
                    x, y = point["x"], point["y"]
                    assert power == 2
                    return (
                        self.factor * upstream * power * x * y,
                        self.factor * upstream * x**power,
                        None,
                        upstream * shift / shift,
                    )

                return misled(self.factor * point["x"] ** power * point["y"] + shift), grad

        def form(x, y, s):
            return Scale().times(shift=s, power=2, point={"x": x, "y": y})

        check(REVERSE, form, lambda x, y, s: 3 * x**2 * y + s, [POINTS, POINTS + 1, POINTS + 2])
