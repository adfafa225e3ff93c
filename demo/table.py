"""The two tables at the end: what was trained and moved, and what it cost."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from disthooks._tensors import format_bytes


def gradient_summary(log: pathlib.Path) -> dict[str, Any]:
    """The log of gradients in a few numbers; none when it is elsewhere (``--hooks`` names its own place)."""
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not rows:
        return {}
    norms = [float(row["grad_norm"]) for row in rows]  # "nan" when it is not finite
    ratios = [float(row["clip_ratio"]) for row in rows]
    return {
        "logged": len(rows),
        "norm_first": norms[0],
        "norm_median": statistics.median(norms),
        "norm_last": norms[-1],
        "clip_ratio_median": statistics.median(ratios),
        "clipped_steps": sum(ratio < 1 for ratio in ratios),
        "nonfinite": [{**place, "step": row.get("step")} for row in rows for place in row.get("nonfinite_at", [])],
    }


def show(summary: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    console.print()
    console.print(_facts(summary))
    if summary["with"] or summary["without"]:
        console.print(_costs(summary))
    console.print(f"{summary['seconds']:.0f} s in all, not counting the launcher", highlight=False)
    console.print(f"the page of what was predicted, and whose bytes they are: {summary['page']}", soft_wrap=True)
    if "report_page" in summary:
        console.print(f"the page of what was logged, layer by layer: {summary['report_page']}", soft_wrap=True)


def _facts(summary: dict[str, Any]) -> Table:
    table = Table(title=_title(summary), show_header=False, title_justify="left", min_width=76)
    steps = summary["loss_steps"]
    table.add_row(f"training loss, {steps} steps, first -> last", _fall(summary["loss_first"], summary["loss_last"]))
    train, held_out = summary["files"]
    table.add_row(
        f"{held_out} held-out files ({train} trained on)",
        _fall(summary["held_out_first"], summary["held_out_last"]),
    )
    table.add_section()
    for row in _moved(summary):
        table.add_row(*row)
    table.add_row("gradients with and without", _same(summary))
    table.add_section()
    for row in _gradients(summary["gradients"]):
        table.add_row(*row)
    return table


def _title(summary: dict[str, Any]) -> str:
    return (
        f"{summary['parameters'] / 1e6:.1f}M parameters, {summary['engine']}, {summary['world']} x "
        f"{summary['device']}, {summary['bytes_per_step']} bytes of text a step"
    )


def _fall(first: float, last: float) -> str:
    return f"{first:.3f} -> {last:.3f} bits per byte"


def _moved(summary: dict[str, Any]) -> list[tuple[str, str]]:
    saved = summary["with"]
    if saved is None:
        return [("saved tensors", "left where they were (--save never)")]
    each = saved["steps"] * summary["world"]
    words = {
        "moved": f"saved tensors moved to {summary['directory']}",
        "shared": "shared with one of those",
        "kept": "kept (parameters, small ones)",
    }
    return [
        (name, f"{format_bytes(saved[f'{key}_bytes'])} ({format_bytes(saved[f'{key}_bytes'] / each)} a rank and step)")
        for key, name in words.items()
    ]


def _same(summary: dict[str, Any]) -> str:
    if not summary["gradients_changed"]:
        return f"the same bits ({summary['gradients_compared']} parameters)"
    return f"{summary['gradients_changed']} differ; so do {summary['gradients_unsteady']} without it, from pass to pass"


def _gradients(seen: dict[str, Any]) -> list[tuple[str, str]]:
    if not seen:
        return [("gradients", "logged elsewhere, as --hooks says")]
    norm = " / ".join(f"{seen[f'norm_{which}']:.2f}" for which in ("first", "median", "last"))
    clip = f"{seen['clip_ratio_median']:.3f}, {seen['clipped_steps']} of {seen['logged']} steps clipped"
    places = [f"{at['param']} on {_rank(at.get('rank'))}, step {at['step']}" for at in seen["nonfinite"]]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return [
        ("gradient norm first/median/last", norm),
        ("clip ratio, median", clip),
        ("non-finite gradients", "; ".join(places[:3]) + more if places else "none"),
    ]


def _rank(rank: int | None) -> str:
    return "no rank alone" if rank is None else f"rank {rank}"  # finite on each when measured


def _costs(summary: dict[str, Any]) -> Table:
    table = Table(title="what it cost, measured in turns in one run", title_justify="left", min_width=76)
    for heading in ("", "without", "with disthooks", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    without, saved, pairs = summary["without"], summary["with"], summary["ratios"]
    times = (
        {"step_seconds": f"x {statistics.median(pairs):.2f}", "step_seconds_quartiles": _spread(pairs)} if pairs else {}
    )
    modes = [
        mode and {**mode, "predicted_bytes": summary[f"predicted_{name}"]}
        for mode, name in ((without, "without"), (saved, "with"))
    ]
    what = "allocated" if summary["device"] == "cuda" else "resident"
    for name, key, form in (
        ("steps", "steps", str),
        ("step time, median", "step_seconds", _seconds),
        ("  middle half of the steps", "step_seconds_quartiles", _range),
        (f"peak {what} memory", "peak_bytes", format_bytes),
        ("  in use before a step", "resting_bytes", format_bytes),
        ("  added during a step", "rise_bytes", format_bytes),
        ("    predicted by explain", "predicted_bytes", format_bytes),
    ):
        values = [mode[key] if mode else None for mode in modes]
        shown = (form(value) if value is not None else "-" for value in values)
        table.add_row(name, *shown, times.get(key, _ratio(key, *values)))
    return table


def _spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "one pair"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _range(ends: list[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f} s"


def _ratio(key: str, without: Any, saved: Any) -> str:
    if key not in ("peak_bytes", "rise_bytes") or not without or saved is None:
        return ""
    ratio = saved / without
    return f"x {ratio:.2f}" if math.isfinite(ratio) else ""
