"""Peak memory of `custom_vjp` beside `tf.custom_gradient`, with a loop in the function.

    python -m pytest -s tests/benchmarks/bench_memory.py

Forward and backward of 20 steps that draw random numbers, so that TensorFlow cannot prune them, over
10,000,000 entries of float32. A peak is that of a process, so each has one of its own.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FORMS = ["tf.custom_gradient", "custom_vjp"]
MODES = ["inside tf.function", "around tf.function", "eager"]
N, STEPS = 10_000_000, 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a program")
@pytest.mark.parametrize("mode", MODES)
def test_loop_in_the_function(mode):
    native, form = (
        int(subprocess.run([sys.executable, __file__, name, mode], **CAPTURED).stdout)
        for name in FORMS
    )
    print(f"\n{mode}: {native / 1024:.0f} MiB, custom_vjp {form / native:.3f} times that")
    assert form <= 1.1 * native


CAPTURED = {"check": True, "stdout": subprocess.PIPE, "text": True}


def growth(name, mode):
    """By how many KiB the peak grows when the form runs in this process."""
    import tensorflow as tf

    import sgtrick

    def f(x):
        n = tf.size(x)

        def step(i, y):
            return i + 1, tf.sin(y + tf.random.uniform([n]))

        # One after the other: else several steps may draw at once.
        _, y = tf.while_loop(lambda i, _: i < STEPS, step, (0, x), parallel_iterations=1)
        return y, lambda upstream: 2 * upstream

    form = {"tf.custom_gradient": tf.custom_gradient, "custom_vjp": sgtrick.custom_vjp}[name](f)
    form = tf.function(form) if mode == "around tf.function" else form

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = form(x)
        return y, tape.gradient(y, x)

    run = tf.function(run) if mode == "inside tf.function" else run
    run(tf.ones([3]))
    x = tf.ones([N])
    before = peak()
    run(x)
    return peak() - before


def peak():
    """The peak memory of this program in KiB.

    That of `resource.getrusage` starts at the peak of the process that started it.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB"))


if __name__ == "__main__":
    print(growth(*sys.argv[1:]))
