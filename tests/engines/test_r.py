"""R functions through reticulate, with R's own arithmetic as the engine."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

import sgtrick.keras
from hanging import HANGS
from pages import ROOT, blocks

pytestmark = pytest.mark.long

R_SCRIPTS = ROOT / "tests" / "engines" / "r"


def rscript(program, *arguments):
    """The finished process, with this Python in R."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "RETICULATE_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow",
    }
    command = ["Rscript", "-e", program, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANGS, check=False, env=environment
    )


PROGRAM = """
    for (script in commandArgs(TRUE)) {
      source(script, local = new.env(), print.eval = TRUE)
      cat("\\n<end>\\n")
      message("<end>")
    }
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """What each script prints and says: it takes longer to start TensorFlow in R than to run them.

    Skips where R is missing.
    """
    if shutil.which("Rscript") is None:
        pytest.skip("needs Rscript, of Debian's r-base-core")
    found = rscript("invisible(reticulate::py_run_string('import sys'))")
    if found.returncode:
        pytest.skip(f"needs reticulate (r-cran-reticulate) and a shared libpython: {found.stderr}")
    page = tmp_path_factory.mktemp("docs") / "page.R"
    page.write_text("\n".join(blocks(ROOT / "docs" / "r.md", "r")))
    paths = [
        *((ROOT / "examples" / "r" / name) for name in ("log1pexp.R", "infert.R")),
        *(R_SCRIPTS / name for name in ("engines.R", "trouble_in_chain.R", "signatures.R")),
        page,
    ]
    finished = rscript(PROGRAM, *paths)
    assert finished.returncode == 0, finished.stderr
    printed, said = (text.split("<end>\n") for text in (finished.stdout, finished.stderr))
    return {path.stem: both for path, *both in zip(paths, printed, said, strict=False)}


def test_the_docs_page_prints_what_its_text_says(scripts):
    outputs = blocks(ROOT / "docs" / "r.md", "output")
    assert len(outputs) == 3
    assert [output for output in outputs if output.strip() not in scripts["page"][0]] == []


VECTOR, NUMBER = ["double", "2"], ["double", "1"]


def test_values_and_gradients(scripts):
    results = json.loads(scripts["engines"][0])
    # The value, the gradients by all arguments, and the type and length of what R was given. R
    # writes vectors of length one as numbers, so the script itself checks the gradients' shapes.
    expected = {
        "a vector": (5, [[2, 4]], [VECTOR]),
        "a vector of length one": (9, [6], [NUMBER]),
        "a number": (9, [6], [NUMBER]),
        "a batch": ([5, 25], [[[2, 4], [6, 8]]], [VECTOR]),
        "a batch of vectors of length one": ([1, 4], [[2, 4]], [NUMBER]),
        "a whole batch in one call": ([1, 4], [[2, 4]], [VECTOR]),
        "a whole batch of one": (9, [6], [NUMBER]),
        "integers from R": (5, [[2, 4]], [VECTOR]),
        "integers for R": (9, [[2, 12], None], [VECTOR, ["integer", "2"]]),
        "one integer for R": (5, [[2, 4], None], [VECTOR, ["integer", "1"]]),
        "a gradient beside the value": (5, [[2, 4]], [VECTOR]),
        "a matrix, as a list of its rows": (30, [[[2, 4], [6, 8]]], [["list", "2"]]),
        "a named list": (15, [5, [6, 12]], [["list", "2"]]),
        "named vectors, whose names are dropped": (5, [[2, 4]], [VECTOR]),
        "numbers that are not finite": ("-Inf", [["NaN", "Inf"]], [VECTOR]),
    }
    assert results["cases"].pop("served by run") == {"value": 5}
    assert {
        name: (result["value"], result["gradients"], result["given"])
        for name, result in results["cases"].items()
    } == expected

    messages = {
        "an error in R": "RuntimeError: no root below 2\n  args[0] = [1., 2.]",
        "NA": "must be real numbers, got bool",
        "a number for a vector": "must have the shape [2], got []",
        "another executor": "An R function can only be called on R's own thread",
    }
    errors = results["errors"]
    matrix = errors.pop("a matrix from R")
    assert re.search(r"of NumPy not available|must have the shape \[\], got \[2, 2\]", matrix)
    assert errors.keys() == messages.keys()
    assert {
        name: message for name, message in messages.items() if message not in errors[name]
    } == {}


def test_trouble_in_mid_chain_reaches_r(scripts):
    results = json.loads(scripts["trouble_in_chain"][0])
    outcomes = {name: result.pop("outcome") for name, result in results.items()}
    assert "RuntimeError: the solver lost its way\n  args[0] = [" in outcomes["error"]
    assert outcomes["interrupt"] == "interrupted"
    assert "An R function can only be called on R's own thread" in outcomes["no executor"]
    assert outcomes["rejection"] == outcomes["no trouble"] == "100 3"  # the draws' shape
    full = 2 * (1 + 3 * 50)  # of each chain one at the start and three for each draw
    assert results == {
        "error": {"calls": 100, "failures": 1},
        "rejection": {"calls": full, "failures": 1},
        "interrupt": {"calls": 100, "failures": 0},
        "no executor": {"calls": 0, "failures": 0},
        "no trouble": {"calls": full, "failures": 0},
    }


def test_each_signature_of_grad_that_keras_documents(scripts):
    gradients = json.loads(scripts["signatures"][0])
    of_upstream = ["upstream", "..., upstream = NULL", "..., upstream", "u", "..."]
    assert gradients == {f"grad({parameters})": [5, 3] for parameters in of_upstream}


def test_log1pexp(scripts):
    printed, said = scripts["log1pexp"]
    assert said == ""  # TensorFlow's greetings are hidden
    header, *rows = printed.strip().splitlines()
    assert header.split() == ["x", "autodiff", "sgtrick", "sgtrick,", "mapped", "plogis"]
    for row in rows:
        x, autodiff, *others = map(float, row.split())
        assert others == pytest.approx([1 / (1 + math.exp(-x))] * 3, abs=1e-4)
        assert math.isnan(autodiff) == (x == 100)


def test_draws_of_an_r_posterior_agree_with_glm(scripts):
    printed, said = scripts["infert"]
    assert said == ""
    rows = re.findall(r"^(\S+)((?: +-?\d\.\d{3}){5})$", printed, re.MULTILINE)
    table = {name: [float(number) for number in numbers.split()] for name, numbers in rows}
    glm = {"(Intercept)": -1.708, "spontaneous": 1.197, "induced": 0.418}  # in any R
    assert {name: estimate for name, (_, estimate, *_) in table.items()} == glm
    for mean, estimate, deviation, error, rhat in table.values():
        assert abs(mean - estimate) < 0.25 * error
        assert abs(deviation / error - 1) < 0.15
        assert rhat < 1.05


def as_of_reticulate(f):
    """A Python function as reticulate passes an R function, for machines without R."""
    namespace = {"__name__": "rpytools.call", "f": f}
    exec("def python_function(*args, **kwargs): return f(*args, **kwargs)", namespace)
    return namespace["python_function"]


def test_an_r_function_that_fails_is_not_called_in_another_way():
    """Without the names of its parameters, only R's message tells that it lacks `upstream`."""
    given = []

    def fails(*args, **kwargs):
        given.append((args, kwargs))
        raise RuntimeError("no root below 2")

    h = sgtrick.keras.custom_vjp(lambda x: (2 * x, as_of_reticulate(fails)))
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = h(x)
    with pytest.raises(RuntimeError, match="no root below 2"):
        tape.gradient(y, x)
    assert given == [((tf.constant(1.0),), {})]


def test_an_r_function_is_given_lists_and_may_return_numbers_and_lists():
    given = []

    def f(x, p):
        given.append((x, p))
        return 4, [6.0, {"a": [2, 4], "n": None}]

    h = sgtrick.from_numpy(as_of_reticulate(f), event_ndims=(1, {"a": 1, "n": 0}))
    xs = tf.constant([3.0]), tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = h(xs[0], {"a": xs[1], "n": tf.constant(7)})
    assert given == [([3.0], {"a": [1.0, 2.0], "n": 7})]
    assert y == 4
    assert [g.numpy().tolist() for g in tape.gradient(y, xs)] == [[6.0], [2.0, 4.0]]


@pytest.mark.parametrize("on_error", ["raise", -math.inf])
def test_an_r_function_is_not_called_from_other_threads(on_error):
    called = []
    with ThreadPoolExecutor(1) as pool:
        h = sgtrick.from_numpy(as_of_reticulate(called.append), executor=pool, on_error=on_error)
        with pytest.raises(RuntimeError, match=r"on R's own thread.*sgtrick\$MainThreadExecutor"):
            h(tf.constant([1.0]))
    assert called == []


def test_an_interrupt_of_r_is_no_failure_to_be_rejected():
    def interrupted(x):
        raise RuntimeError("(Unknown exception occurred)")  # reticulate 1.28's words

    h = sgtrick.from_numpy(as_of_reticulate(interrupted), on_error=-math.inf)
    with pytest.raises(KeyboardInterrupt):
        h(tf.constant([1.0]))


def test_run_refuses_an_r_function_but_not_what_calls_one():
    executor = sgtrick.MainThreadExecutor()
    f = as_of_reticulate(lambda x: (x[0], 1.0))
    with pytest.raises(TypeError, match="fn is an R function"):
        executor.run(f, [3.0])
    assert executor.run(sgtrick.from_numpy(f, executor=executor), tf.constant([3.0])) == 3
