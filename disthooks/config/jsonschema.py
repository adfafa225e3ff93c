"""The JSON schema by which editors complete and check a configuration.

``python -m disthooks.config.jsonschema --write`` writes ``hooks.schema.json`` anew, from the keys, the kinds and
their signatures, annotations and docstrings. A test says when it has to be.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import re
import textwrap
import typing
from collections.abc import Callable
from typing import Any, Literal

import torch

from disthooks._registry import NOUNS, Kind, base_of, other_kinds, own_kinds
from disthooks.config.build import hints, is_path, parts

FILE = pathlib.Path(__file__).with_name("hooks.schema.json")
_OWN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_SIZES = ("limit", "in_flight")
_DTYPE = r"^(torch\.)?(bfloat16|half|float|double|float\d+(_\w+)?)$"
_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


_HELD = tuple(noun for noun in NOUNS if noun != "engine")  # what a file can name


def schema(others: bool = False) -> dict[str, Any]:
    """The schema as a dict; of other packages' kinds too, if asked for."""
    from disthooks.config.schema import Hooks

    found: dict[str, Any] = Hooks.model_json_schema()
    _name_kinds(found)
    found["$schema"] = "http://json-schema.org/draft-07/schema#"
    found["$defs"] = found["$defs"] | {noun: _noun(noun, others) for noun in _HELD}
    moved: dict[str, Any] = json.loads(json.dumps(found).replace("#/$defs/", "#/definitions/"))
    moved["definitions"] = moved.pop("$defs")  # the name that every editor knows
    return moved


def text(others: bool = False) -> str:
    """The text of the file."""
    return json.dumps(schema(others), indent=2) + "\n"


def _name_kinds(found: dict[str, Any]) -> None:
    """Where pydantic knows any dict, say which."""
    save, watch = found["$defs"]["Save"]["properties"], found["$defs"]["Watch"]["properties"]
    described = save["recompute"]["description"]
    save["recompute"] = {"anyOf": [_ref("recompute"), {"type": "null"}], "default": None, "description": described}
    save["codecs"]["items"] = _ref("codec")
    save["store"] = {**_ref("store"), "description": save["store"]["description"]}
    for key, noun in (("rules", "rule"), ("sinks", "sink")):
        watch[key]["items"] = _ref(noun)
    standard = {"const": "standard"}
    several = {"type": "array", "items": {"anyOf": [standard, _ref("stat")]}}
    found["anyOf"] = [{"required": [key]} for key in ("save", "watch", "blame", "check_replicas")]
    found["$defs"]["Watch"]["anyOf"] = [{"required": ["rules"]}, {"required": ["stats"]}]
    watch["stats"] = {**watch["stats"], "anyOf": [standard, several]}


def _noun(noun: str, others: bool) -> dict[str, Any]:
    own = {
        "type": "object",
        "description": f"A {noun} of your own.",
        "properties": {"kind": {"type": "string", "pattern": _OWN, "description": "package.module:Class"}},
        "required": ["kind"],
    }
    kinds = [*own_kinds(noun), *(other_kinds(noun) if others else [])]
    return {"anyOf": [*map(_kind, kinds), own]}


def _document(kind: Kind) -> str:
    """The docstring of the function that makes its objects, if it has one, else that of the class."""
    return inspect.getdoc(kind.target) or inspect.getdoc(kind.made) or ""


def summary(kind: Kind) -> str:
    """The first sentence of what its docstring says."""
    return _summary(_document(kind))


def _kind(kind: Kind) -> dict[str, Any]:
    document = _document(kind)
    said, known = _arguments(document), hints(kind.target)
    properties: dict[str, Any] = {"kind": {"const": kind.name, "description": _summary(document)}}
    for name, parameter in kind.parameters().items():
        properties[name] = _type(known.get(name), name) | ({"description": said[name]} if name in said else {})
        if parameter.default is not parameter.empty:
            properties[name] |= _default(parameter.default)
    required = [name for name, it in kind.parameters().items() if it.default is it.empty]
    return {
        "type": "object",
        "title": kind.name,
        "description": _summary(document),
        "properties": properties,
        "required": ["kind", *required],
        "additionalProperties": False,
    }


def _default(value: Any) -> dict[str, Any]:
    return {"default": list(value) if isinstance(value, tuple) else value}


def _type(hint: Any, name: str) -> dict[str, Any]:
    """What the annotation of an argument is in a JSON schema; anything goes where it says nothing."""
    if is_path(name, hint):
        several = any(typing.get_origin(part) is not None for part in typing.get_args(hint) if part not in parts(part))
        return _any([_SIMPLE[str], {"type": "array", "items": _SIMPLE[str]}] if several else [_SIMPLE[str]])
    found: list[dict[str, Any]] = []
    for part in typing.get_args(hint) if _is_union(hint) else [hint]:
        one = _one(part)
        if one is not None and one not in found:
            found.append(one)
    return _any(_sized(found, name))


def _sized(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Sizes in bytes may be of the whole node too."""
    from disthooks.config.schema import SIZE

    more: dict[Any, dict[str, Any]] = {
        "integer": {"minimum": 0},
        "string": {"pattern": SIZE.replace("$", r"(\s+per node)?$")},
    }
    return [one | more.get(one.get("type"), {}) if name in _SIZES else one for one in found]


def _one(part: Any) -> dict[str, Any] | None:
    if part in _SIMPLE:
        return dict(_SIMPLE[part])
    if part is torch.dtype:
        return {"type": "string", "pattern": _DTYPE, "examples": ["bfloat16", "float16", "float8_e4m3fn"]}
    if typing.get_origin(part) is Literal:
        return {"enum": list(typing.get_args(part))}
    for noun in _HELD:
        if part is not None and part is base_of(noun):
            return _ref(noun)
    if part is type or typing.get_origin(part) is Callable or part is Any or part is None:
        return None  # no file can hold it
    inner = typing.get_args(part)
    if inner:
        return {"type": "array", "items": _type(inner[0], "")}
    return None


def _any(found: list[dict[str, Any]]) -> dict[str, Any]:
    if len(found) == 1:
        return dict(found[0])
    return {"anyOf": found} if found else {}


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, type(int | str))


def _ref(noun: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{noun}"}


def _summary(document: str) -> str:
    return _plain(document.split("\n\n")[0])


def _arguments(document: str) -> dict[str, str]:
    """What a docstring says of each argument."""
    found = re.search(r"^Args:\n((?: .*\n|\n)*)", document + "\n", re.MULTILINE)
    lines = textwrap.dedent(found[1] if found else "")
    pieces = re.split(r"^(\w+): ", lines, flags=re.MULTILINE)[1:]
    return {name: _plain(said) for name, said in zip(pieces[::2], pieces[1::2], strict=True)}


def _plain(said: str) -> str:
    """Without the marks of reStructuredText."""
    said = re.sub(r":\w+:`~?([^`]*)`", lambda it: it[1].rpartition(".")[2], said)
    return " ".join(said.replace("``", "").split())


def main(words: list[str] | None = None) -> None:
    """Print the schema, or with ``--write`` write the file of the package anew."""
    parser = argparse.ArgumentParser(prog="python -m disthooks.config.jsonschema", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE}")
    if not parser.parse_args(words).write:
        print(text(others=True), end="")
        return
    FILE.write_text(text())
    print(f"{FILE.name}: {len(schema()['definitions'])} definitions")


if __name__ == "__main__":
    main()
