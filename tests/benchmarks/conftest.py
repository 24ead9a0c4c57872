import statistics


def pytest_terminal_summary(terminalreporter, config):
    """Prints what each library took, as the median of its ratios to the first, turn by turn."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    libraries = list(session.benchmarks[0].extra_info["seconds"])
    write = terminalreporter.write_line
    write(f"{'':36}" + "".join(f"{library:>12}" for library in libraries))
    for bench in session.benchmarks:
        base, *others = bench.extra_info["seconds"].values()
        cells = [f"{statistics.median(base) * 1e6:9.0f} us"]
        for other in others:
            ratios = [a / b for a, b in zip(other, base, strict=True)]
            cells.append(f"{statistics.median(ratios):12.2f}")
        write(f"{bench.extra_info['what']:36}{cells[0]:>12}" + "".join(cells[1:]))
