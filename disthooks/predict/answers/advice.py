"""``advise``: what to change so that a step needs less memory, with the bytes, the seconds and the lines of YAML."""

# [Note: how advice is made]
# A candidate is a change of the situation: a plan of disthooks' hooks, a checkpoint around blocks, another dtype, a
# smaller batch, FSDP2. The changed step runs on fake tensors. The change saves the difference of the two peaks. A few
# changes need code that is not installed, such as an optimizer with 8-bit state, or that is the user's own. Their
# savings are estimated from the record, and the text says "about".
#
# [Note: what advice costs]
# A change may add computation. Its time is the time of the step with the change, minus the time without it; both are
# those of `phase_seconds`, as `explain` says them. The speed of a link comes from the table of devices, and that of a
# disk is assumed. A transfer runs beside the computation, so it costs only the time by which it is longer than the
# step. Candidates are sorted by the saved bytes, divided by the seconds of the changed step. Bytes count half if the
# change gives other gradients (those that are only rounded differently count whole) or needs more devices, or if they
# are estimated.

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disthooks._tensors import format_bytes, parse_bytes
from disthooks.config.dump import yaml_of
from disthooks.config.locate import from_config
from disthooks.errors import DisthooksError
from disthooks.predict.answers.chunked_loss import in_chunks
from disthooks.predict.answers.snippets import checkpoint_code, fsdp_code, loss_code
from disthooks.predict.engines.spec import EngineSpec
from disthooks.predict.explanation import Explanation, Memory, ModuleRow
from disthooks.predict.fake.builder import Builder
from disthooks.predict.hardware.devices import device_named
from disthooks.predict.hardware.roofline import format_seconds, phase_seconds
from disthooks.predict.recording.record import StepRecord
from disthooks.predict.run import Situation, Step, record_step
from disthooks.saved.stores.cpu import OnCpu

#: The device whose times are used if the user names none.
USUAL = "h100"
#: The directory in YAML: it exists. The user may have a faster disk.
DISK = tempfile.gettempdir()
#: Bytes a second that a disk is assumed to write and to read. Nothing here measures it.
DISK_SPEED = 1e9
#: Advice that saves a smaller part of the peak than this is not given.
LEAST = 0.02
#: Ranks of the advice to shard.
RANKS = 8
#: If the saved tensors have more bytes than this, the advice is to move a part of them to a disk.
HOST = 256 << 30


@dataclass(frozen=True)
class Advice:
    """One change that makes a step need less memory.

    Attributes:
        saves: by how many bytes the peak becomes lower.
        nbytes: the peak with the change, in bytes.
        seconds: how much longer a step takes: approximate.
        yaml: the lines of ``hooks.yaml`` that do it; "" if a hooks file cannot do it.
        code: the lines of Python, if a hooks file cannot do it. They name what a script has: ``model``, ``batch``,
            ``optimizer``, ``loss_of``, or what the text says.
        is_exact: whether gradients stay the same bits.
        is_estimate: whether ``saves`` was estimated from the record, and not by another run on fake tensors.
    """

    title: str
    text: str
    saves: int
    nbytes: int
    seconds: float
    yaml: str = ""
    code: str = ""
    kind: str = ""
    is_exact: bool = True
    is_estimate: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.text}", *(self.yaml or self.code).splitlines()]
        return "\n    ".join(lines)


@dataclass(frozen=True)
class Candidate:
    """A change that a run on fake tensors can try; ``stays`` is the bytes that its store keeps on the device."""

    kind: str
    title: str
    situation: Situation
    yaml: str = ""
    code: str = ""
    is_exact: bool = True
    note: str = ""
    stays: int = 0


#: The changes that were run, by title: the advice that each gave, and its step, which is None if it failed.
Tried = dict[str, tuple[list[Advice], Step | None]]


class Group(NamedTuple):
    """Modules of one class that stand side by side, such as the layers of a decoder.

    ``pattern`` matches all of them and nothing beside them; it is "" if no simple pattern does.
    """

    names: tuple[str, ...]
    kind: str
    pattern: str
    nbytes: int


def advise(
    builder: Builder,
    explanation: Explanation,
    *,
    top: int = 3,
    limit: int | None = None,
    patience: float = 60.0,
    progress: Callable[[str], None] | None = None,
    tried: Tried | None = None,
) -> list[Advice]:
    """The best ``top`` changes, at most one of each kind. See [Note: what advice costs].

    The exact change with the lowest peak is always among them. If its time makes it a bad choice, it is the last one.

    Args:
        limit: the limit of memory, in bytes. If the step is above it, a plan is tried, too, that keeps on the device
            what fits there, and moves the rest. If an exact change is below it, lossy codecs are not tried.
        patience: no new change is tried after this many seconds.
        progress: called with a line of text after each change.
        tried: the changes that were run before, which are not run again; those that are run here are added.
    """
    found = changes(builder, explanation, limit=limit, patience=patience, progress=progress, tried=tried)
    chosen: list[Advice] = []
    for each in found:
        if len(chosen) < top and all(each.kind != other.kind for other in chosen):
            chosen.append(each)
    exact = [each for each in found if each.is_exact and not each.is_estimate]
    lowest = min(exact, key=lambda each: each.nbytes, default=None)
    if lowest is not None and lowest not in chosen:
        chosen[top - 1 :] = [lowest]
    return chosen


def cheapest(
    builder: Builder,
    explanation: Explanation,
    limit: int,
    progress: Callable[[str], None] | None = None,
    tried: Tried | None = None,
) -> Advice | None:
    """The change that brings the step within ``limit`` bytes and adds the least time; None if no change is enough.

    An exact change is chosen first, one with more devices only if no other exact change is enough, and an estimated
    change only if no change that was tried is enough.
    """
    found = changes(builder, explanation, limit=limit, progress=progress, tried=tried)
    enough = [each for each in found if each.nbytes <= limit]

    def order(each: Advice) -> tuple[bool, bool, bool, float]:
        return each.is_estimate, not each.is_exact, each.kind == "shard", each.seconds

    return min(enough, key=order, default=None)


def changes(
    builder: Builder,
    explanation: Explanation,
    *,
    limit: int | None = None,
    patience: float = 60.0,
    progress: Callable[[str], None] | None = None,
    tried: Tried | None = None,
) -> list[Advice]:
    """All changes that make the peak lower, the best first. :func:`advise` describes the arguments."""
    trial = Trial(builder, explanation, progress, {} if tried is None else tried)
    end = time.monotonic() + patience
    found: list[Advice] = []
    for each in _candidates(explanation):
        if each.kind in _LOSSY and any(other.is_exact and other.nbytes <= (limit or 0) for other in found):
            continue  # with a codec a step runs many more operators, so the prediction takes several times as long
        found += trial.of(each)
        if time.monotonic() > end:
            break
    if limit is not None and explanation.needed_bytes > limit:
        offloaded = [advice for advice in found if advice.kind == "offload" and advice.nbytes < limit]
        if offloaded:
            room = limit - offloaded[0].nbytes
            title = f"keep {format_bytes(room >> 20 << 20)} of saved tensors and move the rest"
            # The peak of OnCpu alone has its `in_flight`; the limit of a Tiered needs room for it.
            copies = parse_bytes(OnCpu().in_flight) if explanation.situation.device == "cuda" else 0
            found += trial.of(keeping(explanation, room, title, copies))
    found += trial.estimates([each.title for each in found])
    return sorted(found, key=trial.worth, reverse=True)


# -- trying


class Trial:
    def __init__(
        self,
        builder: Builder,
        explanation: Explanation,
        progress: Callable[[str], None] | None,
        tried: Tried,
    ) -> None:
        self._builder, self._explanation, self._tried = builder, explanation, tried
        self._say = progress or (lambda text: None)
        self._before = explanation.needed_bytes
        situation = explanation.situation
        self._device = situation.hardware or device_named(USUAL if situation.device == "cuda" else "cpu")
        self._seconds = self._seconds_of(explanation.record)

    def of(self, candidate: Candidate) -> list[Advice]:
        """The advice, if the candidate saves something. A candidate of one title runs once."""
        if candidate.title not in self._tried:
            self._tried[candidate.title] = self._run(candidate)
        return self._tried[candidate.title][0]

    def _run(self, candidate: Candidate) -> tuple[list[Advice], Step | None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what torch says of this change is not about the user's step
                step = record_step(self._builder, candidate.situation)
        except (DisthooksError, TypeError) as error:  # an optimizer of the user's may have no foreach
            self._say(f"{candidate.title}: not possible: {error}")
            return [], None
        nbytes = Explanation(self._builder.name, candidate.situation, step).needed_bytes
        record, stored = step.record, 0 if step.planned is None else step.planned.report().stored
        saves = self._before - nbytes
        self._say(f"{candidate.title}: {format_bytes(nbytes)}")
        if saves < LEAST * self._before:
            return [], step
        compute = self._seconds_of(record) - self._seconds
        if candidate.kind in ("batch", "shard"):
            compute = 0.0  # as many steps more as there are samples less; several devices compute at the same time
        link, cost = 0.0, ""
        moved = max(0, stored - candidate.stays) if candidate.kind in ("offload", "tiers") else 0
        if moved:
            link, where = self._transfer(moved)
            cost = (
                f"{format_bytes(moved)} go out and come back; that takes {format_seconds(link)} {where}, and the "
                f"computation beside it {format_seconds(self._seconds)}"
            )
        elif compute > 0.001 * self._seconds:
            after, before = format_seconds(self._seconds + compute), format_seconds(self._seconds)
            cost = f"a step computes for {after} instead of {before}"
        more = max(0.0, compute) + max(0.0, link - self._seconds - max(0.0, compute))
        text = (
            f"the peak falls from {format_bytes(self._before)} to {format_bytes(nbytes)}"
            + (f"; {cost}" if cost else "")
            + (f" (times of {self._device.name}, roughly)" if cost else "")
            + (f"; {candidate.note}" if candidate.note else "")
        )
        advice = Advice(
            candidate.title,
            text,
            saves,
            nbytes,
            more,
            candidate.yaml,
            fsdp_code(step.units) if candidate.kind == "shard" else candidate.code,
            candidate.kind,
            candidate.is_exact,
        )
        return [advice], step

    def estimates(self, known: Sequence[str]) -> list[Advice]:
        """The changes that cannot be run here, but those of ``known`` titles. See [Note: how advice is made]."""
        given = _estimates(self._explanation, self._before)
        found = [each for each in given if each.saves >= LEAST * self._before and each.title not in known]
        for each in found:
            self._say(f"{each.title}: about {format_bytes(each.nbytes)}")
        return found

    def worth(self, advice: Advice) -> float:
        """Bytes saved for each second of the step. See [Note: what advice costs]."""
        changes_numbers = not advice.is_exact and advice.kind not in ("loss", "attention")  # these only round anew
        is_worse = advice.is_estimate or changes_numbers or advice.kind == "shard"  # it needs more devices
        part = 0.5 if is_worse else 1.0
        return part * advice.saves / (self._seconds + advice.seconds or 1.0)

    def _transfer(self, nbytes: int) -> tuple[float, str]:
        """How long ``nbytes`` take to their place and back, and on what."""
        is_host = self._explanation.situation.device == "cuda"
        link, on = self._device.offload_seconds(nbytes) if is_host else 0.0, self._device.link
        disk = 2 / DISK_SPEED * max(0, nbytes - HOST * is_host)
        speed = f"if the disk moves {DISK_SPEED / 1e9:.0f} GB/s (its speed is unknown)"
        return (disk, speed) if disk > link else (link, f"on the link ({on})")

    def _seconds_of(self, record: StepRecord) -> float:
        return sum(phase_seconds(record.operators, self._device).values())


# -- candidates


def _candidates(explanation: Explanation) -> Iterator[Candidate]:
    """The changes to try. Those that usually save most come first, because the time may be over before the last."""
    situation, at_peak = explanation.situation, explanation.peak
    group = largest_group(explanation)
    if at_peak.phase == "optimizer" and situation.optimizer is not None:
        made: Any = functools.partial(situation.optimizer, foreach=False)  # type: ignore[call-arg]  # if it is torch's
        changed = replace(situation, optimizer=made)
        note = "the optimizer no longer makes temporary tensors for all parameters at once; fused=True does as much"
        name = situation.to_dict()["optimizer"]
        where = "torch.optim." if hasattr(torch.optim, name) else ""
        code = f"optimizer = {where}{name}(model.parameters(), lr=1e-3, foreach=False)"
        yield Candidate("optimizer", "foreach=False in the optimizer", changed, code=code, note=note)
    if group is not None:
        title = f"checkpoint each of the {len(group.names)} {group.kind}"
        code = explanation.step.switch or checkpoint_code(group.names)
        changed = situation.changed(checkpointed(group.names))
        yield Candidate("checkpoint", title, changed, code=code)
    head = _last_linear(explanation)
    if (
        head is not None
        and _probabilities(explanation) > 0.1 * at_peak.nbytes
        and hasattr(nn, "LinearCrossEntropyOptions")
    ):
        changed = situation.changed(in_chunks(head))
        yield Candidate("loss", _IN_CHUNKS, changed, code=loss_code(head), is_exact=False, note=_ROUNDING)
    movable = sum(at_peak.by_category.get(each, 0) for each in ("saved for backward", "temporary"))
    if movable > 0.1 * at_peak.nbytes:
        yield from _plans(explanation, group)
    if situation.backend == "math":
        code = (
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
            "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n"
            "    output = model(batch)"
        )
        changed = replace(situation, backend="flash")
        yield Candidate("attention", "use flash attention", changed, code=code, is_exact=False, note=_ROUNDING)
    if situation.device == "cuda" and situation.autocast is None and situation.dtype is None:
        code = 'with torch.autocast("cuda", torch.bfloat16):\n    output = model(batch)'
        changed = replace(situation, autocast=torch.bfloat16)
        yield Candidate("autocast", "autocast to bfloat16", changed, code=code, is_exact=False, note=_ROUNDING)
    batch = _batch(explanation)
    if batch > 1:
        changed = replace(situation, batch=batch // 2)
        code = "for half in batch.chunk(2):\n    (loss_of(model(half)) / 2).backward()\noptimizer.step()"
        note = "accumulate the gradients of two halves of the batch; a batch norm then has the statistics of each half"
        yield Candidate("batch", "half the batch, with accumulation", changed, code=code, is_exact=False, note=note)
    sharded = sum(at_peak.by_category.get(each, 0) for each in ("parameters", "gradients", "optimizer state"))
    if situation.engine.kind in ("plain", "ddp") and 2 * sharded > at_peak.nbytes:
        ranks = max(RANKS, situation.engine.world)
        changed = replace(situation, engine=EngineSpec("fsdp2", ranks))
        note = "the batch of each rank stays the same; the time of the collectives is not counted"
        yield Candidate("shard", f"shard the model over {ranks} ranks (FSDP2)", changed, note=note)


_LOSSY = ("cast", "quantize")  # plans with a codec
_ROUNDING = "gradients are rounded differently"


def _plans(explanation: Explanation, group: Group | None) -> Iterator[Candidate]:
    situation = explanation.situation
    store, where = far_store(situation, explanation.saved_bytes)
    recompute = {"kind": "Recompute"}
    stays = {"kind": "OnDevice"}
    modules = "*" if group is None or not group.pattern else group.pattern
    yield planned(situation, "offload", f"move all saved tensors to {where}", "*", store=store)
    if group is not None and modules != "*" and group.nbytes < 0.98 * explanation.saved_bytes:
        title = f"move what the {len(group.names)} {group.kind} save to {where}"
        yield planned(situation, "offload", title, modules, store=store)
    title = "compute cheap tensors again"
    yield planned(situation, "recompute", title, "*", recompute=recompute, store=stays)
    if modules != "*":
        title = "compute cheap tensors and outputs of linear layers again"
        again = recompute | {"products": 1}
        yield planned(situation, "recompute", title, modules, recompute=again, store=stays)
    wide = sum(each.nbytes for each in explanation.record.counted() if each.dtype == "float32")
    if 2 * wide > explanation.saved_bytes:
        codecs = [{"kind": "Cast", "dtype": "bfloat16"}]
        yield planned(situation, "cast", "keep saved tensors as bfloat16", "*", codecs=codecs, store=stays)
    small = [{"kind": "Quantize", "bits": 8}]
    yield planned(situation, "quantize", "keep saved tensors in 8 bits", "*", codecs=small, store=stays)


def planned(situation: Situation, kind: str, title: str, modules: str, **entry: Any) -> Candidate:
    document = {"save": [{"modules": modules, **entry}]}
    is_lossy = "codecs" in entry
    note = "the codec is lossy: gradients change a little (docs/saved-tensors/codecs.md)" if is_lossy else ""
    changed = replace(situation, plan=from_config(document))
    yaml = yaml_of(document, is_compact=True)
    return Candidate(kind, title, changed, yaml, is_exact=not is_lossy, note=note)


def keeping(explanation: Explanation, room: int, title: str, copies: int = 0) -> Candidate:
    """A plan that keeps ``room`` bytes of saved tensors on the device, in whole MiB, and moves the others.

    The limit of the device has ``copies`` bytes more, for copies under way.
    """
    store, _ = far_store(explanation.situation, explanation.saved_bytes)
    below = store["stores"] if store["kind"] == "Tiered" else [store]
    nearest = {"kind": "OnDevice", "limit": f"{room + copies >> 20} MiB"}
    tiers = {"kind": "Tiered", "stores": [nearest, *below]}
    made = planned(explanation.situation, "tiers", title, "*", store=tiers)
    note = f"the limit has {format_bytes(copies)} more, for copies under way" if copies else ""
    return replace(made, stays=room >> 20 << 20, note=note)


def far_store(situation: Situation, nbytes: int) -> tuple[dict[str, Any], str]:
    disk = {"kind": "OnDisk", "directory": DISK}
    if situation.device != "cuda":
        return disk, "a disk"
    if nbytes <= HOST:
        return {"kind": "OnCpu"}, "the host"
    return {"kind": "Tiered", "stores": [{"kind": "OnCpu", "limit": f"{HOST >> 30} GiB"}, disk]}, "the host and a disk"


def checkpointed(names: Sequence[str]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for name in names:
            module: Any = model.get_submodule(name)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)

    return change


def _batch(explanation: Explanation) -> int:
    """The batch of the step: that of its situation, or the first dimension of most saved activations; 1 if unknown."""
    if explanation.situation.batch is not None:
        return explanation.situation.batch
    sizes: dict[int, int] = {}
    for each in explanation.record.counted():
        if each.kind == "input" and each.shape:
            sizes[each.shape[0]] = sizes.get(each.shape[0], 0) + 1
    return max(sizes, key=lambda size: sizes[size], default=1)


def largest_group(explanation: Explanation) -> Group | None:
    """The modules of one class inside one module that save most; None if that is less than a third of all."""
    rows = [row for row in explanation.modules if row.whole]
    found: dict[tuple[int, str], list[ModuleRow]] = {}
    for row in rows[1:]:  # the first is the model
        found.setdefault((row.parent, row.kind), []).append(row)

    def worth(members: list[ModuleRow]) -> tuple[int, int]:
        return sum(row.whole for row in members), -len(members)

    members = max((each for each in found.values() if len(each) > 1), key=worth, default=[])
    nbytes = sum(row.whole for row in members)
    if not members or 3 * nbytes <= explanation.saved_bytes:
        return None
    parent, kind = members[0].parent, members[0].kind
    above = explanation.modules[parent].name
    is_alone = all(row in members for row in rows if row.parent == parent)
    return Group(tuple(row.name for row in members), kind, f"{above}.*" if is_alone and above else "", nbytes)


# -- estimates

#: The optimizers of torch that bitsandbytes has with 8-bit state.
_EIGHT_BITS = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
_IN_CHUNKS = "compute the logits in chunks, inside the cross entropy"


def _last_linear(explanation: Explanation) -> str | None:
    return next((row.name for row in reversed(explanation.modules) if row.kind == "Linear"), None)


def _probabilities(explanation: Explanation) -> int:
    """Bytes that cross entropies save, if they are there at the peak."""
    return explanation.by_operator.get("aten._log_softmax", 0) if explanation.peak.phase != "optimizer" else 0


def _estimates(explanation: Explanation, before: int) -> Iterator[Advice]:
    at_peak = explanation.peak.by_category
    logits = _probabilities(explanation)
    if logits:
        text = f"the loss saves {format_bytes(logits)} of probabilities, and its backward needs as many bytes again"
        yield _estimate("loss", _IN_CHUNKS, text, logits, before, loss_code(_last_linear(explanation) or "head"))
    scores = sum(
        explanation.record.allocations[each.allocation].nbytes
        for each in explanation.record.counted()
        if each.operator == "aten._softmax" and len(each.shape) > 2 and each.shape[-1] == each.shape[-2]
    )
    if scores and explanation.peak.phase != "optimizer":
        text = f"attention saves {format_bytes(scores)} of scores; flash attention saves none of them"
        code = "output = torch.nn.functional.scaled_dot_product_attention(query, key, value)"
        if explanation.step.switch:
            code = f'{explanation.step.switch.rpartition(".")[0]}.set_attn_implementation("sdpa")'
        yield _estimate("attention", "use flash attention", text, scores, before, code)
    moments = at_peak.get("optimizer state", 0)
    if moments:
        # An optimizer makes its state in the dtype of the parameters.
        is_wide = explanation.situation.dtype in (None, torch.float32)
        part, saves = ("a quarter", moments * 3 // 4) if is_wide else ("half", moments // 2)
        text = f"the optimizer's state takes {format_bytes(moments)}; with 8 bits for each number it takes {part}"
        name = explanation.situation.to_dict()["optimizer"]
        kind = name if name in _EIGHT_BITS else "AdamW"
        made = f"{kind}8bit(model.parameters(), lr=1e-3{', momentum=0.9' if kind == 'SGD' else ''})"
        code = f"import bitsandbytes\noptimizer = bitsandbytes.optim.{made}"
        yield _estimate("optimizer", "use an optimizer with 8-bit state", text, saves, before, code)


def _estimate(kind: str, title: str, text: str, saves: int, before: int, code: str) -> Advice:
    text = f"{text}; the peak falls from {format_bytes(before)} to about {format_bytes(before - saves)}"
    return Advice(title, text, saves, before - saves, 0.0, "", code, kind, is_exact=False, is_estimate=True)


def what_if(
    explanation: Explanation, advice: Sequence[Advice], tried: Tried, points: int = 300
) -> list[dict[str, Any]]:
    """For each advice that is a hooks file or a checkpoint: its step in ``tried``, as a document for the page."""
    position = {row.name: number for number, row in enumerate(explanation.modules)}
    found = []
    for each in advice:
        _, step = tried.get(each.title, ([], None))
        if step is not None and (each.yaml or each.kind == "checkpoint"):
            memory = Memory(step, explanation.situation).to_dict(position.__getitem__, points)
            found.append({"name": each.title, "yaml": each.yaml or each.code, **memory})
    return found
