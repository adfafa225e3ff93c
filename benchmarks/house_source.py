"""A package as its source shows it: lines, functions, classes, imports, circles.

Everything is read with ``ast`` and ``tokenize``; the package is never imported. Names of its modules are nowhere in
this file, so it reads any commit of it.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterable, Iterator
from typing import Any

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
    def comments(self) -> set[int]:
        """The lines on which a comment stands, alone or after code."""
        return {token.start[0] for token in self.tokens if token.type == tokenize.COMMENT}

    @functools.cached_property
    def code(self) -> set[int]:
        """The lines that hold code: no blank lines, no docstrings, no lines with a comment alone."""
        silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        found: set[int] = set()
        for token in self.tokens:
            if token.type not in (*silent, tokenize.ENDMARKER, tokenize.ENCODING):
                found.update(range(token.start[0], token.end[0] + 1))
        return found - self.docstrings

    @functools.cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every ``def``, methods and nested ones too; no lambda."""
        return (node for node in self.nodes if isinstance(node, FUNCTIONS))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def body(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        """The lines of a function's body that hold code."""
        lines = {line for statement in function.body for line in _span(statement)}
        return len(lines & self.code)


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


def percentile(values: Iterable[int], share: float) -> int:
    """The value below or at which ``share`` of the sorted ``values`` lie.

    >>> percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9)
    9
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))] if ordered else 0


def private_functions(package: Package) -> tuple[int, int]:
    """How many private functions are named in one place only, and how many private functions there are.

    Private is a ``def`` whose name begins with one underscore. A place is a use of the name, called or passed on,
    in the function's own file or in a file that has no private function of that name.
    """
    defined: dict[File, collections.Counter[str]] = {}
    used: dict[File, collections.Counter[str]] = {}
    for file in package.files:
        names = [function.name for function in file.functions()]
        defined[file] = collections.Counter(n for n in names if n.startswith("_") and not n.startswith("__"))
        used[file] = collections.Counter(_uses(file))
    single = every = 0
    for file, counted in defined.items():
        for name, times in counted.items():
            others = (other for other in package.files if other is not file and not defined[other][name])
            elsewhere = sum(used[other][name] for other in others)
            every += times
            # Several functions of one name in one file are each used once if there are as many uses as functions.
            single += times if used[file][name] + elsewhere <= times else 0
    return single, every


def _uses(file: File) -> Iterator[str]:
    for node in file.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr


def attributes(node: ast.ClassDef) -> set[str]:
    """What an instance of the class holds: ``self.x`` assigned in its methods, fields of a dataclass, ``__slots__``."""
    found: set[str] = set()
    fields = any("dataclass" in ast.dump(each) for each in node.decorator_list)
    fields |= any(isinstance(base, ast.Name) and base.id in ("NamedTuple", "BaseModel") for base in node.bases)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and fields:
            if "ClassVar" not in ast.dump(statement.annotation):
                found.add(statement.target.id)
        elif isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__slots__" for target in statement.targets
        ):
            found |= {str(each.value) for each in ast.walk(statement.value) if isinstance(each, ast.Constant)}
        elif isinstance(statement, FUNCTIONS):
            found |= _assigned(statement)
    return found


def _assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    owner = arguments[0].arg if arguments else ""
    if owner != "self":
        return set()
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    }


def measured(package: Package) -> dict[str, Any]:
    """The figures of a package that its source shows."""
    lines = sum(len(file.text.splitlines()) for file in package.files)
    bodies = [file.body(function) for file in package.files for function in file.functions()]
    lengths = [len(file.text.splitlines()) for file in package.files]
    comments = sum(len(file.comments) for file in package.files)
    single, private = private_functions(package)
    classes = [(file, node) for file in package.files for node in file.classes()]
    names = collections.Counter(node.name for _, node in classes)
    largest = sorted(((len(attributes(node)), f"{file.name}.{node.name}") for file, node in classes), reverse=True)
    thousands = lines / 1000
    return {
        "lines": lines,
        "code_lines": sum(len(file.code) for file in package.files),
        "comment_lines": comments,
        "docstring_lines": sum(len(file.docstrings) for file in package.files),
        "files": len(package.files),
        "modules": sum(file.path.name not in ("__init__.py", "__main__.py") for file in package.files),
        "file_lines": {"median": percentile(lengths, 0.5), "p90": percentile(lengths, 0.9), "max": max(lengths)},
        "functions": len(bodies),
        "body_lines": {"median": percentile(bodies, 0.5), "p90": percentile(bodies, 0.9), "max": max(bodies)},
        "functions_per_1000_lines": round(len(bodies) / thousands, 1),
        "comments_per_1000_lines": round(comments / thousands, 1),
        "private_functions": private,
        "private_functions_used_once": single,
        "classes": len(classes),
        "largest_classes": [{"class": name, "attributes": count} for count, name in largest[:10]],
        "classes_with_more_than_12_attributes": sum(count > 12 for count, _ in largest),
        "class_names_used_twice": sorted(name for name, times in names.items() if times > 1),
        "circles": package.circles(),
    }
