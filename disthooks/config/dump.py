"""Writes a plan: objects as plain values, and plain values as YAML. Reading them gives equal objects."""

# [Note: an object is written by its arguments]
# An entry of a file is a class and the arguments of its constructor. An object tells its class, and its arguments are
# read from the attributes of the same names, as a dataclass keeps them. So an object can be written if its class can
# be imported by name and it keeps every argument. A function, a class in a script's `__main__`, and an object that
# keeps an argument by another name cannot be written, and that is an error: a file that means something else than the
# plan would be worse than no file. Arguments with their default value are left out.
#
# [Note: placeholders in written paths]
# Reading replaces `$VAR`, `{run}` and the like in paths. A path of an object has its final text, so `$` and braces are
# doubled when it is written. `{local_rank}` is the exception: `OnDisk` itself replaces it, so it is left as it is.

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disthooks._registry import Kind, kind_of_object
from disthooks.config.source import escaped, is_path
from disthooks.errors import ConfigError
from disthooks.saved.pipeline import Pipeline


def yaml_of(document: Mapping[str, Any], is_compact: bool = False) -> str:
    """``document`` as the text of a YAML file, with its keys in their order.

    A compact one has each list and mapping without other lists and mappings in one line.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("writing a configuration needs PyYAML: pip install 'disthooks[config]'") from error

    class NoAnchors(yaml.SafeDumper):
        """A dumper that writes no anchors: an object that occurs twice is written twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    style = None if is_compact else False
    return str(
        yaml.dump(document, Dumper=NoAnchors, sort_keys=False, allow_unicode=True, width=120, default_flow_style=style)
    )


def entry(value: Any) -> dict[str, Any]:
    """One store, codec, rule, statistic or sink, as its ``kind`` and the arguments that differ from the default.

    See [Note: an object is written by its arguments].

    >>> from disthooks import Cast, ClipNorm, only
    >>> entry(Cast(torch.bfloat16)), entry(only("*.bias", ClipNorm(1.0)))["rule"]
    ({'kind': 'Cast', 'dtype': 'bfloat16'}, {'kind': 'ClipNorm', 'max_norm': 1.0})
    """
    name, target, hidden = _kind(value)
    written: dict[str, Any] = {"kind": name}
    hints = Kind(name, "", target).hints()
    for key, parameter in inspect.signature(target).parameters.items():
        if not hasattr(value, key):
            raise ConfigError(
                f"{value!r} cannot be written to a file: {name} takes {key!r}, and does not keep it by that name"
            )
        given, default = getattr(value, key), parameter.default
        # True == 1 and 1 == 1.0, but a file writes them differently, so the types are compared too.
        if default is not inspect.Parameter.empty and type(given) is type(default) and bool(given == default):
            continue
        if key not in hidden:
            written[key] = _plain(given, f"{name}.{key}", is_path(key, hints.get(key)))
        elif key not in ("engine", "accelerator"):  # these two are given again when the plan that was read is attached
            raise ConfigError(
                f"{value!r} cannot be written to a file: no file can hold its {key!r}; leave it out there"
            )
    return written


def _kind(value: Any) -> tuple[str, Any, tuple[str, ...]]:
    """The text of ``kind``, the callable whose parameters are the keys, and the parameters that no file can hold."""
    kind = kind_of_object(value)
    if kind is not None:
        return kind.name, kind.target, (*kind.hidden, *([kind.given] if kind.given else []))
    made = type(value)
    name = f"{made.__module__}:{made.__qualname__}"
    # disthooks.grads.rules.base wraps rules that are plain functions, and no file can hold the function.
    if not inspect.isfunction(value) and _importable(made) and name.partition(":")[0] != "disthooks.grads.rules.base":
        return name, made, ()
    raise ConfigError(
        f"{value!r} cannot be written to a file: give an object of a class that a module has by name, whose arguments "
        "it keeps as attributes of the same names"
    )


def _importable(made: type) -> bool:
    # `__main__` is another module in the process that reads the file.
    if made.__module__ in ("builtins", "__main__"):
        return False
    try:
        found: Any = importlib.import_module(made.__module__)
        for part in made.__qualname__.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return found is made


def _plain(value: Any, where: str, path: bool) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if path and isinstance(value, str):
        return escaped(value).replace("{{local_rank}}", "{local_rank}")  # See [Note: placeholders in written paths]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [_plain(each, where, path) for each in value]
    if isinstance(value, Mapping):
        return {key if isinstance(key, int) else str(key): _plain(each, where, path) for key, each in value.items()}
    if isinstance(value, type) or inspect.isroutine(value):
        raise ConfigError(f"{where}={value!r} cannot be written to a file: patterns there are texts")
    return entry(value)


def saved(patterns: Sequence[Any], pipeline: Pipeline) -> dict[str, Any]:
    """One entry of ``save``: tensors that the modules matching ``patterns`` save go through the ``pipeline``."""
    found: dict[str, Any] = {"modules": _patterns(patterns, "modules")}
    if pipeline.at_least != pipeline.store.min_bytes:
        found["at_least"] = pipeline.at_least
    if pipeline.recompute is not None:
        found["recompute"] = entry(pipeline.recompute)
    if pipeline.codecs:
        found["codecs"] = [entry(codec) for codec in pipeline.codecs]
    if not pipeline.selective_checkpoints:
        found["selective_checkpoints"] = False
    return found | {"store": entry(pipeline.store)}


def _patterns(patterns: Any, where: str) -> Any:
    # A class or a function is one pattern too. It becomes an error in `_plain`, which says what a file can have.
    several = [patterns] if isinstance(patterns, (str, type)) or callable(patterns) else list(patterns)
    plain = [_plain(pattern, where, False) for pattern in several]
    return plain[0] if len(plain) == 1 else plain


def watched(watches: Mapping[str, Any]) -> dict[str, Any]:
    """The value of ``watch`` in a file, from the arguments of :func:`disthooks.gradients`."""
    found: dict[str, Any] = {}
    for key, value in watches.items():
        if key in ("rules", "stats", "sinks"):
            found |= {key: [entry(each) for each in value]} if value else {}
        elif key == "groups":
            found |= {key: {name: _patterns(each, "groups") for name, each in value.items()}} if value else {}
        elif key == "every":
            found[key] = value
        elif key in ("recent", "process_group", "experts", "copies", "rerun", "capture"):
            found |= {key: value} if value else {}
        elif key == "restore_buffers":
            found |= {} if value else {key: value}
        elif key == "optimizers":
            found |= {key: value} if value != "apart" else {}
        else:
            raise ConfigError(f"watch: {key} cannot be written to a file: give it to plan.watch()")
    return found
