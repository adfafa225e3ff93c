"""``verdict``: sentences about a run, the most important first, and the words for its numbers."""

# [Note: what stands out]
# The first sentences say what went wrong, by the timeline (timeline.py). A norm stands out too if it is ten times the
# median, in a log of few records a hundred times, and twice as many decades above it as all others. A rank does if its
# norm is ten times that of the others and of most steps in one step, or twice that of the others in more steps than by
# chance: batches of a healthy run differ by less. What the log has no numbers of is named, so that nobody takes
# "nothing stands out" for more than it is.

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from disthooks._tensors import format_bytes
from disthooks.report.culprit import Culprit, Timeline
from disthooks.report.log import Run, number
from disthooks.report.loop import changes
from disthooks.report.record import Record

_LONG = 300  # characters of what was noted of a batch
_FEW = 3  # steps, and culprits, that the verdict names one by one
_MUCH = 10.0  # see [Note: what stands out]
_FIRST = 10  # records of a new model
_MANY = 30  # records after which ten times the median is much
_AS_SPIKE = "the step was skipped as a spike"
_CALL = re.compile(r"(?:forward|backward) (\d+)")
_SECONDS = re.compile(r"[_/]seconds(_per_step)?(/(max|mean)_rank)?$")


def verdict(run: Run, found: Timeline) -> list[str]:
    """Sentences that say what went wrong, what the rules did, what saving cost, and what the log does not tell.

    See [Note: what stands out].
    """
    culprits = found.culprits
    named = {culprit.step for culprit in culprits}
    spikes = [record.step for record in run.records if record.spike]
    wrong = [culprit.text for culprit in culprits[:_FEW]]
    if len(culprits) > _FEW:
        more = len(culprits) - _FEW
        things = f"{more} more things stand out; the last" if more > 1 else "1 more thing stands out: it"
        wrong.append(f"{things} is at step {max(named)}.")
    again = [f"Step {record.step}: {words}" for record in run.records if (words := rerun_words(record))]
    others = [*_nonfinite_said(run), *_norm_said(run, named), *_rank_said(run, named), *again[:_FEW]]
    wrong += others
    if not others and all(culprit.kind == "noted" for culprit in culprits):
        wrong.insert(0, nothing_said(run, found))
    said = [text.partition(":")[0] for text in wrong if _AS_SPIKE in text]
    untold = [step for step in spikes if not any(re.search(rf" {step}\b", steps) for steps in said)]
    changed = changes(run)
    told = [change.text for change in changed[:_FEW]]
    if len(changed) > _FEW:
        told.append(f"The loop changed {len(changed) - _FEW} more things; the last at step {changed[-1].step}.")
    wrong += _batches_said(run, culprits)
    return [*wrong, *told, *_clipping_said(run, untold), *_saving_said(run), *found.unseen]


def _batches_said(run: Run, culprits: Sequence[Culprit]) -> Iterator[str]:
    """What ranks noted of the batches of the first steps that stand out; of one rank, if it is known which."""
    ranks = {culprit.step: culprit.rank for culprit in culprits if culprit.rank is not None}
    steps = list(dict.fromkeys(step for step, _ in sorted(run.batches)))[:_FEW]
    for (step, rank), data in sorted(run.batches.items()):
        if step in steps and ranks.get(step, rank) == rank:
            yield f"The batch of step {step} on rank {rank}: {data if len(data) <= _LONG else data[:_LONG] + ' ...'}."


def rerun_words(record: Record) -> str:
    """What a second run of a step showed (grads/rerun.py); "" if there was none."""
    from disthooks.report.watch.replicas import format_ranks

    where = f" on {format_ranks(record.rerun_ranks, ' and ')}" if record.rerun_ranks else ""
    if record.rerun == "transient":
        words = f"a rule left it out; run again, its gradients were good, with other bits{where}: the step was made."
        return words + (f" Test the device of{where.removeprefix(' on')} if it comes again." if where else "")
    why = f", and {record.rerun_why}" if record.rerun_why else ""
    captured = "".join(
        f" Replay it: disthooks replay {each} --model MODULE:FUNCTION" for each in record.rerun_capture[:1]
    )
    said = {
        "repeats": f"run again, it gave the same bits: the fault is in the data or in the program{why}.{captured}",
        "differs": f"run again, it gave other bits{where}, and no good step: the function is not deterministic.",
        "refused": f"it was not run again: {record.rerun_why}.",
    }
    return said.get(record.rerun, "")


def nothing_said(run: Run, found: Timeline) -> str:
    """That nothing stands out, and in what."""
    many = len(run.records)
    steps = f"{many} logged steps, {run.steps[0]} to {run.steps[-1]}" if many > 1 else f"1 logged step, {run.steps[0]}"
    looked = f": {', '.join(found.looked_at)}" if found.looked_at else ""
    noted = " as a fault" if found.culprits else ""  # what is noted is no fault
    return f"Nothing stands out{noted} in {steps}{looked}."


def nonfinite_entries(run: Run) -> list[dict[str, Any]]:
    """The steps with gradients that were not finite, and the parameters and ranks that the records name."""
    return [entry for record in run.records if (entry := nonfinite_entry(record)) is not None]


def nonfinite_entry(record: Record) -> dict[str, Any] | None:
    """What a record knows of gradients that were not finite; None if they were finite."""
    count, norm = record.nonfinite, record.grad_norm
    if count is not None:  # the statistic NonFinite has counted
        is_nonfinite = count > 0
    else:
        is_nonfinite = bool(record.nonfinite_at) or (norm is not None and not math.isfinite(norm))
    if not is_nonfinite:
        return None
    keys = ("nonfinite_ranks", "nonfinite_params", "nonfinite_since", "nonfinite_steps", "skipped")
    more = {key.removeprefix("nonfinite_"): record[key] for key in keys if key in record}
    return {"step": record.step, "at": list(record.nonfinite_at), **more}


def nonfinite_words(found: dict[str, Any]) -> str:
    """What is known of one step with gradients that are not finite, as :func:`nonfinite_entry` has it."""
    from disthooks.grads.sinks.base import FINITE_WHEN_MEASURED, is_finite_when_measured, places_words
    from disthooks.report.watch.replicas import format_ranks

    ranks, at = found.get("ranks"), found["at"]
    where = f" on {format_ranks(ranks, ' and ')}" if ranks else ""
    count = found.get("params") or len(at)
    is_late = is_finite_when_measured(at)
    words = places_words(at, count, _FEW, says_rank=not is_late and len(ranks or ()) != 1)
    names = f", of {count} parameter{'s' if count != 1 else ''}: {words}" if at else ""
    skipped = found.get("skipped")
    end = "" if skipped is None else "; the step was skipped" if skipped else "; the step was made"
    late = f" ({FINITE_WHEN_MEASURED})" if is_late else ""
    return f"gradients were not finite{where}{names}{late}{end}"


def _nonfinite_said(run: Run) -> Iterator[str]:
    found = nonfinite_entries(run)
    first = [each for each in found if "since" not in each]
    if len(first) > _FEW:
        more = len(first) - _FEW
        rows = (
            f"{more} more rows of such steps followed; the last begins at" if more > 1 else "1 more such row begins at"
        )
        yield f"{rows} step {first[-1]['step']}."
    totals = [total for total in run.column("nonfinite_steps") if total is not None]
    total = int(totals[-1]) if totals else len(found)
    if found and (total > 1 or len(found) > 1):
        yield f"Gradients were not finite in {total} steps, {found[0]['step']} to {found[-1]['step']} at least."
    blamed = dict.fromkeys(text for record in run.records for text in record.blame)
    for text in sorted(blamed, key=lambda text: [*map(int, _CALL.findall(text)), 0][0]):  # the first one is the cause
        yield f"blame found: {text}."


def peak_of(run: Run, begin: int = 0) -> dict[str, Any] | None:
    """The largest finite norm of a run, its step, the rank that led if it is known, and the median of logged norms.

    "next" is the largest norm of the other steps.
    """
    norms, found = [], []
    for record in run.records[begin:]:
        peak, norm = record.grad_norm_peak, record.grad_norm
        if peak is not None and math.isfinite(peak):
            found.append((peak, record.grad_norm_peak_step, record.grad_norm_peak_rank))
        if norm is not None and math.isfinite(norm):
            norms.append(norm)
            found.append((norm, record.step, record.grad_norm_argmax_rank))
    if not norms:
        return None
    largest, step, rank = max(found, key=lambda each: each[0])
    following = max((norm for norm, of, _ in found if of != step), default=0.0)
    return {"norm": largest, "step": step, "rank": rank, "median": statistics.median(norms), "next": following}


def spike_said(run: Run, step: int) -> str:
    """The end of a sentence about a step that SkipSpike left out; empty for any other step."""
    is_spike = any(record.spike for record in run.records if record.step == step)
    return f"; {_AS_SPIKE}" if is_spike else ""


def _norm_said(run: Run, named: set[int]) -> Iterator[str]:
    # The first norms of a new model are large, and fall fast.
    peak = peak_of(run, _FIRST if len(run.records) > 2 * _FIRST else 0)
    if not peak or not peak["median"] or peak["step"] in named:
        return
    times, following = peak["norm"] / peak["median"], max(peak["next"] / peak["median"], 1.0)
    if times > max(_MUCH if len(run.records) > _MANY else _MUCH**2, following**2):
        led = f", and rank {peak['rank']} had the largest norm" if peak["rank"] is not None else ""
        yield (
            f"Step {peak['step']}: the gradient norm was {figure('', peak['norm'])}, "
            f"{_times(peak['norm'], peak['median'])} its median of {figure('', peak['median'])}{led}"
            f"{spike_said(run, peak['step'])}."
        )


def value_of(record: Record, name: str) -> Any:
    """The value of ``name``; None for the number of a rank that was found by norms that are not finite."""
    which = re.sub(r"(argmin|argmax|outlier)_rank", "max_rank", name) if "_rank" in name else name
    if which != name and not math.isfinite(number(record.get(which)) or 0.0):
        return None
    return record.get(name)


def _rank_said(run: Run, named: set[int]) -> Iterator[str]:
    """Which rank led with the largest norm, if its lead stands out."""
    if (run.ranks or 2) < 2:
        return
    leads: dict[int, list[tuple[float, float, float, int]]] = collections.defaultdict(list)
    for record in run.records:
        rank = value_of(record, "grad_norm/argmax_rank")
        most, mean = record.grad_norm_max_rank, record.grad_norm_mean_rank
        if rank is None or not most or mean is None:
            continue
        ranks = run.ranks or 2
        others = max((mean * ranks - most) / max(ranks - 1, 1), 0.0)
        if others:
            leads[rank].append((most / others, most, others, record.step))
    many = sum(map(len, leads.values()))
    norms = sorted(most for found in leads.values() for _, most, *_ in found)
    largest = norms[int(0.9 * many)] if norms else 0.0
    for rank, found in leads.items():
        lead, most, others, step = max(found)
        usual = statistics.median(each[0] for each in found)
        is_far = lead > _MUCH and most > _MUCH * largest and step not in named
        if is_far or (usual > 2 and len(found) > max(many / 2, many / (run.ranks or 2) + 3 * many**0.5)):
            yield (
                f"Rank {rank} had the largest gradient norm in {len(found)} of {many} logged "
                f"step{'s' * (many != 1)}. Its lead is the largest at step {step}: {figure('', most)}, and "
                f"{figure('', others)} on the other ranks on average."
            )


def _clipping_said(run: Run, spikes: Sequence[int]) -> Iterator[str]:
    for name in dict.fromkeys(name for record in run.records for name in record):
        if name.split("/")[0] in ("clip_ratio", "unit_clip_ratio"):
            ratios = [ratio for ratio in run.column(name) if ratio is not None]
            clipped = [ratio for ratio in ratios if ratio < 1]
            label = f" ({name.partition('/')[2]})" if "/" in name else ""
            factor = f", by a median factor of {statistics.median(clipped):.3g}" if clipped else ""
            yield f"Gradients were clipped in {len(clipped)} of {len(ratios)} logged steps{label}{factor}."
    totals = [total for total in run.column("skipped_total") if total is not None]
    skipped = max(totals) if totals else sum(each or 0.0 for each in run.column("skipped"))
    if skipped:
        yield f"{skipped:.0f} step{'s were' if skipped > 1 else ' was'} skipped."
    if spikes:
        were = f"{len(spikes)} steps were" if len(spikes) > 1 else "1 step was"
        yield f"{were} skipped as a spike, the first at step {spikes[0]}."


def _saving_said(run: Run) -> Iterator[str]:
    moved = [each for each in run.column("saved/moved_per_step") if each is not None]
    if not moved:
        return
    if not max(moved):
        yield "Saving moved nothing on the first rank: saved tensors stayed where they were."
        return
    waits = 0.0
    for name in ("pack_seconds", "unpack_seconds"):
        waited = [each for each in run.column(f"saved/{name}_per_step") if each is not None]
        waits += statistics.median(waited) if waited else 0.0
    usual = format_bytes(statistics.median(moved))
    told = f"Saving moved {usual} of saved tensors a step out of the memory they were in"
    made = run.steps[-1] - run.steps[0]
    share = ""
    if run.began is not None and run.ended is not None and made > 0 and run.ended > run.began:
        each = (run.ended - run.began) / made
        share = f", {waits / each:.1%} of the {seconds(each)} from step to step"
    yield f"{told}, on the first rank; forward and backward waited {seconds(waits)} a step for it{share}."


def _times(value: float, median: float) -> str:
    if not median:
        return "above"
    return f"{value / median:,.0f} times" if value > _MUCH * median else f"{value / median:.3g} times"


def figure(name: str, value: float) -> str:
    """A number for people: bytes as MiB, seconds as ms, others with four digits.

    >>> figure("saved/moved", 589824.0), figure("saved/pack_seconds_per_step", 0.0042), figure("grad_norm", 0.28957)
    ('576.0 KiB', '4.2 ms', '0.2896')
    """
    if _SECONDS.search(name):
        return seconds(value)
    if name.startswith("saved/") and math.isfinite(value):
        return format_bytes(value)
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """A time for people.

    >>> seconds(0.0000213), seconds(0.2), seconds(75.0)
    ('0.0213 ms', '200 ms', '75 s')
    """
    return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s" if abs(value) < 1000 else f"{value:.0f} s"
