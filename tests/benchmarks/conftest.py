import time

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture
def take_turns(benchmark):
    """Runs rivals by turns, so that whatever else the machine does hits them alike.

    Prints what each took, as the median of its ratios to the first, turn by turn.
    """

    def run(what, rivals, arguments, n, rounds=40, clock=time.perf_counter):
        seconds = {name: [] for name in rivals}
        repeats = max(1, 50_000 // n)

        def turn():
            for name, rival in rivals.items():
                start = clock()
                for _ in range(repeats):
                    rival(*arguments)
                seconds[name].append((clock() - start) / repeats)

        benchmark.pedantic(turn, rounds=rounds, warmup_rounds=3)
        seconds = {name: times[3:] for name, times in seconds.items()}
        benchmark.extra_info.update(what=what, seconds=seconds)
        first = next(iter(seconds.values()))
        print(f"\n{what}, {np.median(first) * 1e6:.0f} us:")
        for name, times in seconds.items():
            print(f"{name:>30} {np.median(np.divide(times, first)):.2f}")

    return run


def pytest_benchmark_update_machine_info(config, machine_info):
    """For plot.py, which states it."""
    machine_info["tensorflow"] = tf.__version__
