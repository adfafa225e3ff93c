"""The benchmarks of this checkout and of an older commit in turn, so that the drift of a machine meets both.

    make bench NAME=before ARGS=v0.1.0                     # or: python benchmarks/before.py v0.1.0 --turns 5
    python benchmarks/before.py v0.1.0 --only gradients

Each turn runs every benchmark once in each of the two checkouts, each with its own script, in processes of their own;
the commit that goes first changes from turn to turn. The older commit is checked out into a temporary folder. For each
figure it prints, and writes as JSON, the medians of both, the median of the ratios now / before of one turn, and the
smallest and largest of these ratios. A ratio whose range holds 1 is within the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
#: Of each benchmark: how often it repeats itself in one turn, and its command up to the file that its JSON goes to.
BENCHMARKS = {
    "overhead": (15, ["overhead.py", "--out"]),
    "gradients": (5, ["gradients.py", "--json"]),
    "transformer": (2, ["disk.py", "--model", "transformer", "--json"]),
    "resnet152": (2, ["disk.py", "--model", "resnet152", "--json"]),
}
FIGURES = ("microseconds a tensor, pack and unpack", "medians", "added_milliseconds", "step_seconds", "peak_bytes")


def figures(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Every number of a result that stands under one of ``FIGURES``, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and set(FIGURES) & set(path):
        yield ": ".join(key for key in path if key != "results"), float(value)


def run(name: str, root: pathlib.Path, rounds: int | None) -> dict[str, float]:
    """One run of the benchmark ``name`` of the checkout ``root``."""
    usual, (script, *arguments) = BENCHMARKS[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).strip(":")}
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, f"benchmarks/{script}", *arguments, str(out), "--rounds", str(rounds or usual)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
        )
        # A benchmark exits with 1 if it misses a target of its own; its figures are there all the same.
        if not out.exists():
            raise SystemExit(f"{name} of {root} wrote no result, exit status {done.returncode}:\n{done.stderr[-2000:]}")
        return dict(figures(json.loads(out.read_text())))


def compared(before: list[dict[str, float]], now: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians and ratios of each figure that both commits have.

    Some figures are differences of two times. One that is not positive in every turn is lost in the noise, and has no
    row.
    """
    result = {}
    for name in before[0]:
        pairs = [(old[name], new[name]) for old, new in zip(before, now, strict=True) if name in old and name in new]
        if len(pairs) < len(before) or any(min(pair) <= 0 for pair in pairs):
            continue
        ratios = [new / old for old, new in pairs]
        result[name] = {
            "before": statistics.median(old for old, _ in pairs),
            "now": statistics.median(new for _, new in pairs),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older commit: a tag, a branch or a hash")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=["overhead", "gradients", "transformer"])
    parser.add_argument("--rounds", type=int, help="repetitions inside one turn; default: what each benchmark needs")
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "before.json")
    options = parser.parse_args()
    git = ["git", "-C", str(HERE.parent)]
    commit = subprocess.check_output([*git, "rev-parse", f"{options.commit}^{{commit}}"], text=True).strip()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="disthooks-before-") as folder:
        older = pathlib.Path(folder) / "before"
        subprocess.run([*git, "worktree", "add", "-q", "--detach", str(older), commit], check=True)
        try:
            for name in options.only:
                rows = compare(name, options.turns, options.rounds, older)
                results[name] = {"turns": options.turns, "figures": rows}
                # Written after each benchmark, so that an interrupt loses no more than the one under way.
                options.json.write_text(json.dumps({"before": commit, "results": results}, indent=1) + "\n")
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(older)], check=True)


def compare(name: str, turns: int, rounds: int | None, older: pathlib.Path) -> dict[str, dict[str, float]]:
    """Run one benchmark in turn in both checkouts, and print the comparison as a table."""
    runs: dict[pathlib.Path, list[dict[str, float]]] = {older: [], HERE.parent: []}
    for turn in range(turns):
        for root in sorted(runs, key=lambda root: (root == older) == bool(turn % 2)):
            begin = time.monotonic()
            runs[root].append(run(name, root, rounds))
            which = "before" if root == older else "now"
            print(f"{name}, turn {turn + 1} of {turns}, {which}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
    rows = compared(*runs.values())
    print(f"\n| {name} | before | now | now / before | least to most |\n|---|---|---|---|---|")
    for figure, row in rows.items():
        medians = f"{row['before']:,.4g} | {row['now']:,.4g}"
        print(f"| {figure} | {medians} | {row['ratio']} | {row['least']} to {row['most']} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
