"""What `import sgtrick` brings along, and which module imports which."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "sgtrick"

CODE = """
import sys, tensorflow
before = set(sys.modules)
import sgtrick
print(*sorted(set(sys.modules) - before))
"""
ON_DEMAND = {
    "jax",
    "keras",
    "matplotlib",
    "scipy",
    "sgtrick.keras",
    "sgtrick.tfp",
    "tensorflow_probability",
    "torch",
}


@pytest.mark.long
def test_no_more_than_tensorflow_does():
    command = [sys.executable, "-c", CODE]
    imported = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "sgtrick" in imported
    assert ON_DEMAND.isdisjoint(imported)


# From the bottom: each layer imports from itself and from those before; what users import, from all.
LAYERS = ["_types", "_arguments", "_tensorflow", "_core", "_host"]


@functools.cache
def imports():
    """`(module, imported module)` of all within the package, also of those inside functions."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sgtrick"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("sgtrick")]
            else:
                continue
            found += [(module, imported_module(Path(*name.split(".")[1:]))) for name in names]
    return found


def imported_module(name):
    """The file of a module, of a package, or of what has a name in one."""
    if (PACKAGE / name).is_dir():
        return name / "__init__.py"
    file = name.parent / f"{name.name}.py"
    return file if (PACKAGE / file).is_file() else imported_module(name.parent)


def test_arrows_point_one_way():
    """The core knows no engines and no forms, engines no forms, and no form a checker."""
    assert len(imports()) > 100
    for module, imported in imports():
        layer = module.with_suffix("").parts[0]
        if layer in LAYERS:
            below = LAYERS[: LAYERS.index(layer) + 1]
            assert imported.with_suffix("").parts[0] in below, f"{module} imports {imported}"
        if imported.parts[0] == "_check":
            assert module.parts[0] in ("_check", "__init__.py"), f"{module} imports {imported}"


def test_no_module_imports_itself():
    """By way of others, that is."""
    arrows = {}
    for module, imported in imports():
        arrows.setdefault(module, set()).add(imported)

    finished = set()

    def visit(module, above):
        assert module not in above, f"a circle: {[*map(str, above), str(module)]}"
        if module not in finished:
            for imported in arrows.get(module, ()):
                visit(imported, [*above, module])
            finished.add(module)

    for module in arrows:
        visit(module, [])
