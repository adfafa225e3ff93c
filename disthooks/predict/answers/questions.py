"""``answers``: the questions that users have about the memory of a step, each answered in a sentence or two.

The fourteen questions are those that pytorch/pytorch#125323 lists for decisions, and the three that it lists for
debugging come after them. An answer has figures of the record, or of further steps on fake tensors; its ``source`` says
which. The questions about FSDP run torch's FSDP2 on fake ranks.
"""

# [Note: the ranks of the answers]
# A step with an engine takes as long on 64 fake ranks as on 8. So the answers about FSDP run on 8 ranks, as one machine
# has, and those about meshes on 64, or on as many as the situation has. The engine is FSDP2. If the situation has
# another one, its ranks, its dtype and its classes to wrap are taken over.
#
# A step is run once, however many questions it answers, and the questions come in the order of pytorch/pytorch#125323.
# A large model needs more time for a step than the answers have: then the last questions say how to ask.

from __future__ import annotations

import collections
import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from disthooks._tensors import format_bytes
from disthooks.errors import DisthooksError
from disthooks.predict.answers.advice import Group, checkpointed, largest_group
from disthooks.predict.answers.fits import Fits, Largest
from disthooks.predict.engines.spec import EngineSpec
from disthooks.predict.explanation import Explanation, Memory
from disthooks.predict.fake.builder import Builder
from disthooks.predict.recording.record import CATEGORIES
from disthooks.predict.run import Step, record_step

#: Ranks of one machine, and of several. See [Note: the ranks of the answers].
RANKS, MANY = 8, 64
_COMMAND = "disthooks explain ... --engine"
_BUILD = "Give a function that builds the model, and more time, so that further steps can be run"
_FEW_BITS = (torch.bfloat16, torch.float16)

Source = Literal["record", "run", "ask"]
#: What a further step gives: what it needs, and what was recorded of it.
_Ran = tuple[int, Step]


@dataclass(frozen=True)
class Answer:
    """One question and its answer.

    Attributes:
        question: as users ask it.
        answer: one or two sentences.
        figures: the bytes or sizes in it, by name.
        source: "record": of the step; "run": of further steps on fake tensors; "ask": how to ask, because it was not
            asked for, the step did not run, or the time was over.
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
    explanation: Explanation,
    fits: Fits | None = None,
    builder: Builder | None = None,
    patience: float = 30.0,
    ranks: tuple[int, int] = (RANKS, MANY),
) -> list[Answer]:
    """The answers, in the order of the questions.

    Args:
        explanation: the step.
        fits: the largest sizes that fit; None if they were not searched.
        builder: builds the model of ``explanation``, for further steps; None to run none.
        patience: seconds after which no further step begins.
        ranks: the ranks of one machine, and of several; a situation with more ranks takes the place of the second.
    """
    return list(_Answers(explanation, fits, builder, time.monotonic() + patience, ranks).all())


class _Answers:
    def __init__(
        self, explanation: Explanation, fits: Fits | None, builder: Builder | None, end: float, ranks: tuple[int, int]
    ) -> None:
        self._explanation, self._fits, self._builder, self._end = explanation, fits, builder, end
        self._situation = explanation.situation
        self._peak = explanation.peak_bytes
        self._few = ranks[0]
        self._many = max(ranks[1], self._situation.engine.world)
        self._group: Group | None = largest_group(explanation)
        self._known: list[tuple[Mapping[str, Any], _Ran | None]] = []  # what was changed, and what it gave

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

    # -- further steps

    def _run(self, **changes: Any) -> _Ran | None:
        """A changed step; None if it does not run, or the time is over."""
        for known, ran in self._known:
            if known == changes:
                return ran
        situation = replace(self._situation, **changes)
        if situation == self._situation:
            return self._as_it_is()
        if self._builder is None or time.monotonic() > self._end:
            return None
        ran = None
        with contextlib.suppress(DisthooksError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of this engine is not about the user's step
            step = record_step(self._builder, situation)
            ran = Memory(step, situation).peak_bytes, step
        self._known.append((changes, ran))
        return ran

    def _engine(self, kind: str, world: int, options: Mapping[str, Any] | None = None, **changes: Any) -> _Ran | None:
        """A step with an engine. See [Note: the ranks of the answers]."""
        asked = self._situation.engine
        given = dict(asked.options) if kind in ("fsdp2", "hsdp") and asked.kind in ("fsdp2", "hsdp") else {}
        taken: dict[str, Any] = {} if kind in ("plain", "ddp") else {"wrap": asked.wrap, "dtype": asked.dtype}
        taken |= {"options": given | dict(options or {}), **changes}
        try:
            spec = EngineSpec(kind, world, **taken)
        except DisthooksError:
            return None
        rank = self._situation.rank if isinstance(self._situation.rank, str) else "largest"
        return self._run(engine=spec, rank=rank)

    def _compared(self, question: str, runs: Mapping[str, Callable[[], _Ran | None]], how: str) -> Answer:
        """An answer that compares peaks."""
        found = {name: run() for name, run in runs.items()}
        figures = {name: ran[0] for name, ran in found.items() if ran is not None}
        if len(figures) < 2:
            return Answer(question, how, figures, "ask")
        said = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in figures.items())
        return Answer(question, f"Peaks: {said}.", figures, "run")

    def _as_it_is(self) -> _Ran:
        return self._peak, self._explanation.with_plan or self._explanation.step

    # -- decisions

    def _expected_peak(self) -> Answer:
        at = self._explanation.peak
        largest = next(iter(at.by_category), "nothing")
        text = (
            f"{format_bytes(at.nbytes)}, {at.where}; most of it, "
            f"{format_bytes(at.by_category.get(largest, 0))}, is {largest}."
        )
        return Answer("What is the expected peak memory?", text, {"peak": at.nbytes, **at.by_category})

    def _wrapping(self) -> Answer:
        question, few = "How does another FSDP wrapping change the peak?", self._few
        usual = self._engine("fsdp2", few)
        if usual is None:
            return Answer(question, f"{_BUILD}: {_COMMAND} fsdp2 --world {few}.", {}, "ask")
        units, inner = _unit_classes(usual[1])
        runs: dict[str, Callable[[], _Ran | None]] = {}
        if units:
            runs["the whole model as one unit"] = lambda: self._engine("fsdp2", few, wrap=None)
        runs[f"a unit for each {_either(units)}" if units else "the whole model as one unit"] = lambda: usual
        if inner:
            runs[f"a unit for each {_either(inner)}"] = lambda: self._engine("fsdp2", few, wrap=inner)
        answer = self._compared(question, runs, f"No smaller units were found; {_COMMAND} fsdp2 has the whole model.")
        return replace(answer, answer=f"On {few} ranks: {answer.answer}") if answer.source == "run" else answer

    def _size(self, question: str, what: str, largest: Largest | None) -> Answer:
        if largest is None or largest.size is None:
            how = "Ask with a limit: disthooks explain ... --fits 80GiB."
            if largest is not None:
                how = f"{largest.text[:1].upper()}{largest.text[1:]}."
            return Answer(question, how, {}, "ask")
        assert self._fits is not None
        text = f"In {format_bytes(self._fits.limit)}: {largest.text}."
        return Answer(question, text, {"size": largest.size, "nbytes": largest.nbytes}, "run")

    def _world_size(self) -> Answer:
        few = self._few
        worlds = sorted({2, few, self._many})
        runs: dict[str, Callable[[], _Ran | None]] = {"1": lambda: self._engine("plain", 1)}
        runs |= {str(world): lambda world=world: self._engine("fsdp2", world) for world in worlds}  # type: ignore[misc]
        runs["ddp"] = lambda: self._engine("ddp", few)
        how = f"{_BUILD}: {_COMMAND} fsdp2 --world {few}."
        answer = self._compared("How does the number of data-parallel ranks change the peak?", runs, how)
        if answer.source == "ask":
            return answer
        said = [f"{format_bytes(n)} on {world}" for world, n in answer.figures.items() if world.isdigit()]
        text = f"With FSDP the peak is {', '.join(said)} ranks."
        if "ddp" in answer.figures:
            text += f" With DDP it is {format_bytes(answer.figures['ddp'])} on any number of them."
        return replace(answer, answer=text)

    def _optimizer_on_the_host(self) -> Answer:
        question = "How much is saved if the optimizer is on the CPU?"
        names = self._explanation.record.phases
        records = self._explanation.record.allocations
        state = sum(each.nbytes for each in records if each.category == "optimizer state")
        if not state or "optimizer" not in names:
            return Answer(question, "The step has no optimizer with state; give one: --optimizer adamw.", {}, "ask")
        without = self._peak_without("optimizer state")
        text = (
            f"{format_bytes(self._peak - without)}: the peak falls from {format_bytes(self._peak)} to "
            f"{format_bytes(without)}, without the state of {format_bytes(state)} and the "
            "temporary tensors of the optimizer's step."
        )
        return Answer(question, text, {"saves": self._peak - without, "peak": without})

    def _peak_without(self, category: str) -> int:
        """The peak of forward and backward without one category."""
        position = CATEGORIES.index(category)
        samples = [each for each in self._explanation.timeline.samples if each.phase != "optimizer"]
        return max((each.total - each.nbytes[position] for each in samples), default=0)

    def _checkpoints(self) -> Iterator[Answer]:
        how = f"{_BUILD}; dh.explain has advice."
        runs: dict[str, Callable[[], _Ran | None]] = {"as it is": self._as_it_is}
        if self._group is not None:
            names = self._group.names
            runs["each block"] = lambda: self._run(change=checkpointed(names))
            runs["every second block"] = lambda: self._run(change=checkpointed(names[::2]))
        yield self._compared("Which activation checkpointing should I use?", runs, how)
        plans = {"cheap operators again": {}, "linear layers too": {"products": 1}}
        again: dict[str, Callable[[], _Ran | None]] = {"as it is": self._as_it_is}
        for name, options in plans.items():
            again[name] = lambda options=options: self._run(plan=_recompute(options))  # type: ignore[misc]
        yield self._compared("How do policies of selective checkpointing compare?", again, how)
        parts: dict[str, Callable[[], _Ran | None]] = {}
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
        question, few = "What does a reduction of gradients in fp32 cost?", self._few
        dtype = self._situation.engine.dtype or self._situation.dtype
        narrow = dtype if dtype in _FEW_BITS else torch.bfloat16
        name = str(narrow).removeprefix("torch.")
        runs: dict[str, Callable[[], _Ran | None]] = {
            f"reduced in {name}": lambda: self._engine("fsdp2", few, _policy(narrow, narrow)),
            "reduced in float32": lambda: self._engine("fsdp2", few, _policy(narrow, torch.float32)),
        }
        answer = self._compared(question, runs, f"{_BUILD}: {_COMMAND} fsdp2 --dtype {name}.")
        if answer.source == "ask":
            return answer
        less, more = answer.figures.values()
        text = f"With FSDP on {few} ranks that computes in {name}, {format_bytes(max(0, more - less))}. {answer.answer}"
        return replace(answer, answer=text)

    def _mixed_precision(self) -> Answer:
        few, bf16 = self._few, torch.bfloat16
        runs: dict[str, Callable[[], _Ran | None]] = {
            "as it is": self._as_it_is,
            "autocast to bfloat16": lambda: self._run(autocast=bf16),
            "everything in bfloat16": lambda: self._run(dtype=bf16, autocast=None),
            f"FSDP on {few} ranks": lambda: self._engine("fsdp2", few),
            f"FSDP on {few} ranks that computes in bfloat16": lambda: self._engine("fsdp2", few, dtype=bf16),
        }
        how = f"{_BUILD}: {_COMMAND} fsdp2 --dtype bfloat16."
        return self._compared("How does a custom mixed precision change the peak?", runs, how)

    def _meshes(self) -> Iterator[Answer]:
        few, many = self._few, self._many
        how = f"{_BUILD}: {_COMMAND}"
        usual = f"FSDP on {many} ranks"
        runs: dict[str, Callable[[], _Ran | None]] = {
            usual: lambda: self._engine("fsdp2", many),
            f"HSDP in groups of {few}": lambda: self._engine("hsdp", many, mesh=(many // few, few)),
        }
        answer = self._compared("When does HSDP make sense?", runs, f"{how} hsdp --world {many}.")
        if answer.source == "run":
            text = f"If {_more(answer)} are free on each rank, and the links between machines are slow. {answer.answer}"
            answer = replace(answer, answer=text)
        yield answer
        runs = {
            usual: runs[usual],
            f"resharded to {few}": lambda: self._engine("fsdp2", many, {"reshard_after_forward": few}),
        }
        how = f"{_BUILD}: EngineSpec('fsdp2', {many}, options=" + "{'reshard_after_forward': %s})."
        answer = self._compared("Can I reshard to a smaller mesh?", runs, how % few)
        if answer.source == "run":
            answer = replace(answer, answer=f"If {_more(answer)} are free on each rank. {answer.answer}")
        yield answer
        runs = {
            usual: runs[usual],
            "not resharded": lambda: self._engine("fsdp2", many, {"reshard_after_forward": False}),
        }
        answer = self._compared("Can I leave out the reshard after forward?", runs, how % "False")
        if answer.source == "run":
            text = f"If {_more(answer)} are free on each rank. {answer.answer}"
            kept = answer.figures["not resharded"]
            if self._fits is not None:
                fits = "fits" if kept <= self._fits.limit else "does not fit"
                text += f" It {fits} in {format_bytes(self._fits.limit)}."
            answer = replace(answer, answer=text)
        yield answer

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
        yield self._unsharded()
        again = sum(1 for each in self._explanation.record.operators if each.is_again)
        saved = format_bytes(self._explanation.saved_bytes)
        text = (
            f"{again} operators of the forward run again in backward, and {saved} are saved beside them."
            if again
            else "Nothing is computed again in backward, so no checkpoint is active in this step."
        )
        yield Answer("Does checkpointing release its memory?", text, {"again": again})

    def _unsharded(self) -> Answer:
        question, few = "Which FSDP unit holds most unsharded memory?", self._few
        ran = self._engine("fsdp2", few)
        if ran is None:
            return Answer(question, f"{_BUILD}: {_COMMAND} fsdp2 --world {few}.", {}, "ask")
        most = _most_gathered(ran[1])
        name = max(most, key=lambda each: most[each])
        text = (
            f"On {few} ranks {name or 'the root'}: at most {format_bytes(most[name])}, its parameters and the "
            "buffer in which they arrive."
        )
        return Answer(question, text, {"unit": most[name]}, "run")


def _most_gathered(step: Step) -> dict[str, int]:
    """The most bytes at one moment that each unit of FSDP has for its gathered parameters, by its name."""
    record, units = step.record, sorted(step.units, key=len, reverse=True)
    backward = record.phases.get("backward", len(record.operators))
    now: collections.Counter[str] = collections.Counter()
    most: dict[str, int] = dict.fromkeys(step.units, 0)
    first: dict[int, int] = {}
    for moment, allocation, nbytes in record.changes:
        found = record.allocations[allocation]
        begin = first.setdefault(allocation, moment)
        if found.category not in ("gathered parameters", "communication") or begin >= backward:
            continue  # a memory that is used first in the backward is for gradients
        unit = _outer(record.modules[found.module].name, units)
        now[unit] += nbytes
        most[unit] = max(most[unit], now[unit])
    return most


def _unit_classes(step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The classes of FSDP's units besides the root, and of the modules with parameters right inside the units."""
    record = step.record
    owners = {each.module for each in record.allocations if each.category == "parameters"}
    full: set[int] = set()
    for position in owners:
        while position >= 0 and position not in full:
            full.add(position)
            position = record.modules[position].parent
    units = {position for position, each in enumerate(record.modules) if each.name in step.units and position}
    inside = [position for position in sorted(full) if record.modules[position].parent in (units or {0})]
    inner = dict.fromkeys(record.modules[position].kind for position in inside)
    return tuple(dict.fromkeys(record.modules[position].kind for position in sorted(units))), tuple(inner)


def _outer(name: str, units: Iterable[str]) -> str:
    """The unit in which the module ``name`` is. ``units`` has the longest names first."""
    return next((unit for unit in units if not unit or f"{name}.".startswith(f"{unit}.")), "")


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


def _more(answer: Answer) -> str:
    """What the second of two peaks has more than the first."""
    first, second = answer.figures.values()
    return format_bytes(max(0, second - first))


def _policy(dtype: torch.dtype, reduced: torch.dtype) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)}


def _recompute(options: Mapping[str, Any]) -> Any:
    from disthooks.config.locate import from_config

    entry = {"modules": "*", "recompute": {"kind": "Recompute", **options}, "store": {"kind": "OnDevice"}}
    return from_config({"save": [entry]})
