"""The results of ``gpu.py`` in print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30
WORDS = {True: "met", False: "MISSED", None: "not tried"}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """All of it; nothing that was to run is left out."""
    if found["machine"]["device"] != "cuda" or found["options"]["size"] != "full":
        yield "A run to see that it runs: no figure here means anything."
    yield ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    yield "link, GB/s: " + ", ".join(f"{key} {value / 1e9:.1f}" for key, value in found["link_bytes_per_s"].items())
    for name, part in found["workloads"].items():
        yield f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in part["about"].items())
        yield f"{'':46}{'step ms':>10}{'wall ms':>10}{'ratio':>8}{'peak GiB':>10}{'moved GiB':>11}  gradients"
        for way, row in part["rows"].items():
            yield f"{way:46}" + _row(row)
    yield from _others(found)


def _others(found: Mapping[str, Any]) -> Iterator[str]:
    for name in ("statistics", "gradients"):
        if name in found:
            yield f"\n{name}: {found[name] if name == 'statistics' else _added(found[name])}"
    for name, targets in found["targets"].items():
        yield f"\ntargets, {name}"
        for one in targets:
            why = f" ({one['why']})" if "why" in one else ""
            yield f"  {WORDS[one['met']]:10}{one['wanted']}: {one['reached']}{why}"
    for name, why in found["not_run"].items():
        yield f"\nNOT RUN: {name}: {why}"


def _row(row: Mapping[str, Any]) -> str:
    if "step_ms" not in row:
        return "  " + (f"not run: {row['not_run']}" if "not_run" in row else f"FAILED: {row['failed']}")
    moved = f"{row['moved_bytes'] / GIB:11.2f}" if "moved_bytes" in row else f"{'':11}"
    off = row["gradient_error"]
    same = "not compared" if off is None else "identical" if row["gradients_identical"] else f"off by {off:.2g}"
    times = f"{row['step_ms']:10.1f}{row['wall_ms']:10.1f}{row['ratio']:8.3f}"
    return f"{times}{row['peak_bytes'] / GIB:10.2f}{moved}  {same}"


def _added(results: Mapping[str, Any]) -> str:
    return "; ".join(f"{size}: {one['added_milliseconds']}, ms over nothing" for size, one in results.items())


def show(found: Mapping[str, Any]) -> None:
    """Print it."""
    for line in lines(found):
        print(line)
