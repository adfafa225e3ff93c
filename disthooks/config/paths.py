"""Variables and placeholders in the paths of a configuration."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from disthooks.config.source import Path, Source

RUN = "{run}"
_PART = re.compile(r"\$\$|\$\{(?P<braced>[^}]*)\}|\$(?P<bare>[A-Za-z_]\w*)|\{\{|\}\}|\{(?P<place>[^{}]*)\}|\$|\{")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Expansion:
    """What stands for what in paths.

    Args:
        source: for errors.
        run: the run directory as it is written; None where there is none.
    """

    def __init__(self, source: Source, run: str | None = None) -> None:
        self._source = source
        self._places: dict[str, Callable[[Path], str]] = {"rank": self._rank, "local_rank": self._local_rank}
        self.run = None if run is None else self(run, ("run",))
        if self.run is not None:
            whole: str = self.run
            self._places["run"] = lambda path: whole

    def __call__(self, text: str, path: Path) -> str:
        """``text`` with every ``$VAR``, ``${VAR}``, ``{rank}``, ``{local_rank}``, ``{run}`` and ``~/`` replaced.

        Raises:
            ConfigError: for a variable that is not set, and an unknown placeholder.
        """
        return _PART.sub(lambda part: self._part(part, path), os.path.expanduser(text))

    def _part(self, part: re.Match[str], path: Path) -> str:
        if part[0] in ("$$", "{{", "}}"):
            return part[0][0]
        if part["place"] is not None:
            return self._place(part["place"], path)
        name = part["braced"] if part["braced"] is not None else part["bare"]
        if name is None:
            self._source.fail(
                path, f": a single {part[0]!r} begins nothing: write {part[0] * 2!r} for the letter itself"
            )
        return self._variable(name, path)

    def _variable(self, name: str, path: Path) -> str:
        if os.environ.get(name):
            return os.environ[name]
        if name in os.environ:
            self._source.fail(path, f": the variable {name!r} is empty: a path would begin where the script does")
        near = difflib.get_close_matches(name, os.environ, n=1, cutoff=0.75)
        hint = f"; did you mean ${near[0]}?" if near else ""
        self._source.fail(path, f": the variable {name!r} is not set{hint} ('$$' is a dollar)")

    def _place(self, name: str, path: Path) -> str:
        if name in self._places:
            return self._places[name](path)
        near = difflib.get_close_matches(name, self._places, n=1, cutoff=0.5)
        hint = f"did you mean {{{near[0]}}}?" if near else f"there are {', '.join(f'{{{n}}}' for n in self._places)}"
        self._source.fail(path, f": {{{name}}} is no placeholder; {hint} ('{{{{' is a brace)")

    def _rank(self, path: Path) -> str:
        world = torch.distributed
        if world.is_available() and world.is_initialized():
            return str(world.get_rank())
        return _first(_RANKS) or "0"

    def _local_rank(self, path: Path) -> str:
        found = _first(_LOCAL_RANKS)
        if found is None and _world() > 1:
            self._source.fail(
                path, ": {local_rank} is not known: LOCAL_RANK is not set, and this is one of several ranks"
            )
        return found or "0"


def escaped(text: str) -> str:
    """``text`` such that reading it gives ``text``.

    >>> escaped("/data/$x/{run}")
    '/data/$$x/{{run}}'
    """
    return re.sub(r"[${}]", lambda letter: letter[0] * 2, text)


def names_run(value: Any) -> bool:
    """Whether a value, or one in it, is in the run directory."""
    if isinstance(value, Mapping):
        return any(map(names_run, value.values()))
    if isinstance(value, list):
        return any(map(names_run, value))
    return isinstance(value, str) and RUN in value.replace("{{", "")


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _world() -> int:
    world = torch.distributed
    return world.get_world_size() if world.is_available() and world.is_initialized() else 1
