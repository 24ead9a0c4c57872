"""`custom_vjp` and `with_gradient` beside `tf.custom_gradient` with the same rule, in one run.

    python -m pytest -s tests/benchmarks/bench_custom_vjp.py

Forward and backward of an elementwise `log(1 + exp(x))`, float32. It prints the medians of
the ratios to `tf.custom_gradient`, turn by turn.
"""

import pytest
import tensorflow as tf
from bench_custom_gradient import MODES

import sgtrick


def value_and_rule(x):
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))


FORMS = {
    "tf.custom_gradient": tf.custom_gradient(value_and_rule),
    "custom_vjp": sgtrick.custom_vjp(value_and_rule),
    "with_gradient": sgtrick.with_gradient(lambda x: tf.math.log(1 + tf.exp(x)), tf.sigmoid),
}


@pytest.mark.parametrize("n", [1_000, 1_000_000])
@pytest.mark.parametrize("mode", ["eager", "tf.function", "XLA"])
def test_elementwise_function(take_turns, mode, n):
    x = tf.random.stateless_normal([n], [0, 1])
    runs = {name: MODES[mode](form) for name, form in FORMS.items()}
    take_turns(f"{mode}, {n:,} entries", runs, (x,), n)
