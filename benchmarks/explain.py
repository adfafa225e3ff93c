"""What a prediction takes: seconds and memory of ``dh.explain`` for models of full size, beside what others predict.

    make bench NAME=explain                                  # or: python benchmarks/explain.py --only "GPT-2 XL"
    python benchmarks/explain.py --size tiny --json out.json # small models, to see that it runs

Each prediction runs in a process of its own, one after another. Its seconds are those of ``dh.explain`` and of the
peak, with the imports that the model needs; ``process_s`` has Python's start and torch's import too. Its memory is the
most that was resident in the process.

The peers run in the same way where they are installed. ``MemTracker`` of torch runs the same step under torch's own
FakeTensorMode, on one device. ``accelerate estimate-memory`` counts weights (here by its own functions, because its
command downloads a configuration). DeepSpeed's estimators count weights, gradients and the optimizer's state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from written import reason, write

import disthooks as dh
from tests.support import oracle, zoo

HERE = pathlib.Path(__file__).parent
GIB = 1 << 30
RANKS = 1024
#: Ranks of a machine.
LOCAL = 8


class Case(NamedTuple):
    """A prediction.

    Attributes:
        model: its name in the zoo.
        tiny: the name of the model that takes its place in a tiny run.
        situation: the arguments of ``dh.explain``.
        seconds: the most that it may take.
        gib: the most resident memory that it may take.
    """

    model: str
    tiny: str
    situation: Mapping[str, Any]
    seconds: float
    gib: float | None = None


def _at_scale(engine: str) -> Case:
    return Case("llama3_8b", "llama", {"engine": engine, "world": RANKS, "optimizer": "adamw"}, 60.0, 4.0)


def _large(model: str, tiny: str, **situation: Any) -> Case:
    return Case(model, tiny, {"optimizer": "adamw"} | situation, 30.0)


CASES: dict[str, Case] = {
    "8B, FSDP2 x 1024": _at_scale("fsdp2"),
    "8B, DDP x 1024": _at_scale("ddp"),
    "8B, HSDP 128 x 8": _at_scale("hsdp"),
    "8B, FSDP2 128 x TP 8": _at_scale("fsdp2+tp"),
    "8B, ZeRO-1 x 1024": _at_scale("zero1"),
    "8B, ZeRO-2 x 1024": _at_scale("zero2"),
    "8B, ZeRO-3 x 1024": _at_scale("zero3"),
    "ResNet-152, batch 256": _large("resnet152_full", "resnet152", optimizer="sgd"),
    "GPT-2 XL": _large("gpt2_xl", "gpt2"),
    "Llama-3-8B": _large("llama3_8b", "llama"),
    "Llama-3-8B, FSDP2 x 64": _large("llama3_8b", "llama", engine="fsdp2", world=64),
    "Llama-3-8B, TP 8": _large("llama3_8b", "llama", engine="tp", world=8),
    "Llama-3-70B, FSDP2 x 64": _large("llama3_70b", "llama", engine="fsdp2", world=64),
    "Llama-3-70B, TP 8": _large("llama3_70b", "llama", engine="tp", world=8),
}
#: What MemTracker is asked for: the cases on one device.
ON_ONE_DEVICE = ("ResNet-152, batch 256", "GPT-2 XL", "Llama-3-8B")


def predict(name: str, size: str) -> dict[str, Any]:
    """One prediction."""
    case = CASES[name]
    tiny = size == "tiny"
    situation = dict(case.situation)
    if tiny and situation.get("engine") == "tp":
        situation["world"] = 2  # the small model has two heads of keys
    if tiny and situation.get("engine") == "fsdp2+tp":
        from disthooks.predict.engines.spec import EngineSpec

        situation["engine"] = EngineSpec("fsdp2+tp", situation["world"], mesh=(situation["world"] // 2, 2))
    builder = {**zoo.ZOO, **zoo.FULL}[case.tiny if tiny else case.model]
    begin, used = time.perf_counter(), time.process_time()
    said = dh.explain(builder, **situation, device="h100")
    peak = said.peak_bytes
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        "saved_bytes": said.saved_bytes,
        "peak_bytes": peak,
        "state": said.state,
        "operators": len(said.record.operators),
        "unknown": [each.what for each in said.unknown],
    }


# -- peers


def tracked(name: str, size: str) -> dict[str, Any]:
    """The same step by torch's MemTracker under torch's FakeTensorMode: the CPU's operators, on one device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = CASES[name]
    builder = {**zoo.ZOO, **zoo.FULL}[case.tiny if size == "tiny" else case.model]
    optimizer = torch.optim.SGD if case.situation["optimizer"] == "sgd" else torch.optim.AdamW
    begin, used = time.perf_counter(), time.process_time()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = builder()
        peak, categories = oracle.tracked(model, inputs, None, optimizer)
    seconds = time.perf_counter() - begin, time.process_time() - used
    own = dh.explain(builder, optimizer=case.situation["optimizer"], device="cpu")
    return {
        "seconds": round(seconds[0], 2),
        "cpu_seconds": round(seconds[1], 2),
        "peak_bytes": peak,
        "categories": categories,
        "ours_for_a_cpu": own.peak_bytes,
    }


def _weights(name: str, size: str) -> nn.Module:
    case = CASES[name]
    with torch.device("meta"):
        return {**zoo.ZOO, **zoo.FULL}[case.tiny if size == "tiny" else case.model]()[0]


def accelerates(size: str) -> dict[str, Any]:
    """What ``accelerate estimate-memory`` says of GPT-2 XL in float32."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(_weights("GPT-2 XL", size))
    training = estimate_training_usage(total, "float32")
    return {"weights_bytes": int(total), "training_with_adam_bytes": int(training["step"])}


def deepspeeds(size: str) -> dict[str, Any]:
    """What DeepSpeed's estimators say of the 8B decoder for a rank, without offload."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    model = _weights("Llama-3-8B", size)
    total = sum(each.numel() for each in model.parameters())
    largest = max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules())
    ranks = {"num_gpus_per_node": LOCAL, "num_nodes": RANKS // LOCAL}
    return {
        "zero2_bytes": zero2(total, **ranks, cpu_offload=False)[1],
        "zero3_bytes": zero3(total, largest, **ranks, cpu_offload=False, cpu_offload_params=False)[1],
    }


PEERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "accelerate estimate-memory, GPT-2 XL": accelerates,
    "DeepSpeed's estimators, 8B": deepspeeds,
    **{f"MemTracker, {name}": lambda size, name=name: tracked(name, size) for name in ON_ONE_DEVICE},
}


# -- one after another


def own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """``name`` in a process of its own; what it found, or why it found nothing."""
    command = [sys.executable, str(HERE / "explain.py"), "--child", name, "--size", options.size]
    load = round(os.getloadavg()[0], 2)
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {options.limit:.0f} s", "load": load}
    whole = time.perf_counter() - begin
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300], "load": load}
    return json.loads(lines[-1]) | {"process_s": round(whole, 2), "load": load}


def child(name: str, size: str) -> None:
    """The last line of the output is the JSON of ``name``."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = PEERS[name](size) if name in PEERS else predict(name, size)
    except ImportError as error:
        found = {"not_run": reason(error)}
    found["resident_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20), 2)
    print(json.dumps(found))


def judged(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What was wanted, and whether it was reached."""
    case = CASES[name]
    wanted = f"{case.seconds:.0f} s" + (f", {case.gib:.0f} GiB" if case.gib else "")
    if "seconds" not in row:
        return {"wanted": wanted, "met": False}
    return {
        "wanted": wanted,
        "met": row["seconds"] <= case.seconds and (case.gib is None or row["resident_gib"] <= case.gib),
    }


def compared(rows: Mapping[str, Any], peers: Mapping[str, Any]) -> dict[str, float]:
    """What each peer says, as a part of what is predicted for the peak."""
    found: dict[str, float] = {}

    def add(what: str, peer: str, key: str, case: str) -> None:
        if key in peers.get(peer, {}) and "peak_bytes" in rows.get(case, {}):
            found[what] = round(peers[peer][key] / rows[case]["peak_bytes"], 4)

    for name in ON_ONE_DEVICE:
        row = peers.get(f"MemTracker, {name}", {})
        add(f"MemTracker / explain, {name}", f"MemTracker, {name}", "peak_bytes", name)
        if "peak_bytes" in row:
            found[f"MemTracker / explain for a CPU, {name}"] = round(row["peak_bytes"] / row["ours_for_a_cpu"], 4)
    for key, what in (("weights_bytes", "weights"), ("training_with_adam_bytes", "training with Adam")):
        add(f"accelerate, {what} / explain, GPT-2 XL", "accelerate estimate-memory, GPT-2 XL", key, "GPT-2 XL")
    for stage in (2, 3):
        case = f"8B, ZeRO-{stage} x 1024"
        add(f"DeepSpeed / explain, {case}", "DeepSpeed's estimators, 8B", f"zero{stage}_bytes", case)
    return found


def line(name: str, row: Mapping[str, Any], target: Mapping[str, Any] | None = None) -> str:
    """A row of the table."""
    if "resident_gib" not in row or "not_run" in row:
        return f"{name:40} {row.get('failed') or row.get('not_run')}"
    times = f"{row['seconds']:8.1f}{row['cpu_seconds']:8.1f}" if "seconds" in row else f"{'':16}"
    saved = f"{row['saved_bytes'] / GIB:10.2f}" if "saved_bytes" in row else f"{'':10}"
    peak = f"{row['peak_bytes'] / GIB:10.2f}" if "peak_bytes" in row else f"{'':10}"
    said = "" if target is None else f"  {'met' if target['met'] else 'MISSED'}: {target['wanted']}"
    return f"{name:40}{times}{row['resident_gib']:10.2f}{saved}{peak}{row['load']:6.1f}{said}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--only", nargs="+", choices=[*CASES, *PEERS], metavar="NAME", default=[*CASES, *PEERS])
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each process")
    parser.add_argument("--json", type=pathlib.Path, help="default results/explain.json; of a tiny run, nowhere")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.size)
        return
    if options.size == "full":
        options.json = options.json or HERE / "results" / "explain.json"
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__}
    found: dict[str, Any] = {"machine": machine, "size": options.size, "results": {}, "peers": {}, "targets": {}}
    print(f"{'':40}{'s':>8}{'CPU s':>8}{'resident':>10}{'saved GiB':>10}{'peak GiB':>10}{'load':>6}", flush=True)
    for name in options.only:
        row = own_process(name, options)
        found["results" if name in CASES else "peers"][name] = row
        if name in CASES:
            found["targets"][name] = judged(name, row)
        print(line(name, row, found["targets"].get(name)), flush=True)
        found["compared"] = compared(found["results"], found["peers"])
        if options.json:
            write(options.json, found)
    for what, share in found["compared"].items():
        print(f"{what}: {share:.3f}")


if __name__ == "__main__":
    main()
