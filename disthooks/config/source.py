"""Reads a configuration: its plain values, the line of each value, and the variables and placeholders in its paths."""

# [Note: values with their lines]
# An error of a configuration says `file:line`. PyYAML gives values or nodes with lines, not both, so the nodes are read
# here and their values are made one by one. Reading nodes also allows to refuse what YAML takes without a word and a
# configuration cannot mean: a key that stands twice, a key that is no text, a tag of Python, a value that contains
# itself, and so many aliases of aliases that memory would run out.
#
# [Note: YAML 1.1]
# PyYAML reads YAML 1.1, which surprises: `1e-3` is a text, `010` is 8, and `1:30` is 90. The first is read as the
# number that was meant. The others are an error, since nobody can tell which number was meant. A date stays a text.
#
# [Note: errors of YAML]
# PyYAML says what its parser expected, which tells little about the mistake. Five mistakes make nearly all of these
# errors: a tab, a bracket that is not closed, a pattern such as `*.mlp` or a placeholder without quotes, a missing
# blank behind a colon, and a wrong indentation. They are looked for in the line of the error, and the advice is added.

from __future__ import annotations

import collections.abc
import difflib
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from disthooks._ranks import (
    LOCAL_RANK_VARIABLES,
    RANK_VARIABLES,
    first_set,
    global_rank,
    has_process_group,
    has_several_ranks,
)
from disthooks.errors import ConfigError

Path = tuple[str | int, ...]

# A number that YAML 1.1 takes for a text, as it wants 1.0e-3. See [Note: YAML 1.1].
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
# A number that YAML 1.1 takes for an octal one or a time. See [Note: YAML 1.1].
_OLD_INTEGER = re.compile(r"[-+]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+)")
# A pattern, and a placeholder, without quotes at the beginning of a value. See [Note: errors of YAML].
_STAR = re.compile(r"(?:^|[\s:\[{,])(\*[^\s,\]}#]*)")
_BRACE = re.compile(r"[:\-,\[]\s+(\{\w+\}[^\s,}\]]*)")
# A key with a value right behind its colon, as in `save:[]`; not a URL.
_JOINED = re.compile(r"\s*(- +)?[A-Za-z_]+:[^\s/].*$")
# The dash of a list's entry.
_DASH = re.compile(r" *-( +)")
#: The environment variable that has the path of a configuration.
VARIABLE = "DISTHOOKS_CONFIG"
_MOST = 100_000  # values of a file; aliases of aliases could be more than memory holds


@dataclass(frozen=True, eq=False)
class Source:
    """A configuration that was read, with the line of each value, by its path; see [Note: values with their lines]."""

    name: str
    document: Any
    lines: Mapping[Path, int] = field(default_factory=dict)

    def at(self, path: Path = ()) -> str:
        """``name:line`` of the value at ``path``; if the file does not have it, of the nearest value around it.

        >>> Source("hooks.yaml", {}, {("save",): 2}).at(("save", 0, "store"))
        'hooks.yaml:2'
        """
        known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), ())
        return f"{self.name}:{self.lines[known]}" if known in self.lines else self.name

    def say(self, path: Path, says: str) -> str:
        """A message: the file and line of ``path``, the path with dots, and ``says``."""
        name = ".".join(map(str, path))
        return f"{self.at(path)}: {name}{says}" if name else f"{self.at()}: {says.lstrip(': ')}"

    def fail(self, path: Path, says: str) -> NoReturn:
        raise ConfigError(self.say(path, says)) from None

    def of_text(self, message: str, under: Path) -> Path | None:
        """The path of the text that ``message`` begins with, in quotes, as errors about patterns do; else None."""
        for path in self.lines:
            value = self.value(path) if path[: len(under)] == under else None
            if isinstance(value, str) and message.startswith(f"{value!r} "):
                return path
        return None

    def value(self, path: Path) -> Any:
        here = self.document
        for key in path:
            here = here[key]
        return here


def source_of(given: str | os.PathLike[str] | Mapping[str, Any], name: str = "the configuration") -> Source:
    """Read a YAML file, or take a dict, which has no lines."""
    if isinstance(given, Mapping):
        return Source(name, _plain(given))
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"a configuration is the path of a file, or a dict; got {type(given).__name__}")
    path = os.fspath(given)
    return _parsed(path, _text(path))


def _plain(value: Any) -> Any:
    """A copy of ``value`` with dicts for mappings and lists for tuples, so that later changes do not reach it."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _text(name: str) -> str:
    try:
        return pathlib.Path(name).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{name}:{line}: is no text in UTF-8: a byte is 0x{error.object[error.start]:02x}") from None
    except ValueError as error:  # a name with a NUL in it
        raise ConfigError(f"{name!r}: cannot be read: {error}") from None


def _parsed(name: str, text: str) -> Source:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a configuration file needs PyYAML: pip install 'disthooks[config]'") from error
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{name}:1: is empty: it needs 'save' or 'watch'")
        return _YamlReader(name, loader).read(root)
    except yaml.YAMLError as error:
        raise ConfigError(_short(name, text, error)) from None
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deep") from None


def _short(name: str, text: str, error: Any) -> str:
    """PyYAML's error in one line, with advice; see [Note: errors of YAML]."""
    mark = getattr(error, "problem_mark", None)
    line = text[: getattr(error, "position", 0)].count("\n") if mark is None else mark.line
    where, lines = f"{name}:{line + 1}", text.splitlines()
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    opened = getattr(error, "context_mark", None)
    text_of_error = f"{problem}{f' ({context})' if context else ''}"
    if "'\\t'" in problem:
        hint = "; YAML takes no tabs, indent with blanks"
    elif "end of stream" in problem and opened is not None:
        hint = f"; what is opened in line {opened.line + 1} is not closed"
    else:
        hint = _unquoted(lines, line, text_of_error) or _misplaced(lines, line, text_of_error)
    return f"{where}: is not YAML: {text_of_error}{hint}"


def _unquoted(lines: list[str], at: int, problem: str) -> str:
    """Advice if a text needs quotes because of its first letter, or if a blank is missing; else ""."""
    here = lines[at] if at < len(lines) else ""
    wanted = _STAR if "alias" in problem else _BRACE if "expected" in problem else None
    found = wanted.search(here) if wanted else None
    if found:
        return f'; a text that begins with {found[1][0]} stands in quotes: "{found[1]}"'
    joined = next((i for i in (at, at - 1) if 0 <= i < len(lines) and _JOINED.match(lines[i])), None)
    return f"; a blank is missing behind ':' in line {joined + 1}" if joined is not None else ""


def _misplaced(lines: list[str], at: int, problem: str) -> str:
    """Advice if the line ``at`` begins in a column in which none of the blocks around it begins; else ""."""
    if at >= len(lines) or not ("not allowed here" in problem or "<block end>" in problem):
        return ""
    here = _columns(lines[at])
    # The columns of the blocks that are still open: going up, each line that begins further left opens one.
    above: list[int] = []
    for text in reversed(lines[:at]):
        if text.strip() and not text.lstrip().startswith("#"):
            above += [column for column in reversed(_columns(text)) if not above or column < above[-1]]
    if not above or here[0] in above:
        return ""
    columns = ", ".join(map(str, reversed(above)))
    return f"; indentation: line {at + 1} begins in column {here[0]}, and what is above it in columns {columns}"


def _columns(text: str) -> list[int]:
    """The columns, from 1, in which a line begins: that of its dash, if it has one, and that of its first key."""
    first = len(text) - len(text.lstrip(" "))
    dash = _DASH.match(text)
    return [first + 1, dash.end() + 1] if dash else [first + 1]


class _YamlReader:
    """Makes values of YAML's nodes and notes their lines; see [Note: values with their lines]."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name, self._loader = name, loader
        self._lines: dict[Path, int] = {}
        self._checked: set[int] = set()  # ids of mappings whose keys were checked
        self._open: set[int] = set()  # ids of the nodes around the one that is being read

    def read(self, root: Any) -> Source:
        return Source(self._name, self._value(root, ()), self._lines)

    def _value(self, node: Any, path: Path) -> Any:
        self._lines.setdefault(path, _line(node))
        if len(self._lines) > _MOST:
            raise ConfigError(f"{self._name}: has more than {_MOST} values: it names aliases of aliases")
        if node.id == "scalar":
            return self._scalar(node)
        self._check_tag(node, ("seq", "map"))
        if id(node) in self._open:
            raise ConfigError(f"{self._name}:{_line(node)}: contains itself")
        self._open.add(id(node))
        value: Any
        if node.id == "sequence":
            value = [self._value(each, (*path, i)) for i, each in enumerate(node.value)]
        else:
            # An alias names a mapping that was read before. Its keys are not checked again, because merging has put
            # keys into it that may stand there twice.
            if id(node) not in self._checked:
                self._checked.add(id(node))
                self._check_keys(node)
            # "<<" merges other mappings. Their keys come first, so the keys that are written here win.
            self._loader.flatten_mapping(node)
            value = {}
            for key_node, value_node in node.value:
                here: Path = (*path, key_node.value)
                self._lines[here] = _line(key_node)
                value[key_node.value] = self._value(value_node, here)
        self._open.discard(id(node))
        return value

    def _check_keys(self, node: Any) -> None:
        """Check that each key of a mapping is a text and stands once."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            here = f"{self._name}:{_line(key)}"
            shown = key.value if key.id == "scalar" else f"a {key.id}"
            if key.id != "scalar" or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise ConfigError(f"{here}: a key is a text, got {shown}; put it in quotes")
            if key.value in lines:
                raise ConfigError(f"{here}: {key.value!r} stands here and in line {lines[key.value]}: leave one out")
            lines[key.value] = _line(key)

    def _check_tag(self, node: Any, known: tuple[str, ...]) -> None:
        if node.tag.removeprefix("tag:yaml.org,2002:") not in known:
            raise ConfigError(f"{self._name}:{_line(node)}: no plain value: the tag {node.tag} cannot stand here")

    def _scalar(self, node: Any) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind == "int" and _OLD_INTEGER.fullmatch(node.value):
            raise ConfigError(
                f"{self._name}:{_line(node)}: {node.value!r} is an octal number or a time to YAML 1.1: write a plain "
                "number, or a text in quotes"
            )
        if kind == "str" and node.style is None and _EXPONENT.fullmatch(node.value):
            return float(node.value)
        if kind in ("str", "timestamp"):
            return node.value
        self._check_tag(node, ("null", "bool", "int", "float"))
        try:
            return self._loader.construct_object(node)
        except ValueError:
            raise ConfigError(f"{self._name}:{_line(node)}: {node.value!r} is no {kind}") from None


def _line(node: Any) -> int:
    line: int = node.start_mark.line  # it counts from 0
    return line + 1


_PATHS = ("path", "directory", "log_dir")
# The annotations of a value that has values of other types in it, or is one of several types.
_HOLDERS = (typing.Union, types.UnionType, list, tuple, collections.abc.Sequence, collections.abc.Iterable)


def is_path(name: str, hint: Any) -> bool:
    """Whether a parameter takes a path, which its name says, or ``os.PathLike`` among its types.

    >>> is_path("directory", None), is_path("where", str | os.PathLike[str]), is_path("limit", int | str)
    (True, True, False)
    """
    return name in _PATHS or any(typing.get_origin(part) is os.PathLike or part is os.PathLike for part in parts(hint))


def parts(hint: Any) -> list[Any]:
    """The types of a union, also of the lists in it; ``[hint]`` for any other annotation."""
    if typing.get_origin(hint) in _HOLDERS:
        return [part for each in typing.get_args(hint) for part in parts(each)]
    return [hint]


RUN = "{run}"
# One alternative for each thing that a path can have: $$, ${VAR}, $VAR, {{, }}, {place}, and a letter that stands
# alone.
_PART = re.compile(r"\$\$|\$\{(?P<braced>[^}]*)\}|\$(?P<bare>[A-Za-z_]\w*)|\{\{|\}\}|\{(?P<place>[^{}]*)\}|\$|\{")


class Expansion:
    """Replaces variables and placeholders in paths. One without a value is an error: the path would be another."""

    def __init__(self, source: Source, run: str | None = None) -> None:
        self._source = source
        self.run: str | None = None  # `{run}` is unknown in the run directory itself
        self.run = None if run is None else self(run, ("run",))

    def __call__(self, text: str, path: Path) -> str:
        """``text`` with every ``$VAR``, ``${VAR}``, ``{rank}``, ``{local_rank}``, ``{run}`` and ``~/`` replaced."""
        return _PART.sub(lambda part: self._replacement(part, path), os.path.expanduser(text))

    def _replacement(self, part: re.Match[str], path: Path) -> str:
        if part[0] in ("$$", "{{", "}}"):
            return part[0][0]
        if part["place"] is not None:
            return self._placeholder(part["place"], path)
        name = part["braced"] if part["braced"] is not None else part["bare"]
        if name is None:
            self._source.fail(
                path, f": a single {part[0]!r} begins nothing: write {part[0] * 2!r} for the letter itself"
            )
        if os.environ.get(name):
            return os.environ[name]
        if name in os.environ:
            self._source.fail(path, f": the variable {name!r} is empty: a path would begin where the script does")
        near = difflib.get_close_matches(name, os.environ, n=1, cutoff=0.75)
        hint = f"; did you mean ${near[0]}?" if near else ""
        self._source.fail(path, f": the variable {name!r} is not set{hint} ('$$' is a dollar)")

    def _placeholder(self, name: str, path: Path) -> str:
        if name == "rank":
            return str(global_rank()) if has_process_group() else first_set(RANK_VARIABLES) or "0"
        if name == "local_rank":
            local_rank = first_set(LOCAL_RANK_VARIABLES)
            # Rank 0 would be wrong here: all ranks of a node would write to the same files.
            if local_rank is None and has_several_ranks():
                self._source.fail(
                    path, ": {local_rank} is not known: LOCAL_RANK is not set, and this is one of several ranks"
                )
            return local_rank or "0"
        if name == "run" and self.run is not None:
            return self.run
        known = ["rank", "local_rank", *(["run"] if self.run is not None else [])]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join(f'{{{one}}}' for one in known)}"
        self._source.fail(path, f": {{{name}}} is no placeholder; {hint} ('{{{{' is a brace)")


def escaped(text: str) -> str:
    """``text`` with ``$``, ``{`` and ``}`` doubled, so that :class:`Expansion` gives ``text`` again.

    >>> escaped("/data/$x/{run}")
    '/data/$$x/{{run}}'
    """
    return re.sub(r"[${}]", lambda letter: letter[0] * 2, text)


def names_run(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(names_run, value.values()))
    if isinstance(value, list):
        return any(map(names_run, value))
    return isinstance(value, str) and RUN in value.replace("{{", "")  # "{{run}}" is a text in braces
