"""Every Python block of README and docs runs, and prints what the text says; broken links are found."""

import ast
import contextlib
import importlib
import inspect
import re
import runpy
import socket
import subprocess
import sys
import time
import typing
import warnings

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from hanging import HANGS
from pages import PAGES, ROOT, blocks, blocks_and_lines, is_for, is_installed, section
from shared import derivative, forward_derivative

SHORT_OR_LONG = [
    pytest.param(
        page,
        id=page.name,
        marks=[pytest.mark.long]
        if page.stem in ("models", "keras", "forward_models", "engines", "long_runs", "solvers")
        else [],
    )
    for page in PAGES
]
OPTIONAL = ["arviz", "numba", "numpyro", "pymc", "stan", "gpflow", "zfit"]


def test_the_pages_were_found():
    assert len(PAGES) >= 9
    assert sum(len(blocks(page, "python")) for page in PAGES) >= 22


def import_quietly(package):
    """Some announce their own future while they are imported; what is to be tested comes later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(package)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # model.save
@pytest.mark.parametrize("page", SHORT_OR_LONG)
def test_blocks_run_in_order(page, capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    for block, before in blocks_and_lines(page, "python"):
        if module := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / module[1]).write_text(block)
        elif "import umbridge" in block:
            pass  # needs a server: below
        elif is_installed("torch") or "import torch" not in block:
            for package in filter(is_installed, OPTIONAL):
                if is_for(block, package):
                    import_quietly(package)
            # AutoGraph reads the source of a function at its line of the page.
            exec(compile("\n" * before + block, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for output in blocks(page, "text"):
        assert output in printed


def run_section(package):
    """What it defines, after the imports of the page alone."""
    if not is_installed(package):
        pytest.skip(f"{package} is not installed: pip install {package}")
    import_quietly(package)
    namespace = {"np": np, "tf": tf, "sgtrick": sgtrick}
    exec(section(package), namespace)
    return namespace


@pytest.mark.parametrize("package", ["numba", "numpyro", "pymc", "gpflow"])
def test_a_section_on_an_optional_engine_runs_as_copied(package):
    """Stan's section is that of tests/tfp/test_posteriors.py."""
    namespace = run_section(package)
    assert "report" not in namespace or namespace["report"].passed


@pytest.mark.filterwarnings("ignore")  # zfit's own
def test_an_optional_density_of_zfit():
    """Beside SciPy's own fit of the same density to the same data."""
    from scipy import stats

    data = stats.skewnorm(3).rvs(size=2000, random_state=1)
    result = run_section("zfit")["fit"](data)
    assert result.valid
    found = [result.params[name]["value"] for name in ("shape", "loc", "scale")]
    np.testing.assert_allclose(found, stats.skewnorm.fit(data, 3.0), rtol=1e-2, atol=1e-2)


def test_an_optional_server_of_umbridge(tmp_path):
    """Beside the same model in TensorFlow."""
    pytest.importorskip("umbridge", reason="umbridge is not installed: pip install umbridge")
    server, client = (b for b in blocks(ROOT / "docs" / "engines.md", "python") if "umbridge" in b)
    (tmp_path / "decay_server.py").write_text(server)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = subprocess.Popen([sys.executable, "decay_server.py", port], cwd=tmp_path)
    try:
        wait_for("127.0.0.1", int(port), running)
        namespace = {"sgtrick": sgtrick}
        exec(client.replace("4242", port), namespace)
        served = namespace["served"]

        def native(p):
            amount, rate = tf.exp(p[..., :1]), tf.exp(p[..., 1:])
            return amount * tf.exp(-rate * tf.constant([0.5, 1.0, 2.0, 4.0], tf.float64))

        x = tf.constant([[0.1, -0.3], [0.5, 0.2]], tf.float64)
        for mode in (derivative, forward_derivative):
            np.testing.assert_allclose(mode(served)(x), mode(native)(x), rtol=1e-12)
    finally:
        running.kill()
        running.wait()


def wait_for(host, port, process):
    deadline = time.monotonic() + HANGS
    while time.monotonic() < deadline:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection((host, port)):
            return
        time.sleep(0.05)


def test_bridgestan_has_the_signature_of_an_engine():
    """`from_numpy(model.log_density_gradient)`, docs/engines.md: compiling a model needs a network."""
    bridgestan = pytest.importorskip(
        "bridgestan", reason="bridgestan is not installed: pip install bridgestan"
    )
    signature = inspect.signature(bridgestan.StanModel.log_density_gradient)
    _, *parameters = signature.parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    assert needed == ["theta_unc"]
    assert parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    value, gradient = typing.get_args(signature.return_annotation)
    assert value is float
    assert "ndarray" in str(gradient)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_the_page(page):
    """88 columns are shown at 1280 px without scrolling; README is read elsewhere, too."""
    language = "python" if page.name == "README.md" else "(?:python|r|sh|bash|json)"
    lines = [line for block in blocks(page, language) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


def test_readme_example_comes_first():
    assert (ROOT / "README.md").read_text().partition("\n```\n")[0].count("\n") < 30


def test_broken_links_are_found(tmp_path):
    site, readme = tmp_path / "site", tmp_path / "README.md"
    site.mkdir()
    (site / "two.html").write_text('<p id="there">', encoding="utf-8")
    (site / "plot.png").write_bytes(b"a picture")
    (site / "empty.png").touch()
    right = ["#top", "two.html", "two.html#there", "two.html?q#there", "https://elsewhere.org/no"]
    wrong = ["#gone", "two.html#gone", "three.html"]
    links = "".join(f'<a href="{link}"></a>' for link in [*right, *wrong])
    images = '<img src="plot.png"><img src="empty.png"><img src="gone.png">'
    (site / "index.html").write_text(links + images, encoding="utf-8")
    readme.write_text("[a](site/two.html) ![b](site/gone.png) [c](https://elsewhere.org)")
    complaints = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["complaints"]
    assert [line.removeprefix(f"{tmp_path}/") for line in complaints(site, readme)] == [
        "site/index.html: #gone: no such anchor",
        "site/index.html: two.html#gone: no such anchor",
        "site/index.html: three.html: no such file",
        "site/index.html: empty.png: an empty file",
        "site/index.html: gone.png: no such file",
        "README.md: site/gone.png: no such file",
    ]


def strings(source):
    """The texts of a module, with `...` for what is formatted into them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{\d?\}", "...", node.value)


def test_messages_of_the_troubleshooting_page_are_raised():
    sources = sorted((ROOT / "sgtrick").rglob("*.py"))
    raised = "\n".join(text for source in sources for text in strings(source.read_text()))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headlines = re.findall(r"^(?!No message)(.+)\n: ", page, re.MULTILINE)
    assert len(headlines) > 30
    for headline in headlines:
        for fragment in headline.split("..."):
            assert fragment.strip() in raised, headline
