"""What each entry of ``save`` is on a model: the modules it takes, and what stands in its way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from disthooks._match import Pattern, match_modules
from disthooks.cli.conflicts import conflicts
from disthooks.config.budget import stores_within
from disthooks.config.conflicts import check_conflicts
from disthooks.errors import DisthooksError
from disthooks.saved.inplace import chosen, save_activations
from disthooks.saved.pipeline import Pipeline


@dataclass
class Found:
    """What a check has to say, worst first."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def failed(self, where: str, error: BaseException | str) -> None:
        """One error, in one line."""
        text = " ".join(str(error).split())
        self.errors.append(f"{where}: {text}" if where else text)


@dataclass
class Entry:
    """One entry of ``save``.

    Attributes:
        where: its name in the file.
        at: file and line.
        patterns: as they stand there.
        line: the pipeline.
        matched: for each pattern the names of the modules that it matches.
        placed: the pipeline with what a ``budget`` puts in front.
        modules: those that the hooks are on: not those inside others, not containers that nobody calls.
    """

    where: str
    at: str
    patterns: tuple[Pattern, ...]
    line: Pipeline
    matched: dict[str, list[str]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    placed: Pipeline | None = None

    def parameters(self) -> int:
        """Elements of the parameters inside, each once."""
        every = {id(p): _size(p) for module in self.modules.values() for p in module.parameters()}
        return sum(every.values())


def entries_of(plan: Any) -> list[Entry]:
    """The entries of ``save``, before there is a model."""
    return [
        Entry(f"save.{i}", plan.source.at(("save", i, "modules")), tuple(patterns), line)
        for i, (patterns, line) in enumerate(plan.saves)
    ]


def place(plan: Any, entries: list[Entry], model: nn.Module, found: Found) -> None:
    """Attach all entries to ``model`` as a run does, write down where they are, and take them off again."""
    before = len(found.errors)
    for entry in entries:
        _match(entry, model, found)
    try:
        if len(found.errors) == before:  # all of this stops at the first error
            check_conflicts(model, [entry.patterns for entry in entries], plan.source)
            lines = stores_within(plan.budget, model, plan.saves, plan.source)
            _attach(entries, [line for _, line in lines], model, found)
    except DisthooksError as error:
        found.failed("", error)
    for entry in entries:
        _conflicts(entry, model, found)


def _match(entry: Entry, model: nn.Module, found: Found) -> None:
    for pattern in entry.patterns:
        try:
            names = [name for name, _ in match_modules(model, [pattern])]
            entry.matched[str(pattern)] = list(dict.fromkeys(names))
        except DisthooksError as error:
            found.failed(f"{entry.at}: {entry.where}", error)


def _attach(entries: list[Entry], lines: list[Pipeline], model: nn.Module, found: Found) -> None:
    with contextlib.ExitStack() as attached:
        for entry, line in zip(entries, lines, strict=True):
            try:
                attached.enter_context(save_activations(model, entry.patterns, line))
            except DisthooksError as error:
                found.failed(f"{entry.at}: {entry.where}", error)
            else:
                entry.modules, entry.placed = dict(chosen(model, entry.patterns)), line


def _conflicts(entry: Entry, model: nn.Module, found: Found) -> None:
    lost, warned = conflicts(model, entry.modules)
    found.warnings += [f"{entry.where}: {text}" for text in warned]
    if lost and len(lost) == len(entry.modules):
        found.failed(f"{entry.at}: {entry.where}", f"it would save nothing: {next(iter(lost.values()))}")
    else:
        found.warnings += [f"{entry.where}: {name!r} would save nothing: {why}" for name, why in lost.items()]


def _size(parameter: nn.Parameter) -> int:
    """How many elements it has; none before a lazy module has run."""
    return 0 if nn.parameter.is_lazy(parameter) else parameter.numel()
