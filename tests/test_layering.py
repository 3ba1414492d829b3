"""Who may import whom: the layers of the package, read from the source so that imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import mmpos

ROOT = Path(mmpos.__file__).parent

# a part may import the parts to the right of its name, and itself
CORE = {"positions", "coordinates", "functional"}
METHODS = {"encodings", "multimodal", "pruning", "multiview", "tables"}
ALLOWED: dict[str, set[str]] = {
    "functional": set(),
    "positions": {"functional"},
    "coordinates": {"positions", "functional"},
    "encodings": CORE,
    "multimodal": CORE,
    "pruning": CORE,
    "multiview": CORE,
    "tables": CORE,
    "attention": CORE | {"encodings"},
}
# everything else may import everything, except that nothing imports these but their own kind
TOPS = {"training", "evaluation", "cli", "__main__"}
MAY_IMPORT_TOPS = TOPS | {"data", "config", "plotting", "docs"}


def imports_of(path: Path) -> set[str]:
    """Dotted names of our own modules that a file imports, relative imports resolved."""
    package = path.relative_to(ROOT.parent).with_suffix("").parts
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: -node.level]) if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)} if name == "mmpos" else {name}
    return {name for name in found if name.split(".")[0] == "mmpos"}


def part(name: str) -> str:
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 else ""


FILES = sorted(path for path in ROOT.rglob("*.py") if "_configs" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    used = {part(name) for name in imports_of(path)} - {own, ""}
    if own in ALLOWED:
        assert used <= ALLOWED[own], (
            f"{own} may import {sorted(ALLOWED[own])}, and imports {sorted(used - ALLOWED[own])}"
        )
    if own not in ("training", "cli", "__main__"):
        assert "training" not in used, f"{own} imports training, which stands above it"
    if own not in MAY_IMPORT_TOPS:
        assert not used & TOPS, f"{own} imports {sorted(used & TOPS)}; only {sorted(MAY_IMPORT_TOPS)} may"


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[-2] == "functional"], ids=lambda path: path.name)
def test_functional_is_pure_torch(path: Path) -> None:
    outside = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    standard = sys.stdlib_module_names
    assert outside <= standard | {"torch", "mmpos"}


def test_the_reader_of_imports_sees_what_it_should(tmp_path: Path) -> None:
    """The test above would pass for ever if its reader found nothing."""
    assert "mmpos.functional.rotary" in imports_of(ROOT / "encodings" / "_rotary.py")
    assert "mmpos.positions" in imports_of(ROOT / "coordinates.py")
    assert {part(name) for name in imports_of(ROOT / "attention.py")} >= {"encodings"}
    assert len(FILES) > 15


def test_tests_and_benchmarks_are_not_imported() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.split(".")[0] for name in names} & {"tests", "benchmarks", "datasets", "recipes"}, path
