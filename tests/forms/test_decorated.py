"""Every form on whatever Python can call, as a function and as a decorator with options.

What is called is `scale * x**3`, with a `scale` that belongs to the object or is bound, and the
gradient that each form gives is 10 times the true one: who drops it, or takes that of another
object, gets another number.
"""

import copy
import dataclasses
import functools
import traceback
import types
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from shared import EXECUTED, WRAPS, derivative

X = tf.constant([1.0, 2.0], tf.float64)


def cube(scale, x):
    return scale * x**3


def tenfold(scale, x):
    return 10 * scale * 3 * x**2


def both(scale, x):
    return cube(scale, x), tenfold(scale, x)


def with_rule(scale, x):
    return cube(scale, x), lambda upstream: upstream * tenfold(scale, x)


def rule(*args):
    *before, primals, tangents = args
    return None, tenfold(*(of.scale for of in before), primals[-1]) * tangents[-1]


def of_object(f):
    """The same with an object in the place of its scale."""

    def method(self, x):
        return f(self.scale, x)

    return method


def of_no_name(f):
    """The same without a name for it."""

    def method(*args):
        this, x = args
        return f(this.scale, x)

    return method


def custom_jvp(f):
    form = sgtrick.custom_jvp(f, nondiff_argnums=())
    form.defjvp(rule)
    return form


# What is decorated, the decorator with options, and how to bring its rule if it does not.
FORMS = {
    "with_gradient": (cube, lambda of: sgtrick.with_gradient(grad=of(tenfold), device="CPU:0")),
    "from_value_and_gradient": (both, lambda of: sgtrick.from_value_and_gradient(device="CPU:0")),
    "custom_jvp": (cube, lambda of: custom_jvp),
    "custom_vjp": (with_rule, lambda of: sgtrick.custom_vjp()),
    "from_numpy": (both, lambda of: sgtrick.from_numpy(event_ndims=0, vectorized=True)),
    "from_numpy, apart": (
        cube,
        lambda of: sgtrick.from_numpy(event_ndims=0, vectorized=True, grad=of(tenfold)),
    ),
}

EVERY = pytest.mark.parametrize("name", FORMS)
OF_OBJECTS = [name for name in FORMS if "from_numpy" not in name]  # which cannot be methods


def check(h, scale, wrap=lambda f: f):
    """Value and gradient are those of this scale."""
    np.testing.assert_allclose(wrap(h)(X), cube(scale, X), rtol=1e-12)
    np.testing.assert_allclose(wrap(derivative(h))(X), tenfold(scale, X), rtol=1e-12)


class Scaled:
    scale = 3.0

    def __init__(self, scale=3.0):
        self.scale = scale


class Wrapping(Scaled):
    pass


# What a class may have, from a method that is not decorated and its decorator: what can be called,
# with the scale of each.


def of_objects(method, decorate):
    class Model(Scaled):
        h = decorate(method)

    class Derived(Model):
        def h(self, x):
            return super().h(x)

    class Other(Scaled):
        pass

    Other.g = Model.h
    one, two = Model(2.0), Derived(5.0)
    return [(one.h, 2), (two.h, 5), (functools.partial(Model.h, one), 2), (Other(7.0).g, 7)]


def of_classes(method, decorate):
    class Model(Scaled):
        inside = decorate(classmethod(method))
        outside = classmethod(decorate(method))

    class Derived(Model):
        scale = 5.0

    return [(Model.inside, 3), (Model().outside, 3), (Derived.inside, 5), (Derived().outside, 5)]


def under_another_decorator(method, decorate):
    method.__qualname__, method.__name__ = f"{Wrapping.__qualname__}.h", "h"
    h = decorate(method)
    Wrapping.h = functools.wraps(h)(lambda self, x: h(self, x))
    return [(Wrapping().h, 3)]


def of_objects_that_hold_tensors(method, decorate):
    """Also those that TensorFlow takes for structures of tensors."""

    class Named(NamedTuple):
        scale: tf.Tensor
        h = decorate(method)

    class Extension(tf.experimental.ExtensionType):
        scale: tf.Tensor

    Extension.h = decorate(method)

    @dataclasses.dataclass(slots=True)
    class Data:
        scale: tf.Tensor
        h = decorate(method)

    class Layer(keras.layers.Layer):
        def __init__(self, scale):
            super().__init__(dtype="float64")
            self.scale = scale

        h = decorate(method)

    scale = tf.constant(3.0, tf.float64)
    return [(of(scale).h, 3) for of in (Named, Extension, Data, Layer)]


def that_are_tf_functions(method, decorate):
    class Model(Scaled):
        def h(self, x):
            return method(self, x)

        h = tf.function(decorate(h))

    one, two = Model(2.0), Model(5.0)  # of which TensorFlow keeps weak references
    return [(lambda x: one.h(x), 2), (lambda x: two.h(x), 5)]


METHODS = [
    of_objects,
    of_classes,
    under_another_decorator,
    of_objects_that_hold_tensors,
    that_are_tf_functions,
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "of", "wrap"),
    spread(OF_OBJECTS, METHODS, [of_object, of_no_name], EXECUTED),
    ids=lambda part: getattr(part, "__name__", part),
)
def test_methods(name, kind, of, wrap):
    """What makes a method is that a class holds it, not the name of its first parameter."""
    f, decorate = FORMS[name]
    for h, scale in kind(of(f), decorate(of)):
        check(h, scale, EXECUTED[wrap])


@pytest.mark.parametrize("name", OF_OBJECTS)
class TestObjects:
    """That have a method."""

    @pytest.fixture
    def of(self, name):
        f, decorate = FORMS[name]

        class Model(Scaled):
            h = decorate(of_object)(of_object(f))

        return Model

    @pytest.mark.long
    def test_together_in_functions(self, of):
        """And as arguments of one: TensorFlow traces again for another object."""
        one, two = of(2.0), of(5.0)
        total = lambda x: one.h(x) + two.h(x)  # noqa: E731
        check(total, 7.0, tf.function)
        check(tf.function(lambda x: one.h(x) + tf.function(two.h)(x)), 7.0)
        call = tf.function(lambda method, x: method(x))
        for object_ in (one, two, one):
            check(functools.partial(call, object_.h), object_.scale)

    def test_whose_place_in_memory_is_used_again(self, of):
        for scale in range(1, 6):
            check(of(float(scale)).h, float(scale))

    def test_that_change_and_their_copies(self, of):
        """Python copies the object with a method."""
        one = of(2.0)
        check(one.h, 2.0)
        two, h = copy.deepcopy(one), copy.deepcopy(one.h)
        one.scale, two.scale = 3.0, 5.0
        for called, scale in ((one.h, 3.0), (two.h, 5.0), (h, 2.0)):
            check(called, scale)


class Point(NamedTuple):
    """Its static methods get an object of the class, under the name that methods use."""

    x: tf.Tensor

    def both(self):
        return cube(1.0, self.x), Point(tenfold(1.0, self.x))

    def with_rule(self, other=None):
        x = self.x if other is None else other.x
        return cube(1.0, x), lambda u: Point(u * tenfold(1.0, x))

    inside = sgtrick.custom_vjp(staticmethod(with_rule))
    outside = staticmethod(sgtrick.custom_vjp(with_rule))
    fused = staticmethod(sgtrick.from_value_and_gradient(both))


OF_POINTS = {
    "static, inside": Point.inside,
    "static, outside": Point.outside,
    "static, fused": Point.fused,
    "function": sgtrick.custom_vjp(Point.with_rule),
    "bound": sgtrick.custom_vjp(Point(2 * X).with_rule),
}


@pytest.mark.parametrize("h", OF_POINTS.values(), ids=OF_POINTS)
@WRAPS
def test_an_argument_that_is_an_object_of_the_class(h, wrap):
    """Static methods, and forms of the methods of a class, are no methods themselves."""
    check(lambda x: h(Point(x)), 1.0, wrap)


def function_of(parameter, f, calls=None):
    """The function without a scale among its arguments, by the name of its parameter."""

    def plain(x):
        """Says something."""
        if calls is not None:
            calls.append(1)
        return f(3.0, x)

    def of_self(self):
        return plain(self)

    return {"x": plain, "self": of_self}[parameter]


def form_of(name, plain):
    """The form of a function of `x` alone."""
    h = FORMS[name][1](lambda f: functools.partial(f, 3.0))(plain)
    if name == "custom_jvp":
        form = getattr(h, "__func__", h)  # that of a static method
        form.defjvp(lambda primals, tangents: (None, tenfold(3.0, primals[0]) * tangents[0]))
    return h


class Callable:
    def __init__(self, f):
        self.f = f

    def __call__(self, x):
        return self.f(x)

    def method(self, cls):
        return self.f(cls)


def static(decorated):
    class Model:
        h = decorated

    return lambda x: (Model.h(x) + Model().h(x)) / 2


# What is called, from a decorator and what it decorates.
CALLABLES = {
    "function": lambda make, f: make(f),
    "partial": lambda make, f: make(functools.partial(f)),
    "partial of the form": lambda make, f: functools.partial(make(f)),
    "object": lambda make, f: make(Callable(f)),
    "bound method": lambda make, f: make(Callable(f).method),
    "copy": lambda make, f: copy.copy(make(f)),
    "deep copy": lambda make, f: copy.deepcopy(make(f)),
    "static method, inside": lambda make, f: static(make(staticmethod(f))),
    "static method, outside": lambda make, f: static(staticmethod(make(f))),
}


def is_possible(name, kind, parameter, wrap):
    """An engine has a `self` of its own, and is no method."""
    is_engine = name.startswith("from_numpy")
    return not (is_engine and ("static" in kind or (kind == "by name" and parameter == "self")))


@pytest.mark.parametrize(
    ("name", "kind", "parameter", "wrap"),
    spread(FORMS, [*CALLABLES, "by name"], ["x", "self"], EXECUTED, valid=is_possible),
)
def test_callables(name, kind, parameter, wrap):
    """A first parameter called `self` is one like any other."""
    plain, make = function_of(parameter, FORMS[name][0]), functools.partial(form_of, name)
    h = make(plain) if kind == "by name" else CALLABLES[kind](make, plain)
    check((lambda x: h(**{parameter: x})) if kind == "by name" else h, 3.0, EXECUTED[wrap])


@WRAPS
@pytest.mark.parametrize("name", ["with_gradient", "from_value_and_gradient", "custom_vjp"])
def test_a_partial_that_gives_an_argument_by_its_name(name, wrap):
    f, decorate = FORMS[name]
    by_name = lambda f: lambda x, *, scale: f(scale, x)  # noqa: E731
    if name == "custom_vjp":  # whose rule counts the scale too
        rule = lambda x, *, scale: (cube(scale, x), lambda u: (u * tenfold(scale, x), None))  # noqa: E731
        h = sgtrick.custom_vjp(rule)
    else:
        h = decorate(by_name)(by_name(f))
    check(functools.partial(h, scale=3.0), 3.0, wrap)


def injecting(f, scale=3.0):
    """Wrappers that pass a scale of their own."""

    @functools.wraps(f)
    def alone(x):
        return f(scale, x)

    @functools.wraps(f)
    def beside(*args, **kwargs):
        return f(scale, *args, **kwargs)

    @functools.wraps(f)
    def named(x, **kwargs):
        return f(scale, x, **kwargs)

    return {"alone": alone, "any": beside, "named": named, "method": Wrapped(beside).method}


class Wrapped:
    def __init__(self, f):
        self.method = types.MethodType(functools.wraps(f)(lambda self, *args: f(*args)), self)


@pytest.mark.parametrize(
    ("name", "kind", "wrap"),
    [*spread(FORMS, ["alone", "any", "named", "method"], EXECUTED, together=2)],
)
def test_wrappers_with_an_argument_of_their_own(name, kind, wrap):
    f, decorate = FORMS[name]
    h = decorate(lambda f: injecting(f)[kind])(injecting(f)[kind])
    if name == "custom_jvp":
        h.defjvp(lambda primals, tangents: (None, tenfold(3.0, primals[0]) * tangents[0]))
    check(lambda x: h(x), 3.0, EXECUTED[wrap])  # tf.function of h would look into the wrapper
    if kind in ("alone", "named"):
        check(lambda x: h(x=x), 3.0, EXECUTED[wrap])


@EVERY
def test_calls(name):
    """Once for value and gradient, or one trace; a host engine is called once by each."""
    calls = []
    h = form_of(name, function_of("x", FORMS[name][0], calls))
    for run in (h, derivative(h)):
        calls.clear()
        run(X)
        assert len(calls) == 1
    run = tf.function(derivative(h))
    calls.clear()
    for _ in range(3):
        run(X)
    assert len(calls) == (3 if name.startswith("from_numpy") else 1)


@EVERY
def test_keeps_its_name_and_documentation(name):
    h = form_of(name, function_of("x", FORMS[name][0]))
    assert (h.__name__, h.__doc__) == ("plain", "Says something.")


def frames(call, error, message):
    """Of the traceback, with TensorFlow's filter and without it."""

    def found():
        with pytest.raises(error, match=message) as caught:
            call(X)
        return [frame for frame, _ in traceback.walk_tb(caught.tb)]

    filtered = found()
    tf.debugging.disable_traceback_filtering()
    try:
        return filtered, found()
    finally:
        tf.debugging.enable_traceback_filtering()


@pytest.mark.parametrize("name", OF_OBJECTS)
def test_errors_in_eager_execution_show_what_the_caller_wrote(name):
    """As TensorFlow's do: at most the wrappers of the call stand before the caller's frames."""

    def broken(x):
        return tf.reshape(x, [3])

    found = frames(form_of(name, broken), tf.errors.InvalidArgumentError, "shape")
    filtered, all_ = ([frame.f_code.co_name for frame in of].index("broken") for of in found)
    assert filtered <= 5 < all_


def test_errors_of_engines_in_eager_execution_are_short():
    """They carry the engine's own message, and few frames of this package."""

    @sgtrick.from_numpy
    def broken(x):
        raise ArithmeticError("no convergence")

    found = frames(broken, RuntimeError, "broken raised ArithmeticError")
    filtered, all_ = (
        sum(frame.f_globals["__name__"].startswith("sgtrick.") for frame in of) for of in found
    )
    assert filtered <= 3 < all_
