"""The arguments of each kind as pydantic's models, and the JSON schema made of them and of the keys (yaml_keys.py).

Editors use the schema to complete and check a configuration. ``python -m disthooks.config.schema`` prints it with the
kinds of installed packages; ``--write`` writes the file ``hooks.schema.json``, without these kinds.
"""

# [Note: one model for each kind]
#
# The signature of a kind says what may be written for it: its annotations say which values are right, its defaults say
# which keys may be left out, and the docstring says what each key means. ``arguments_of`` makes a pydantic model of the
# signature. The model refuses wrong values and gives the kind's part of the JSON schema, so neither is written by hand
# anywhere. The model checks values and does not convert them: the class itself makes the object of the checked values.
#
# [Note: a schema for editors]
#
# pydantic's JSON schema is right, and editors make little of it. An entry is any dict to pydantic, so the schema of
# each noun is put in its place. Choices that are equal are joined, and a word is an ``enum`` without a type, because
# editors offer the values of an ``enum``. Patterns for sizes and dtypes are for editors alone: when a file is read, the
# function that reads such a text refuses a wrong one with a better message.

from __future__ import annotations

import argparse
import collections.abc
import functools
import inspect
import json
import os
import pathlib
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, WithJsonSchema, create_model
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from disthooks._registry import NOUNS, Kind, base_of, kind_names, near, other_kinds, own_kinds
from disthooks.config.source import Path
from disthooks.config.yaml_keys import SIZE, Bundle, Hooks

FILE = pathlib.Path(__file__).with_name("hooks.schema.json")
_OWN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_SIZES = ("limit", "in_flight")
_DTYPE = r"^(torch\.)?(bfloat16|half|float|double|float\d+(_\w+)?)$"
_FILE_NOUNS = tuple(noun for noun in NOUNS if noun != "engine")  # the nouns whose kinds a file can name
# In an annotation it makes pydantic check the class of an object, and nothing inside the object.
_ITS_CLASS = typing.cast(Any, InstanceOf)()
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)


class WrongArgumentError(Exception):
    def __init__(self, path: Path, text: str) -> None:
        super().__init__(text)
        self.path = path


@functools.lru_cache(maxsize=256)
def arguments_of(kind: Kind) -> type[BaseModel]:
    """The model of the arguments of ``kind``; see [Note: one model for each kind].

    >>> from disthooks._registry import find_kind
    >>> list(arguments_of(find_kind("codec", "Cast")).model_json_schema()["properties"])
    ['dtype']
    """
    hints = kind.hints()
    # The text of each argument, by its name, from the `Args:` of the docstring.
    found = re.search(r"^Args:\n((?: .*\n|\n)*)", _document(kind) + "\n", re.MULTILINE)
    pieces = re.split(r"^(\w+): ", textwrap.dedent(found[1] if found else ""), flags=re.MULTILINE)[1:]
    texts = {name: _plain(text) for name, text in zip(pieces[::2], pieces[1::2], strict=True)}
    fields: dict[str, Any] = {}
    for number, (name, it) in enumerate(kind.parameters().items()):
        if it.kind in (it.VAR_KEYWORD, it.VAR_POSITIONAL):
            continue
        default: Any = ... if it.default is it.empty else it.default
        # An argument may have a name that pydantic takes for its own, so the name is an alias.
        fields[f"argument_{number}"] = (
            _checked(hints.get(name, Any), name),
            Field(default, alias=name, description=texts.get(name)),
        )
    extra: Literal["allow", "forbid"] = "allow" if kind.takes_any_name else "forbid"
    config = ConfigDict(strict=True, extra=extra, arbitrary_types_allowed=True)
    return create_model(kind.name, __config__=config, **fields)


def _checked(hint: Any, name: str = "") -> Any:
    """The annotation ``hint`` in the form that pydantic checks: of objects the class alone."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_checked(each, name) for each in args)]  # noqa: UP007
    if origin in _LISTS:
        return list[_checked(args[0], name)] if args else list[Any]  # type: ignore[misc]
    if origin is os.PathLike or hint is os.PathLike:
        return Annotated[os.PathLike, _ITS_CLASS, WithJsonSchema({"type": "string"})]
    if origin in (dict, collections.abc.Mapping):
        return dict[Any, Any]
    if origin is Literal or hint in (bool, float, None, types.NoneType) or origin is collections.abc.Callable:
        return hint
    if hint in (int, str):
        size: dict[str, Any] = {"minimum": 0} if hint is int else {"pattern": SIZE.replace("$", r"(\s+per node)?$")}
        return Annotated[hint, Field(json_schema_extra=size)] if name in _SIZES else hint
    return _instance(hint)


def _instance(hint: Any) -> Any:
    noun = next((noun for noun in _FILE_NOUNS if noun != "sink" and hint is base_of(noun)), None)
    if noun is not None:
        return Annotated[hint, _ITS_CLASS, WithJsonSchema({"noun": noun})]
    if hint is torch.dtype:
        schema = {"type": "string", "pattern": _DTYPE, "examples": ["bfloat16", "float16", "float8_e4m3fn"]}
        return Annotated[hint, _ITS_CLASS, WithJsonSchema(schema)]
    return Annotated[hint, _ITS_CLASS] if isinstance(hint, type) and hint not in (Any, object) else Any


def check_arguments(kind: Kind, given: Mapping[str, Any], names_alone: bool = False) -> None:
    """Check the arguments of an entry, and raise the first mistake: unknown names, then missing ones, then types."""
    try:
        arguments_of(kind).model_validate(dict(given))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        parameters = kind.parameters()
        for each in errors:
            if each["type"] == "extra_forbidden":
                name = str(each["loc"][0])
                raise WrongArgumentError(
                    (name,), f": {kind.name} has no argument {name!r}{near(name, parameters)}"
                ) from None
        if names_alone:
            return
        missing = [
            name for name in parameters if any((each["type"], each["loc"]) == ("missing", (name,)) for each in errors)
        ]
        if missing:
            raise WrongArgumentError((), f": {kind.name} needs {' and '.join(map(repr, missing))}") from None
        name = next(key for key in given if any(each["loc"][0] == key for each in errors))
        value, hint = given[name], kind.hints().get(name)
        raise WrongArgumentError(
            (name,), f": {expected(hint)} is needed, got {value!r}{_meant(value, choices(hint))}"
        ) from None


def _meant(value: Any, words: Sequence[str]) -> str:
    """Advice for a value of the wrong type, for which ``words`` are right: the nearest word, or an entry; or ""."""
    if words and isinstance(value, str):
        advice = near(value, words)
        return advice if "?" in advice else ""  # without a near word it would list the words, as the message does
    # The name of a kind, or a list with one, stands where an entry is needed.
    names = {name for noun in _FILE_NOUNS for name in kind_names(noun)}
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and each in names:
            return f"; did you mean {{kind: {each}}}?"
    return ""


def expected(hint: Any) -> str:
    """The values that an annotation allows, in words for people who write YAML.

    >>> expected(float | None), expected(Literal["a", "b"]), expected(int | str)
    ('a number or null', "'a' or 'b'", 'a whole number or a text')
    """
    # No file can hold a function.
    parts = [part for part in _choices(hint) if typing.get_origin(part) is not collections.abc.Callable]
    return " or ".join(dict.fromkeys(_named(part) for part in parts or _choices(hint)))


def choices(hint: Any) -> list[str]:
    return [word for part in _choices(hint) if isinstance(part, _Word) for word in [part.word] if isinstance(word, str)]


class _Word(typing.NamedTuple):
    word: Any


# The words for each type of a value.
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    torch.dtype: "a dtype such as bfloat16",
    os.PathLike: "a text",
}


def _choices(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for each in typing.get_args(hint) for part in _choices(each)]
    return [_Word(each) for each in typing.get_args(hint)] if typing.get_origin(hint) is Literal else [hint]


def _named(part: Any) -> str:
    if isinstance(part, _Word):
        return repr(part.word)
    origin = typing.get_origin(part)
    if origin in _LISTS:
        return f"a list, each {expected(typing.get_args(part)[0])}" if typing.get_args(part) else "a list"
    known = _WORDS.get(part) or _WORDS.get(origin)
    return known or f"a {getattr(part, '__name__', str(part)).lower()}"


class _Quietly(GenerateJsonSchema):
    """Leaves out choices that no file can hold, without a warning, and titles, which would repeat the names."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema(others: bool = False) -> dict[str, Any]:
    """The JSON schema as a dict; see [Note: a schema for editors]."""
    found: dict[str, Any] = Hooks.model_json_schema()
    _name_kinds(found)
    found["$schema"] = "http://json-schema.org/draft-07/schema#"
    found["$defs"] = found["$defs"] | {noun: _noun(noun, others) for noun in _FILE_NOUNS}
    moved: dict[str, Any] = json.loads(json.dumps(found).replace("#/$defs/", "#/definitions/"))
    moved["definitions"] = moved.pop("$defs")  # draft 07 calls them "definitions", and every editor knows that name
    return moved


def text(others: bool = False) -> str:
    return json.dumps(schema(others), indent=2) + "\n"


def _noun(noun: str, others: bool) -> dict[str, Any]:
    own = {
        "type": "object",
        "description": f"A {noun} of your own.",
        "properties": {"kind": {"type": "string", "pattern": _OWN, "description": "package.module:Class"}},
        "required": ["kind"],
    }
    kinds = [*own_kinds(noun), *(other_kinds(noun) if others else [])]
    return {"anyOf": [*map(_kind, kinds), own]}


def _kind(kind: Kind) -> dict[str, Any]:
    found = arguments_of(kind).model_json_schema(schema_generator=_Quietly)
    properties = {name: _plain_schema(it) for name, it in found.get("properties", {}).items()}
    about = summary(kind)
    return {
        "type": "object",
        "title": kind.name,
        "description": about,
        "properties": {"kind": {"const": kind.name, "description": about}, **properties},
        "required": ["kind", *found.get("required", [])],
        "additionalProperties": False,
    }


def _plain_schema(found: dict[str, Any]) -> dict[str, Any]:
    """The part ``found`` in the form that editors use best; see [Note: a schema for editors]."""
    # pydantic would look for a reference in the model of this kind alone, so its model has the name of the noun.
    if "noun" in found:
        found |= _ref(found.pop("noun"))
    if "enum" in found or "const" in found:
        found = {key: it for key, it in found.items() if key not in ("type", "const")} | {
            "enum": found.get("enum", [found.get("const")])
        }
    if "items" in found:
        found |= {"items": _plain_schema(found["items"])}
    if "anyOf" in found:
        choices = [_plain_schema(each) for each in found.pop("anyOf")]
        several = [each for number, each in enumerate(choices) if each not in choices[:number]]
        found |= several[0] if len(several) == 1 else {"anyOf": several}
    return found


def _document(kind: Kind) -> str:
    """The docstring of the function that makes the objects of ``kind``; if it has none, that of their class."""
    return inspect.getdoc(kind.target) or inspect.getdoc(kind.made) or ""


def summary(kind: Kind) -> str:
    """The first paragraph of the docstring of ``kind``, as plain text."""
    return _plain(_document(kind).split("\n\n")[0])


def _name_kinds(found: dict[str, Any]) -> None:
    """Put references to the nouns where pydantic's schema allows any dict; see [Note: a schema for editors]."""
    save, watch = found["$defs"]["Save"]["properties"], found["$defs"]["Watch"]["properties"]
    described = save["recompute"]["description"]
    save["recompute"] = {"anyOf": [_ref("recompute"), {"type": "null"}], "default": None, "description": described}
    save["codecs"]["items"] = _ref("codec")
    save["store"] = {**_ref("store"), "description": save["store"]["description"]}
    for key, noun in (("rules", "rule"), ("sinks", "sink")):
        watch[key]["items"] = _ref(noun)
    standard = {"enum": list(typing.get_args(Bundle))}
    several = {"type": "array", "items": {"anyOf": [standard, _ref("stat")]}}
    found["anyOf"] = [{"required": [key]} for key in ("save", "watch", "blame", "check_replicas")]
    found["$defs"]["Watch"]["anyOf"] = [{"required": ["rules"]}, {"required": ["stats"]}]
    watch["stats"] = {**watch["stats"], "anyOf": [standard, several]}


def _ref(noun: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{noun}"}


def _plain(text: str) -> str:
    """``text`` in one line, without the marks of reStructuredText."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda it: it[1].rpartition(".")[2], text)
    return " ".join(text.replace("``", "").split())


def main(words: list[str] | None = None) -> None:
    """Print the schema, or with ``--write`` write the file of the package anew."""
    parser = argparse.ArgumentParser(prog="python -m disthooks.config.schema", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE}")
    if not parser.parse_args(words).write:
        print(text(others=True), end="")
        return
    FILE.write_text(text())
    print(f"{FILE.name}: {len(schema()['definitions'])} definitions")


if __name__ == "__main__":
    main()
