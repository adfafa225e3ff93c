"""Every public name with its signature, as text that does not change when a private module moves.

A class of disthooks that has a public name is written by it, whatever its module and its own ``__name__`` are; one
that has none is written ``<private>``. Annotations are evaluated, so that ``nn.Module`` and ``torch.nn.Module`` are
the same, and so are the spellings of a union.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any

import torch

import disthooks as dh

#: Modules whose names are public, and the names; None for all of ``__all__``. Three are the paths under which the
#: documentation names the base classes of a user's own store and codec.
NAMESPACES: dict[str, tuple[str, ...] | None] = {
    "disthooks": None,
    "disthooks.config": None,
    "disthooks.errors": None,
    "disthooks.memory": None,
    "disthooks.sinks": None,
    "disthooks.stats": None,
    "disthooks.saved.codecs": ("Codec",),
    "disthooks.saved.codecs.base": ("Codec",),
    "disthooks.saved.stores.base": ("Store", "StoreReport"),
    "disthooks.saved.pipeline": ("pipeline",),
    # What functions return.
    "disthooks._handles": ("Attachment",),
    "disthooks.grads.attachment": ("Gradients",),
    "disthooks.predict.explanation": ("Explanation",),
    "disthooks.saved.attach": ("SavingHandle",),
    "disthooks.saved.fit": ("FitReport", "Fitted"),
    "disthooks.saved.report": ("SavedReport",),
    "disthooks.report.watch.replicas": ("ReplicaReport",),
}
#: Public modules that import a framework: they are read, not imported.
INTEGRATIONS = ("accelerate", "lightning", "transformers")
#: Classes that only ``disthooks.run`` uses.
NOT_PUBLIC = ("WaitingCallback",)
#: What a user's own subclass has, or what a user calls. The rest of these classes is between them and the runtime.
EXTENSIONS = {
    "Codec": ("decode", "encode", "lossy"),
    "Rule": (),
    "Store": ("directories", "drop", "get", "put", "report", "stores", "tier_of"),
}
#: Classes that functions of disthooks return: nobody else calls them.
RETURNED = ("Gradients", "Prepared", "PreparedReport", "ReplicaReport", "SavedReport", "SavingHandle", "SavingPlan")
#: Members without an underscore that are between modules of disthooks.
INTERNAL = {
    "disthooks.Plan": ("read",),
    "disthooks.blame().report().found": ("numbers", "of"),
    "disthooks.config.Plan": ("read",),
    "disthooks.on_gradient()": ("attach",),
}
#: Private classes that a user gets hold of, by how: what these return, and what is inside of reports.
FOLLOWED = re.compile(r"disthooks\.(blame|features|on_gradient|trace)\(\)|\.report\(\)|Report\.\w+|\.events$")
DUNDERS = ("__add__", "__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")

_Met = list[tuple[str, type]]


def signatures() -> dict[str, Any]:
    """All of them, by path."""
    public = _public()
    met: _Met = []
    found = {path: _described(path, value, public, met) for path, value in public.items()}
    done: set[type] = set()
    while met:
        path, kind = met.pop(0)
        if kind not in done and FOLLOWED.search(path):
            done.add(kind)
            found[path] = _described(path, kind, public, met)
    return found | {f"disthooks.integrations.{name}": _read(name) for name in INTEGRATIONS}


def _public() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, names in NAMESPACES.items():
        module = getattr(dh, name.partition(".")[2], None) if name.count(".") == 1 else None
        module = dh if name == "disthooks" else module or importlib.import_module(name)
        found |= {f"{name}.{each}": getattr(module, each) for each in names or module.__all__ if each != "__version__"}
    return found


def _described(path: str, value: Any, public: dict[str, Any], met: _Met) -> Any:
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return _class(path, value, public, met)
    if inspect.isroutine(value):
        return _signature(path, value, public, met)
    return f"alias of {_text(value, path, public, met)}"


def _class(path: str, kind: type, public: dict[str, Any], met: _Met) -> dict[str, Any]:
    ours = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "disthooks"]
    named = [_name_of(each, public) for each in kind.__mro__[1:-1]]
    found: dict[str, Any] = {"bases": [name for name in named if name and name not in ("ABC", "Generic", "Protocol")]}
    makes = any("__init__" in vars(each) or "__new__" in vars(each) for each in ours)
    if makes and "()" not in path and path.rpartition(".")[2] not in (*RETURNED, "differs", "sites"):
        found["call"] = _signature(path, kind, public, [])
    if dataclasses.is_dataclass(kind):
        found["frozen"] = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    hints = _hints(kind)
    fields: dict[str, str] = {}
    if dataclasses.is_dataclass(kind):
        own = [each for each in dataclasses.fields(kind) if each.name[0] != "_"]
        own = [each for each in own if each.init or each.name in _shown(kind, (each.name,))]
        fields = {each.name: _field(path, hints, each, public, met) for each in own}
    elif hasattr(kind, "_fields"):
        fields = {each: _text(hints[each], f"{path}.{each}", public, met) for each in kind._fields}
    names = (
        {name for each in ours for name in vars(each)} - set(getattr(kind, "__dataclass_fields__", ())) - set(fields)
    )
    frozen = _shown(kind, sorted(name for name in names if name in DUNDERS or name[0] != "_"))
    members = {
        name: _member(f"{path}.{name}", kind, name, public, met)
        for name in frozen
        if name not in INTERNAL.get(path, ())
    }
    found |= {"fields": fields} if fields else {}
    return found | {"members": {name: text for name, text in members.items() if text}}


def _extended(kind: type) -> str | None:
    """The base of a user's own classes that ``kind`` is, or has."""
    ours = [each.__name__ for each in kind.__mro__ if each.__module__.startswith("disthooks.")]
    return next((name for name in ours if name in EXTENSIONS), None)


def _shown(kind: type, names: Iterable[str]) -> list[str]:
    base = _extended(kind)
    return [name for name in names if base is None or name in EXTENSIONS[base]]


def _field(path: str, hints: dict[str, Any], field: Any, public: dict[str, Any], met: _Met) -> str:
    text = _text(hints.get(field.name, field.type), f"{path}.{field.name}", public, met)
    if field.default is not dataclasses.MISSING:
        return f"{text} = {_value(field.default, public)}"
    return f"{text} = <factory>" if field.default_factory is not dataclasses.MISSING else text


def _member(path: str, kind: type, name: str, public: dict[str, Any], met: _Met) -> str:
    member = inspect.getattr_static(kind, name)
    if isinstance(member, property):
        assert member.fget is not None
        signature = _signature(path, member.fget, public, met)
        return "property" + signature[signature.rindex(" -> ") :] if " -> " in signature else "property"
    if isinstance(member, (classmethod, staticmethod)):
        return f"{type(member).__name__} {_signature(path + '()', member.__func__, public, met)}"
    if inspect.isfunction(member):
        base = _extended(kind)
        if name in DUNDERS:
            return "method"
        if base is not None and kind.__name__ != base:  # tickets are the subclass's own
            return f"({', '.join(inspect.signature(member).parameters)})"
        return _signature(path + "()", member, public, met)
    return "" if inspect.isclass(member) else "attribute"


def _signature(path: str, function: Any, public: dict[str, Any], met: _Met) -> str:
    path = path if path.endswith("()") or inspect.isclass(function) else f"{path}()"
    parameters, star = [], False
    signature = inspect.signature(function)
    for each in signature.parameters.values():
        if each.name.startswith("_"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parameters.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        text = mark + each.name
        if each.annotation is not each.empty:
            text += f": {_text(_evaluated(each.annotation, function), path, public, [])}"
        if each.default is not each.empty:
            text += f" = {_value(each.default, public)}"
        parameters.append(text)
    back = signature.return_annotation
    end = "" if back is signature.empty else f" -> {_text(_evaluated(back, function), path, public, met)}"
    return f"({', '.join(parameters)}){end}"


def _value(value: Any, public: dict[str, Any]) -> str:
    if inspect.isroutine(value) or inspect.isclass(value):
        return str(_name_of(value, public) if inspect.isclass(value) else value.__name__)
    return "<factory>" if repr(value) == "<factory>" else re.sub(r" at 0x\w+", "", repr(value))


def _name_of(kind: Any, public: dict[str, Any]) -> str | None:
    """The public path of a class; its name if it is not of disthooks; None for a private one."""
    for path, value in public.items():
        if value is kind:
            return path
    return None if kind.__module__.partition(".")[0] == "disthooks" else str(kind.__qualname__)


# -- annotations


@functools.cache
def _names() -> dict[str, Any]:
    """What annotations name, also where it is imported for the type checker alone."""
    found: dict[str, Any] = {"torch": torch, "nn": torch.nn, "os": os, "Any": Any, "types": types}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("disthooks") and module is not None:
            found |= {key: value for key, value in vars(module).items() if inspect.isclass(value)}
    return {**vars(collections.abc), **vars(typing), **found}


def _evaluated(annotation: Any, owner: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    owner = inspect.unwrap(owner)
    own = vars(sys.modules[owner.__module__]) if inspect.isclass(owner) else owner.__globals__
    try:
        return eval(annotation, {**_names(), **own})
    except NameError:
        return annotation


def _hints(kind: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        noted = vars(each).get("__annotations__", {})
        found |= {name: _evaluated(hint, each) for name, hint in noted.items()}
    return found


def _text(hint: Any, path: str, public: dict[str, Any], met: _Met) -> str:
    """An annotation as text; private classes in it are added to ``met``."""
    if isinstance(hint, (str, typing.ForwardRef)):
        hint = _evaluated(hint if isinstance(hint, str) else hint.__forward_arg__, _text)
    if typing.get_origin(hint) is not None or isinstance(hint, list):
        return _generic(hint, path, public, met)
    if inspect.isclass(hint) and hint is not type(None):
        name = _name_of(hint, public)
        if name is None:
            met.append((path, hint))
        return name or "<private>"
    if isinstance(hint, typing.TypeVar):
        return "<type variable>"
    known = {None: "None", type(None): "None", ...: "..."}
    return hint if isinstance(hint, str) else known.get(hint) or repr(hint).replace("typing.", "")


def _generic(hint: Any, path: str, public: dict[str, Any], met: _Met) -> str:
    origin, args = typing.get_origin(hint), hint if isinstance(hint, list) else typing.get_args(hint)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    texts = [_text(each, path, public, met) for each in args]
    if origin in (typing.Union, types.UnionType):
        return " | ".join(texts)
    return f"{_text(origin, path, public, met) if origin else ''}[{', '.join(texts)}]"


# -- integrations


def _read(name: str) -> dict[str, Any]:
    """The public functions and classes of an integration, from its source: nothing is imported."""
    folder = pathlib.Path(dh.__file__).parent
    tree = ast.parse((folder / f"integrations/{name}.py").read_text())
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = _as_written(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in NOT_PUBLIC:
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found[node.name] = {
                each.name: _as_written(each) for each in inner if each.name == "__init__" or each.name[0] != "_"
            }
    return found


def _as_written(node: ast.FunctionDef) -> str:
    marks = "property " if any(ast.unparse(each) == "property" for each in node.decorator_list) else ""
    back = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{marks}({ast.unparse(node.args)}){back}"
