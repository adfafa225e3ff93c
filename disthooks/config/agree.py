"""Checks before anything is attached: that all ranks do the same, and that no two entries take one module."""

# [Note: processes that train alone]
# A launcher may start several processes that never form a process group. Each process would then train a model of its
# own, and every rule and statistic would be of one rank; no error and no number of the log would show that. So the
# launcher's WORLD_SIZE is compared with the number of processes that torch.distributed knows, and with the number that
# accelerate knows. `accelerate launch` with MULTI_GPU and `use_cpu: true` needs the second comparison, and so does an
# `Accelerator()` on a machine without a GPU: accelerate 1.15 makes a process group of all processes there, believes
# that there is one process, and wraps no model. With `InitProcessGroupKwargs(backend="gloo")` it knows all processes,
# and still wraps no model. A user who wants several independent trainings sets WORLD_SIZE=1 (decision 64).
# `disthooks.run` leaves the second comparison out, because it attaches to scripts as they are: a model that accelerate
# did not wrap is left alone there, the user is told, and the script goes on.
#
# [Note: one vote of all ranks]
# If one rank raised an error while it attaches, and the others went on, the others would wait forever in their next
# collective. So each rank catches its own error, and then all ranks take part in one collective, `Team.agree`. It says
# whether a rank failed, and whether all ranks have the same description of their plan. Afterwards all ranks go on, or
# all of them raise an error. The description is the text of the configuration, not its path: the path may differ
# between nodes (decision 63).
#
# [Note: a module belongs to one entry]
# A pattern covers the module that it matches and all modules inside it. If two entries covered one module, its saved
# tensors would have two stores. Entries are read in their order, so there are two cases: the outer module was claimed
# by an earlier entry (`inner` has its parts), or the inner module was (`owners` has it). Patterns of one entry may
# overlap, because they mean the same store.

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._ranks import has_process_group, launched_world_size, world_size
from disthooks.config.source import Source
from disthooks.engines.base import Engine
from disthooks.engines.detect import detect_engine
from disthooks.errors import AttachError, ConfigError, MatchError
from disthooks.grads import collectives
from disthooks.saved.attach import chosen


def reason_alone(asks_accelerate: bool = False) -> str | None:
    """Why this process trains alone although a launcher started several; None otherwise.

    See [Note: processes that train alone].
    """
    launched, known = launched_world_size(), world_size()
    reason = f"torch.distributed {'has a group of one' if has_process_group() else 'was not initialised'}"
    # The module is looked up and not imported: a script without accelerate shall not pay for the import.
    state = sys.modules.get("accelerate.state") if asks_accelerate else None
    advice = "Call torch.distributed.init_process_group() before the model is wrapped"
    if state is not None and known > 1:
        shared = state.PartialState._shared_state
        if shared.get("num_processes") == 1 or str(shared.get("distributed_type")).endswith("NO"):
            known, reason = 1, "accelerate wraps no model"
            advice = (
                "On a machine without GPUs write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true in each process"
            )
    if launched <= 1 or known > 1:
        return None
    return (
        f"a launcher started {launched} processes (WORLD_SIZE={launched}), and {reason} in this one: each would train "
        f"alone. {advice}. If each is meant to train alone, set WORLD_SIZE=1"
    )


def check_not_alone() -> None:
    """Raise AttachError if a launcher started several processes and this process knows of no other."""
    if reason := reason_alone(asks_accelerate=True):
        raise AttachError(reason)


@dataclass(frozen=True)
class Team:
    """The ranks that train a model together.

    Attributes:
        group: their process group; None if this rank trains alone.
        device: the device of tensors that the group can reduce.
        engine: the engine that has the model; None if hooks on gradients cannot be attached to it.
    """

    ranks: tuple[int, ...]
    group: Any
    device: torch.device
    engine: Engine | None

    @classmethod
    def of(cls, model: nn.Module, engine: Engine | None = None) -> Team:
        """The ranks of the engine that has ``model``; only this rank if it has none, or one that is refused."""
        try:
            engine = engine or detect_engine(model)
        except AttachError:
            # Saving tensors works with an unknown engine. Attaching to gradients detects the engine again and raises.
            return cls((0,), None, torch.device("cpu"), None)
        group = collectives.group_of(engine.ranks)
        return cls(tuple(engine.ranks), group, collectives.device_for(group, engine.shards[0].parameter.device), engine)

    def agree(self, failure: Exception | None, described: str, name: str) -> None:
        """Compare with the other ranks, in one collective of all of them; see [Note: one vote of all ranks].

        Raises ``failure``, or AttachError if another rank failed, or has another plan.
        """
        # A rank that failed may have no plan. Its empty description differs from the others', which does not matter:
        # the other ranks look at `failed` first.
        described = "" if failure else described
        failed, alike = collectives.agree(self.group, self.device, failure is not None, described)
        if failure is not None:
            raise failure
        ranks = str(list(self.ranks)) if len(self.ranks) <= 8 else f"[{self.ranks[0]}, ..., {self.ranks[-1]}]"
        if failed:
            raise AttachError(f"{name}: another of the ranks {ranks} failed; its error says why")
        if not alike:
            raise AttachError(
                f"{name}: the ranks {ranks} have different configurations: give all of them the same one; "
                f"this one says {described if len(described) < 500 else described[:500] + ' ...'}"
            )


class _Claim(NamedTuple):
    """A pattern of an entry, where it stands (``at``), and the name of a module that it matches."""

    entry: int
    pattern: Any
    at: str
    name: str


def check_conflicts(
    model: nn.Module, patterns: Sequence[Sequence[Any]], source: Source, partly: bool = False
) -> dict[int, MatchError]:
    """Check that no two entries of ``save`` take the same module; see [Note: a module belongs to one entry].

    Returns the error of each entry that matches nothing, if ``partly``; else that error is raised.
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
            if module in inner:  # an earlier claim covers this module
                _check(claim, inner[module], "is inside")
            for part in module.modules():
                if part in owners:  # an earlier claim is of a module inside this one
                    _check(owners[part], claim, "is inside")
                inner.setdefault(part, claim)
    return missed


def _claims(model: nn.Module, entry: int, patterns: Sequence[Any], source: Source) -> list[tuple[_Claim, nn.Module]]:
    found = []
    for number, pattern in enumerate(patterns):
        at = source.at(("save", entry, "modules", number))  # one pattern without a list has the line of "modules"
        try:
            matched = chosen(model, [pattern])
        except MatchError as error:
            raise MatchError(f"{at}: {error}" if at != "the plan" else str(error)) from None
        except AttachError:
            # The pattern matches containers that are never called, such as a ModuleList. That is no error beside
            # modules that are called; `save_activations` raises it again if an entry has nothing else.
            continue
        found += [(_Claim(entry, pattern, at, name), module) for name, module in matched]
    return found


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
