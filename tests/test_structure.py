"""The shape of the code: who imports whom.

Imports are read from the source, those inside functions and under ``TYPE_CHECKING`` included. The exceptions below
only ever shrink: one that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each layer imports the layers before it, and modules of its own.
LAYERS = (
    (
        "errors",
        "files",
        "references",
        "registry",
        "patterns",
        "remote",
        "untyped",
        "environment",
        "progress",
    ),
    ("models",),
    ("methods",),
    ("tasks",),
    ("checkpoints",),
    ("training",),
    ("decoding",),
    ("drafting",),
    ("recipe",),
    ("reporting",),
    ("pipelines",),
    ("cli", "", "__main__"),  # "" is peftlab/__init__.py
)
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}

# save_pretrained of an injected model writes its adapter: the one thing that a lower layer asks of a higher one.
UPWARD = {("peftlab.methods.inject", "peftlab.checkpoints.adapter")}

# To be mended: nothing may be added below.
CIRCLES: set[frozenset[str]] = set()
UNDESCRIBED: set[str] = set()


@cache
def modules() -> dict[str, Path]:
    """Return the package's files by module name."""
    found = {}
    for path in sorted((ROOT / "peftlab").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def public_names() -> list[tuple[str, str]]:
    """Return module and name of each import in the stub of the public API."""
    body = ast.parse((ROOT / "peftlab" / "__init__.pyi").read_text(encoding="utf-8")).body
    return [(f"peftlab.{n.module}", alias.name) for n in body if isinstance(n, ast.ImportFrom) for alias in n.names]


@cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of the package that a module imports anywhere in its source.

    ``from peftlab.a import b`` imports the module ``peftlab.a.b`` if there is one, else ``peftlab.a``. That importing
    ``a.b`` runs ``a/__init__.py`` is not counted: these files are empty or import when asked.
    """
    found = {place for place, _ in public_names()} if module == "peftlab" else set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found |= {name for name in (inner if inner in modules() else node.module,) if name in modules()}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{module}: write imports in full"
    return frozenset(found - {module})


def named(module: str) -> set[str]:
    """Return the modules that a module names in texts of the form ``"module:attribute"``, to import them later."""
    texts = (n.value for n in ast.walk(parsed(module)) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text.partition(":")[0] for text in texts if re.fullmatch(r"peftlab[\w.]*:[\w.]+", text)} & modules().keys()


def layer(module: str) -> int:
    """Return the layer of a module by the first name after ``peftlab``."""
    first = module.removeprefix("peftlab").lstrip(".").split(".")[0]
    assert first in LAYER, f"{module}: give its package a layer"
    return LAYER[first]


def circles() -> set[frozenset[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(imports(module)):
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            component = frozenset(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.add(component)

    for module in modules():
        if module not in index:
            visit(module)
    return found


def _same(found: set, known: set, what: str) -> None:
    """Assert that what was found is what is known: nothing new, and nothing listed that is mended."""
    new, mended = found - known, known - found
    assert not new, f"{what}: {sorted(map(str, new))}"
    assert not mended, f"no longer so, take it off the list in {Path(__file__).name}: {sorted(map(str, mended))}"


def test_no_module_imports_a_higher_layer() -> None:
    found = {
        (module, other)
        for module in modules()
        for other in imports(module) | named(module)
        if layer(other) > layer(module)
    }
    _same(found, UPWARD, "imports of a higher layer")


def test_there_are_no_import_circles() -> None:
    found = circles()
    assert not [circle for circle in found if not any(circle <= known for known in CIRCLES)], "new import circles"
    mended = [sorted(known) for known in CIRCLES if not any(circle <= known for circle in found)]
    assert not mended, f"no longer so, take it off the list in {Path(__file__).name}: {mended}"


def test_public_names_are_where_the_stub_says() -> None:
    for place, name in public_names():
        defined = {node.name for node in parsed(place).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined |= {
            t.id for n in parsed(place).body if isinstance(n, ast.Assign) for t in n.targets if hasattr(t, "id")
        }
        assert name in defined, f"peftlab/__init__.pyi: {place} defines no {name}"


def test_each_module_says_what_it_is() -> None:
    bare = {
        module
        for module, path in modules().items()
        if path.stat().st_size and (ast.get_docstring(parsed(module)) or "TODO").startswith("TODO")
    }
    _same(bare, UNDESCRIBED, "modules without a docstring")


def test_recipes_are_composed_of_configurations_and_tables() -> None:
    """What reads a recipe loads neither torch nor what a recipe describes."""
    found = {
        (module, other)
        for module in modules()
        if module.startswith("peftlab.recipe.")
        for other in imports(module)
        if 0 < layer(other) < LAYER["recipe"] and other.rpartition(".")[2] not in ("config", "table")
    }
    assert not found


def test_imports_are_found_wherever_they_are() -> None:
    assert imports("peftlab.checkpoints.adapter") >= {"peftlab.errors", "peftlab.files"}  # at the top
    assert "peftlab.checkpoints.adapter" in imports("peftlab")  # in the stub
    lazy = next(module for module in sorted(modules()) if module.startswith("peftlab.cli."))
    inside = [
        node.module
        for function in ast.walk(parsed(lazy))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.module in modules()
    ]
    assert inside and set(inside) <= imports(lazy)  # in a function
