"""Function forms under `tf.vectorized_map`, and the graphs that they make.

    python -m pytest -s tests/benchmarks/bench_graphs.py

An elementwise `log(1 + exp(x))` with a rule of its own, float32. Mapped over 5,000 numbers, forward
and backward in a `tf.function`, as ratios to the function by autodiff; and traced, in chains of 100
to 1,000 calls with gradient, as ratios to `tf.custom_gradient` with the same rule. It prints
the medians of the ratios, turn by turn; the numbers of operations stand in `extra_info`.
"""

import pytest
import tensorflow as tf
from bench_custom_gradient import forward_and_backward

import sgtrick
from bench_custom_vjp import FORMS


def native(x):
    return tf.math.log(1 + tf.exp(x))


by_jvp = sgtrick.custom_jvp(native)


@by_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return native(x), tf.sigmoid(x) * t


MAPPED = {
    "autodiff": native,
    "custom_vjp": FORMS["custom_vjp"],
    "with_gradient": FORMS["with_gradient"],
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x: (native(x), tf.sigmoid(x))
    ),
    "custom_jvp": by_jvp,
    "clip_gradient": lambda x: sgtrick.clip_gradient(native(x), -1.0, 1.0),
}


TRACED = {**FORMS, "custom_jvp": by_jvp}


def test_mapped(take_turns):
    x = tf.random.stateless_normal([5_000], [0, 1])
    runs = {
        name: tf.function(forward_and_backward(lambda x, form=form: tf.vectorized_map(form, x)))
        for name, form in MAPPED.items()
    }
    take_turns("vectorized_map, 5,000 members", runs, (x,), 5_000)


def chained(form, calls):
    def run(x):
        for _ in range(calls):
            x = form(x)
        return x

    return run


def traced(f):
    return tf.function(f, autograph=False).get_concrete_function(tf.TensorSpec([3]))


@pytest.mark.parametrize("calls", [100, 300, 1_000])
def test_traced(benchmark, take_turns, calls):
    chains = {name: chained(form, calls) for name, form in TRACED.items()}
    runs = {
        name: lambda chain=chain: traced(forward_and_backward(chain))
        for name, chain in chains.items()
    }
    benchmark.extra_info["operations"] = {
        name: {
            "with gradient": len(runs[name]().graph.get_operations()),
            "forward": len(traced(chain).graph.get_operations()),
        }
        for name, chain in chains.items()
    }
    take_turns(f"tracing {calls:,} calls", runs, (), 50_000, rounds=5)
