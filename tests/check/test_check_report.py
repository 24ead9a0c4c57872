"""What `check_gradient` refuses to check, and its report as text and as a plot."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from checked_functions import MODES, density, density_gradient, report
from sgtrick import check_gradient
from shared import constant

REFUSED = [
    (
        ValueError,
        r"not deterministic.*y was first .* then",
        lambda x: x * tf.random.uniform([], dtype=x.dtype),
        constant(1.0),
    ),
    (ValueError, r"y\[1\], which f returns, is nan at x", tf.math.log, constant([1.0, -1.0])),
    (
        ValueError,
        r"x\['a'\] is not finite",
        lambda x: x["a"],
        {"a": constant([1.0, np.inf])},
    ),
    (TypeError, r"x is complex.*real and imaginary", tf.abs, tf.constant(1j)),
    (
        TypeError,
        r"y, which f returns, is complex.*real",
        lambda x: tf.complex(x, x),
        constant(1.0),
    ),
    (TypeError, "x has nothing to differentiate with respect to", lambda x: x, 3),
    (TypeError, "floating and not empty", tf.reduce_sum, tf.zeros([0])),
    (TypeError, "f returns nothing of a floating dtype", lambda x: tf.cast(x, tf.int32), 3.0),
    (TypeError, "or only empty tensors", lambda x: x[:0], [3.0]),
    (TypeError, "y, the result of <lambda>, must be a tensor", lambda x: None, 3.0),
    (  # nothing is guessed: they may be a value and its gradient
        TypeError,
        r"pass sgtrick\.from_value_and_gradient.* as a list",
        lambda x: (tf.sin(x), tf.cos(x)),
        constant([1.0, 2.0]),
    ),
]


class TestRefusals:
    @MODES
    def test_a_state_that_changes_later(self, mode):
        calls = iter(range(10**6))

        def f(x):
            return x if next(calls) < 10 else 2 * x

        with pytest.raises(ValueError, match="not deterministic"):
            check_gradient(f, constant(1.0), mode=mode)

    @pytest.mark.parametrize(("error", "message", "f", "x"), REFUSED)
    def test_says_why(self, error, message, f, x):
        with pytest.raises(error, match=message):
            check_gradient(f, x)

    def test_in_a_graph(self):
        with pytest.raises(RuntimeError, match="runs eagerly"):
            tf.function(lambda x: check_gradient(tf.sin, x) and x)(constant(1.0))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"order": 3}, "order must be 1 or 2, got 3"),
            ({"mode": "fast"}, "mode must be 'full' or 'random', got 'fast'"),
            ({"atol": np.nan}, "atol must be None or a non-negative number"),
            ({"rtol": "1e-3"}, "rtol must be None or a non-negative number, got '1e-3'"),
            ({"max_step": 0.0}, "max_step must be None, the largest step, or a pair"),
            ({"max_step": (1e-2, 1e-4)}, "smallest and the largest step"),
            ({"max_step": (None, 0.1)}, r"max_step must be None.*, got \(None, 0.1\)"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            check_gradient(tf.sin, 1.0, **options)


class TestReport:
    @pytest.fixture
    def found(self):
        off = constant([1.0, 1.5, 1.01])
        f = sgtrick.with_gradient(density, lambda x: density_gradient(x) * off)
        return report(f, constant([0.5, 2.0, -1.0]))

    def test_a_table_that_is_sorted_by_error(self, found):
        summary, header, *rows = str(found).splitlines()
        assert summary == f"3 entries: 2 wrong, 1 ok. {found.evaluations} evaluations."
        verdict = header.index("verdict")
        shown = [(row.split()[0], row[verdict:]) for row in rows]
        assert shown == [("x[1]", "wrong"), ("x[2]", "wrong"), ("x[0]", "ok")]
        assert [(entry.name, entry.verdict) for entry in found.entries] == shown

    def test_a_long_table_is_cut(self):
        text = str(check_gradient(lambda x: tf.reduce_sum(x**2), constant(np.ones(30))))
        assert "... and 10 more with smaller errors" in text

    @pytest.mark.parametrize(
        ("factor", "message"),
        [
            (-1.0, "The gradient is right but for its sign, which is reversed."),
            (0.0, "The gradient is zero everywhere."),
            (2.0, "The gradient is twice the numerical one."),
            (0.5, "The gradient is half of the numerical one."),
            (1.37, "The gradient is 1.37 times the numerical one."),
            (1 + 8e-6, "All errors are below 1e-05: .* solver's tolerance, pass rtol=1e-05."),
            (1 + 4e-4, "All errors are below 1e-03: .* solver's tolerance, pass rtol=1e-03."),
            (1 + 4e-3, r"3 entries: 3 wrong\. \d+ evaluations\.\n"),  # not "1 times"
        ],
    )
    def test_what_all_errors_share_is_said(self, factor, message):
        f = sgtrick.with_gradient(density, lambda x: factor * density_gradient(x))
        x = constant([0.5, 2.0, -1.0])
        with pytest.raises(sgtrick.GradientCheckError, match=message) as caught:
            check_gradient(f, x)
        if "rtol" in message:
            assert check_gradient(f, x, rtol=float(message[:-1].rpartition("=")[2])).passed
        else:
            assert caught.value.report.count("wrong") == 3

    def test_what_one_error_shares_with_none_is_not_said(self, found):
        assert str(found).splitlines()[0].endswith("evaluations.")
        odd = sgtrick.with_gradient(tf.sin, lambda x: 1.37 * tf.cos(x))
        assert str(report(odd, 0.5)).splitlines()[0].endswith("evaluations.")

    def test_an_infinite_entry_hides_no_other(self):
        f = sgtrick.with_gradient(lambda x: tf.reduce_sum(x**2), lambda x: [np.inf, 5.0, 7.0] * x)
        found = report(f, constant([1.0, 2.0, 3.0]))
        assert found.count("wrong") == 3
        assert str(found).splitlines()[0].endswith("evaluations.")

    def test_it_is_false_if_the_check_failed(self, found):
        assert not found
        assert report(tf.sin, 0.5)

    def test_errors(self, found):
        error = sgtrick.GradientCheckError(found)
        assert error.report is found
        assert "wrong at x[1]: embedded" in str(error)
        assert str(found) in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)

    def test_numbers(self, found):
        worst = found.worst
        assert worst.absolute == pytest.approx(abs(worst.embedded - worst.numerical))
        assert worst.relative == pytest.approx(1 / 3, rel=1e-6)
        assert worst.embedded == pytest.approx(1.5 * worst.numerical)
