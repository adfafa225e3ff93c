"""What ways of saving tensors would cost on a GPU, without one: tapes of two models on a modelled clock.

    make bench NAME=simulated                           # a table, and benchmarks/results/simulated.json
    python benchmarks/simulated.py --link 25 --device 2 # a slower link and device memory, in GB/s and TB/s

No figure here was measured on a GPU. ``ASSUMED`` says what is assumed, recorded and computed, and it is in the JSON.
The rows of ``Tiered`` replay the library's own plan (``disthooks.saved.stores.plan``): they are a model of the store as
it is, which a test compares with the store (``tests/device/test_clock_is_right.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import disthooks as dh
from tests.support.sim.checkpointed import checkpointed
from tests.support.sim.clock import Policy, Rates, Result, Saved, Tape, largest_limit, replay
from tests.support.sim.planned import PlannedTiered
from tests.support.sim.policies import EverythingOut

HERE = pathlib.Path(__file__).parent
GB = 1e9
TAPES = {"ResNet-152 fp32": "resnet152", "decoder bf16": "decoder"}
ASSUMED = [
    "Sizes, the order of saves and reads, and what Recompute drops are recorded (tapes.py); those below 64 KiB stay.",
    "The times of forward and backward are assumed (about.forward_s, about.backward_s), and so are all rates.",
    "Operators take the longer of their bytes and their products, scaled to these times; copies do not slow them down.",
    "The host needs host_operator_s for each operator and host_tensor_s for each storage in a store, each way.",
    "The host is not ahead when a step begins. When it waits for a copy, so does the computation.",
    "Device memory is the sum of live bytes: no fragments, no workspaces; a copied tensor's memory is free at once.",
    "A recomputed tensor is made when backward first reads it; inputs that this needs earlier are not brought earlier.",
    "Codecs run at 0.7 of the speed of device memory; Recompute makes 3 passes over a tensor.",
    "What was compared with a store: which tensors Tiered and OnCpu move, in which order, and the peak. No time was.",
    "Not modelled: the ways of torch and of other libraries, page-locking of host memory, other processes.",
]
#: Bytes of peak memory to reach, by name; a share of nothing's where it is under 2.
PEAKS = {
    "ResNet-152 fp32": {f"{n} GB": n * GB for n in (5, 10, 20, 30)},
    "decoder bf16": {"-30%": 0.7, "-50%": 0.5},
}
#: The default limit of ``OnCpu`` for bytes in flight.
IN_FLIGHT = 512 << 20
#: Passes over a tensor that is computed again: two operands are read and the result is written.
PASSES = 3
#: The share of the speed of device memory that the codecs' kernels are wanted to reach (``targets.py``).
OF_MEMORY = 0.7
#: What the audit's model of a step gave: workload, codec and peak to the ratio of Tiered and of the plan.
AUDIT = {
    ("ResNet-152 fp32", "", "5 GB"): (5.6, 5.6),
    ("ResNet-152 fp32", "Quantize(4)", "5 GB"): (1.12, 1.12),
    ("ResNet-152 fp32", "Recompute", "10 GB"): (3.15, 2.9),
    ("ResNet-152 fp32", "Recompute", "20 GB"): (2.30, 1.67),
    ("ResNet-152 fp32", "Recompute", "30 GB"): (1.43, 1.10),
    ("decoder bf16", "Recompute", "-30%"): (1.06, 1.02),
    ("decoder bf16", "Recompute", "-50%"): (1.43, 1.15),
    ("decoder bf16", "Recompute and products", "-50%"): (1.19, 1.07),
}
#: The largest ratio that is wanted, for the plan of a row.
WANTED = {
    ("decoder bf16", "Recompute, Tiered at -30%"): 1.03,
    ("decoder bf16", "Recompute and products, Tiered at -50%"): 1.10,
    ("ResNet-152 fp32", "Recompute, Tiered at 30 GB"): 1.15,
    ("ResNet-152 fp32", "Quantize(4), Tiered at 5 GB"): 1.15,
}
#: Steps of a replay: the tape of the first one is not known, the plan of the third has learned the order of reads.
STEPS = 3


# -- codecs, as factors of bytes and seconds of the device

Codec = Callable[[Saved], Saved]


def recomputed(rates: Rates) -> Codec:
    """``Recompute``: what it drops has no bytes in the store, and is computed when it is first read."""

    def change(saved: Saved) -> Saved:
        if not saved.is_recomputable:
            return saved
        return dataclasses.replace(saved, stored=0, restore_s=PASSES * saved.nbytes / rates.device)

    return change


def encoded(codec: Any, rates: Rates) -> Codec:
    """A codec of the library: the bytes are those that it makes of a sample; integers stay as they are."""
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        sample = torch.ones(1 << 18, dtype=dtype).view(512, 512)
        name = str(dtype).removeprefix("torch.")
        shares[name] = sum(t.nbytes for t in codec.encode(sample)[0]) / sample.nbytes

    def change(saved: Saved) -> Saved:
        if shares.get(saved.dtype, 1) == 1 or not saved.stored:
            return saved
        stored = round(shares[saved.dtype] * saved.nbytes)
        seconds = (saved.nbytes + stored) / (OF_MEMORY * rates.device)
        return dataclasses.replace(saved, stored=stored, encode_s=seconds, restore_s=seconds)

    return change


def products(tape: Tape, rates: Rates) -> Codec:
    """``Recompute`` with one formula more: the product of the MLP's ``up``, whose input is computed again anyway.

    A product takes as long as it took in forward: the time of its floating point operations at the speed that the
    assumed time of the forward comes to.
    """
    about, again = tape.about, recomputed(rates)
    speed = about.get("forward_flops", 0) / about["forward_s"]

    def change(saved: Saved) -> Saved:
        if not saved.module.endswith(".up"):
            return again(saved)
        return dataclasses.replace(saved, stored=0, restore_s=about["product_flops"] / speed)

    return change


def both(first: Codec, second: Codec) -> Codec:
    return lambda saved: second(first(saved))


def codecs(tape: Tape, rates: Rates) -> dict[str, Codec]:
    """By name, for the rows of one tape."""
    four = encoded(dh.Quantize(4), rates)
    found = {"": lambda saved: saved, "Recompute": recomputed(rates), "Quantize(4)": four}
    found["Recompute, Quantize(4)"] = both(recomputed(rates), four)
    if "product_flops" in tape.about:
        found["Recompute and products"] = products(tape, rates)
    else:
        found["Cast(bfloat16)"] = encoded(dh.Cast(torch.bfloat16), rates)
    return found


def block_of(module: str) -> str:
    """The block of a module: a layer of the decoder, a bottleneck of the ResNet; empty outside of blocks."""
    parts = module.split(".")
    if parts[0] == "layers":
        return ".".join(parts[:2])
    return parts[0] if len(parts) > 1 and parts[0] not in ("", "0") else ""


# -- rows


def row(results: Sequence[Result], plain: Result) -> dict[str, Any]:
    """The figures of one way: of its last step, with the largest peak of all steps; seconds, bytes and shares."""
    result = results[-1]
    return {
        "ratio": round(result.step_s / plain.step_s, 3),
        "first_ratio": round(results[0].step_s / plain.step_s, 3),
        "forward_s": round(result.forward_s, 4),
        "backward_s": round(result.backward_s, 4),
        "compute_s": round(result.compute_s, 4),
        "stalled_s": round(result.stalled_s, 4),
        "host_s": round(result.host_s, 4),
        "peak_bytes": max(each.peak for each in results),
        "host_peak_bytes": max(each.host_peak for each in results),
        "held_bytes": result.held,
        "sent_bytes": result.sent,
        "link_out_busy": round(result.link_out, 3),
        "link_back_busy": round(result.link_back, 3),
    }


def steps_of(tape: Tape, policy: Policy, rates: Rates) -> list[Result]:
    """So many steps that the policy has learned what it can."""
    return [replay(tape, policy, rates) for _ in range(STEPS)]


def limited(tape: Tape, make: Callable[[int], Policy], peak: float, rates: Rates, plain: Result) -> dict[str, Any]:
    """A way with as large a limit as its own peak leaves room for."""
    limit = largest_limit(lambda limit: steps_of(tape, make(limit), rates), peak, 2 * tape.nbytes)
    if limit is None:
        return {"not_reached": f"its peak is above {peak / GB:.2f} GB even with nothing left on the device"}
    return row(steps_of(tape, make(limit), rates), plain) | {"limit_bytes": limit}


def rows(tape: Tape, rates: Rates) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way of one tape."""
    plain = replay(tape, Policy(), rates)
    peaks = {name: wanted * plain.peak if wanted < 2 else wanted for name, wanted in PEAKS[tape.name].items()}
    inputs = checkpointed(tape, block_of)

    def full(tape: Tape, policy: Policy) -> dict[str, Any]:
        return row(steps_of(tape, policy, rates), plain)

    yield "nothing", full(tape, Policy())
    yield "checkpoint per block", full(inputs, Policy())
    for name, codec in codecs(tape, rates).items():
        coded, front = tape.coded(codec), f"{name}, " if name else ""
        if name:
            yield f"{front}OnDevice", full(coded, Policy())
        yield f"{front}OnCpu", full(coded, EverythingOut(IN_FLIGHT))
        for peak_name, peak in peaks.items():
            yield f"{front}Tiered at {peak_name}", limited(coded, PlannedTiered, peak, rates, plain)
    yield "OnCpu around checkpoints", full(inputs, EverythingOut(IN_FLIGHT))


def beside_audit(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The audit's table, and what came of the same rows here."""
    table = []
    for (workload, codec, peak), audit in AUDIT.items():
        front = f"{codec}, " if codec else ""
        here = found[workload]["rows"][f"{front}Tiered at {peak}"].get("ratio")
        table.append({"row": f"{workload}, {front}{peak}", "audit": list(audit), "here": here})
    return table


def beside_wanted(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ratios that are wanted, and those of the same rows here."""
    pairs = ((workload, name, most) for (workload, name), most in WANTED.items())
    here = [(f"{work}, {name}", most, found[work]["rows"][name].get("ratio")) for work, name, most in pairs]
    return [{"row": name, "wanted": most, "here": ratio} for name, most, ratio in here]


def read(name: str, folder: pathlib.Path = HERE / "tapes") -> Tape:
    """A tape with its assumed times."""
    tape = Tape.read(folder / f"{TAPES[name]}.json")
    return tape.timed(tape.about["forward_s"], tape.about["backward_s"])


def run(rates: Rates) -> dict[str, Any]:
    """All of it, as it is written."""
    workloads: dict[str, Any] = {}
    for name in TAPES:
        tape = read(name)
        about = tape.about | {"saved_bytes": tape.nbytes, "storages": len(tape.saved)}
        workloads[name] = {"about": about, "rows": dict(rows(tape, rates))}
    return {
        "simulated": True,
        "about": "Simulated: modelled clock, link and stores; assumed time of a step. Nothing here ran on a GPU.",
        "assumed": ASSUMED,
        "rates": dataclasses.asdict(rates),
        "workloads": workloads,
        "audit": beside_audit(workloads),
        "wanted": beside_wanted(workloads),
    }


# -- the table


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The table."""
    yield found["about"]
    for name, part in found["workloads"].items():
        yield f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in part["about"].items())
        columns = ("ratio", "first", "forward ms", "backward ms", "stalled ms", "peak GB", "sent GB", "out", "back")
        yield f"{'':56}" + "".join(f"{each:>12}" for each in columns)
        for way, one in part["rows"].items():
            yield f"{way:56}" + (_figures(one) if "ratio" in one else f"  {one['not_reached']}")
    columns = ("audit before", "audit's plan", "Tiered here")
    yield f"\n{'the audit, and here':56}" + "".join(f"{each:>16}" for each in columns)
    for each in found["audit"]:
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (*each["audit"], each["here"]))
        yield f"{each['row']:56}" + "".join(f"{ratio:>16}" for ratio in ratios)
    yield ""
    yield from (f"{each['row']:56} wanted {each['wanted']:.2f}, here {each['here']}" for each in found["wanted"])


def _figures(one: Mapping[str, Any]) -> str:
    times = "".join(f"{1e3 * one[key]:12.1f}" for key in ("forward_s", "backward_s", "stalled_s"))
    sizes = "".join(f"{one[key] / GB:12.2f}" for key in ("peak_bytes", "sent_bytes"))
    ratios = f"{one['ratio']:12.3f}{one['first_ratio']:12.3f}"
    return f"{ratios}{times}{sizes}{one['link_out_busy']:12.3f}{one['link_back_busy']:12.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=float, default=53.0, help="GB/s each way")
    parser.add_argument("--device", type=float, default=4.3, help="TB/s of device memory")
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "simulated.json")
    options = parser.parse_args()
    link = options.link * GB
    rates = Rates(options.device * 1e12, link, link, host_operator_s=6e-6, host_tensor_s=40e-6)
    found = run(rates)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
