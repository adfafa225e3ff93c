"""``answers``: the questions that users have about the memory of a step, each answered in a sentence or two.

The fourteen questions are those that pytorch/pytorch#125323 lists for decisions, and the three that it lists for
debugging come after them. An answer has figures of the record, of further steps on fake tensors, or of a formula over
the bytes of parameters, gradients and optimizer state; its ``source`` says which.
"""

# [Note: formulas of shards]
# FSDP divides parameters, gradients and the optimizer's state by the number of ranks that share them, and gathers the
# parameters of a unit while it runs: two units at once, because the next one is gathered ahead. Saved tensors and
# temporaries stay what they are. An answer by this formula says "about", and names the command that runs the engine.

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from disthooks._tensors import format_bytes
from disthooks.errors import DisthooksError
from disthooks.predict.answers.advice import Group, checkpointed, largest_group
from disthooks.predict.answers.fits import Fits, Largest
from disthooks.predict.explain import explain_built
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation

#: Ranks of the answers by formula: one machine, and several.
RANKS, MANY = 8, 64
_COMMAND = "disthooks explain ... --engine"

Source = Literal["record", "run", "formula", "ask"]


@dataclass(frozen=True)
class Answer:
    """One question and its answer.

    Attributes:
        question: as users ask it.
        answer: one or two sentences.
        figures: the bytes or sizes in it, by name.
        source: "record": of the step; "run": of further steps on fake tensors; "formula": computed from the bytes of
            the record; "ask": how to ask, because it was not asked for, or the time was over.
    """

    question: str
    answer: str
    figures: Mapping[str, int] = field(default_factory=dict)
    source: Source = "record"

    def to_dict(self) -> dict[str, Any]:
        """As a document that JSON can hold."""
        return {
            "question": self.question,
            "answer": self.answer,
            "figures": dict(self.figures),
            "source": self.source,
        }


def answers(
    explanation: Explanation, fits: Fits | None = None, builder: Builder | None = None, patience: float = 30.0
) -> list[Answer]:
    """The answers, in the order of the questions.

    Args:
        explanation: the step.
        fits: the largest sizes that fit; None if they were not searched.
        builder: builds the model of ``explanation``, for further steps; None to run none.
        patience: seconds after which no further step is run.
    """
    return list(_Answers(explanation, fits, builder, time.monotonic() + patience).all())


class _Answers:
    def __init__(self, explanation: Explanation, fits: Fits | None, builder: Builder | None, end: float) -> None:
        self._explanation, self._fits, self._builder, self._end = explanation, fits, builder, end
        self._peak = explanation.peak_bytes
        self._state: collections.Counter[str] = collections.Counter()
        for each in explanation.record.allocations:
            self._state[each.category] += each.nbytes
        self._sharded = sum(self._state[each] for each in ("parameters", "gradients", "optimizer state"))
        self._group: Group | None = largest_group(explanation)

    def all(self) -> Iterator[Answer]:
        yield self._expected_peak()
        yield self._wrapping()
        yield self._size("What is the best batch size?", "batch", self._fits.batch if self._fits else None)
        yield self._size("What is the longest sequence?", "seq", self._fits.seq if self._fits else None)
        yield self._world_size()
        yield self._optimizer_on_the_host()
        yield from self._checkpoints()
        yield self._reduction()
        yield self._mixed_precision()
        yield from self._meshes()
        yield from self._debugging()

    def _run(self, **changes: Any) -> int | None:
        """The peak of a changed step; None if it does not run, or the time is over."""
        if self._builder is None or time.monotonic() > self._end:
            return None
        situation: Situation = replace(self._explanation.situation, **changes)
        try:
            return explain_built(self._builder, situation).peak_bytes
        except DisthooksError:
            return None

    def _compared(self, question: str, runs: Mapping[str, Callable[[], int | None]], how: str) -> Answer:
        """An answer that compares peaks."""
        found = {name: run() for name, run in runs.items()}
        figures = {name: nbytes for name, nbytes in found.items() if nbytes is not None}
        if len(figures) < 2:
            return Answer(question, how, figures, "ask")
        said = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in figures.items())
        return Answer(question, f"Peaks: {said}.", figures, "run")

    # -- decisions

    def _expected_peak(self) -> Answer:
        at = self._explanation.peak
        largest = next(iter(at.by_category), "nothing")
        text = (
            f"{format_bytes(at.nbytes)}, {at.where}; most of it, "
            f"{format_bytes(at.by_category.get(largest, 0))}, is {largest}."
        )
        return Answer("What is the expected peak memory?", text, {"peak": at.nbytes, **at.by_category})

    def _units(self) -> dict[str, int]:
        """The bytes of the parameters of each block, and of the rest."""
        names = self._group.names if self._group is not None else ()
        found = dict.fromkeys((*names, ""), 0)
        record = self._explanation.record
        for each in record.allocations:
            if each.category == "parameters":
                owner = record.modules[each.module].name
                found[next((name for name in names if f"{owner}.".startswith(f"{name}.")), "")] += each.nbytes
        return found

    def _wrapping(self) -> Answer:
        units, whole = self._units(), self._state["parameters"]
        blocks = sorted((nbytes for name, nbytes in units.items() if name), reverse=True)
        figures = {"whole": whole, "blocks": units[""] + sum(blocks[:2])}
        text = f"As one FSDP unit, all {format_bytes(whole)} of parameters are gathered at once"
        if blocks:
            text += (
                f"; with a unit for each of the {len(blocks)} blocks about {format_bytes(figures['blocks'])}: the "
                f"root's {format_bytes(units[''])} and two blocks"
            )
        text += f". To run it: {_COMMAND} fsdp2 --world {RANKS}."
        return Answer("How does another FSDP wrapping change the peak?", text, figures, "formula")

    def _size(self, question: str, what: str, largest: Largest | None) -> Answer:
        if largest is None or largest.size is None:
            how = "Ask with a limit: disthooks explain ... --fits 80GiB."
            if largest is not None:
                how = f"{largest.text[:1].upper()}{largest.text[1:]}."
            return Answer(question, how, {}, "ask")
        assert self._fits is not None
        text = f"In {format_bytes(self._fits.limit)}: {largest.text}."
        return Answer(question, text, {"size": largest.size, "nbytes": largest.nbytes}, "run")

    def _sharded_over(self, ranks: int) -> int:
        return self._peak - self._at_peak() + self._at_peak() // ranks

    def _at_peak(self) -> int:
        """The bytes at the peak that FSDP divides. See [Note: formulas of shards]."""
        found = self._explanation.peak.by_category
        return sum(found.get(each, 0) for each in ("parameters", "gradients", "optimizer state"))

    def _world_size(self) -> Answer:
        figures = {str(ranks): self._sharded_over(ranks) for ranks in (1, 2, RANKS, MANY)}
        said = ", ".join(f"{format_bytes(nbytes)} on {ranks}" for ranks, nbytes in figures.items())
        text = f"With DDP nothing changes. With FSDP the peak is about {said} ranks, and the gathered units beside it."
        return Answer("How does the number of data-parallel ranks change the peak?", text, figures, "formula")

    def _optimizer_on_the_host(self) -> Answer:
        question = "How much is saved if the optimizer is on the CPU?"
        names = self._explanation.record.phases
        if not self._state["optimizer state"] or "optimizer" not in names:
            return Answer(question, "The step has no optimizer with state; give one: --optimizer adamw.", {}, "ask")
        without = self._peak_without("optimizer state")
        text = (
            f"{format_bytes(self._peak - without)}: the peak falls from {format_bytes(self._peak)} to "
            f"{format_bytes(without)}, without the state of {format_bytes(self._state['optimizer state'])} and the "
            "temporary tensors of the optimizer's step."
        )
        return Answer(question, text, {"saves": self._peak - without, "peak": without})

    def _peak_without(self, category: str) -> int:
        """The peak of forward and backward without one category."""
        from disthooks.predict.recording.record import CATEGORIES

        position = CATEGORIES.index(category)
        samples = [each for each in self._explanation.timeline.samples if each.phase != "optimizer"]
        return max((each.total - each.nbytes[position] for each in samples), default=0)

    def _checkpoints(self) -> Iterator[Answer]:
        how = "Not known: an answer needs further steps, and there was no time, or no function that builds the model."
        runs: dict[str, Callable[[], int | None]] = {"as it is": lambda: self._peak}
        if self._group is not None:
            names = self._group.names
            runs["each block"] = lambda: self._run(change=checkpointed(names))
            runs["every second block"] = lambda: self._run(change=checkpointed(names[::2]))
        yield self._compared("Which activation checkpointing should I use?", runs, how)
        plans = {"cheap operators again": {}, "linear layers too": {"products": 1}}
        again: dict[str, Callable[[], int | None]] = {"as it is": lambda: self._peak}
        for name, options in plans.items():
            again[name] = lambda options=options: self._run(plan=_recompute(options))  # type: ignore[misc]
        yield self._compared("How do policies of selective checkpointing compare?", again, how)
        parts: dict[str, Callable[[], int | None]] = {}
        for kind, inside in self._inside().items():
            parts[f"{kind} alone"] = lambda inside=inside: self._run(change=checkpointed(inside))  # type: ignore[misc]
        yield self._compared("What if different units have different policies?", parts, how)

    def _inside(self) -> dict[str, tuple[str, ...]]:
        """The modules right inside the blocks that save most, by class: at most three."""
        if self._group is None:
            return {}
        found: dict[str, list[str]] = {}
        nbytes: dict[str, int] = {}
        rows = self._explanation.modules
        for row in rows:
            if row.parent >= 0 and rows[row.parent].name in self._group.names and row.whole:
                found.setdefault(row.kind, []).append(row.name)
                nbytes[row.kind] = nbytes.get(row.kind, 0) + row.whole
        best = sorted(found, key=lambda kind: -nbytes[kind])[:3]
        return {kind: tuple(found[kind]) for kind in best}

    def _reduction(self) -> Answer:
        question = "What does a reduction of gradients in fp32 cost?"
        units = self._units()
        largest = max(units.values(), default=0)
        if self._is_wide():
            text = "Nothing: the parameters are float32, and so are their gradients."
            return Answer(question, text, {"more": 0}, "formula")
        text = f"About {format_bytes(largest)} while the largest unit is reduced: its gradients go from 16 to 32 bits."
        return Answer(question, text, {"more": largest}, "formula")

    def _is_wide(self) -> bool:
        return self._explanation.situation.dtype in (None, torch.float32)

    def _mixed_precision(self) -> Answer:
        runs: dict[str, Callable[[], int | None]] = {
            "as it is": lambda: self._peak,
            "autocast to bfloat16": lambda: self._run(autocast=torch.bfloat16),
            "everything in bfloat16": lambda: self._run(dtype=torch.bfloat16, autocast=None),
        }
        how = f"FSDP's policy: {_COMMAND} fsdp2 --dtype bfloat16."
        return self._compared("How does a custom mixed precision change the peak?", runs, how)

    def _meshes(self) -> Iterator[Answer]:
        near, far = self._sharded // RANKS, self._sharded // MANY
        more = near - far
        text = (
            f"HSDP over {MANY} ranks in groups of {RANKS} holds {format_bytes(near)} of parameters, gradients and "
            f"state on a rank, FSDP {format_bytes(far)}. It makes sense where {format_bytes(more)} are free and "
            f"the links between machines are slow. To run it: {_COMMAND} hsdp --world {MANY}."
        )
        yield Answer("When does HSDP make sense?", text, {"hsdp": near, "fsdp": far, "more": more}, "formula")
        whole = self._state["parameters"]
        smaller = whole // RANKS - whole // MANY
        text = (
            f"Resharding over {RANKS} instead of {MANY} ranks after forward keeps {format_bytes(smaller)} more of "
            "parameters until backward."
        )
        yield Answer("Can I reshard to a smaller mesh?", text, {"more": smaller}, "formula")
        kept = whole - whole // MANY
        text = f"Without resharding after forward all parameters stay gathered: up to {format_bytes(kept)} more"
        figures = {"more": kept}
        if self._fits is not None:
            room = self._fits.limit - self._sharded_over(MANY)
            figures["room"] = room
            text += f", and about {format_bytes(max(0, room))} are free on {MANY} ranks: "
            text += "it is safe" if kept <= room else "it runs out of memory"
        yield Answer("Can I leave out the reshard after forward?", f"{text}.", figures, "formula")

    # -- debugging

    def _debugging(self) -> Iterator[Answer]:
        row = max(self._explanation.modules, key=lambda each: each.own, default=None)
        if row is not None and row.own:
            operator = next(iter(row.operators), "")
            text = (
                f"{row.name or 'the model'} ({row.kind}) saves {format_bytes(row.own)} itself, most of it by {operator}"
            )
            if self._group is not None:
                names = len(self._group.names)
                text += f"; the {names} {self._group.kind} together save {format_bytes(self._group.nbytes)}"
            yield Answer("Which module saves most?", f"{text}.", {"own": row.own})
        else:
            yield Answer("Which module saves most?", "None: nothing is saved.", {"own": 0})
        units = self._units()
        name = max(units, key=lambda each: units[each])
        text = f"{name or 'the root'}, with {format_bytes(units[name])} of parameters."
        yield Answer("Which FSDP unit holds most unsharded memory?", text, {"unit": units[name]}, "formula")
        again = sum(1 for each in self._explanation.record.operators if each.is_again)
        saved = format_bytes(self._explanation.saved_bytes)
        text = (
            f"{again} operators of the forward run again in backward, and {saved} are saved beside them."
            if again
            else "Nothing is computed again in backward, so no checkpoint is active in this step."
        )
        yield Answer("Does checkpointing release its memory?", text, {"again": again})


def _recompute(options: Mapping[str, Any]) -> Any:
    from disthooks.config.locate import from_config

    entry = {"modules": "*", "recompute": {"kind": "Recompute", **options}, "store": {"kind": "OnDevice"}}
    return from_config({"save": [entry]})
