"""Everything that is measured on a GPU, side by side in one run: saved tensors, gradients' statistics, codecs.

    make bench NAME=gpu                              # or: python benchmarks/gpu.py --budget 520
    python benchmarks/gpu.py --parts "decoder bf16" statistics --json decoder.json
    python benchmarks/gpu.py --parts --add images.json decoder.json  # no new figures: those of both as one
    python benchmarks/gpu.py --device cpu --size tiny --budget 60    # to see that it runs

A ResNet-152 of 256 images and a decoder-only transformer of 8,192 tokens go through each way that saved tensors can
go. A way is attached once, for all its steps, as in training. Before each timed step stands one of nothing, and the
ratio is that of the two medians. What others keep in page-locked memory is given back before the next way, since the
host has not room for two. Times are the device's own. All of cuDNN is deterministic. The link's speed, and a copy's on
the device, are measured in the same run.

The most important comes first. What did not fit into the time, is not installed or failed is named in the table and in
the JSON, which is written after every row. Targets are said to be met, missed, or not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from accelerator import Device, simulate
from rows import Bench, alike
from statistics_of_gradients import measure as statistics_of
from table import show
from targets import of_codecs, of_gradients, of_images, of_language, of_statistics
from workloads import WORKLOADS
from written import reason, write

HERE = pathlib.Path(__file__).parent
RESULTS, IMAGES = HERE / "results", HERE.parent / "docs" / "img"
#: The parts in their order, and what of the time each may take; what it leaves is for those that follow.
SHARES = {"ResNet-152 fp32": 0.4, "decoder bf16": 0.22, "statistics": 0.05, "codecs": 0.09, "gradients": 0.06}
SHARES |= {"ResNet-152 bf16 channels_last": 0.12, "ResNet-152 bf16": 0.04, "ResNet-152 fp32 channels_last": 0.02}
assert SHARES.keys() >= WORKLOADS.keys()


class Run:
    """All parts, in order, until the time is over.

    Attributes:
        found: what is written.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device, self.begin = options, Device(options.device), time.monotonic()
        self.share = 0.0  # of the time, until the end of the part that is under way
        nbytes = 1 << (30 if options.size == "full" else 20)
        self.found: dict[str, Any] = {
            "machine": self.device.about(),
            "options": {"size": options.size, "budget_s": options.budget, "repeats": options.repeats},
            "link_bytes_per_s": {},
            "workloads": {},
            "not_run": {},
        }
        try:
            self.found["link_bytes_per_s"] = self.device.link(nbytes)
        except Exception as error:
            self.found["not_run"]["link"] = reason(error)

    def left(self) -> float:
        """Seconds, for the part that is under way."""
        return self.begin + self.share * self.options.budget - time.monotonic()

    def all_parts(self) -> None:
        """Each that was asked for; no failure ends the others."""
        least, total = 20 if self.options.size == "full" else 0, sum(SHARES[name] for name in self.options.parts)
        for name in self.options.parts:
            self.share += SHARES[name] / total
            if self.left() <= least:
                self.found["not_run"][name] = "no time was left"
                continue
            print(f"-- {name}, {self.left():.0f} s left", flush=True)
            try:
                self._part(name)
            except Exception as error:
                self.found["not_run"][name] = reason(error)
            with contextlib.suppress(Exception):  # after a fault of the device nothing works; the rest is named
                self.device.empty()
            self.write()

    def _part(self, name: str) -> None:
        if name in WORKLOADS:
            self._workload(name)
        elif name == "statistics":
            self.found[name] = statistics_of(self.device, self.options.size, self.options.repeats)
        else:
            self.found[name] = self._script(name)

    def _workload(self, name: str) -> None:
        work = WORKLOADS[name](self.options.size, self.device.device)
        with alike():
            bench = Bench(self.device, work, self.options.repeats, self.left)
            part = self.found["workloads"][name] = {"about": bench.about(), "rows": bench.rows}
            for way in bench.ways.names():  # an interrupted run has named them all
                bench.rows[way] = {"not_run": "the run was ended before"}
            for way in bench.ways.names():
                row = bench.row(way)
                part["about"] = bench.about()
                step, why = row.get("step_ms"), row.get("not_run") or row.get("failed")
                print(f"   {way:50}" + (f"{step:10.1f} ms" if step else str(why)), flush=True)
                self.write()
            bench.ways.rest("")

    def _script(self, name: str) -> Any:
        """A benchmark of its own, small where this one is; what it wrote, to the end or as far as there was time."""
        full = self.options.size == "full"
        sizes = {
            "gradients": ["--sizes", "100 parameters" if full else "small", "--rounds", "15" if full else "1"],
            "codecs": ["--megabytes", "256" if full else "1", "--rounds", "7" if full else "1"],
        }
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "out.json")
            to = ["--json" if name == "gradients" else "--out", str(out), "--device", self.options.device]
            command = [sys.executable, str(HERE / f"{name}.py"), *sizes[name], *to]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, self.left()), check=False)
            except subprocess.TimeoutExpired:
                if not out.exists():
                    raise
                self.found["not_run"][f"the end of {name}"] = "no time was left"
            else:
                if done.returncode:
                    raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
            found = json.loads(out.read_text())
            self.found["not_run"] |= {f"{name}: {row}": why for row, why in found.get("not_run", {}).items()}
            return found["results"]

    def targets(self) -> dict[str, list[dict[str, Any]]]:
        """By part, for the parts that ran."""
        judged: dict[str, list[dict[str, Any]]] = {}
        link = self.found["link_bytes_per_s"]
        for name, part in self.found["workloads"].items():
            own = of_language(part["rows"]) if "decoder" in name else of_images(part["rows"], link)
            judged[name] = [*own, of_gradients(part["rows"])]
        if "statistics" in self.found:
            judged["statistics"] = list(of_statistics(self.found["statistics"]))
        if "codecs" in self.found and "on_device" in link:
            judged["codecs"] = list(of_codecs(self.found["codecs"], link["on_device"]))
        return judged

    def add(self, path: pathlib.Path) -> None:
        """What an earlier run found and this one did not."""
        other = json.loads(path.read_text())
        if other["machine"].get("gpu") != self.found["machine"].get("gpu"):
            raise SystemExit(f"{path} is of {other['machine'].get('gpu')}")
        for name, part in other["workloads"].items():
            self.found["workloads"].setdefault(name, part)
        for name in ("statistics", "codecs", "gradients"):
            if name in other:
                self.found.setdefault(name, other[name])
        for name, why in other["not_run"].items():
            self.found["not_run"].setdefault(name, why)

    def write(self) -> None:
        """As far as it got."""
        self.found["targets"] = self.targets()
        if self.options.json:
            write(self.options.json, self.found)


def figures(found: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
    """Draw them where matplotlib is installed; what there is to say of it."""
    try:
        from figure import draw
    except ImportError as error:
        return [f"no figure: {error}; pip install 'disthooks[bench]', then python benchmarks/figure.py"]
    return [f"drew {path}" for path in draw(found, folder)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu, or sim, the simulated accelerator: to see that it runs")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for all")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each way")
    parser.add_argument(
        "--parts", nargs="*", default=list(SHARES), choices=list(SHARES), metavar="PART", help=str(list(SHARES))
    )
    parser.add_argument("--add", nargs="+", default=[], type=pathlib.Path, help="JSON of earlier runs of other parts")
    parser.add_argument("--json", type=pathlib.Path, help="default results/gpu.json; of a tiny run, nowhere")
    parser.add_argument("--figures", type=pathlib.Path, help="a folder; default docs/img, of a tiny run none")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: at least one")
    if options.size == "full":
        options.json, options.figures = options.json or RESULTS / "gpu.json", options.figures or IMAGES
    return options


def main() -> None:
    """Measure, print, write, draw."""
    options = _options()
    simulate(options.device)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; to see that this runs: --device cpu --size tiny")
    run = Run(options)
    try:
        run.all_parts()
    except KeyboardInterrupt:
        run.found["not_run"]["the rest"] = "the run was interrupted"
    for path in options.add:
        run.add(path)
    run.write()
    show(run.found)
    if options.figures:
        print(*figures(run.found, options.figures), sep="\n")


if __name__ == "__main__":
    main()
