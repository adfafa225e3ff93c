"""Peak memory against the time of a step, every way a point: from the JSON of ``gpu.py`` or of ``disk.py``.

    python benchmarks/figure.py                                            # results/gpu.json -> docs/img
    python benchmarks/figure.py results/disk-resnet152.json --to /tmp      # a run on a CPU

The machine is in each figure. It needs matplotlib: ``pip install 'disthooks[bench]'``.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
GIB = 2**30
Point = tuple[str, float, float]  # name, peak in GiB, seconds of a step


def charts(found: Mapping[str, Any]) -> dict[str, list[Point]]:
    """The points of each figure, by its name: a workload's of ``gpu.py``, or all of ``disk.py``."""
    if "workloads" in found:
        every = {f"gpu-{_plain(name)}": part["rows"] for name, part in found["workloads"].items()}
    else:
        every = {f"cpu-{found['model']}": found["results"]}
    made = {name: [point for way, row in rows.items() if (point := _point(way, row))] for name, rows in every.items()}
    return {name: points for name, points in made.items() if len(points) > 1}


def _point(name: str, row: Mapping[str, Any]) -> Point | None:
    seconds = row.get("step_seconds") or row.get("step_ms", 0.0) / 1e3
    return (name, row["peak_bytes"] / GIB, seconds) if seconds else None


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def machine_of(found: Mapping[str, Any]) -> str:
    """What the figures come from, in a line."""
    about = found["machine"]
    what = about.get("gpu") or f"{about['cores']} cores of {about['cpu']}, no GPU"
    return f"{what}, torch {about['torch']}"


def draw(found: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """One SVG for each of ``charts``; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # Text stays text; and the same numbers give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "disthooks"}):
        for name, points in charts(found).items():
            paths.append(folder / f"{name}.svg")
            _chart(name, points, machine_of(found)).savefig(paths[-1], metadata={"Date": None})
    return paths


def _chart(name: str, points: list[Point], machine: str) -> Figure:
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    points = sorted(points, key=lambda point: point[2])
    for number, (way, peak, seconds) in enumerate(points, 1):
        ours = way.startswith("disthooks")
        style = {"color": "tab:blue" if ours else "tab:gray", "marker": "o" if ours else "s", "linestyle": "none"}
        axes.plot([peak], [seconds], label=f"{number} {way}", **style)
        axes.annotate(str(number), (peak, seconds), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak memory, GiB")
    axes.set_ylabel("time of a step (forward and backward), s")
    axes.set_title(f"{name.partition('-')[2]}: down and left is better\n{machine}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=pathlib.Path, default=HERE / "results" / "gpu.json")
    parser.add_argument("--to", type=pathlib.Path, default=HERE.parent / "docs" / "img", help="a folder")
    options = parser.parse_args()
    for path in draw(json.loads(options.results.read_text()), options.to):
        print(path)


if __name__ == "__main__":
    main()
