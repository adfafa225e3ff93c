"""Modules that two entries ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from disthooks.config.source import Path, Source
from disthooks.errors import AttachError, ConfigError, MatchError
from disthooks.saved.inplace import chosen


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
