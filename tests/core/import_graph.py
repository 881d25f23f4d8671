"""Which module of this project imports which, read from the source.

Late imports count, those through ``importlib`` with a formatted name too: a placeholder stands for
every module that the name can mean.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


def modules_of(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """Every module of the packages under ``root``, by its dotted name."""
    found: dict[str, Path] = {}
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_names(file: Path, parts: tuple[str, ...], *, typed: bool = False) -> Iterator[str]:
    """Every name that ``file`` imports, absolute; ``*`` stands for a placeholder's value.

    Args:
        parts: of the file's path without its suffix, from the root.
        typed: also the imports under ``if TYPE_CHECKING``, which never run.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    branches = () if typed else _typing_branches(tree)
    skipped = {id(n) for branch in branches for n in ast.walk(branch)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(parts[: len(parts) - node.level]) if node.level else []
            base += [node.module] if node.module else []
            # "from package import module" may name a module
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_module(node.func):
            yield from _named(node.args[0] if node.args else None)


def _typing_branches(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body


def _is_import_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _named(argument: ast.expr | None) -> Iterator[str]:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.JoinedStr):
        pieces = [p.value if isinstance(p, ast.Constant) else "*" for p in argument.values]
        name = "".join(str(piece) for piece in pieces)
        if not name.startswith("*"):  # which package it is, only the caller knows
            yield name


def graph(
    root: Path, modules: Mapping[str, Path], *, typed: bool = False
) -> dict[str, frozenset[str]]:
    """For each module, those of ``modules`` that it imports; see `imported_names`."""
    edges: dict[str, frozenset[str]] = {}
    for name, file in modules.items():
        parts = file.relative_to(root).with_suffix("").parts
        found: set[str] = set()
        for imported in imported_names(file, parts, typed=typed):
            found |= _meant(imported, modules)
        edges[name] = frozenset(found - {name})
    return edges


def _meant(imported: str, modules: Mapping[str, Path]) -> set[str]:
    if "*" in imported:
        pattern = re.compile(re.escape(imported).replace(r"\*", r"\w+"))
        return {module for module in modules if pattern.fullmatch(module)}
    if imported in modules:
        return {imported}
    owner = imported.rpartition(".")[0]
    return {owner} if owner in modules else set()


def circles(edges: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """The groups of modules that import one another in a circle: Tarjan's strong components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = []
            while module not in group:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in index:
            visit(module)
    return sorted(found)
