def pytest_terminal_summary(terminalreporter, config):
    """Prints each group's fastest rounds as ratios to the first library of the group."""
    session = getattr(config, "_benchmarksession", None)
    if session is None or not session.benchmarks:
        return
    groups: dict[str, dict[str, float]] = {}
    for bench in session.benchmarks:
        groups.setdefault(bench.group, {})[bench.extra_info["library"]] = bench.stats.min
    write = terminalreporter.write_line
    write("")
    write("Fastest rounds, as ratios to tfp.math.custom_gradient in the same run")
    write(f"{'':32}{'tfp':>12}{'tf':>8}{'sgtrick':>10}")
    for group, fastest in groups.items():
        base = fastest["tfp"]
        write(
            f"{group:32}{base * 1e6:9.0f} us"
            + "".join(
                f"{fastest[key] / base:{width}.2f}" for key, width in (("tf", 8), ("sgtrick", 10))
            )
        )
