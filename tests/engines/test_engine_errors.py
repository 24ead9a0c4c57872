"""What engines that fail, or return what they must not, raise or are replaced by."""

import re
import warnings
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import engine_functions as engines
import sgtrick
from shared import WRAPS, derivative, value_and_gradients

RAISED = (RuntimeError, TypeError, ValueError, tf.errors.OpError)


class TestErrors:
    @WRAPS
    def test_the_message_of_the_engine_and_its_input(self, wrap):
        h = sgtrick.from_numpy(engines.fails_beyond_one)
        match = (
            r"(?s)fails_beyond_one raised ArithmeticError: no solution at 0\.1.*x = \[0\.1, 2\. \]"
        )
        with pytest.raises((RuntimeError, tf.errors.UnknownError), match=match) as caught:
            wrap(h)(tf.constant([[0.5, 0.5], [0.1, 2.0]], tf.float64))
        assert (h.calls, h.failures) == (2, 1)
        if isinstance(caught.value, RuntimeError):
            assert isinstance(caught.value.__cause__, ArithmeticError)

    @WRAPS
    def test_the_input_as_it_was_before_the_engine_changed_it(self, wrap):
        def engine(x):
            x *= 2
            raise ArithmeticError

        with pytest.raises((RuntimeError, tf.errors.UnknownError), match=r"x = \[1\., 2\.\]"):
            wrap(sgtrick.from_numpy(engine))(tf.constant([1.0, 2.0]))

    @WRAPS
    def test_a_number_in_the_place_of_failures(self, wrap):
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
        y, (g,) = wrap(value_and_gradients)(h, tf.constant([[2.0, 0.0], [0.0, 1.0]]))
        np.testing.assert_array_equal(y, [-np.inf, -0.5])
        np.testing.assert_array_equal(g, [[0, 0], [0, -1]])
        assert (h.calls, h.failures) == (2, 1)

    def test_the_first_that_is_replaced_is_reported(self):
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
        told = r"(?s)on_error replaces the first failure\..*fails_beyond_one raised .*x = \[2"
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            h(tf.constant([[2.0, 0.0], [3.0, 1.0]]))
            h(tf.constant([4.0, 0.0]))
        assert [w.category for w in found] == [RuntimeWarning]
        assert re.match(told, str(found[0].message))
        assert h.failures == 3

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    @pytest.mark.parametrize("error", [NameError, AttributeError, ImportError, SyntaxError])
    def test_mistakes_in_the_code_are_not_replaced(self, wrap, error, vectorized):
        def engine(x):
            raise error("a mistake")

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=vectorized)
        with pytest.raises(RAISED, match=f"engine raised {error.__name__}: a mistake"):
            wrap(h)(tf.ones([2, 2]))

    @WRAPS
    @pytest.mark.parametrize("given", ["grad", "hessp", "hess"])
    def test_functions_of_other_arguments_are_not_replaced(self, wrap, given):
        def fn(x):
            value = np.sum(x)
            return value if given == "grad" else (value, np.ones_like(x))

        def other(a, b, c):
            raise AssertionError

        h = sgtrick.from_numpy(fn, **{given: other}, on_error=-np.inf)
        number = 2 if given == "hessp" else 1
        what = "fn" if given == "grad" else f"{given} of fn"
        message = (
            rf"{what} is called with {number} arguments by position, but other\(a, b, c\) does"
        )
        with pytest.raises((TypeError, *RAISED), match=message):
            wrap(h if given == "grad" else derivative(derivative(h)))(tf.ones([2]))

    @WRAPS
    def test_an_executor_of_the_engine_that_is_lost_is_its_failure(self, wrap):
        def engine(x):
            raise futures.BrokenExecutor("workers of its own")

        y = wrap(sgtrick.from_numpy(engine, on_error=-np.inf))(tf.ones([2]))
        np.testing.assert_array_equal(y, -np.inf)
        with pytest.raises(RAISED, match=r"(?s)engine raised BrokenExecutor: workers of.*x = "):
            wrap(sgtrick.from_numpy(engine))(tf.ones([2]))

    @WRAPS
    def test_a_vectorized_engine_is_asked_again_for_each_member(self, wrap):
        seen = []

        def engine(x, a):
            seen.append((x.shape, a.shape))
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
        assert seen == [((4, 2), (4,))] + [((1, 2), (1,))] * 4
        assert (h.calls, h.failures) == (5, 2)
        np.testing.assert_array_equal(wrap(h)(x[0], tf.constant(2.0)), 7)
        assert (h.calls, h.failures) == (6, 3)  # of one member there is nothing to find out

    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    def test_a_vectorized_engine_gets_its_own_dtype_each_time(self, on_error):
        """And is asked again only if that is of use."""
        seen = []

        def engine(x):
            seen.append(x.dtype)
            x[:] = np.nan
            raise ArithmeticError

        h = sgtrick.from_numpy(engine, vectorized=True, on_error=on_error)
        x = tf.ones([2, 2], tf.float32)
        if on_error == "raise":
            with pytest.raises(RuntimeError, match="ArithmeticError"):
                h(x)
            assert (h.calls, h.failures, h.nonfinite) == (1, 1, 0)
        else:
            np.testing.assert_array_equal(h(x), [-np.inf, -np.inf])
            assert (h.calls, h.failures, h.nonfinite) == (3, 2, 0)
        assert set(seen) == {np.dtype("float64")}
        np.testing.assert_array_equal(x, tf.ones([2, 2]))

    def test_a_vectorized_engine_that_fails_for_none_alone(self):
        def engine(x):
            if len(x) > 1:
                raise MemoryError
            return np.sum(x, -1), np.ones_like(x)

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=True)
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [2, 2, 2])
        assert (h.calls, h.failures) == (4, 0)

    @WRAPS
    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            (
                1.0,
                r"must return \(value, gradient\), got float 1\.0, a value without a gradient\. .*grad=.*from_torch or from_jax",
            ),
            (np.ones(2), r"got ndarray of shape \[2\] and dtype float64, a value without"),
            ((1.0, None), r"got tuple \(float 1\.0, None\), a value without"),
            (None, r"got None"),
            (
                (1.0, [1.0], 2.0),
                r"got tuple \(float 1\.0, list \(float 1\.0\), float 2\.0\)\. With several arguments",
            ),
            (
                (np.ones([1, 2]), np.ones(2)),
                r"the value of f must have the shape \[\], got \[1, 2\]",
            ),
            ((1.0, np.ones(3)), r"f with respect to x must have the shape \[2\], got \[3\]"),
            ((1.0, 1.0), r"gradient of f with respect to x must have the shape \[2\], got \[\]"),
            ((1j, np.ones(2)), r"the value of f must be real numbers, got complex 1j"),
            ((True, np.ones(2)), r"the value of f must be real numbers, got bool True"),
            (({"a": 1.0}, np.ones(2)), r"got a dict of \['a'\].*several outputs.*value_shape"),
            (("a", np.ones(2)), r"the value of f must be real numbers, got str 'a'"),
            ((1.0, ["a", "b"]), r"the gradient of f with respect to x must be real numbers"),
            ((1.0, [[1.0], [1.0, 2.0]]), r"of f with respect to x must be (an array of )?real"),
        ],
    )
    def test_wrong_replies(self, wrap, on_error, reply, message):
        def f(x):
            return reply

        h = sgtrick.from_numpy(f, on_error=on_error)
        with pytest.raises(RAISED, match=f"(?s){message}"):
            wrap(h)(tf.zeros([2]))
        assert h.failures == 0

    @pytest.mark.parametrize(
        ("gradient", "message"),
        [
            ((1.0,), r"must be a tuple of 2, got tuple \(float 1\.0\)"),
            (1.0, r"must be a tuple of 2, got float 1\.0"),
            (
                ({"a": 1.0}, 1.0),
                r"the gradient of f\[0\] must be a dict of \['a', 'b'\], got a dict of \['a'\]",
            ),
            (({"a": 1.0, "b": (1.0,)}, 1.0), r"the gradient of f\[0\]\['b'\] must be a tuple of 2"),
            (
                ({"a": 1.0, "b": (1.0, np.ones(2))}, 1.0),
                r"of f with respect to p\['b'\]\[1\] must have the shape \[\], got \[2\]",
            ),
            (({"a": 1.0, "b": (1.0, 1.0)}, None, 1.0), r"must be a tuple of 2"),
            (
                ({"a": 1.0, "b": (1.0, 1.0)}, 3.0),
                r"respect to k must be None, got float 3\.0: k has a dtype without derivatives",
            ),
        ],
    )
    def test_wrong_structures(self, gradient, message):
        def f(p, k):
            return 1.0, gradient

        h = sgtrick.from_numpy(f, event_ndims=0)
        with pytest.raises((TypeError, ValueError), match=message):
            h({"a": tf.constant(1.0), "b": (tf.constant(1.0), tf.constant(1.0))}, tf.constant(1))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"dtype": "complex128"},
                TypeError,
                "dtype must be a real floating dtype such as 'float64', got 'complex128'",
            ),
            ({"dtype": int}, TypeError, "got <class 'int'>"),
            ({"dtype": "no"}, TypeError, "got 'no'"),
            ({"dtype": None}, TypeError, "dtype must be .* got None"),
            ({"on_error": np.complex64(1j)}, ValueError, "on_error must be .* got .*1j"),
            (
                {"on_error": "ignore"},
                ValueError,
                "on_error must be 'raise' or a number such as -np.inf, got 'ignore'",
            ),
            ({"on_error": None}, ValueError, "got None"),
            ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor, .*got 4"),
            ({"grad": 4}, TypeError, "grad must be a function, got int"),
            ({"hessp": 4}, TypeError, "hessp must be a function, got int"),
            ({"hess": np.eye(2)}, TypeError, "hess must be a function, got ndarray"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            sgtrick.from_numpy(engines.normal, **options)

    @pytest.mark.parametrize(
        ("event_ndims", "args", "message"),
        [
            (-1, [np.ones(2)], "event_ndims must be a non-negative int.* got -1 for x"),
            ("a", [np.ones(2)], "got 'a' for x"),
            (
                (1, 1),
                [np.ones(2)],
                r"event_ndims must .* one entry for each of the 1 arguments \(x\), got \(1, 1\)",
            ),
            (
                2,
                [np.ones(2)],
                r"x has shape \[2\], but the engine is declared to take arrays of 2 dimensions",
            ),
            (
                1,
                [[1.0, 2.0]],
                r"x\[0\] has shape \[\], but the engine .* 1 dimension, event_ndims=1.* a list is a structure",
            ),
            ({"a": 1}, [{"b": np.ones(2)}], "the event_ndims of x must have the structure of x"),
        ],
    )
    def test_event_ndims(self, event_ndims, args, message):
        h = sgtrick.from_numpy(engines.normal, event_ndims=event_ndims)
        with pytest.raises(ValueError, match=message):
            h(*args)

    def test_event_ndims_of_numpy(self):
        h = sgtrick.from_numpy(engines.normal, event_ndims=np.int64(1))
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [-1, -1, -1])

    def test_event_ndims_of_an_unknown_rank(self):
        run = tf.function(sgtrick.from_numpy(engines.normal), input_signature=[tf.TensorSpec(None)])
        with pytest.raises(
            tf.errors.OpError, match=r"x has shape \[\], but the engine is declared"
        ):
            run(1.0)

    @WRAPS
    def test_batches_that_do_not_broadcast(self, wrap):
        h = sgtrick.from_numpy(engines.two, event_ndims=(2, 0))
        message = r"x \[3, 2, 2\], y \[4\] have batch shapes that do not broadcast, with event_ndims=\[2, 0\]"
        with pytest.raises(ValueError, match=message):
            wrap(h)(tf.zeros([3, 2, 2]), tf.zeros([4]))

    def test_unknown_ranks_of_several_arguments(self):
        h = sgtrick.from_numpy(lambda x, k: (np.sum(x) * k, (x, None)), event_ndims=(2, 0))
        graph = tf.function(h, input_signature=[tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)])
        x, k = tf.ones([2, 3, 3]), tf.constant([1, 2])
        np.testing.assert_array_equal(graph(x, k), [9, 18])
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="event_ndims=2, but x has fewer dimensions"
        ):
            graph(tf.ones([3]), tf.ones([5], tf.int32))
        assert h.calls == 2

    def test_complex_and_inconvertible_arguments(self):
        h = sgtrick.from_numpy(engines.normal)
        with pytest.raises(TypeError, match=r"x is complex \(complex64\).* two arguments"):
            h(tf.zeros([2], tf.complex64))
        with pytest.raises(TypeError, match="x must be a tensor, variable, array or number"):
            h(object())


class TestNonfinite:
    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_points_are_counted(self, wrap, vectorized):
        def engine(x):
            value = np.where(x[..., 0] > 3, np.nan, np.sum(x, -1))
            gradient = np.where(x < 0, np.inf, 1.0)
            return value, gradient

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        # A gradient that is finite where the value is NaN, one that is not, both, and neither.
        wrap(h)(tf.constant([[4.0, 1.0], [1.0, -1.0], [4.0, -1.0], [1.0, 1.0]]))
        assert h.nonfinite == 3

    def test_failures_and_gradients_that_are_not_known_are_none(self):
        def engine(x, data):
            if x[0] > 1:
                raise ArithmeticError
            return np.sum(x), (np.ones_like(x), None)

        h = sgtrick.from_numpy(engine, on_error=-np.inf)
        h(tf.constant([[0.0], [2.0]]), tf.ones([2, 1]))
        assert (h.failures, h.nonfinite) == (1, 0)

    def test_aux_does_not_count(self):
        for reply, vectorized in (((1.0, np.nan), False), (([1.0], [np.nan]), True)):
            h = sgtrick.from_numpy(lambda x: (reply, x), has_aux=True, vectorized=vectorized)  # noqa: B023
            h(tf.ones([1, 2]))
            assert h.nonfinite == 0


class TestMaskedReplies:
    """NumPy drops masks without a word, and what is under them is anything."""

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_are_nan_where_masked(self, wrap, vectorized):
        def engine(x):
            total = np.sum(x, -1)
            value = np.ma.masked_where(total > 5, np.where(total > 5, 999.0, total))
            return value, np.ma.masked_greater(x, 3.5)

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        y, (g,) = wrap(value_and_gradients)(h, tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]))
        np.testing.assert_array_equal(y, [3, np.nan, 5])
        np.testing.assert_array_equal(g, [[1, 2], [3, np.nan], [np.nan, 0]])
        assert h.nonfinite == 2

    def test_of_integers(self):
        h = sgtrick.from_numpy(
            lambda x: (np.ma.array(3, mask=True), np.ma.array([1, 2], mask=[False, True]))
        )
        y, (g,) = value_and_gradients(h, tf.ones([2]))
        assert np.isnan(y)
        np.testing.assert_array_equal(g, [1, np.nan])

    def test_without_a_mask_are_what_they_are(self):
        h = sgtrick.from_numpy(lambda x: (np.ma.array(3.0), np.ma.array(x)))
        y, (g,) = value_and_gradients(h, tf.ones([2]))
        assert y == 3
        np.testing.assert_array_equal(g, [1, 1])


class TestUsualCauses:
    @WRAPS
    @pytest.mark.parametrize(
        ("engine", "options", "message"),
        [
            (
                lambda x: (x**2, 2 * x),
                {},
                r"must have the shape \[\], got \[2\]\. That is the shape of the point\. If the value is an array, .*sum over the point; .*event_ndims=0",
            ),
            (
                lambda x: (x**2, 2 * x),
                {"vectorized": True},
                r"must have the shape \[3\], got \[3, 2\]\. That is the shape of the point\. .*value_shape=\(2,\).* sum",
            ),
            (
                lambda x: (np.sum(x**2), 2 * x),
                {"vectorized": True},
                r"must have the shape \[3\], got \[\]\. The engine is called for .* axis=-1, or leave out vectorized=True",
            ),
        ],
    )
    def test_of_wrong_shapes(self, wrap, engine, options, message):
        with pytest.raises(RAISED, match=message):
            wrap(sgtrick.from_numpy(engine, **options))(tf.ones([3, 2]))

    @pytest.mark.parametrize("value", [[3.0], np.full([1, 1], 3.0), 3.0])
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_an_array_of_one_is_one_number(self, value, vectorized):
        h = sgtrick.from_numpy(lambda x: (value, x), vectorized=vectorized)
        np.testing.assert_array_equal(h(tf.ones([1, 2])), [3.0])
        np.testing.assert_array_equal(h(tf.ones([2])), 3.0)

    def test_a_sum_over_a_batch_of_one(self):
        """Would be right for this batch alone."""
        h = sgtrick.from_numpy(lambda x: (np.sum(x), x), vectorized=True)
        with pytest.raises(ValueError, match="must return one value for each batch member"):
            h(tf.ones([1, 2]))

    def test_of_other_shapes(self):
        with pytest.raises(ValueError, match=r"got \[7\]\. .* pass its shape, value_shape=\(7,\)"):
            sgtrick.from_numpy(lambda x: (np.ones(7), x))(tf.ones([2]))


def test_the_engine_s_message_ends_what_graphs_raise():
    """Above it are forty lines of where TensorFlow Probability made the operation."""

    def engine(x):
        raise ArithmeticError("the solver did not converge")

    h = sgtrick.from_numpy(engine)

    @tf.function(autograph=False)
    def sample():
        kernel = tfp.mcmc.HamiltonianMonteCarlo(h, 0.1, 3)
        return tfp.mcmc.sample_chain(3, tf.zeros([2]), kernel=kernel, trace_fn=None, seed=[1, 2])

    with pytest.raises(tf.errors.UnknownError) as caught:
        sample()
    lines = [line for line in str(caught.value).splitlines() if line.strip()]
    last = next(k for k, line in enumerate(lines) if "[[{{node" in line)  # TensorFlow's own
    assert (
        lines[last - 2]
        == "RuntimeError: engine raised ArithmeticError: the solver did not converge"
    )
    assert lines[last - 1] == "  x = [0., 0.]"
    assert "engine.py" not in "".join(lines[last - 12 : last])  # nor our own frames before it
