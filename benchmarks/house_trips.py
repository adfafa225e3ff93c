"""The trips of a value through disthooks, call by call, by ``sys.setprofile``.

    python benchmarks/house_trips.py disk --root PATH      # prints one JSON object; house.py runs each trip like this

``disk``: a saved tensor to disk and back. One ``nn.Linear(1024, 1024)`` on 1024 rows saves its input (4 MiB) inside
``disthooks.saving``, the context ends, backward reads the tensor back and frees it.
``gradient``: backward and a step of the same module with ``ClipNorm``, ``Norm`` and a JSONL file, every step logged.
``yaml``: ``from_config`` of a file with one rule, without a store, a statistic or a sink.
``worker``: the first worker of ``disthooks launch torchrun --nproc-per-node 2``, a whole process from its first line to
its last: DDP, two steps, one pattern to disk, ``ClipNorm``, ``Norm`` and a JSONL file.

A *call* is an entry into a Python function whose file is the package's, a resumed generator included. What runs while a
module of the package is being imported is not counted. A *function* is a code object, a *file* its file. A *switch* is
a call of a function that stands in another file than the function called just before it on the same thread. All threads
count, the stores' workers too. Trips are made up to five times, then ``--runs`` times (``worker``: at once, and a
fifth as often). Calls and switches are medians; functions and files are those that at least half of the runs entered.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

TRACE = "DISTHOOKS_HOUSE_TRACE"  # where each process of the trip "worker" writes what it called


class Recorder:
    """The calls into the files below one folder, on all threads that start after it was installed."""

    def __init__(self, folder: str, runs: int = 1) -> None:
        self._folder, self.runs, self.warm = folder + os.sep, runs, min(5, runs)
        self._importing: collections.Counter[int] = collections.Counter()  # how deep, by thread
        self.calls: list[tuple[int, CodeType]] = []
        self.on = False

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._folder):
            return
        thread = threading.get_ident()
        if code.co_name == "<module>":
            if frame.f_globals["__name__"] != "__main__":  # the main module is run, not imported
                self._importing[thread] += 1 if event == "call" else -1
        elif self.on and event == "call" and not self._importing[thread]:
            self.calls.append((thread, code))

    def taken(self) -> dict[str, Any]:
        """What was called since the last time."""
        calls, self.calls = self.calls, []
        last: dict[int, str] = {}
        switches = 0
        for thread, code in calls:
            switches += last.get(thread, code.co_filename) != code.co_filename
            last[thread] = code.co_filename
        entered = {(self._short(code), f"{code.co_name}:{code.co_firstlineno}") for _, code in calls}
        return {
            "calls": len(calls),
            "switches": switches,
            "functions": sorted(f"{file}:{name}" for file, name in entered),
            "files": sorted({file for file, _ in entered}),
        }

    def _short(self, code: CodeType) -> str:
        return code.co_filename.removeprefix(self._folder)


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One trip out of several runs of it."""
    often: dict[str, list[str]] = {}
    for what in ("functions", "files"):
        times = collections.Counter(each for run in runs for each in run[what])
        often[what] = sorted(each for each, count in times.items() if 2 * count >= len(runs))
    return {
        "calls": round(statistics.median(run["calls"] for run in runs)),
        "functions": len(often["functions"]),
        "files": len(often["files"]),
        "switches": round(statistics.median(run["switches"] for run in runs)),
        "names_of_files": often["files"],
    }


def repeated(
    recorder: Recorder, trip: Callable[[], None], between: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """``trip``, profiled; ``between`` runs after each, and is not."""
    runs = []
    for number in range(recorder.warm + recorder.runs):
        recorder.on = True
        trip()
        time.sleep(0.05)  # a worker thread may still be on its way
        recorder.on = False
        between()
        taken = recorder.taken()
        if number >= recorder.warm:
            runs.append(taken)
    return summed(runs)


def disk(recorder: Recorder, folder: pathlib.Path) -> dict[str, Any]:
    import torch

    import disthooks as dh

    layer, store = torch.nn.Linear(1024, 1024, bias=False), dh.OnDisk(str(folder))
    moved: list[Any] = []
    rows = torch.rand(1024, 1024)

    def trip() -> None:
        with dh.saving(store) as saved:
            loss = layer(rows).sum()
        loss.backward()
        del loss
        moved.append(saved)

    def between() -> None:
        nonlocal rows
        assert moved.pop().report().moved >= rows.nbytes, "the tensor did not go to the disk"
        rows = torch.rand(1024, 1024)
        layer.weight.grad = None
        gc.collect()

    return repeated(recorder, trip, between)


def gradient(recorder: Recorder, folder: pathlib.Path) -> dict[str, Any]:
    import torch

    import disthooks as dh

    layer = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    log = folder / "gradients.jsonl"
    rules, stats = [dh.ClipNorm(1.0)], [dh.stats.Norm()]
    watch = dh.gradients(layer, optimizer, rules=rules, stats=stats, sinks=[dh.sinks.Jsonl(str(log))], every=1)
    rows = torch.rand(64, 1024)
    loss = layer(rows).square().mean()

    def trip() -> None:
        loss.backward()
        optimizer.step()

    def between() -> None:
        nonlocal loss
        optimizer.zero_grad()
        loss = layer(rows).square().mean()

    found = repeated(recorder, trip, between)
    watch.remove()
    assert len(log.read_text().splitlines()) == recorder.warm + recorder.runs, "one line a step was to be written"
    return found


def yaml(recorder: Recorder, folder: pathlib.Path) -> dict[str, Any]:
    import disthooks as dh

    file = folder / "hooks.yaml"
    file.write_text("watch:\n  rules:\n    - {kind: ClipNorm, max_norm: 1.0}\n")

    def trip() -> None:
        dh.from_config(file)

    return repeated(recorder, trip)


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.rand(256, 512)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
HOOKS = """
save:
  - {modules: "*", at_least: 0, store: {kind: OnDisk, directory: FOLDER}}
watch:
  every: 1
  rules: [{kind: ClipNorm, max_norm: 1.0}]
  stats: [{kind: Norm}]
  sinks: [{kind: Jsonl, path: FOLDER/gradients.jsonl}]
"""
# Python imports a sitecustomize before anything else, in every process that has its folder on PYTHONPATH.
CUSTOMIZE = "import house_trips; house_trips.trace_this_process()\n"


def worker(root: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "hooks.yaml").write_text(HOOKS.replace("FOLDER", str(folder)))
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    paths = [str(folder), str(pathlib.Path(__file__).parent), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    command = ["-m", "disthooks", "launch", "--hooks", "hooks.yaml", *torchrun]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment | {TRACE: f"{folder}{os.pathsep}{root / 'disthooks'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((folder / "gradients.jsonl").read_text().splitlines()) == 2
    found: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
    return found


def trace_this_process() -> None:
    """Record this process if it is a worker; called by the ``sitecustomize`` of the trip "worker"."""
    if "RANK" not in os.environ or TRACE not in os.environ:
        return
    folder, package = os.environ[TRACE].split(os.pathsep)
    recorder, rank, own = Recorder(package), os.environ["RANK"], os.getpid()

    def write() -> None:
        recorder.on = False
        if os.getpid() == own:
            pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(recorder.taken()))

    atexit.register(write)  # the first that is registered runs last
    recorder.on = True
    recorder.install()


TRIPS = {"disk": disk, "gradient": gradient, "yaml": yaml}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trip", choices=[*TRIPS, "worker"])
    parser.add_argument("--root", type=pathlib.Path, required=True, help="the folder that holds the package disthooks")
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    root = args.root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        if args.trip == "worker":
            folders = [pathlib.Path(folder, str(number)) for number in range(max(1, args.runs // 5))]
            found = summed([worker(root, each) for each in folders])
        else:
            sys.path.insert(0, str(root))
            recorder = Recorder(str(root / "disthooks"), args.runs)
            recorder.install()
            found = TRIPS[args.trip](recorder, pathlib.Path(folder))
            sys.setprofile(None)
            package = pathlib.Path(sys.modules["disthooks"].__file__ or "").parent
            assert package == root / "disthooks", f"measured {package}, not {root / 'disthooks'}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
