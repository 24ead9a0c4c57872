"""What a caller's function finds around it, wherever its derivatives are computed."""

import contextvars
import threading

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, POINTS, exact
from matrix import spread
from shared import derivative, forward_derivative, mapped

FACTOR = contextvars.ContextVar("FACTOR", default=np.nan)
LOCAL = threading.local()


def both_rules(f, slope):
    form = OF_SLOPE["custom_vjp"](f, slope)
    form.defjvp(lambda xs, ts: (form(*xs), slope(xs[0]) * ts[0]))
    return form


def itself(f, slope):
    """A rule that calls its own function."""
    form = sgtrick.custom_jvp(f)
    form.defjvp(lambda xs, ts: (form(*xs), slope(xs[0]) * ts[0]))
    return form


FORMS = OF_SLOPE | {"both rules": both_rules, "custom_jvp of itself": itself}

# Each with the order of the derivative.
WAYS = {
    "forward": (forward_derivative, 1),
    "forward in a function": (lambda f: tf.function(forward_derivative(f)), 1),
    "forward around a function": (lambda f: forward_derivative(tf.function(f)), 1),
    "forward around a map": (lambda f: forward_derivative(mapped(f)), 1),
    "forward twice": (lambda f: forward_derivative(forward_derivative(f)), 2),
    "forward over reverse": (lambda f: forward_derivative(derivative(f)), 2),
    "reverse over forward": (lambda f: derivative(forward_derivative(f)), 2),
    "forward over a map of reverse": (lambda f: forward_derivative(mapped(derivative(f))), 2),
}


class TestContext:
    @pytest.fixture(autouse=True)
    def values(self):
        token = FACTOR.set(2.0)
        LOCAL.factor = 1.5
        yield
        FACTOR.reset(token)
        del LOCAL.factor

    @pytest.mark.parametrize(("form", "way"), spread(FORMS, WAYS, together=1))
    def test_is_that_of_the_caller(self, form, way):
        def times(f):
            return lambda x: FACTOR.get() * getattr(LOCAL, "factor", np.nan) * f(x)

        h = FORMS[form](times(tf.asinh), times(lambda x: (1 + x**2) ** -0.5))
        differentiated, order = WAYS[way]
        found = differentiated(h)(tf.constant(POINTS))
        np.testing.assert_allclose(found, 3 * exact(order), rtol=1e-9)

    @pytest.mark.parametrize("form", ["custom_vjp", "custom_jvp"])
    def test_of_a_rule_lasts(self, form):
        """What it keeps in thread-local data for the first time is there afterwards."""
        kept = threading.local()

        def slope(x):
            kept.calls = getattr(kept, "calls", 0) + 1
            return (1 + x**2) ** -0.5

        forward_derivative(FORMS[form](tf.asinh, slope))(tf.constant(POINTS))
        assert kept.calls
