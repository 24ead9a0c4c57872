"""Every form on whatever Python can call, as a function and as a decorator with options.

What is called is `scale * x**3`, with a `scale` that belongs to the object or is bound, and the
gradient that each form gives is 10 times the true one: who drops it, or takes that of another
object, gets another number.
"""

import copy
import dataclasses
import functools
import inspect
import traceback
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WRAPS

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
    return None, tenfold(*map(scale_of, before), primals[-1]) * tangents[-1]


def scale_of(bound):
    """Of an object, or a class, or the number itself."""
    return getattr(bound, "scale", bound)


def of_object(f):
    """The same with an object in the place of its scale."""

    def method(self, x):
        return f(self.scale, x)

    return method


def of_another_name(f):
    """The same under a name that Python allows as well."""

    def method(this, x):
        return f(this.scale, x)

    return method


def of_no_name(f):
    """The same without any name."""

    def method(*args):
        this, x = args
        return f(this.scale, x)

    return method


def jvp_form(f, jvp, **options):
    form = sgtrick.custom_jvp(f, **options)
    form.defjvp(jvp)
    return form


# What is decorated, the decorator with options, and how to bring its rule if it does not.
FORMS = {
    "with_gradient": (cube, lambda of: sgtrick.with_gradient(grad=of(tenfold), device="CPU:0")),
    "from_value_and_gradient": (
        both,
        lambda of: sgtrick.from_value_and_gradient(device="CPU:0"),
    ),
    "custom_jvp": (
        cube,
        lambda of: lambda f: jvp_form(f, rule, nondiff_argnums=()),
    ),
    "custom_vjp": (with_rule, lambda of: sgtrick.custom_vjp()),
    "from_numpy": (both, lambda of: sgtrick.from_numpy(event_ndims=0, vectorized=True)),
    "from_numpy, apart": (
        cube,
        lambda of: sgtrick.from_numpy(event_ndims=0, vectorized=True, grad=of(tenfold)),
    ),
}

EVERY = pytest.mark.parametrize("name", FORMS)


def check(h, scale, wrap=lambda f: f):
    """Value and gradient are those of this scale."""

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        return y, tape.gradient(y, x)

    y, g = wrap(run)(X)
    np.testing.assert_allclose(y, cube(scale, X), rtol=1e-12)
    np.testing.assert_allclose(g, tenfold(scale, X), rtol=1e-12)


def model(name):
    """A class with a method of that form."""
    f, decorate = FORMS[name]

    class Model:
        def __init__(self, scale):
            self.scale = scale

        h = decorate(of_object)(of_object(f))

    return Model


@EVERY
class TestMethods:
    @WRAPS
    def test_of_different_objects(self, name, wrap):
        of = model(name)
        one, two = of(2.0), of(5.0)
        for _ in range(2):
            check(one.h, 2.0, wrap)
            check(two.h, 5.0, wrap)
        one.scale = 7.0
        check(one.h, 7.0)

    def test_in_functions(self, name):
        """In one together, and as arguments of one: TensorFlow traces again for another object."""
        of = model(name)
        one, two = of(2.0), of(5.0)
        total = lambda x: one.h(x) + two.h(x)  # noqa: E731
        check(total, 7.0, tf.function)
        check(lambda x: tf.vectorized_map(total, x), 7.0)
        check(tf.function(lambda x: one.h(x) + tf.function(two.h)(x)), 7.0)
        call = tf.function(lambda method, x: method(x))
        for object_ in (one, two, one):
            check(functools.partial(call, object_.h), object_.scale)

    def test_of_an_object_whose_place_in_memory_is_used_again(self, name):
        of = model(name)
        for scale in range(1, 6):
            check(of(float(scale)).h, float(scale))

    def test_of_copies(self, name):
        """Python copies the object with a method."""
        one = model(name)(2.0)
        check(one.h, 2.0)
        two, h = copy.deepcopy(one), copy.deepcopy(one.h)
        one.scale, two.scale = 3.0, 5.0
        check(one.h, 3.0)
        check(two.h, 5.0)
        check(h, 2.0)


@EVERY
@pytest.mark.parametrize("of", [of_object, of_another_name, of_no_name])
class TestMethodsByBinding:
    """What makes a method is that a class holds it, not the name of its first parameter."""

    @WRAPS
    def test_of_objects(self, name, of, wrap):
        f, decorate = FORMS[name]

        class Model:
            def __init__(self, scale):
                self.scale = scale

            h = decorate(of)(of(f))

        class Derived(Model):
            def h(self, x):
                return super().h(x)

        for class_ in (Model, Derived):
            check(class_(3.0).h, 3.0, wrap)
            check(functools.partial(class_.h, class_(5.0)), 5.0, wrap)

    @WRAPS
    def test_of_classes(self, name, of, wrap):
        f, decorate = FORMS[name]

        class Model:
            scale = 3.0
            inside = decorate(of)(classmethod(of(f)))
            outside = classmethod(decorate(of)(of(f)))

        class Derived(Model):
            scale = 5.0

        for class_ in (Model, Derived):
            check(class_.inside, class_.scale, wrap)
            check(class_().outside, class_.scale, wrap)

    @WRAPS
    def test_under_other_decorators(self, name, of, wrap):
        f, decorate = FORMS[name]
        undecorated = of(f)
        undecorated.__qualname__ = f"{Model.__qualname__}.h"
        undecorated.__name__ = "h"
        h = decorate(of)(undecorated)
        Model.h = functools.wraps(h)(lambda self, x: h(self, x))
        check(Model().h, 3.0, wrap)


class Model:
    scale = 3.0


class Point(NamedTuple):
    """Its static methods get an object of the class, under the name that methods use."""

    x: tf.Tensor

    @sgtrick.custom_vjp
    @staticmethod
    def vjp(self):
        return cube(1.0, self.x), lambda u: Point(u * tenfold(1.0, self.x))

    @staticmethod
    @sgtrick.from_value_and_gradient
    def both(self):
        return cube(1.0, self.x), Point(tenfold(1.0, self.x))

    @staticmethod
    @sgtrick.from_numpy(event_ndims=0, vectorized=True)
    def host(self):
        return cube(1.0, self.x), Point(tenfold(1.0, self.x))

    def plain(self, other=None):
        x = self.x if other is None else other.x
        return cube(1.0, x), lambda u: Point(u * tenfold(1.0, x))

    undecorated = staticmethod(sgtrick.custom_vjp(plain))


@pytest.mark.parametrize("name", ["vjp", "both", "host", "undecorated"])
@WRAPS
def test_static_methods_of_an_object_of_their_class(name, wrap):
    check(lambda x: getattr(Point, name)(Point(x)), 1.0, wrap)


@WRAPS
def test_forms_of_the_methods_of_a_class_are_no_methods_themselves(wrap):
    """An object of the class that they get is an argument."""
    function = sgtrick.custom_vjp(Point.plain)
    check(lambda x: function(Point(x)), 1.0, wrap)
    bound = sgtrick.custom_vjp(Point(2 * X).plain)
    check(lambda x: bound(Point(x)), 1.0, wrap)


def function_of_x(name, scale=3.0, calls=None):
    """What is decorated, without a scale among its arguments."""
    f, _ = FORMS[name]

    def plain(x):
        """Says something."""
        if calls is not None:
            calls.append(1)
        return f(scale, x)

    return plain


def form_of(name, plain, scale=3.0):
    """The form of a function of `x` alone."""
    _, decorate = FORMS[name]
    h = decorate(lambda f: functools.partial(f, scale))(plain)
    if name == "custom_jvp":
        form = getattr(h, "__func__", h)  # that of a static method
        form.defjvp(lambda primals, tangents: (None, tenfold(scale, primals[0]) * tangents[0]))
    return h


class Callable:
    def __init__(self, f):
        self.f = f

    def __call__(self, x):
        return self.f(x)


def with_keyword(name):
    """A partial that gives the scale by its name, where the form takes keywords."""
    if name == "custom_vjp":  # whose rule counts the scale too
        rule = lambda x, *, scale: (cube(scale, x), lambda u: (u * tenfold(scale, x), None))  # noqa: E731
        return functools.partial(sgtrick.custom_vjp(rule), scale=3.0)
    if name not in ("with_gradient", "from_value_and_gradient"):
        return form_of(name, function_of_x(name))
    f, decorate = FORMS[name]
    by_name = lambda f: lambda x, *, scale: f(scale, x)  # noqa: E731
    return functools.partial(decorate(by_name)(by_name(f)), scale=3.0)


CALLABLES = {
    "partial": lambda name: form_of(name, functools.partial(FORMS[name][0], 3.0)),
    "partial with a keyword": with_keyword,
    "partial of the form": lambda name: functools.partial(form_of(name, function_of_x(name))),
    "object": lambda name: form_of(name, Callable(function_of_x(name))),
    "copy": lambda name: copy.copy(form_of(name, function_of_x(name))),
    "deep copy": lambda name: copy.deepcopy(form_of(name, function_of_x(name))),
    "point by its name": lambda name: lambda x: form_of(name, function_of_x(name))(x=x),
}


@EVERY
@pytest.mark.parametrize("kind", CALLABLES)
@WRAPS
def test_callables(name, kind, wrap):
    check(CALLABLES[kind](name), 3.0, wrap)


@EVERY
@pytest.mark.parametrize("inside", [True, False])
@WRAPS
def test_static_methods(name, inside, wrap):
    plain = function_of_x(name)

    class Model:
        h = form_of(name, staticmethod(plain)) if inside else staticmethod(form_of(name, plain))

    check(Model.h, 3.0, wrap)
    check(Model().h, 3.0, wrap)


@EVERY
def test_calls(name):
    """Once for value and gradient, or one trace; a host engine is called once by each."""
    calls = []
    h = form_of(name, function_of_x(name, calls=calls))
    h(X)
    assert len(calls) == 1
    check(h, 3.0)
    assert len(calls) == 2
    run = tf.function(functools.partial(first_derivatives, h))
    for _ in range(3):
        run(X)
    assert len(calls) == (5 if name.startswith("from_numpy") else 3)


@EVERY
def test_keeps_its_name_and_documentation(name):
    h = form_of(name, function_of_x(name))
    assert (h.__name__, h.__doc__) == ("plain", "Says something.")


@pytest.mark.parametrize("name", [name for name in FORMS if "numpy" not in name])
def test_errors_in_eager_execution_show_what_the_caller_wrote(name):
    """As TensorFlow's do: at most the wrappers of the call stand before the caller's frames."""

    def broken(x):
        return tf.reshape(x, [3])

    h = FORMS[name][1](lambda f: f)(broken)
    if name == "custom_jvp":
        h.defjvp(rule)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        h(X)
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.tb)]
    assert frames.index("broken") <= 5
    tf.debugging.disable_traceback_filtering()
    try:
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            h(X)
    finally:
        tf.debugging.enable_traceback_filtering()
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.tb)]
    assert frames.index("broken") > 5


def test_errors_of_engines_in_eager_execution_are_short():
    """They carry the engine's own message, and few frames of this package."""

    @sgtrick.from_numpy
    def broken(x):
        raise ArithmeticError("no convergence")

    def frames_of_ours():
        with pytest.raises(RuntimeError, match="broken raised ArithmeticError") as caught:
            broken(X)
        modules = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(caught.tb)]
        return sum(module.startswith("sgtrick.") for module in modules)

    assert frames_of_ours() <= 3
    tf.debugging.disable_traceback_filtering()
    try:
        assert frames_of_ours() > 3
    finally:
        tf.debugging.enable_traceback_filtering()


class TestInheritedEngines:
    """Functions of one name in a class and in what it is derived from."""

    class Base(model("from_numpy")):
        pass

    class Derived(Base):
        @sgtrick.from_numpy(event_ndims=0, vectorized=True)
        def h(self, x):
            return both(100 * self.scale, x)

    def test_of_the_base(self):
        object_ = self.Derived(2.0)
        check(object_.h, 200.0)
        check(super(self.Derived, object_).h, 2.0)
        check(functools.partial(self.Base.h, object_), 2.0)
        check(object_.h, 200.0)


FIRST = {name: form for name, form in FORMS.items() if not name.startswith("from_numpy")}


def first_derivatives(h, *args):
    with tf.GradientTape() as tape:
        tape.watch(args)
        y = h(*args)
    return tape.gradient(y, args)


@pytest.mark.parametrize("name", FIRST)
class TestAFirstArgumentCalledSelf:
    """It is the object of a method, and an argument like any other elsewhere."""

    @staticmethod
    def decorated(name, f):
        """A form of `f(first, x)` whose derivative by the first argument is tenfold."""
        tenfold = lambda first, x: 20 * first * x  # noqa: E731
        if name == "with_gradient":
            return sgtrick.with_gradient(f, tenfold)
        if name == "from_value_and_gradient":
            return sgtrick.from_value_and_gradient(calls_like(f, lambda *a: (f(*a), tenfold(*a))))
        if name == "custom_jvp":
            return jvp_form(
                f, lambda p, t: (None, tf.reduce_sum(tenfold(*p) * t[0] + p[0] ** 2 * t[1]))
            )
        rule = lambda *a: (f(*a), lambda u: (u * tenfold(*a), u * a[0] ** 2))  # noqa: E731
        return sgtrick.custom_vjp(calls_like(f, rule))

    @staticmethod
    def check_both(h, wrap=lambda f: f):
        by_first, by_x = wrap(functools.partial(first_derivatives, h))(X, 3 * X)
        np.testing.assert_allclose(by_first, 20 * X * 3 * X)
        np.testing.assert_allclose(by_x, X**2)

    @WRAPS
    def test_of_functions(self, name, wrap):
        of_self = self.decorated(name, lambda self, x: tf.reduce_sum(self**2 * x))
        of_cls = self.decorated(name, lambda cls, x: tf.reduce_sum(cls**2 * x))
        for h in (of_self, of_cls):
            self.check_both(h, wrap)
        self.check_both(lambda first, x: of_self(self=first, x=x), wrap)
        self.check_both(lambda first, x: of_cls(x=x, cls=first), wrap)

    def test_of_static_and_bound_methods(self, name):
        decorated = self.decorated

        class Model:
            def plain(self, x):
                return tf.reduce_sum(self**2 * x)

            def method(_, cls, x):  # noqa: N805
                return tf.reduce_sum(cls**2 * x)

            h = staticmethod(decorated(name, plain))

        self.check_both(Model.h)
        self.check_both(Model().h)
        self.check_both(self.decorated(name, Model().method))

    @WRAPS
    def test_of_objects_that_hold_tensors(self, name, wrap):
        """Also those that TensorFlow takes for structures of tensors."""
        f, decorate = FORMS[name]

        class Named(NamedTuple):
            scale: tf.Tensor
            h = decorate(of_object)(of_object(f))

        class Extension(tf.experimental.ExtensionType):
            scale: tf.Tensor

            def h(self, x):
                return f(self.scale, x)

        Extension.h = decorate(of_object)(Extension.h)

        @dataclasses.dataclass(slots=True)
        class Data:
            scale: tf.Tensor
            h = decorate(of_object)(of_object(f))

        class Layer(keras.layers.Layer):
            def __init__(self, scale):
                super().__init__(dtype="float64")
                self.scale = scale

            call = decorate(of_object)(of_object(f))

        scale = tf.constant(3.0, tf.float64)
        for of in (Named, Extension, Data):
            check(of(scale).h, 3.0, wrap)
        check(Layer(scale), 3.0, wrap)

    def test_of_a_method_that_is_a_tf_function(self, name):
        f, decorate = FORMS[name]

        class Model:
            def __init__(self, scale):
                self.scale = scale

            def h(self, x):
                return f(self.scale, x)

            h = tf.function(decorate(of_object)(h))

        one, two = Model(3.0), Model(5.0)
        check(one.h, 3.0)
        check(two.h, 5.0)

    def test_of_functions_that_become_methods(self, name):
        f, decorate = FORMS[name]

        class Model:
            scale = 3.0

        class Other:
            scale = 5.0

        Model.h = decorate(of_object)(of_object(f))
        Other.g = Model.h
        check(Model().h, 3.0)
        check(Other().g, 5.0)


def calls_like(f, g):
    """`g` with the signature of `f`."""
    g.__signature__ = inspect.signature(f)
    return g
