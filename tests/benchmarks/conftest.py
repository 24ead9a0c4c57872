import statistics
import time

import pytest
import tensorflow as tf


@pytest.fixture
def take_turns(benchmark):
    """Runs rivals by turns, so that whatever else the machine does hits them alike."""

    def run(what, rivals, arguments, n, rounds=40, size=None):
        seconds = {name: [] for name in rivals}
        repeats = max(1, 50_000 // n)

        def turn():
            for name, rival in rivals.items():
                start = time.perf_counter()
                for _ in range(repeats):
                    rival(*arguments)
                seconds[name].append((time.perf_counter() - start) / repeats)

        benchmark.pedantic(turn, rounds=rounds, warmup_rounds=3)
        benchmark.extra_info["seconds"] = {key: values[3:] for key, values in seconds.items()}
        benchmark.extra_info["what"] = what
        benchmark.extra_info["size"] = size  # where there are several: plot.py says how time grows

    return run


def pytest_benchmark_update_machine_info(config, machine_info):
    """For plot.py, which states it."""
    machine_info["tensorflow"] = tf.__version__


def pytest_terminal_summary(terminalreporter, config):
    """Prints what each library took, as the median of its ratios to the first, turn by turn."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    write, shown = terminalreporter.write_line, None
    for bench in session.benchmarks:
        if shown != (shown := list(bench.extra_info["seconds"])):
            widths = [max(20, 2 + len(name)) for name in shown]
            write(_row("", shown, widths))
        base, *others = bench.extra_info["seconds"].values()
        cells = [f"{statistics.median(base) * 1e6:.0f} us"]
        for other in others:
            ratios = [a / b for a, b in zip(other, base, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        write(_row(bench.extra_info["what"], cells, widths))


def _row(what, cells, widths):
    return f"{what:44}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
