"""A package as its source shows it: functions, classes, imports, circles.

Everything is read with ``ast`` and ``tokenize``; the package is never imported. Names of its modules are nowhere in
this file, so it reads any commit of it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterator

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        target: the module, the longest dotted name that is a module where the package is this one.
        name: what is taken from it; None for ``import target``.
        typing_only: it stands below ``if TYPE_CHECKING``.
        deferred: it stands inside a function.
        line: its line.
    """

    target: str
    name: str | None
    typing_only: bool
    deferred: bool
    line: int


class File:
    """One file of the package, parsed once.

    Attributes:
        path: where it is.
        name: its module, ``package.part`` for a ``package/part/__init__.py``.
        text: what it holds.
        tree: its syntax tree.
    """

    def __init__(self, path: pathlib.Path, root: pathlib.Path) -> None:
        self.path, self.text = path, path.read_text()
        self.name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        self.tree = ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @functools.cached_property
    def docstrings(self) -> set[int]:
        """The lines of docstrings."""
        found: set[int] = set()
        for node in self.nodes:
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                found.update(_span(node.body[0]))
        return found

    @functools.cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every ``def``, methods and nested ones too; no lambda."""
        return (node for node in self.nodes if isinstance(node, FUNCTIONS))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


class Package:
    """All files of a package.

    Args:
        folder: the package's directory.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.root = folder, folder.parent
        self.files = [File(path, self.root) for path in sorted(folder.rglob("*.py"))]
        self.by_name = {file.name: file for file in self.files}

    def imports(self, file: File) -> list[Import]:
        """Every import of ``file``, wherever it stands."""
        typing_only = {
            id(node)
            for block in file.nodes
            if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
            for statement in block.body
            for node in ast.walk(statement)
        }
        deferred = {id(node) for function in file.functions() for node in ast.walk(function)}
        found = []
        for node in file.nodes:
            marks = (id(node) in typing_only, id(node) in deferred)
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, *marks, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(file, node)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    is_module = inner in self.by_name
                    name = None if is_module else alias.name
                    found.append(Import(inner if is_module else base, name, *marks, node.lineno))
        return found

    def _base(self, file: File, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = file.name.split(".")
        here = parts if file.path.name == "__init__.py" else parts[:-1]
        up = here[: len(here) - node.level + 1]
        return ".".join([*up, *([node.module] if node.module else [])])

    @functools.cached_property
    def graph(self) -> dict[str, set[str]]:
        """Which modules of the package each module names in an import, TYPE_CHECKING and functions included.

        ``from package.part import name`` names ``package.part.name`` if that is a module, and ``package.part``
        otherwise. A package that is only on the way to a module (``package`` of ``package.part``) is not named by it.
        """
        return {
            file.name: {each.target for each in self.imports(file) if each.target in self.by_name} - {file.name}
            for file in self.files
        }

    def circles(self) -> list[list[str]]:
        """Modules that import each other, directly or through others: strongly connected components of two or more."""
        return circles(self.graph)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of names of which each reaches each other, two or more: strongly connected components.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    [['a', 'b', 'c']]
    """
    reached = {name: _reached(graph, name) for name in graph}
    found = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return [list(members) for members in sorted(found) if len(members) > 1]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found
