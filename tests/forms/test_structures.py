"""Arguments arrive as they were passed: structures are what `tf.nest` says, objects are the same.

The oracle is the function itself on the same arguments, differentiated by hand.
"""

import array
import collections
import types

import attr
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
import sgtrick.keras
from matrix import spread
from sgtrick._arguments import structures
from shared import EXECUTED, WRAPS, constant, derivative, with_jvp

X = constant([1.0, 2.0])
SCALE = constant(3.0)


def product(x, scale):
    return x**2 * tf.cast(scale, tf.float64)


def slope(x, scale):
    return 2 * x * tf.cast(scale, tf.float64)


def of_scale(get):
    """The forms of `x**2` times a scale, which `get` finds in another argument."""
    f = lambda x, p: product(x, get(p))  # noqa: E731
    g = lambda x, p: slope(x, get(p))  # noqa: E731
    return {
        "with_gradient": sgtrick.with_gradient(f, g),
        "from_value_and_gradient": sgtrick.from_value_and_gradient(lambda x, p: (f(x, p), g(x, p))),
        "custom_jvp": with_jvp(lambda q, t: (None, g(*q) * t[0]), f),
        "nondiff": with_jvp(lambda p, q, t: (None, g(*q, p) * t[0]), f, nondiff_argnums=1),
        "custom_vjp": sgtrick.custom_vjp(lambda x, p: (f(x, p), lambda u: (u * g(x, p), None))),
        "keras": sgtrick.keras.custom_vjp(lambda x, p: (f(x, p), lambda u: (u * g(x, p), None))),
        "from_numpy": sgtrick.from_numpy(
            lambda x, p: (x**2 * np.asarray(get(p)), 2 * x * np.asarray(get(p))),
            argnums=0,
            event_ndims=0,
        ),
    }


FORMS = list(of_scale(None))


@attr.s(auto_attribs=True, kw_only=True)
class ByKeyword:
    scale: object
    n: int = 2


@attr.s(auto_attribs=True)
class NotInitialised:
    scale: object
    n: int = attr.ib(init=False, default=2)


@attr.s(auto_attribs=True)
class Checked:
    scale: tf.Tensor = attr.ib(validator=attr.validators.instance_of((tf.Tensor, np.generic)))


class Own(tuple):
    def __new__(cls, scale, n):
        return super().__new__(cls, (scale, n))


class Named(collections.namedtuple("Named", "scale n")):
    def __new__(cls, scale):
        return super().__new__(cls, scale, 2)


# What is passed, and how the function finds the scale in it.
STRUCTURES = {
    "list": (lambda s: [0, s], lambda p: p[-1]),
    "deque": (lambda s: collections.deque([s]), lambda p: p[-1]),
    "deque of arrays": (lambda s: collections.deque([np.asarray(3.0)]), lambda p: p[-1]),
    "range": (lambda s: range(2, 4), lambda p: p[1]),
    "UserList": (lambda s: collections.UserList([1.0, s]), lambda p: p[1]),
    "UserDict": (lambda s: collections.UserDict(b=1, a=s), lambda p: p["a"]),
    "values": (lambda s: {"a": s, "b": [s, 2]}.values(), lambda p: list(p)[1][0]),
    "items": (lambda s: {"a": s}.items(), lambda p: next(iter(p))[1]),
    "array": (lambda s: array.array("d", [3.0]), lambda p: p[0]),
    "deque in a dict": (lambda s: {"a": collections.deque([1, s])}, lambda p: p["a"][1]),
    "attrs that checks": (Checked, lambda p: p.scale),
}
# What tf.nest calls a leaf, and classes that it cannot build.
OBJECTS = {
    "set": (lambda s: {3}, lambda p: next(iter(p))),
    "operator": (
        lambda s: tf.linalg.LinearOperatorScaledIdentity(1, s),
        lambda p: p.to_dense()[0, 0],
    ),
    "by keyword": (lambda s: ByKeyword(scale=3), lambda p: p.scale),
    "not initialised": (lambda s: NotInitialised(3), lambda p: p.scale),
    "own constructor": (lambda s: Own(3, 2), lambda p: p[0]),
    "named": (lambda s: Named(3), lambda p: p.scale),
    "named, with a tensor": (Named, lambda p: p.scale),
    "by keyword, with a tensor": (lambda s: ByKeyword(scale=s), lambda p: p.scale),
    "proxy": (lambda s: types.MappingProxyType({"a": s}), lambda p: p["a"]),
}


def is_possible(kind, form, wrap):
    """Engines get arrays for tensors, and rules that cover all arguments their own tensors."""
    if kind not in OBJECTS:
        return True
    covers = form in ("custom_jvp", "custom_vjp", "keras")
    if kind == "operator":
        return form != "custom_jvp" and form != "from_numpy"
    return form != "from_numpy" and not (covers and ("with" in kind or kind == "proxy"))


@pytest.mark.parametrize(
    ("kind", "form", "wrap"),
    [
        *spread([*STRUCTURES, *OBJECTS], FORMS, EXECUTED, together=1, valid=is_possible),
        *spread(["deque", "range", "array"], FORMS, EXECUTED),
    ],
)
def test_of_any_kind(kind, form, wrap):
    make, get = (STRUCTURES | OBJECTS)[kind]
    run = lambda x, s: of_scale(get)[form](x, make(s))  # noqa: E731
    wrap = EXECUTED[wrap]
    np.testing.assert_allclose(wrap(run)(X, SCALE), 3 * X**2, rtol=1e-12)
    np.testing.assert_allclose(wrap(derivative(run))(X, SCALE), 6 * X, rtol=1e-12)


@pytest.mark.parametrize("kind", ["deque", "UserList", "values", "attrs that checks"])
@WRAPS
def test_tensors_in_them_keep_their_derivatives(kind, wrap):
    make, get = STRUCTURES[kind]
    for form in ("with_gradient", "from_value_and_gradient", "nondiff"):
        run = lambda x, s: of_scale(get)[form](x, make(s))  # noqa: B023, E731
        np.testing.assert_allclose(wrap(derivative(run, 1))(X, SCALE), 5)
        mixed = derivative(derivative(run), 1)
        np.testing.assert_allclose(wrap(mixed)(X, SCALE), 6)


@pytest.mark.parametrize("kind", ["named, with a tensor", "by keyword, with a tensor", "proxy"])
def test_a_class_that_cannot_be_built_again(kind):
    """Its tensors count as closed over, and a rule cannot cover them."""
    make, get = OBJECTS[kind]
    for form, h in of_scale(get).items():
        if form in ("custom_jvp", "custom_vjp", "from_numpy"):
            with pytest.raises(TypeError, match=r"p is a structure .* tf\.nest cannot build .* of"):
                h(X, make(SCALE))
        elif form != "keras":
            run = lambda x, s: h(x, make(s))  # noqa: B023, E731
            np.testing.assert_allclose(derivative(run, 1)(X, SCALE), 5)


@pytest.mark.parametrize("kind", ["deque", "UserList", "values"])
@WRAPS
def test_of_covered_tensors(kind, wrap):
    """Gradients, primals and tangents come in the same structure, or in a list for a view."""
    make, get = {**STRUCTURES, "values": (lambda s: {"a": s}.values(), lambda p: next(iter(p)))}[
        kind
    ]
    like = lambda p, g: [0 * t if t is not get(p) else g for t in p]  # noqa: E731
    cube = lambda p: tf.stop_gradient(get(p) ** 3)  # noqa: E731
    rule = lambda p: like(p, 3 * get(p) ** 2)  # noqa: E731
    for h in (
        sgtrick.with_gradient(cube, rule),
        sgtrick.from_value_and_gradient(lambda p: (cube(p), rule(p))),
        with_jvp(lambda p, t: (None, 3 * get(*p) ** 2 * get(*t)), cube),
        sgtrick.custom_vjp(lambda p: (cube(p), lambda u: (like(p, u * 3 * get(p) ** 2),))),
    ):
        run = lambda s, h=h: h(make(s))  # noqa: E731
        assert wrap(derivative(run))(SCALE) == 27
        assert wrap(derivative(derivative(run)))(SCALE) == 18


@pytest.mark.parametrize("make", [collections.deque, collections.UserList, tuple])
def test_of_roots(make):
    def residual(x, a):
        return tf.nest.map_structure(lambda t: t**2 - a, x)

    def root(a):
        at = tf.stop_gradient(tf.sqrt(a))
        return sgtrick.implicit_root(residual, make([at, -at]), a)[1]

    np.testing.assert_allclose(derivative(root)(constant(9.0)), -1 / 6)


def test_structures_are_those_of_tf_nest():
    kinds = [make(SCALE) for make, _ in (STRUCTURES | OBJECTS).values()]
    kinds += [
        X,
        1.0,
        None,
        "text",
        b"bytes",
        bytearray(b"a"),
        memoryview(b"ab"),
        X.shape,
        np.ones(2),
    ]
    kinds += [frozenset([1]), slice(1), iter([1]), (), {}, tf.RaggedTensor.from_row_lengths(X, [2])]
    for value in kinds:
        is_leaf = [path for path, _ in structures.flatten(value)] == [""]
        assert is_leaf != tf.nest.is_nested(value), value


class TestSameObjects:
    """An argument of which no leaf is replaced is the object itself."""

    @staticmethod
    def forms(f):
        """Of `x**2`, with whatever else the function does."""
        g = lambda x, *_: 2 * x  # noqa: E731
        yield sgtrick.with_gradient(f, g)
        yield sgtrick.from_value_and_gradient(lambda x, p: (f(x, p), g(x)))
        yield with_jvp(lambda q, t: (None, g(*q) * t[0]), f)
        yield with_jvp(lambda p, q, t: (None, g(*q) * t[0]), f, nondiff_argnums=1)
        yield sgtrick.custom_vjp(lambda x, p: (f(x, p), lambda u: (u * g(x), None)))
        yield sgtrick.keras.custom_vjp(lambda x, p: (f(x, p), lambda u: (u * g(x), None)))

    @WRAPS
    @pytest.mark.parametrize("start", [[], {}, [1, "a"], {"n": [2]}, collections.deque()], ids=repr)
    def test_what_is_stored_stays(self, start, wrap):
        kept = []

        def f(x, store):
            kept.append(store)
            store.update(m=1) if isinstance(store, dict) else store.append(1)
            return x**2

        for h in self.forms(f):
            store = type(start)(start)
            run = lambda x, h=h, store=store: h(x, store)  # noqa: E731
            np.testing.assert_allclose(wrap(derivative(run))(X), 2 * X)
            assert kept[-1] is store
            assert len(store) > len(start)

    def test_a_mutable_default(self):
        def f(x, calls=[]):  # noqa: B006
            calls.append(1)
            return x**2

        for h in (
            sgtrick.with_gradient(f, lambda x: 2 * x),
            with_jvp(lambda p, t: (None, 2 * p[0] * t[0]), f),
            sgtrick.custom_vjp(
                lambda x, calls=f.__defaults__[0]: (f(x, calls), lambda u: 2 * x * u)
            ),
        ):
            f.__defaults__[0].clear()
            for count in (1, 2, 3):
                np.testing.assert_allclose(derivative(h)(X), 2 * X)
                assert len(f.__defaults__[0]) == count

    def test_a_list_of_tensors_that_grows(self):
        """Second derivatives see the list of the call."""

        def f(x, past):
            past.append(x)
            return x**2 * past[0]

        h = sgtrick.with_gradient(f, lambda x, past: 2 * x * past[0])
        past = [SCALE]
        for _ in range(2):
            found = derivative(derivative(lambda x: h(x, past)))(X)
            np.testing.assert_allclose(found, [6, 6])

    @WRAPS
    def test_a_variable_that_the_function_assigns(self, wrap):
        count = tf.Variable(0.0, dtype=tf.float64)

        def f(x, count):
            count.assign_add(1.0)
            return x**2

        _, fused, _, jvp, *_ = self.forms(f)
        for h in (sgtrick.with_gradient(f, lambda x, count: 2 * x + 0 * count), fused, jvp):
            count.assign(0.0)
            np.testing.assert_allclose(wrap(derivative(lambda x: h(x, count)))(X), 2 * X)  # noqa: B023
            assert count == 1

    def test_a_variable_that_the_rule_covers_is_a_tensor(self):
        def f(x):
            return x.assign_add(1.0)

        v = tf.Variable(1.0)
        for h in (sgtrick.with_gradient(f, f), with_jvp(f, f), sgtrick.custom_vjp(f)):
            with pytest.raises(AttributeError, match="no attribute 'assign_add'"):
                h(v)
