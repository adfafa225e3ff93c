"""What was wanted of ``gpu.py``'s figures, what was reached, and whether that is it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from names import CHECKPOINT, NOTHING, OURS

Rows = Mapping[str, Mapping[str, Any]]
GB = 1e9


def target(wanted: str, reached: Any, met: bool | None, why: str = "") -> dict[str, Any]:
    """One; ``met`` is None where it could not be tried, and ``why`` says so."""
    return {"wanted": wanted, "reached": reached, "met": met} | ({"why": why} if why else {})


def ran(rows: Rows, ours: bool | None = None, like: str = "") -> dict[str, Mapping[str, Any]]:
    """The rows that have figures: all, ours or those of others; ``like`` is in their names."""
    found = {name: row for name, row in rows.items() if "step_ms" in row and like in name}
    return found if ours is None else {n: row for n, row in found.items() if n.startswith("disthooks") is ours}


def within(rows: Rows, peak: float) -> dict[str, Mapping[str, Any]]:
    """Those whose peak is at most that."""
    return {name: row for name, row in rows.items() if row["peak_bytes"] <= peak}


def fastest(rows: Rows) -> tuple[str, float] | None:
    """By its time against nothing's."""
    return min(((name, row["ratio"]) for name, row in rows.items()), key=lambda pair: pair[1], default=None)


def at_most(wanted: str, rows: Rows, peak: float, ratio: float) -> dict[str, Any]:
    """The fastest of ``rows`` under a peak takes at most ``ratio`` of nothing's time."""
    best = fastest(within(rows, peak))
    why = "" if best else f"no way of ours ran at a peak of at most {peak / GB:.1f} GB"
    return target(wanted, best, best[1] <= ratio if best else None, why)


def of_images(rows: Rows, link: Mapping[str, float]) -> Iterable[dict[str, Any]]:
    """ResNet-152's."""
    yield at_most("at 5 GB with 4 bits at most 1.5 times nothing", ran(rows, True, "Quantize(4)"), 5 * GB, 1.5)
    yield at_the_link(rows, link)
    for peak in (5, 10, 20, 30):
        there = within(ran(rows), peak * GB)
        for which, kinds in (("", (True, False)), (" that lose nothing", (True,))):
            best = fastest({name: row for name, row in there.items() if row["exact"] in kinds})
            wanted = f"at {peak} GB the fastest of all{which}"
            if best is None or best[0] == NOTHING:
                yield target(wanted, best, None, "nothing fits as it is" if best else "no way fits")
            else:
                yield target(wanted, best, best[0].startswith("disthooks"))


def at_the_link(rows: Rows, link: Mapping[str, float]) -> dict[str, Any]:
    """Lossless offload of everything against the longer of computing and copying, forward and backward."""
    wanted = "lossless offload of everything at most 10% over the link's limit"
    ours, nothing = rows.get(OURS, {}), rows.get(NOTHING, {})
    if "step_ms" not in ours or "step_ms" not in nothing:
        return target(wanted, None, None, "it did not run")
    if not ours["moved_bytes"]:
        return target(wanted, None, None, "nothing was moved: it is in the host's memory already")
    limit = limit_ms(ours, nothing, link)
    over = ours["step_ms"] / limit
    return target(wanted, {"limit_ms": round(limit, 2), "of_limit": round(over, 3)}, over <= 1.1)


def limit_ms(ours: Mapping[str, Any], nothing: Mapping[str, Any], link: Mapping[str, float]) -> float:
    """Milliseconds that no step can be faster than which moves these bytes."""
    out, back = (
        1e3 * ours[key] / link[way] for key, way in (("moved_bytes", "to_host"), ("loaded_bytes", "to_device"))
    )
    return max(nothing["forward_ms"], out) + max(nothing["backward_ms"], back)


def of_language(rows: Rows) -> Iterable[dict[str, Any]]:
    """The decoder's; lossless ways alone."""
    exact = {name: row for name, row in ran(rows, True).items() if row["exact"]}
    nothing, checkpoint = rows.get(NOTHING, {}), rows.get(CHECKPOINT, {})
    for share, ratio in ((0.7, 1.02), (0.5, 1.08)):
        wanted = f"{share - 1:.0%} of peak at most {ratio} times nothing, lossless"
        if "peak_bytes" in nothing:
            yield at_most(wanted, exact, share * nothing["peak_bytes"], ratio)
        else:
            yield target(wanted, None, None, "nothing did not run")
    wanted = "never slower than checkpointing at its peak"
    if "step_ms" in checkpoint:
        yield at_most(wanted, exact, checkpoint["peak_bytes"], checkpoint["ratio"])
    else:
        yield target(wanted, None, None, "checkpointing did not run")


def of_gradients(rows: Rows) -> dict[str, Any]:
    """All ways that promise it, on every workload."""
    wrong = [name for name, row in ran(rows).items() if row["exact"] and row["gradients_identical"] is False]
    floor = rows.get(NOTHING, {}).get("gradient_error", 0.0)
    # How far two runs are from each other varies by some percent: no further would be tossing a coin for each way.
    met = None if not ran(rows) else all(rows[name]["gradient_error"] <= 1.25 * floor for name in wrong)
    return target("gradients the same bits, or as far off as nothing from itself", wrong, met)


def of_statistics(found: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """What looks at gradients."""
    wanted = "all gradient statistics in every step at most 1% of it"
    share = found.get("share")
    yield target(wanted, share, None if share is None else share <= 0.01, "" if share is not None else str(found))
    waits = found.get("waits")
    why = "torch tells of CUDA alone what waits for the device" if waits is None else ""
    yield target("no host synchronisation", waits or None, None if waits is None else not waits, why)


def of_codecs(results: Mapping[str, Mapping[str, Mapping[str, float]]], copy: float) -> Iterable[dict[str, Any]]:
    """Bytes read and written of each against a copy on the device; the slowest of the tensors."""
    worst: dict[str, float] = {}
    for codecs in results.values():
        for codec, figures in codecs.items():
            for way in ("encode", "decode"):
                moved = figures[f"{way}, GB/s"] * GB * (1 + 1 / figures["ratio"])
                name = f"{codec} {way}"
                worst[name] = min(worst.get(name, float("inf")), moved / copy)
    for name, share in worst.items():
        yield target(f"{name}: 70% of copy bandwidth", round(share, 3), share >= 0.7)
