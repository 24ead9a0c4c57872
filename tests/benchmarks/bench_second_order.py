"""What second derivatives cost where nobody asks for them: a tape around that watches `x`, too.

    python -m pytest tests/benchmarks/bench_second_order.py

Value and gradient inside of an outer tape, as in a training step or a sampler that somebody looks
at, in relation to the same without it. In eager the outer tape records the gradient; so it does of
native code, whose ratio stands beside ours.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick

N = 1_000
X = tf.constant(np.random.default_rng(0).normal(size=N))


def gradient_alone(f):
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return y, tape.gradient(y, x)

    return run


def under_a_tape(f):
    inside = gradient_alone(f)

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, gradient = inside(x)
        del tape
        return y, gradient

    return run


def product(x, v):
    return 2 * v


FORMS = {
    "native": lambda x: tf.reduce_sum(x**2),
    "custom_gradient": lambda x: sgtrick.custom_gradient(tf.reduce_sum(x**2), 2 * x, x),
    "custom_gradient, hx=": lambda x: sgtrick.custom_gradient(
        tf.reduce_sum(x**2), 2 * x, x, hx=lambda v: 2 * v
    ),
    "from_numpy": sgtrick.from_numpy(lambda x: (np.sum(x**2), 2 * x)),
    "from_numpy, hessp=": sgtrick.from_numpy(lambda x: (np.sum(x**2), 2 * x), hessp=product),
    "with_gradient": sgtrick.with_gradient(lambda x: tf.reduce_sum(x**2), lambda x: 2 * x),
}
MODES = {"eager": lambda f: f, "tf.function": tf.function}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_watched(take_turns, form, mode):
    f, made = FORMS[form], MODES[mode]
    rivals = {"alone": made(gradient_alone(f)), "under a tape": made(under_a_tape(f))}
    take_turns(f"{form}, {mode}", rivals, (X,), N)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["custom_gradient", "from_numpy"])
def test_known_hessian(take_turns, form, mode):
    """A Hessian that is known, beside none."""
    known = {"custom_gradient": "custom_gradient, hx=", "from_numpy": "from_numpy, hessp="}[form]
    made = MODES[mode]
    rivals = {
        "alone": made(gradient_alone(FORMS[form])),
        "with a Hessian": made(gradient_alone(FORMS[known])),
    }
    take_turns(f"{form}, {mode}", rivals, (X,), N)
