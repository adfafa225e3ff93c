"""What ``watch`` is on a model: the parameters of each rule and group, and what stands in its way."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disthooks.cli.asked import missing_sinks
from disthooks.cli.entries import Found
from disthooks.engines.find import find
from disthooks.errors import DisthooksError
from disthooks.grads.attach import gradients
from disthooks.grads.plan import groups_of, scope_of
from disthooks.grads.rules.base import as_rule


def made(plan: Any, what: str) -> list[Any]:
    """The rules, statistics or sinks of ``plan``; a sink is not opened by being made."""
    return [make() for make in plan.watches.get(what, ())]


def check_sinks(plan: Any, found: Found) -> None:
    """Packages that are missing and files that could not be written."""
    for name, remedy in missing_sinks(plan):
        found.failed("watch.sinks", f"{name}: its package is not installed: {remedy}")
    for sink in made(plan, "sinks"):
        path = getattr(sink, "path", None) or getattr(sink, "log_dir", None)
        if isinstance(path, (str, os.PathLike)) and (why := _unwritable(pathlib.Path(path))):
            found.failed("watch.sinks", f"{type(sink).__name__}: {why}")


def _unwritable(path: pathlib.Path) -> str | None:
    """Why nothing can be written at ``path``, whose directories are made when they are missing."""
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{path} cannot be written"
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        return f"{path} cannot be made: {above} is no directory"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{path} cannot be made: {above} cannot be written"


def scopes(plan: Any, model: nn.Module, found: Found) -> dict[str, dict[str, list[str]]]:
    """For each rule and each group the names of its parameters; what a run would raise goes to ``found``."""
    before = len(found.errors)
    try:
        shards = find(model).shards
    except DisthooksError as error:
        found.failed("watch", error)
        return {"rules": {}, "groups": {}}
    rules = _rules(plan, shards, found)
    groups: dict[str, list[str]] = {}
    for name, patterns in plan.watches.get("groups", {}).items():
        try:
            groups[name] = [shards[i].name for i in groups_of({name: patterns}, shards)[name]]
        except DisthooksError as error:
            found.failed(f"{plan.source.at(('watch', 'groups', name))}: watch.groups.{name}", error)
    if len(found.errors) == before:
        _attach(plan, model, found)
    return {"rules": rules, "groups": groups}


def _rules(plan: Any, shards: Sequence[Any], found: Found) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for i, rule in enumerate(map(as_rule, made(plan, "rules"))):
        where = f"{plan.source.at(('watch', 'rules', i))}: watch.rules.{i}"
        try:
            names[f"{i} {rule!r}"] = [shards[j].name for j in scope_of(rule, shards)]
        except DisthooksError as error:
            found.failed(where, error)
        if rule.withholds:
            found.warnings.append(
                f"{where}: {rule!r} keeps single parameters from the optimizer, which is refused under FSDP1 with flat "
                "parameters (use_orig_params=False) and where DeepSpeed partitions them (ZeRO, half precision)"
            )
    return names


def _attach(plan: Any, model: nn.Module, found: Found) -> None:
    """As a run does, but for the sinks, which would begin files: a function that does nothing stands for them."""
    given: dict[str, Any] = {key: made(plan, key) for key in ("rules", "stats")}
    given["sinks"] = [_nowhere] * bool(made(plan, "sinks"))
    given |= {key: plan.watches[key] for key in ("every", "groups") if key in plan.watches}
    try:
        gradients(model, torch.optim.SGD(model.parameters(), lr=0.0), **given).remove()
    except (DisthooksError, ValueError) as error:
        found.failed("watch", error)


def _nowhere(record: dict[str, Any]) -> None:
    """The sink of a check."""
