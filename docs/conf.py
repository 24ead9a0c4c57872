"""Sphinx configuration.

Generates the figures and the notebooks of the gallery, which are executed, and checks that no
public name is undocumented. The first build takes minutes. Later builds execute what has changed.
"""

import ast
import base64
import contextlib
import functools
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from docutils import nodes
from jupyter_client.provisioning import local_provisioner
from PIL import Image
from sphinx.util.logging import getLogger


# The examples repeat this function, since each has to run when it is copied alone; notebooks, which
# show no messages of libraries anyway, leave it out: _without_silence.
@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Newer TensorFlow prints to file descriptor 2 before it reads its own log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with silent_stderr():
    import sgtrick
    import sgtrick.keras
    import sgtrick.tfp

HERE = Path(__file__).parent
ROOT = HERE.parent
GENERATED = HERE / "_generated"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GALLERY = HERE / "gallery"
API = HERE / "api"
_SECTION = re.compile(r"^### (\S+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
# By record.py: examples that need more than the docs install.
RECORDED = HERE / "recorded"
# Of the first figure of an example, the upper left panel, as a part of the width and height.
_SHOWN = {
    "lynx_hare": (1, 0.53),
    "jax_in_graph": (1, 0.49),
    "newton_laplace": (0.5, 0.5),
    "straight_through_digits": (0.47, 1),
    "zipf": (0.34, 1),
}

project = "sgtrick"
author = "The sgtrick developers"
copyright = f"2026, {author}"
release = version = sgtrick.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # formulas need no network
]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated", "gallery/figures", "gallery/data"]
nb_execution_mode = "cache"  # a notebook runs when its source has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True  # one block for what a cell prints
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
_COPIED = "python", "ipython3", "default", "sh", "r"  # not what is printed
copybutton_selector = ", ".join(f".highlight-{language} pre" for language in _COPIED)
html_theme = "furo"
html_title = "sgtrick"
html_show_sourcelink = False
html_use_index = False  # the API is a table
html_static_path = ["_static"]
html_css_files = ["custom.css"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!sgtrick\b).*")]  # of no page here
python_maximum_signature_line_length = 80
default_role = "code"
autodoc_default_options = {"members": True}


logging.getLogger("traitlets").setLevel("WARNING")  # else a line for every notebook
# Kernels are started without the terminal, to which TensorFlow prints before it can be told not to.
local_provisioner.launch_kernel = functools.partial(
    local_provisioner.launch_kernel, stderr=subprocess.DEVNULL
)

# What users are given and never make: documented, but not by the module that it is in.
sgtrick.HostFunction.__module__ = sgtrick.Entry.__module__ = "sgtrick"

# One line in pyproject.toml: where the sources are. Until it is a real address, pages do not link.
SOURCES = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
if "example.org" not in SOURCES:
    html_theme_options = {
        f"source_{what}_link": f"{SOURCES}/{what}/main/docs/{{filename}}"
        for what in ("view", "edit")
    }


def _generate_figures() -> None:
    command = [sys.executable, HERE / "figures.py", GENERATED]
    subprocess.run(command, check=True, capture_output=True)


def _generate_gallery() -> None:
    """Scripts become notebooks, beside a copy of their data."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    shutil.copytree(ROOT / "examples" / "data", GALLERY / "data")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for script in EXAMPLES:
        notebook = jupytext.read(script)
        notebook.metadata["kernelspec"] = kernel
        _tidy(notebook.cells)
        if (RECORDED / f"{script.stem}.txt").exists():
            _show_recorded(notebook, script.stem)
        jupytext.write(notebook, GALLERY / f"{script.stem}.ipynb")


def _generate_api() -> None:
    """A page for each name, from its section in api.md, where the sources' readers have them all.

    Its docstring replaces the link to it.
    """
    shutil.rmtree(API, ignore_errors=True)
    API.mkdir()
    for name, text in _SECTION.findall((HERE / "api.md").read_text()):
        text = re.sub(r"(, )?\[[Dd]ocstring\]\(.*?\)", "", text)
        directive = r"```{eval-rst}\n\1\n```"
        text = re.sub(r"<!-- (\.\. auto.*?) -->", directive, text, flags=re.DOTALL)
        text = text.replace("](", "](../")
        (API / f"{name}.md").write_text(f"# {name}\n{text}")


def _link_generated(_app: Any, docname: str, content: list[str]) -> None:
    """Links to scripts and sections, for readers of the sources, lead to the pages made of them."""
    if docname == "gallery":
        entry = r"^\* \[(.*)\]\(\.\./examples/(\w+)\.py\): (.*(?:\n  .*)*)\n"
        content[0] = re.sub(entry, _entry, content[0], flags=re.MULTILINE)
    content[0] = re.sub(
        r"\(\.\./examples/(\w+)\.py\)", r"(gallery/\1.ipynb)", content[0]
    )
    names = [name for name, _ in _SECTION.findall((HERE / "api.md").read_text())]
    if docname == "api":
        content[0] = _SECTION.sub("", content[0]).replace("](#", "](api.md#")
        content[0] += "\n".join(["", "```{toctree}", ":hidden:", ""])
        content[0] += "".join(f"\n{name} <api/{name}>" for name in names) + "\n```\n"
    for name in names:
        anchor = name.lower().replace(".", "")
        content[0] = content[0].replace(f"](api.md#{anchor})", f"](api/{name}.md)")


def _entry(found: re.Match[str]) -> str:
    """An example in the gallery, with a thumbnail if it draws a figure."""
    title, name, description = found.groups()
    draws = "savefig" in (ROOT / "examples" / f"{name}.py").read_text()
    thumbnail = f'<img src="_images/{name}_thumbnail.png" alt="">\n' * draws
    return f"""````{{container}} example
{thumbnail}
[{title}](gallery/{name}.ipynb)

{description[0].upper()}{description[1:]} {{download}}`Notebook <gallery/{name}.ipynb>`,
{{download}}`script <../examples/{name}.py>`
````
"""


def _tidy(cells: list[Any]) -> None:
    """Folds how figures are drawn and verdicts reached, and leaves out what only scripts need.

    A figure's alternative text is the heading above.
    """
    heading = ""
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.partition("\n")[0].lstrip("# ")
        if "def silent_stderr" in cell.source:
            cell.source = _without_silence(cell.source)
        for for_scripts in (r"  # noqa.*", r'^print\(f"(\\n)?Figure: .*\n?'):
            cell.source = re.sub(for_scripts, "", cell.source, flags=re.MULTILINE)
        if "savefig" in cell.source:
            one = re.search(r"axis = plt\.subplots|subplots\(\d, 1,", cell.source)
            classes = "one-panel" if one else "panels"
            cell.metadata["mystnb"] = {"image": {"alt": heading, "classes": classes}}
        if "savefig" in cell.source or (
            cell.cell_type == "code" and heading == "Verdict"
        ):
            cell.metadata["tags"] = ["hide-input"]


def _without_silence(source: str) -> str:
    """The imports of an example alone."""
    source = re.sub(r'\A""".*?"""\n+', "", source, flags=re.DOTALL)
    silence = inspect.getsource(silent_stderr)
    assert silence in source, "an example has a silent_stderr of its own"
    before, _, block = source.replace(silence, "").partition("with silent_stderr():\n")
    imports = re.match(r"(?:    .*\n|\n)*", block + "\n")[0]
    rest = block[len(imports) :].lstrip()
    source = f"{before}{textwrap.dedent(imports).rstrip()}\n\n{rest}"
    source = re.sub(r"\n{3,}os\.environ(.*\n)", r"\n\nos.environ\1\n", source)
    for line, name in [
        ("import contextlib\n", "contextlib."),
        ("from collections.abc import Iterator\n", "Iterator["),
    ]:
        if name not in source:
            source = source.replace(line, "")
    return source.strip()


def _show_recorded(notebook: Any, name: str) -> None:
    """What record.py kept of each cell, in the notebook, which the build does not execute."""
    notebook.metadata["mystnb"] = {"execution_mode": "off"}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    recorded = (RECORDED / f"{name}.txt").read_text().split("# %%\n")
    for cell, printed in zip(cells, recorded, strict=True):
        printed = re.sub(r"\n?Figure: .*\n", "", printed)
        if printed:
            output = nbformat.v4.new_output("stream", name="stdout", text=printed)
            cell.outputs.append(output)
        if "savefig" in cell.source:
            image = base64.b64encode((RECORDED / f"{name}.png").read_bytes()).decode()
            data = {"image/png": image}
            cell.outputs.append(nbformat.v4.new_output("display_data", data=data))
    note = (
        "The build of this page does not run the example. What it prints was recorded."
    )
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(f"```{{note}}\n{note}\n```"))


def _finish_gallery(app: Any, error: Exception | None) -> None:
    """Checks that every example has its entry and its page, and makes the thumbnails."""
    if error or app.builder.name != "html":
        return
    listed = (HERE / "gallery.md").read_text()
    missing = [
        s.name
        for s in EXAMPLES
        if f"../examples/{s.name})" not in listed
        or not (app.outdir / f"gallery/{s.stem}.html").exists()
    ]
    if missing:
        raise RuntimeError(f"the gallery lacks {missing}")
    images, done = app.outdir / "_images", set()
    for path, (docnames, name) in app.env.images.items():
        example = next(iter(docnames)).removeprefix("gallery/")
        if f"gallery/{example}" in docnames and example not in done:
            assert path.endswith(".png")
            done.add(example)
            width, height = _SHOWN.get(example, (1, 1))
            with Image.open(images / name) as image:
                part = image.crop((0, 0, width * image.width, height * image.height))
                part.thumbnail((480, 480))
                part.save(images / f"{example}_thumbnail.png")


def _signature(
    _app: Any, what: str, _name: str, obj: Any, *_: Any
) -> tuple[str, str | None] | None:
    """The signature with the names of types that are in the source, not what they stand for."""
    if obj in (sgtrick.HostFunction, sgtrick.Entry, sgtrick.GradientReport):
        return "", None  # made by functions
    if what in ("class", "exception"):
        obj = obj.__init__
    if not inspect.isfunction(inspect.unwrap(obj)):
        return None
    (function,) = ast.parse(
        textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))
    ).body
    arguments = function.args
    if what in ("class", "exception", "method"):
        (arguments.posonlyargs or arguments.args).pop(0)  # self
    returned = ast.unparse(function.returns).strip("'") if function.returns else None
    return f"({ast.unparse(arguments)})", None if what in (
        "class",
        "exception",
    ) else returned


def _types_to_signatures(
    _app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]
) -> None:
    """Attributes: the type beside the name, where napoleon puts it below the description.

    Of arrays without their parameters, which are all Any.
    """
    attribute = r"(\.\. attribute:: \w+\n)(.*?)(   :type: .*?\n)"
    text = re.sub(attribute, r"\1\3\2", "\n".join(lines), flags=re.DOTALL)
    lines[:] = re.sub(r"numpy\.ndarray\[.*\]", "numpy.ndarray", text).split("\n")


def _mark(_app: Any, doctree: nodes.document, _docname: str) -> None:
    """Classes by which the style sheet knows what may wrap: not short code, and not columns."""
    for literal in doctree.findall(nodes.literal):
        if len(literal.astext()) <= 30:
            literal["classes"].append("short")
    for block in doctree.findall(nodes.literal_block):
        columns = re.findall(r"^.*\S {2,}\S.*$", block.astext(), re.MULTILINE)
        if columns:
            block["classes"].append("aligned")
        if block.get("language") != "python" and max(map(len, columns), default=0) > 88:
            getLogger(__name__).warning(
                "columns wider than the page: %s", columns[0], location=block
            )


def _check_documented() -> None:
    documented = (HERE / "api.md").read_text()
    public = [
        f"{module.__name__}.{name}"
        for module in (sgtrick, sgtrick.keras, sgtrick.tfp)
        for name in module.__all__
    ]
    missing = [name for name in public if not re.search(rf":: {name}\s", documented)]
    if missing:
        raise RuntimeError(f"docs/api.md lacks the public names {missing}")


def setup(app: Any) -> None:
    _check_documented()
    GENERATED.mkdir(exist_ok=True)
    _generate_figures()
    _generate_gallery()
    _generate_api()
    app.connect("source-read", _link_generated)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _types_to_signatures)
    app.connect("doctree-resolved", _mark)
    app.connect("build-finished", _finish_gallery)
