"""Sphinx configuration.

Generates the comparison table, the figures and the notebooks of the gallery, which are executed,
and checks that no public name is undocumented.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

import sgtrick
import sgtrick.keras
import sgtrick.tfp

HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parent / "examples").glob("*.py"))
GALLERY = HERE / "gallery"
RECORDED = HERE / "recorded"  # by record.py: examples that need more than the docs install

project = "sgtrick"
author = "The sgtrick developers"
copyright = f"2026, {author}"
release = version = "0.1.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # formulas need no network
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated", "gallery/figures", "gallery/data"]
nb_execution_mode = "cache"  # a notebook runs when its source has changed
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # progress bars
nb_merge_streams = True  # one block for what a cell prints
html_theme = "furo"
html_title = "sgtrick"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(tf|collections)\..*")]  # of no page here
autodoc_typehints = "none"  # the docstrings say more than Any
default_role = "code"
autodoc_default_options = {"members": True}


def _generate_comparison() -> None:
    """Runs the transformation matrix; about a minute."""
    generated = HERE / "_generated" / "comparison.md"
    generated.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "matrix.table"]
    done = subprocess.run(command, cwd=HERE.parent / "tests", capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the comparison table failed:\n{done.stderr}")
    generated.write_text(done.stdout)


def _generate_figures() -> None:
    subprocess.run([sys.executable, HERE / "figures.py", HERE / "_generated"], check=True)


def _generate_gallery() -> None:
    """Scripts become notebooks, beside a copy of their data."""
    shutil.rmtree(GALLERY, ignore_errors=True)
    shutil.copytree(HERE.parent / "examples" / "data", GALLERY / "data")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for script in EXAMPLES:
        notebook = jupytext.read(script)
        notebook.metadata["kernelspec"] = kernel
        _fold(notebook.cells)
        if (RECORDED / f"{script.stem}.txt").exists():
            _show_recorded(notebook, script.stem)
        jupytext.write(notebook, GALLERY / f"{script.stem}.ipynb")
    entries = "\n".join(
        f"* {{doc}}`gallery/{s.stem}`. {ast.get_docstring(ast.parse(s.read_text()))} "
        f"{{download}}`Notebook <gallery/{s.stem}.ipynb>`, "
        f"{{download}}`script <../examples/{s.name}>`"
        for s in EXAMPLES
    )
    (HERE / "_generated" / "gallery.md").write_text(entries + "\n")


def _fold(cells: list[Any]) -> None:
    """Folds imports and how figures are drawn; a figure's alternative text is the heading above."""
    heading = ""
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.partition("\n")[0].lstrip("# ")
        if "def silent_stderr" in cell.source or "savefig" in cell.source:
            cell.metadata["tags"] = ["hide-input"]
            cell.metadata["mystnb"] = {"image": {"alt": heading}}


def _show_recorded(notebook: Any, name: str) -> None:
    notebook.metadata["mystnb"] = {"execution_mode": "off"}
    printed = (RECORDED / f"{name}.txt").read_text()
    text = (
        "## As it ran\n\nThe build of this page does not run the example; this was recorded.\n\n"
        f"```text\n{printed}```\n\n![The figure of this page](../recorded/{name}.png)"
    )
    notebook.cells.append(nbformat.v4.new_markdown_cell(text))


def _check_gallery(app: Any, error: Exception | None) -> None:
    if error or app.builder.name != "html":
        return
    missing = [s.name for s in EXAMPLES if not (app.outdir / f"gallery/{s.stem}.html").exists()]
    if missing:
        raise RuntimeError(f"the gallery lacks {missing}")


def _check_documented() -> None:
    documented = (HERE / "api.md").read_text()
    public = [
        f"{module.__name__}.{name}"
        for module in (sgtrick, sgtrick.keras, sgtrick.tfp)
        for name in module.__all__
    ]
    missing = [name for name in public if f":: {name}\n" not in documented]
    if missing:
        raise RuntimeError(f"docs/api.md lacks the public names {missing}")


def setup(app: Any) -> None:
    _check_documented()
    _generate_comparison()
    _generate_figures()
    _generate_gallery()
    app.connect("build-finished", _check_gallery)
