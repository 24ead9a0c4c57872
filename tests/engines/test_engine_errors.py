"""What engines that fail, or return what they must not, raise or are replaced by."""

import re
import warnings
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from array_model import RAISED, VECTORIZED
from shared import WRAPS, derivative, forward_derivative, value_and_gradients


def unused(*args):
    raise AssertionError


OPTIONS = [
    # What is no such option.
    ({"dtype": "complex128"}, TypeError,
     "dtype must be a real floating dtype such as 'float64', got 'complex128'"),
    ({"dtype": None}, TypeError, "dtype must be .* got None"),
    ({"on_error": "ignore"}, ValueError,
     "on_error must be 'raise' or a number such as -np.inf, got 'ignore'"),
    ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor, .*got 4"),
    ({"grad": 4}, TypeError, "grad must be a function, got int"),
    ({"grad": "cs"}, ValueError,
     "grad must be a function, '2-point' or '3-point' for finite differences, or False .*got 'cs'"),
    ({"value_shape": 3}, TypeError,
     r"value_shape must be a tuple of ints, such as \(3,\), .* got 3"),
    ({"value_shape": ((3,), (-1,))}, TypeError, r"value_shape\[1\]\[0\] must be a tuple of ints"),
    # What does not go with another one.
    ({"grad": unused, "vjp": unused}, TypeError, "grad and vjp were both given. Pass one of them"),
    ({"grad": unused, "jvp": unused}, TypeError,
     "grad gives all first derivatives: leave jvp out"),
    ({"grad": False, "vjp": unused}, TypeError, "grad=False says .* no gradient: leave out vjp"),
    ({"vjp": unused, "value_shape": (None,), "on_error": -np.inf}, ValueError,
     r"its shape must be known, but value_shape is \(None,\)"),
    # What some are used to from elsewhere.
    ({"has_aux": True}, TypeError, "argument 'has_aux'. Return .* outputs of a dict.* draws"),
    ({"hess": unused}, TypeError, r"argument 'hess'. .* hessp: lambda x, v: hessian\(x\) @ v; or"),
    ({"no": 1}, TypeError, r"from_numpy\(\) got an unexpected keyword argument 'no'\.$"),
    ({"argnums": 0.5}, TypeError, "argnums must be ints or parameter names, got 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        sgtrick.from_numpy(unused, **options)


ARGUMENTS = [
    (-1, [np.ones(2)], ValueError, "event_ndims must be a non-negative int.* got -1 for x"),
    ((1, 1), [np.ones(2)], ValueError,
     r"event_ndims must .* one entry for each of the 1 arguments \(x\), got \(1, 1\)"),
    (2, [np.ones(2)], ValueError,
     r"x has shape \[2\], but the engine is declared to take arrays of 2 dimensions"),
    (1, [[1.0, 2.0]], ValueError,
     r"x\[0\] has shape \[\], but .* 1 dimension, event_ndims=1.* a list is a structure"),
    ({"a": 1}, [{"b": np.ones(2)}], ValueError, "event_ndims of x must have the structure of x"),
    (1, [tf.zeros([2], tf.complex64)], TypeError, r"x is complex \(complex64\).* two arguments"),
    (1, [object()], TypeError, "x must be a tensor, variable, array or number"),
]  # fmt: skip


@pytest.mark.parametrize(("event_ndims", "args", "error", "message"), ARGUMENTS)
def test_arguments(event_ndims, args, error, message):
    h = sgtrick.from_numpy(engines.normal, event_ndims=event_ndims)
    with pytest.raises(error, match=message):
        h(*args)


def test_batches_that_do_not_broadcast():
    h = sgtrick.from_numpy(engines.two, event_ndims=(2, 0))
    message = (
        r"x \[3, 2, 2\], y \[4\] have batch shapes that do not broadcast, with event_ndims=\[2, 0\]"
    )
    with pytest.raises(ValueError, match=message):
        h(tf.zeros([3, 2, 2]), tf.zeros([4]))


def test_unknown_ranks():
    h = tf.function(sgtrick.from_numpy(engines.normal), input_signature=[tf.TensorSpec(None)])
    with pytest.raises(ValueError, match=r"x has an unknown rank. Set its rank, .*tf.ensure_shape"):
        h(tf.ones([2]))


def test_methods():
    """It would be called without its object."""

    class Model:
        @sgtrick.from_numpy
        def log_prob(self, x):
            raise AssertionError

    message = r"cannot be a method.*in __init__: self.log_prob = from_numpy\(self._log_prob\)"
    with pytest.raises(TypeError, match=message):
        Model().log_prob(tf.ones([2]))
    with pytest.raises(TypeError, match=message):
        sgtrick.from_numpy(staticmethod(Model.__dict__["log_prob"]._fn))


def second(h):
    return derivative(derivative(h))


VALUE, GRADIENT = "the value of f must", "the gradient of f with respect to x must"
MANY = {"vectorized": True}
THREE = {"value_shape": (3,)}

# The engine returns the reply, which may be a function of its argument, at each of [3, 2] ones.
REPLIES = [
    (1.0, {}, r"must return \(value, gradient\), got float 1\.0, a value without a gradient\. .*"
     "grad=.*from_torch or from_jax"),
    ((1.0, None), {}, "return the value alone and pass grad=False"),
    (None, {}, r"got None: did you forget to return\?"),
    (None, {"grad": False}, r"the value of f must be real numbers, got None: did you forget to re"),
    ((1.0, np.ones(3)), {"grad": "3-point"},
     r"the value of f .* got tuple .*With grad= or vjp=, an engine returns its value alone\."),
    ((1.0, (np.ones(2), np.ones(2))), {}, r"have the shape \[2\], got \[2, 2\]\. It is a tuple, "
     "and f was called with one argument that has gradients, x: return its gradient alone"),
    ((1.0, [1.0], 2.0), {}, r"got tuple \(float 1\.0, list \(float 1\.0\), float 2\.0\)\. With several arguments"),
    ((np.ones([1, 2]), np.ones(2)), {}, VALUE + r" have the shape \[\], got \[1, 2\]"),
    ((1.0, np.ones(3)), {}, GRADIENT + r" have the shape \[2\], got \[3\]"),
    ((1j, np.ones(2)), {}, VALUE + " be real numbers, got complex 1j"),
    (({"a": 1.0}, np.ones(2)), {}, r"got a dict of \['a'\].*several outputs.*value_shape"),
    (("a", np.ones(2)), {}, VALUE + " be real numbers, got str 'a'"),
    ((1.0, np.ones(2) > 0), {}, GRADIENT + " be real numbers, got ndarray"),
    ((1.0, [[1.0], [1.0, 2.0]]), {}, GRADIENT + " be (an array of )?real"),
    # Of arrays.
    ((np.ones(3), np.ones(2)), THREE, GRADIENT + r" have the shape \[3, 2\], got \[2\]"),
    ((np.ones(3), np.ones([3, 2])), THREE | MANY, "must return one value for each batch member"),
    ((np.ones(3), np.ones([3, 2])), THREE | {"vjp": unused},
     VALUE + r" (be an array of real numbers|have the shape \[3\])"),
    (lambda x: (np.ones(n := int(x[0])), np.ones([n, 2])),
     {"value_shape": (None,), "on_error": "raise"},
     VALUE + r" have the same shape for all members .*, got \[1\] and \[2\]"),
    (({"y": 1.0}, {"y": None}), {"value_shape": {"y": ()}},
     r"the gradient of value\['y'\] of f .* be real numbers, got None"),
    # With their usual causes.
    ((np.ones(7), np.ones([7, 2])), {},
     VALUE + r" have the shape \[\], got \[7\]\. .* pass its shape, value_shape=\(7,\)"),
    (lambda x: (x**2, 2 * x), {}, r"must have the shape \[\], got \[2\]\. That is the shape of the "
     r"point\. If the value is an array, .*value_shape=\(2,\); .* sum over the point; .*"
     "event_ndims=0"),
    (lambda x: (np.sum(x**2), 2 * x), MANY, r"must have the shape \[3\], got \[\]\. The engine is "
     "called for .* axis=-1, or leave out vectorized=True"),
]  # fmt: skip

# What products return beside a value that is right.
PRODUCTS = [
    ({"vjp": lambda x, u: None}, derivative,
     r"the VJP of f must be like the arguments, got None: did you forget to return\?"),
    ({"vjp": lambda x, u: (x, x)}, derivative, r"the VJP of f .*must have the shape \[2\]"),
    ({"vjp": lambda x, u: u}, derivative,
     r"the VJP of f with respect to x must have the shape \[2\]"),
    ({"jvp": lambda x, t: t}, forward_derivative, r"of f must have the shape \[\], got \[2\]"),
    ({"hessp": lambda x, v: v[:1]}, second,
     r"the Hessian times v of f with respect to x must have the shape \[2\], got \[1\]"),
    ({"hessp": lambda x, v: (v, v)}, second, r"must have the shape \[2\], got \[2, 2\]"),
]  # fmt: skip


class TestWrongReplies:
    """Not failures, which `on_error` would replace."""

    X = tf.constant([[1.0, 1.0], [2.0, 1.0], [1.0, 1.0]])

    @pytest.mark.parametrize(("reply", "options", "message"), REPLIES)
    def test_of_the_engine(self, reply, options, message):
        fn = reply if callable(reply) else lambda x: reply
        h = sgtrick.from_numpy(fn, **{"on_error": -np.inf, "name": "f", **options})
        with pytest.raises(RAISED, match=f"(?s){message}"):
            h(self.X)
        assert h.failures == 0

    @pytest.mark.parametrize(("product", "derived", "message"), PRODUCTS)
    def test_of_its_products(self, product, derived, message):
        fn = (lambda x: 1.0) if "vjp" in product or "jvp" in product else engines.normal
        h = sgtrick.from_numpy(fn, **product, on_error=-np.inf, name="f")
        with pytest.raises(RAISED, match=f"(?s){message}"):
            tf.function(derived(h))(self.X)
        assert h.failures == 0

    @pytest.mark.parametrize(
        ("gradient", "message"),
        [
            ((1.0,), r"must be a tuple of 2, got tuple \(float 1\.0\)"),
            (({"a": 1.0}, 1.0),
             r"the gradient of f\[0\] must be a dict of \['a', 'b'\], got a dict of \['a'\]"),
            (({"a": 1.0, "b": (1.0, np.ones(2))}, 1.0),
             r"of f with respect to p\['b'\]\[1\] must have the shape \[\], got \[2\]"),
            (({"a": 1.0, "b": (1.0, 1.0)}, 3.0),
             r"respect to k must be None, got float 3\.0: k has a dtype without derivatives"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("by", ["grad", "vjp"])
    def test_structures(self, by, gradient, message):
        given = {"grad": lambda p, k: gradient, "vjp": lambda p, k, u: gradient}
        h = sgtrick.from_numpy(lambda p, k: 1.0, **{by: given[by]}, event_ndims=0, name="f")
        p = {"a": tf.constant(1.0), "b": (tf.constant(1.0), tf.constant(1.0))}
        message = message.replace("the gradient", "the VJP") if by == "vjp" else message
        with pytest.raises((TypeError, ValueError), match=message):
            value_and_gradients(h, p, tf.constant(1))

    def test_a_list_for_one_array(self):
        def f(x):
            return np.sum(x**2), 2 * x

        message = "(?s)f raised TypeError.*x is a list, which is a structure. .* as tf.stack of the"
        with pytest.raises(RuntimeError, match=message):
            sgtrick.from_numpy(f)([self.X, self.X])
        with pytest.raises(ValueError, match=r"must be a list of 2, got ndarray .* as tf.stack of"):
            sgtrick.from_numpy(lambda x: (np.sum(x), np.ones(2)))([self.X, self.X])

    def test_tangents_of_several_arguments(self):
        h = sgtrick.from_numpy(lambda x, a: 1.0, jvp=lambda x, a, t, s: 1.0)
        with pytest.raises(RAISED, match="Vectors like several arguments are one tuple"):
            forward_derivative(h)(self.X, self.X)

    @pytest.mark.parametrize("value", [[3.0], np.full([1, 1], 3.0), 3.0])
    @VECTORIZED
    def test_an_array_of_one_is_one_number(self, value, vectorized):
        h = sgtrick.from_numpy(lambda x: (value, x), vectorized=vectorized)
        np.testing.assert_array_equal(h(tf.ones([1, 2])), [3.0])
        np.testing.assert_array_equal(h(tf.ones([2])), 3.0)

    def test_a_sum_over_a_batch_of_one(self):
        """Would be right for this batch alone."""
        h = sgtrick.from_numpy(lambda x: (np.sum(x), x), vectorized=True)
        with pytest.raises(ValueError, match="must return one value for each batch member"):
            h(tf.ones([1, 2]))


ROW = np.ma.array([1.0, 2.0], mask=[False, True])


class TestFailures:
    @WRAPS
    def test_the_message_of_the_engine_and_its_input(self, wrap):
        """As it was before the engine changed it."""

        def engine(x):
            x *= 2
            return engines.fails_beyond_one(x)

        h = sgtrick.from_numpy(engine)
        match = r"(?s)engine raised ArithmeticError: no solution at 0\.2.*x = \[0\.1, 2\. \]"
        with pytest.raises((RuntimeError, tf.errors.UnknownError), match=match) as caught:
            wrap(h)(tf.constant([[0.5, 0.5], [0.1, 2.0]], tf.float64))
        assert (h.calls, h.failures) == (2, 1)
        if isinstance(caught.value, RuntimeError):
            assert isinstance(caught.value.__cause__, ArithmeticError)

    @WRAPS
    @pytest.mark.parametrize(
        ("name", "vector", "derived"), [("vjp", "u", derivative), ("hessp", "v of x", second)]
    )
    def test_those_of_a_product(self, wrap, name, vector, derived):
        def fails(x, v):
            raise ArithmeticError("no solution")

        fn = (lambda x: 1.0) if name == "vjp" else engines.normal
        h = sgtrick.from_numpy(fn, **{name: fails}, name="f")
        message = rf"(?s){name} of f raised ArithmeticError: no solution.*x = \[.*{vector} = "
        with pytest.raises(RAISED, match=message):
            wrap(derived(h))(tf.ones([2, 2]))
        assert (h.vjp_calls + h.hess_calls, h.failures) == (1, 1)

    @WRAPS
    @pytest.mark.parametrize("products", [False, True])
    def test_the_member_that_failed_has_no_gradient(self, wrap, products):
        """Whichever dimensions the batch has, and whether `fn` or `vjp` gives gradients."""

        def fn(x):
            if x[0] > 1:
                raise ArithmeticError
            return x @ x if products else (x @ x, 2 * x)

        given = {"vjp": lambda x, u: 2 * x * u} if products else {}
        h = sgtrick.from_numpy(fn, **given, on_error=-np.inf)
        x = np.linspace(0, 1, 12).reshape(2, 3, 2)
        expected = 2 * x
        x[0, 2, 0], expected[0, 2] = 2.0, 0.0
        _, (g,) = wrap(value_and_gradients)(h, tf.constant(x))
        np.testing.assert_allclose(g, expected)

    @WRAPS
    def test_a_number_in_the_place_of_failures(self, wrap):
        """The first of which is reported."""
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
        x = tf.constant([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            y, (g,) = wrap(value_and_gradients)(h, x)
            wrap(h)(x[0])
        np.testing.assert_array_equal(y, [-np.inf, -0.5, -np.inf])
        np.testing.assert_array_equal(g, [[0, 0], [0, -1], [0, 0]])
        assert (h.calls, h.failures) == (4, 3)
        (told,) = [w for w in found if w.category is RuntimeWarning]
        message = r"(?s)on_error replaces the first failure\..*fails_beyond_one raised .*x = \[2"
        assert re.match(message, str(told.message))

    @VECTORIZED
    @pytest.mark.parametrize("error", [NameError, AttributeError, ImportError, SyntaxError])
    def test_mistakes_in_the_code_are_not_replaced(self, error, vectorized):
        def engine(x):
            raise error("a mistake")

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=vectorized)
        with pytest.raises(RAISED, match=f"engine raised {error.__name__}: a mistake"):
            h(tf.ones([2, 2]))

    @pytest.mark.parametrize("given", ["grad", "hessp"])
    def test_functions_of_other_arguments_are_not_replaced(self, given):
        def fn(x):
            return 1.0 if given == "grad" else (1.0, x)

        def other(a, b, c):
            raise AssertionError

        h = sgtrick.from_numpy(fn, **{given: other}, on_error=-np.inf)
        number = 2 if given == "hessp" else 1
        what = "fn" if given == "grad" else f"{given} of fn"
        message = (
            rf"{what} is called with {number} arguments by position, but other\(a, b, c\) does"
        )
        with pytest.raises(RAISED, match=message):
            (h if given == "grad" else second(h))(tf.ones([2]))

    @WRAPS
    def test_an_executor_of_the_engine_that_is_lost_is_its_failure(self, wrap):
        def engine(x):
            raise futures.BrokenExecutor("workers of its own")

        y = wrap(sgtrick.from_numpy(engine, on_error=-np.inf))(tf.ones([2]))
        np.testing.assert_array_equal(y, -np.inf)
        with pytest.raises(RAISED, match=r"(?s)engine raised BrokenExecutor: workers of.*x = "):
            wrap(sgtrick.from_numpy(engine))(tf.ones([2]))

    def test_the_engine_s_message_ends_what_graphs_raise(self):
        """Above it TensorFlow tells where the operation was made."""

        def engine(x):
            raise ArithmeticError("the solver did not converge")

        h = sgtrick.from_numpy(engine)

        with pytest.raises(tf.errors.UnknownError) as caught:
            tf.function(derivative(h))(tf.zeros([2]))
        lines = [line for line in str(caught.value).splitlines() if line.strip()]
        last = next(k for k, line in enumerate(lines) if "[[{{node" in line)  # TensorFlow's own
        assert lines[last - 2 : last] == [
            "RuntimeError: engine raised ArithmeticError: the solver did not converge",
            "  x = [0., 0.]",
        ]
        assert "engine.py" not in "".join(lines[last - 12 : last])  # nor our own frames before it


class TestVectorizedEnginesThatFail:
    @WRAPS
    def test_are_asked_again_for_each_member(self, wrap):
        seen = []

        def engine(x, a):
            seen.append((x.shape, a.shape, x.dtype))
            if np.any(x > 1):
                x[:] = np.nan  # what fails may have changed its arguments
                raise ArithmeticError
            return a * np.sum(x, -1), (a[..., None] + 0 * x, np.sum(x, -1))

        h = sgtrick.from_numpy(engine, event_ndims=(1, 0), on_error=7, vectorized=True)
        x = tf.constant([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 3.0]])
        y, (by_x, by_a) = wrap(value_and_gradients)(h, x, tf.constant(2.0))
        np.testing.assert_array_equal(y, [7, 2, 1, 7])
        np.testing.assert_array_equal(by_x, [[0, 0], [2, 2], [2, 2], [0, 0]])
        np.testing.assert_array_equal(by_a, 1.5)
        np.testing.assert_array_equal(x, [[2, 0], [0, 1], [0.5, 0], [0, 3]])
        assert seen == [((4, 2), (4,), float)] + [((1, 2), (1,), float)] * 4
        assert (h.calls, h.failures, h.nonfinite) == (5, 2, 0)
        np.testing.assert_array_equal(wrap(h)(x[0], tf.constant(2.0)), 7)
        assert (h.calls, h.failures) == (6, 3)  # of one member there is nothing to find out

    def test_are_not_asked_again_where_that_is_of_no_use(self):
        h = sgtrick.from_numpy(engines.many_fail_beyond_one, vectorized=True)
        with pytest.raises(RuntimeError, match="ArithmeticError"):
            h(2 * tf.ones([2, 2]))
        assert (h.calls, h.failures, h.nonfinite) == (1, 1, 0)

    def test_for_none_alone(self):
        def engine(x):
            if len(x) > 1:
                raise MemoryError
            return np.sum(x, -1), np.ones_like(x)

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=True)
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [2, 2, 2])
        assert (h.calls, h.failures) == (4, 0)


class TestNonfinite:
    @WRAPS
    @VECTORIZED
    def test_points_are_counted(self, wrap, vectorized):
        """A masked entry is one, which NumPy would replace by anything, without a word."""

        def engine(x):
            total = np.sum(x, -1)
            value = np.ma.masked_where(total > 5, np.where(total > 5, 999.0, total))
            return value, np.ma.masked_greater(np.where(x < 0, -np.inf, x), 3.5)

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        # A gradient that is finite where the value is not, one that is not, both, and neither.
        x = [[3.0, 3.0], [1.0, -1.0], [4.0, 2.0], [1.0, 1.0]]
        y, (g,) = wrap(value_and_gradients)(h, tf.constant(x))
        np.testing.assert_array_equal(y, [np.nan, 0, np.nan, 2])
        np.testing.assert_array_equal(g, [[3, 3], [1, -np.inf], [np.nan, 2], [1, 1]])
        assert h.nonfinite == 3

    @WRAPS
    @pytest.mark.parametrize("given", ["with the value", "vjp", "3-point"])
    def test_the_first_is_reported(self, wrap, given):
        """Else a sampler may stand still, and only the counter knows."""

        def f(x):
            with np.errstate(all="ignore"):
                value, slope = np.log(x[0]), np.array([1 / x[0], 0.0])
            return (value, slope) if given == "with the value" else value

        options = {"vjp": {"vjp": lambda x, u: [u * np.inf, 0.0]}, "3-point": {"grad": "3-point"}}
        h = sgtrick.from_numpy(f, **options.get(given, {}))
        x = tf.constant([[2.0, 0.0], [0.0, 1.0], [0.0, 2.0]], tf.float64)
        x = x[:1] if given == "vjp" else x
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                wrap(value_and_gradients)(h, x)
        message = (
            r"(?s)f returned a value or a derivative that is not finite\..*x = \[[02]\., [01]\."
        )
        (told,) = [w for w in found if w.category is RuntimeWarning]
        assert re.match(message, str(told.message))
        assert h.nonfinite in (2, 4, 8)

    def test_failures_and_gradients_that_are_not_known_are_none(self):
        def engine(x, data):
            if x[0] > 1:
                raise ArithmeticError
            return np.sum(x), (np.ones_like(x), None)

        h = sgtrick.from_numpy(engine, on_error=-np.inf)
        h(tf.constant([[0.0], [2.0]]), tf.ones([2, 1]))
        assert (h.failures, h.nonfinite) == (1, 0)

    @pytest.mark.parametrize(
        ("value", "gradient", "want"),
        [
            (np.ma.array(3, mask=True), np.ma.array([1, 2], mask=[False, True]),
             [np.nan, 1, np.nan]),
            (np.ma.array(3.0), np.ma.array([1.0, 2.0]), [3, 1, 2]),
        ],
        ids=["of integers", "without a mask"],
    )  # fmt: skip
    def test_masked_replies(self, value, gradient, want):
        y, (g,) = value_and_gradients(sgtrick.from_numpy(lambda x: (value, gradient)), tf.ones([2]))
        np.testing.assert_array_equal([y, *g], want)

    @pytest.mark.parametrize(
        ("rows", "want"),
        [
            ([ROW, np.array([3.0, 4.0])], [[1, np.nan], [3, 4]]),
            ([[ROW, [3, 4]], ([5, 6], ROW)], [[[1, np.nan], [3, 4]], [[5, 6], [1, np.nan]]]),
            (((1.0, np.ma.masked), [3.0, 4.0]), [[1, np.nan], [3, 4]]),
            ([[[[1, np.ma.array(2, mask=True)]]]], [[[[1, np.nan]]]]),
            ([[np.ma.array([1.0, 2.0])]], [[[1, 2]]]),
        ],
    )
    @pytest.mark.parametrize("of", ["the gradient", "the value"])
    def test_masked_entries_of_nested_lists(self, rows, want, of):
        x = np.ones(np.shape(want))
        if of == "the gradient":
            h = sgtrick.from_numpy(lambda x: (3.0, rows), event_ndims=x.ndim)
            _, (came,) = value_and_gradients(h, tf.constant(x))
        else:
            came = sgtrick.from_numpy(lambda x: rows, grad=False, value_shape=x.shape)(x[0])
        np.testing.assert_array_equal(came, np.broadcast_to(want, came.shape))
