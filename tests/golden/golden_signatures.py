"""Every public name with its signature: annotations stand as they are written in the source."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
from typing import Any

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
}
#: What functions return, and what is inside of reports. Nobody else makes one.
RETURNED: dict[str, tuple[str, ...]] = {
    "disthooks._handles": ("Attachment",),
    "disthooks.grads.attachment": ("Gradients",),
    "disthooks.grads.gradients_report": ("GradientsReport",),
    "disthooks.grads.on_gradient": ("OnGradient",),
    "disthooks.predict.explanation": ("Explanation",),
    "disthooks.report.watch.blame": ("Blame", "BlameReport", "Blamed"),
    "disthooks.report.watch.features": ("Seen",),
    "disthooks.report.watch.replicas": ("Difference", "ReplicaReport"),
    "disthooks.report.watch.trace": ("Trace", "TraceEvent", "TraceReport", "TraceRow"),
    "disthooks.saved.attach": ("SavingHandle",),
    "disthooks.saved.computed_again": ("Outlook",),
    "disthooks.saved.cost": ("Kind",),
    "disthooks.saved.fit": ("FitReport", "Fitted"),
    "disthooks.saved.report": ("BudgetReport", "SavedReport", "SiteReport"),
}
#: Public modules that import a framework: they are read, not imported.
INTEGRATIONS = ("accelerate", "lightning", "transformers")
#: What a user's own subclass has, or what a user calls. The rest of these classes is between them and the runtime.
EXTENSIONS = {
    "Codec": ("decode", "encode", "lossy"),
    "Rule": (),
    "Store": ("directories", "drop", "get", "put", "report", "stores", "tier_of"),
}
#: Members without an underscore that are between modules of disthooks, and classes that only ``disthooks.run`` uses.
INTERNAL = {"Plan": ("read",), "Blamed": ("numbers", "of"), "OnGradient": ("attach",)}
NOT_PUBLIC = ("WaitingCallback",)
DUNDERS = ("__add__", "__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")


def signatures() -> dict[str, Any]:
    """All of them, by path."""
    found: dict[str, Any] = {}
    for name, names in {**NAMESPACES, **RETURNED}.items():
        if name.count(".") == 1 and hasattr(dh, name.partition(".")[2]):
            module = getattr(dh, name.partition(".")[2])
        else:
            module = importlib.import_module(name)
        for each in names or module.__all__:
            if each != "__version__":
                found[f"{name}.{each}"] = _described(getattr(module, each))
    return found | {f"disthooks.integrations.{name}": _read(name) for name in INTEGRATIONS}


def _described(value: Any) -> Any:
    if inspect.ismodule(value):
        return "module"
    if inspect.isclass(value):
        return _class(value)
    return _signature(value) if inspect.isroutine(value) else f"alias of {value}"


def _class(kind: type) -> dict[str, Any]:
    ours = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "disthooks"]
    base = next((each.__name__ for each in ours if each.__name__ in EXTENSIONS), None)
    found: dict[str, Any] = {"bases": [each.__name__ for each in kind.__mro__[1:-1]]}
    is_made = any("__init__" in vars(each) or "__new__" in vars(each) for each in ours)
    if is_made and kind.__name__ not in RETURNED.get(kind.__module__, ()):
        found["call"] = _signature(kind)
    if dataclasses.is_dataclass(kind):
        found["frozen"] = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    names = {name for each in ours for name in vars(each) if name in DUNDERS or name[0] != "_"}
    names |= {name for each in ours for name in inspect.get_annotations(each) if name[0] != "_"}
    names -= {*INTERNAL.get(kind.__name__, ())}
    if base is not None:
        fields = {each.name for each in dataclasses.fields(kind) if each.init} if dataclasses.is_dataclass(kind) else ()
        names &= {*EXTENSIONS[base], *fields}
    return found | {"members": {name: _member(kind, name) for name in sorted(names)}}


def _member(kind: type, name: str) -> str:
    member = inspect.getattr_static(kind, name, None)
    if isinstance(member, property):
        return f"property -> {member.fget.__annotations__.get('return')}"
    if isinstance(member, (classmethod, staticmethod)):
        return f"{type(member).__name__} {_signature(member.__func__)}"
    if inspect.isfunction(member):
        return "method" if name in DUNDERS else _signature(member)
    written = [inspect.get_annotations(each)[name] for each in kind.__mro__ if name in inspect.get_annotations(each)]
    default = getattr(kind, "_field_defaults", {}).get(name)  # of a named tuple, whose annotations are references
    text = str(getattr(written[0], "__forward_arg__", written[0])) if written else "attribute"
    return text if default is None else f"{text} = {default}"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if not each.name.startswith("_")]
    text = str(signature.replace(parameters=parameters))
    return re.sub(r" at 0x\w+", "", re.sub(r"(: |-> )(['\"])(.*?)\2(?= =|,|\)|$)", r"\1\3", text))


def _read(name: str) -> dict[str, Any]:
    """The public functions and classes of an integration, from its source: nothing is imported."""
    tree = ast.parse((pathlib.Path(dh.__file__).parent / f"integrations/{name}.py").read_text())
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
