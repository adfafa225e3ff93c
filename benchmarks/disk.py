"""One model and batch, its saved tensors left alone and moved in every way there is, side by side in one process.

    make bench NAME=disk                                   # or: python benchmarks/disk.py --model resnet152 --rounds 7

The ways: nothing, torch's ``save_on_cpu``, TRL's ``OffloadActivations`` where it can run, a file a tensor as in torch's
tutorial, disthooks on disk, and the same in bfloat16, whose gradients are not exact and which is there to be seen only.
They take turns, a step of each a round. In each round stand also the bandwidth of the disk, by a plain loop that does
nothing else, and a chain of operations that compute so little that the disk is what they wait for. Medians are
printed, compared with three targets, and written as JSON with the machine they came from.

On a CPU-only machine freed memory is returned at once, for every way alike; without that no way lowers resident
memory. What disthooks keeps from one step to the next (threads, memory to read into, room in its file) it gives back
after each, untimed: nobody else's peak is charged for it, and all of its own steps begin cold.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import tempfile
from typing import Any

import torch
from bandwidth import Disk
from measured import Bench, Measured
from models import NAMES, build
from peers import NOTHING, OURS, OURS_CAST, TUTORIAL, all_ways, nothing_and_ours

import disthooks as dh
from disthooks._tensors import format_bytes

RESULTS = pathlib.Path(__file__).parent / "results"
ADDED, BANDWIDTH = 0.2, 0.7  # of the tutorial's added time, at most; of the disk's bandwidth, at least


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All figures: ``rounds`` rounds of everything, after one that is not counted."""
    model, x = build(args.model, args.size, args.device)
    chain, start = build("chain", args.size, args.device)
    bench = Bench(model, x, all_ways(model, args.device, folder))
    # The chain's forward ends when all is written, so that its backward finds nothing in memory.
    bound = Bench(chain, start, nothing_and_ours(folder), flush=True)
    disk = Disk(folder, chain.nbytes)
    for number in range(-1, args.rounds):
        bench.round(number)
        disk.round(number)
        with chain.filled():
            bound.round(number)
    rows = bench.rows()
    plain, ours = bench.results[NOTHING], bench.results[OURS]
    chained = at_the_limit(bound.results[NOTHING], bound.results[OURS], disk)
    return {
        "targets": targets(rows, chained),
        "results": rows,
        "limit": limit(plain, ours, disk),
        "disk": disk.figures(),
        "disk_bound": {"results": bound.rows(), **chained},
        "said": str(ours.reports[-1]),
    }


def limit(plain: Measured, ours: Measured, disk: Disk) -> dict[str, Any]:
    """The time that no way through this disk could be without: what is left of moving when all computing hides it.

    All bytes are counted, although the last 64 MiB of a forward may be wanted again before they were written.
    """
    report = ours.reports[-1]
    write, read = report.moved / disk.best("write"), report.loaded / disk.best("read")
    forward, backward = plain.seconds("forward"), plain.seconds("backward")
    least = max(0.0, write - forward) + max(0.0, read - backward)
    added = ours.seconds() - plain.seconds()
    return {
        "moved_bytes": report.moved,
        "loaded_bytes": report.loaded,
        "write_seconds_at_bandwidth": round(write, 4),
        "read_seconds_at_bandwidth": round(read, 4),
        "forward_seconds_to_hide_in": round(forward, 4),
        "backward_seconds_to_hide_in": round(backward, 4),
        "least_added_seconds": round(least, 4),
        "added_seconds": round(added, 4),
        "distance_seconds": round(added - least, 4),
    }


def at_the_limit(plain: Measured, ours: Measured, disk: Disk) -> dict[str, Any]:
    """Bytes a second of the chain each way, against the plain loop's."""
    found: dict[str, Any] = {"limit": limit(plain, ours, disk)}
    report = ours.reports[-1]
    for what, phase, nbytes in (("write", "forward", report.moved), ("read", "backward", report.loaded)):
        reached, best = nbytes / ours.seconds(phase), disk.best(what)
        found[what] = {
            "gb_per_second": round(reached / 1e9, 3),
            "of_measured": round(reached / best, 3),
            "disk_is_the_bottleneck": nbytes / best > plain.seconds(phase),
        }
    return found


def targets(rows: dict[str, dict[str, Any]], chained: dict[str, Any]) -> dict[str, Any]:
    """Each with what was wanted, what was reached, and whether it was met; None where it could not be tried."""
    theirs, ours = rows[TUTORIAL], rows[OURS]
    # Where a file a tensor costs nothing there is nothing to compare with.
    ratio = ours["added_seconds"] / theirs["added_seconds"] if theirs["added_seconds"] > 0 else None
    reached = {what: chained[what]["of_measured"] for what in ("write", "read")}
    bound = [figure for what, figure in reached.items() if chained[what]["disk_is_the_bottleneck"]]
    return {
        "added_time_against_tutorial": {
            "at_most": ADDED,
            "reached": None if ratio is None else round(ratio, 3),
            "met": None if ratio is None else ratio <= ADDED,
        },
        "peak_memory_against_tutorial": {
            "at_most_bytes": theirs["peak_bytes"],
            "reached_bytes": ours["peak_bytes"],
            "met": ours["peak_bytes"] <= theirs["peak_bytes"],
        },
        "bandwidth_while_the_disk_is_the_bottleneck": {
            "at_least": BANDWIDTH,
            **reached,
            "met": min(bound) >= BANDWIDTH if bound else None,
        },
        "gradients_identical": {
            "met": all(row.get("gradients_identical", True) for name, row in rows.items() if name != OURS_CAST)
        },
    }


def machine(device: str) -> dict[str, Any]:
    """What the figures came from."""
    about = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in about if line.startswith("model name")), platform.processor())
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "memory_returned_promptly": device == "cpu" and dh.memory.release_promptly(),
    }


def show(figures: dict[str, Any]) -> None:
    """Print it all."""
    heads = f"{'step':>9}{'ratio':>8}{'added':>9}{'forward':>10}{'backward':>10}{'peak':>12}{'written':>12}"
    print(f"{figures['model']}, {figures['rounds']} rounds, {figures['machine']}\n{'':30}{heads}  exact")
    for title, rows in (("", figures["results"]), ("the chain", figures["disk_bound"]["results"])):
        print(title, end="\n" if title else "")
        for name, row in rows.items():
            print(f"{name:30}" + (f" not run: {row['not_run']}" if "not_run" in row else _line(row)))
    for name, found in (("model", figures["limit"]), ("chain", figures["disk_bound"]["limit"])):
        print(
            f"{name}: the disk alone makes {found['least_added_seconds']:.3f} s unavoidable, "
            f"{found['added_seconds']:.3f} s were added: {found['distance_seconds']:.3f} s from the limit"
        )
    disk, bound = figures["disk"], figures["disk_bound"]
    cache = "" if disk["direct"] else " through the page cache"
    for what in ("write", "read"):
        ours, loop = bound[what]["gb_per_second"], disk[f"{what}_gb_per_second"]
        why = "" if bound[what]["disk_is_the_bottleneck"] else " (computing takes longer than the disk here)"
        share = f"{bound[what]['of_measured']:.0%}{why}"
        print(f"{what}: {ours:.2f} GB/s through disthooks, {loop:.2f} by a plain loop{cache}: {share}")
    print(f"report() of the last step:\n  {figures['said'].replace(chr(10), chr(10) + '  ')}")
    words = {True: "met", False: "NOT met", None: "could not be tried"}
    for name, target in figures["targets"].items():
        rest = ", ".join(f"{key} {value}" for key, value in target.items() if key != "met")
        print(f"{name.replace('_', ' ')}: {words[target['met']]}" + (f" ({rest})" if rest else ""))


def _line(row: dict[str, Any]) -> str:
    times = f"{row['step_seconds']:8.3f}s{row['ratio']:8.2f}{row['added_seconds']:8.3f}s"
    phases = f"{row['forward_seconds']:9.3f}s{row['backward_seconds']:9.3f}s"
    nbytes = f"{format_bytes(row['peak_bytes']):>12}{format_bytes(row['written_bytes_per_step']):>12}"
    return f"{times}{phases}{nbytes}  {row['gradients_identical']}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="transformer")
    parser.add_argument("--size", choices=["full", "small"], default="full", help="small: to see that it runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where the files live; default the system's temporary one")
    parser.add_argument("--json", type=pathlib.Path, help="default results/disk-MODEL.json; of a small run, nowhere")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least one")
    if args.json is None and args.size == "full":
        args.json = RESULTS / f"disk-{args.model}{'' if args.device == 'cpu' else '-' + args.device}.json"
    return args


def main() -> None:
    args = _options()
    about = machine(args.device)
    torch.backends.cudnn.deterministic = True  # two steps of the same way are to give the same bits
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        found = run(args, folder)
    figures = {"model": args.model, "size": args.size, "rounds": args.rounds, "machine": about} | found
    show(figures)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
