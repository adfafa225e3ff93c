"""What ranks must do alike, found out before anything waits for another rank.

Modules that two entries ask for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._ranks import has_process_group, launched_world_size, world_size
from disthooks.config.source import Path, Source
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError, ConfigError, MatchError
from disthooks.grads import collectives
from disthooks.saved.attach import chosen


def check_not_alone() -> None:
    """Refuse to go on in one of several processes that each believe to be alone.

    Each would train a model of its own, and every rule and statistic would be of one rank. ``accelerate launch`` starts
    such processes with ``MULTI_GPU`` and ``use_cpu: true``: version 1.15 makes a group of all, and wraps nothing.

    Raises:
        AttachError: when ``WORLD_SIZE`` says there are several, and torch.distributed or accelerate knows of one.
    """
    said, known = launched_world_size(), world_size()
    what = f"torch.distributed {'has a group of one' if has_process_group() else 'was not initialised'}"
    if known > 1 and _accelerates_count() == 1:
        known, what = 1, "accelerate knows of one"
    if said > 1 and known == 1:
        raise AttachError(
            f"a launcher started {said} processes (WORLD_SIZE={said}), and {what} in this one: each "
            "would train alone. Call torch.distributed.init_process_group() before; with accelerate on CPUs, set "
            "ACCELERATE_USE_CPU=true and no 'use_cpu: true' beside MULTI_GPU. Where each is meant to train alone, "
            "set WORLD_SIZE=1"
        )


def _accelerates_count() -> int | None:
    """How many processes accelerate believes there are; None where nobody uses it."""
    state = sys.modules.get("accelerate.state")
    found = state.PartialState._shared_state.get("num_processes") if state is not None else None
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class Team:
    """The ranks that train a model together.

    Attributes:
        ranks: their numbers.
        group: their process group; None for one alone.
        device: where it can reduce.
    """

    ranks: tuple[int, ...]
    group: Any
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> Team:
        """The ranks of the engine that took ``model``; this one alone before any has, or where none can be told."""
        try:
            engine = detect_engine(model)
        except AttachError:  # to save tensors no engine need be known; with gradients it is raised again
            return cls((0,), None, torch.device("cpu"))
        group = collectives.group_of(engine.ranks)
        return cls(tuple(engine.ranks), group, collectives.device_for(group, engine.shards[0].parameter.device))

    def agree(self, failure: Exception | None, described: str, name: str) -> None:
        """One collective, in which every rank takes part, whatever happened on it.

        Raises:
            AttachError: when another rank failed, or has another plan.
            Exception: ``failure``, if there is one.
        """
        described = "" if failure else described
        failed, alike = collectives.agree(self.group, self.device, failure is not None, described)
        if failure is not None:
            raise failure
        if failed:
            raise AttachError(f"{name}: another of the ranks {_shown(self.ranks)} failed; its error says why")
        if not alike:
            raise AttachError(
                f"{name}: the ranks {_shown(self.ranks)} have different configurations: give all of them the same one; "
                f"this one says {described if len(described) < 500 else described[:500] + ' ...'}"
            )


def _shown(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"


class _Claim(NamedTuple):
    """A pattern of an entry, and a module that it matches."""

    entry: int
    pattern: Any
    at: str
    name: str


def check_conflicts(
    model: nn.Module, patterns: Sequence[Sequence[Any]], source: Source, partly: bool = False
) -> dict[int, MatchError]:
    """Find what two entries would both save, before anything is attached.

    In one entry patterns may overlap: the outer module covers the inner one, and both mean the same store.

    Returns:
        The entries with a pattern that matches nothing, and its error with its line; none unless ``partly``.

    Raises:
        ConfigError: when a module is matched by two entries, or is inside one that another entry matches.
        MatchError: when a pattern matches nothing, unless ``partly``.
    """
    owners: dict[nn.Module, _Claim] = {}
    inner: dict[nn.Module, _Claim] = {}
    missed: dict[int, MatchError] = {}
    for entry, several in enumerate(patterns):
        try:
            claims = _claims(model, entry, several, source)
        except MatchError as error:
            if not partly:
                raise
            missed[entry] = error
            continue
        for claim, module in claims:
            _check(claim, owners.setdefault(module, claim), "both match")
            _check_parts(claim, module, owners, inner)
    return missed


def _claims(model: nn.Module, entry: int, patterns: Sequence[Any], source: Source) -> list[tuple[_Claim, nn.Module]]:
    found = []
    for number, pattern in enumerate(patterns):
        at = source.at(_path(source, entry, number))
        found += [(_Claim(entry, pattern, at, name), module) for name, module in _matched(model, pattern, at)]
    return found


def _check_parts(claim: _Claim, module: nn.Module, owners: dict[Any, _Claim], inner: dict[Any, _Claim]) -> None:
    if module in inner:
        _check(claim, inner[module], "is inside")
    for part in module.modules():
        if part in owners:
            _check(owners[part], claim, "is inside")
        inner.setdefault(part, claim)


def _matched(model: nn.Module, pattern: Any, at: str) -> list[tuple[str, nn.Module]]:
    try:
        return chosen(model, [pattern])
    except MatchError as error:
        raise MatchError(f"{at}: {error}" if at != "the plan" else str(error)) from None
    except AttachError:  # a container that is never called: fine beside others, and said when there are none
        return []


def _path(source: Source, entry: int, number: int) -> Path:
    path: Path = ("save", entry, "modules")
    return (*path, number) if (*path, number) in source.lines else path


def _check(claim: _Claim, other: _Claim, how: str) -> None:
    if claim.entry == other.entry:
        return
    one, two = f"{claim.at}: {claim.pattern!r}", f"{other.at}: {other.pattern!r}"
    name = claim.name or "the model"
    if how == "both match":
        raise ConfigError(f"{one} and {two} both match {name!r}: a module can be in one entry of 'save' only")
    raise ConfigError(
        f"{one} matches {name!r}, which is inside {other.name or 'the model'!r}, that {two} matches: what a module "
        "saves can go to one store only, leave out one of them"
    )
