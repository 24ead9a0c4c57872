"""What a change is checked with: `nox --list`. `.ci/run` checks the same on a bare machine."""

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "test"]
nox.options.reuse_venv = "yes"

SITE = "docs/_build/html"
BENCHMARKS = [
    "bench_custom_gradient.py",
    "bench_custom_vjp.py",
    "bench_memory.py",
    "bench_graphs.py",
    "bench_overhead.py",
    "bench_from_numpy.py",
]


@nox.session
def lint(session: nox.Session) -> None:
    """Lint, format, imports and types."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    session.run("mypy")


@nox.session
def test(session: nox.Session) -> None:
    """The tests, or those named after `--`."""
    session.install("-e", ".[test]")
    session.run("pytest", "-q", "-n", "auto", *session.posargs)


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """The same on the oldest supported versions."""
    session.install("-e", ".[test]", "-c", "tests/oldest.txt")
    session.run("pytest", "-q", "-n", "auto", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, its notebooks executed, and its links."""
    session.install("-e", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", SITE)
    session.run("python", "docs/check_links.py", SITE)


@nox.session
def stan(session: nox.Session) -> None:
    """Stan's tests, and its page of the gallery, which the build of the docs does not run."""
    session.install("-e", ".[test,stan]")
    session.run(
        "pytest",
        "-q",
        "tests/tfp/test_posteriors.py",
        "tests/project/test_examples.py",
        "-k",
        "stan",
    )
    session.run("python", "docs/record.py", "stan_program")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Programs and checks drawn at random: `nox -s fuzz -- --seconds 3600 --seed 1`."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "fuzz", *session.posargs, env={"PYTHONPATH": "tests"})


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmarks, and the tables and the figure of the page on performance."""
    session.install("-e", ".[test]")
    results = f"{session.create_tmp()}/benchmarks.json"
    files = [f"tests/benchmarks/{name}" for name in BENCHMARKS]
    session.run("pytest", "-q", *files, f"--benchmark-json={results}")
    session.run("python", "tests/benchmarks/plot.py", results)
