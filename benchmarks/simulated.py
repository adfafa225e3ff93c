"""What plans of offloading would cost on a GPU, without one: tapes of two models on a modelled clock.

    python benchmarks/simulated.py                      # a table, and benchmarks/results/simulated.json
    python benchmarks/simulated.py --link 25 --device 2 # a slower link and device memory, in GB/s and TB/s

No figure here was measured on a GPU. The sizes and the order of the saved tensors are recorded (``tapes.py``); the time
of a step is assumed; the link, device memory and the stores are models (``tests/support/sim/clock.py`` and
``policies.py``). What is not modelled: the host's time, kernels that share device memory with copies, fragments and
workspaces in device memory, and that a recomputed tensor may need its input earlier than the tape reads it.

Where figures differ from the audit's model of a step, these are the reasons. The ResNet's peak less its saved bytes is
2 to 3 GB lower here, so more of each peak is left for saved tensors, and rows at 10, 20 and 30 GB are faster. The audit
took slopes of real runs, where operators have buffers of their own; whether a GPU has them is not known. The decoder
saves 21.1 GB instead of 20, because the logarithms of the softmax (1 GB in float32) are saved too, and more memory is
needed around the loss: at -50% more is sent. ``Tiered`` leaves a window below its limit empty, and so has to send more
bytes for the same peak than the plan; it waits for a whole copy at its first read from the host, and brings few tensors
ahead: the decoder's rows are slower than the audit's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import disthooks as dh
from tests.support.sim.clock import Policy, Rates, Result, Saved, Tape, largest_limit, replay
from tests.support.sim.policies import EverythingOut, FirstSavedFirst, NearTheLimit

HERE = pathlib.Path(__file__).parent
GB = 1e9
TAPES = {"ResNet-152 fp32": "resnet152", "decoder bf16": "decoder"}
#: Bytes of peak memory to reach, by name; a share of nothing's where it is under 2.
PEAKS = {
    "ResNet-152 fp32": {f"{n} GB": n * GB for n in (5, 10, 20, 30)},
    "decoder bf16": {"-30%": 0.7, "-50%": 0.5},
}
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


# -- codecs, as factors of bytes and seconds of the device

Codec = Callable[[Saved], Saved]


def recomputed(rates: Rates) -> Codec:
    """``Recompute``: what it drops has no bytes in the store, and is computed when it is first read."""

    def change(saved: Saved) -> Saved:
        if not saved.is_recomputable:
            return saved
        return dataclasses.replace(saved, stored=0, restore_s=PASSES * saved.nbytes / rates.device)

    return change


def quantized(rates: Rates) -> Codec:
    """``Quantize(4)``: the bytes are those of the codec itself; integers stay as they are."""
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        sample = torch.ones(1 << 18, dtype=dtype).view(512, 512)
        shares[str(dtype).removeprefix("torch.")] = (
            sum(t.nbytes for t in dh.Quantize(4).encode(sample)[0]) / sample.nbytes
        )

    def change(saved: Saved) -> Saved:
        if saved.dtype not in shares or not saved.stored:
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
    found = {
        "": lambda saved: saved,
        "Recompute": recomputed(rates),
        "Quantize(4)": quantized(rates),
        "Recompute, Quantize(4)": both(recomputed(rates), quantized(rates)),
    }
    if "product_flops" in tape.about:
        found["Recompute and products"] = products(tape, rates)
    return found


# -- rows


def row(result: Result, plain: Result) -> dict[str, Any]:
    """The figures of one way; seconds, bytes and shares."""
    return {
        "ratio": round(result.step_s / plain.step_s, 3),
        "forward_s": round(result.forward_s, 4),
        "backward_s": round(result.backward_s, 4),
        "compute_s": round(result.compute_s, 4),
        "stalled_s": round(result.stalled_s, 4),
        "peak_bytes": result.peak,
        "held_bytes": result.held,
        "sent_bytes": result.sent,
        "link_out_busy": round(result.link_out, 3),
        "link_back_busy": round(result.link_back, 3),
    }


def limited(tape: Tape, kind: str, peak: float, rates: Rates, plain: Result) -> dict[str, Any]:
    """A way with as large a limit as its own peak leaves room for."""
    makes: dict[str, Callable[[int], Policy]] = {
        "Tiered": NearTheLimit,
        "first saved goes first": lambda limit: FirstSavedFirst(tape, limit),
    }
    limit = largest_limit(tape, makes[kind], peak, rates)
    if limit is None:
        return {"not_reached": f"its peak is above {peak / GB:.2f} GB even with nothing left on the device"}
    return row(replay(tape, makes[kind](limit), rates), plain) | {"limit_bytes": limit}


def rows(tape: Tape, rates: Rates) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way of one tape."""
    plain = replay(tape, Policy(), rates)
    yield "nothing", row(plain, plain)
    for name, codec in codecs(tape, rates).items():
        coded, front = tape.coded(codec), f"{name}, " if name else ""
        if name:
            yield f"{front}OnDevice", row(replay(coded, Policy(), rates), plain)
        yield f"{front}OnCpu", row(replay(coded, EverythingOut(), rates), plain)
        for peak_name, wanted in PEAKS[tape.name].items():
            peak = wanted * plain.peak if wanted < 2 else wanted
            for kind in ("Tiered", "first saved goes first"):
                yield f"{front}{kind} at {peak_name}", limited(coded, kind, peak, rates, plain)


def beside_audit(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The audit's table, and what came of the same rows here."""
    table = []
    for (workload, codec, peak), audit in AUDIT.items():
        front = f"{codec}, " if codec else ""
        kinds = ("Tiered", "first saved goes first")
        here = [found[workload]["rows"][f"{front}{kind} at {peak}"].get("ratio") for kind in kinds]
        table.append({"row": f"{workload}, {front}{peak}", "audit": list(audit), "here": here})
    return table


def run(rates: Rates, folder: pathlib.Path = HERE / "tapes") -> dict[str, Any]:
    """All of it, as it is written."""
    workloads: dict[str, Any] = {}
    for name, file in TAPES.items():
        tape = Tape.read(folder / f"{file}.json")
        tape = tape.timed(tape.about["forward_s"], tape.about["backward_s"])
        about = tape.about | {"saved_bytes": tape.nbytes, "storages": len(tape.saved)}
        workloads[name] = {"about": about, "rows": dict(rows(tape, rates))}
    about = "Simulated: modelled clock, link and stores; assumed time of a step. Nothing here ran on a GPU."
    rates_ = dataclasses.asdict(rates)
    return {
        "simulated": True,
        "about": about,
        "rates": rates_,
        "workloads": workloads,
        "audit": beside_audit(workloads),
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The table."""
    yield found["about"]
    for name, part in found["workloads"].items():
        yield f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in part["about"].items())
        columns = ("ratio", "forward ms", "backward ms", "stalled ms", "peak GB", "sent GB", "link out", "link back")
        yield f"{'':56}" + "".join(f"{each:>12}" for each in columns)
        for way, one in part["rows"].items():
            yield f"{way:56}" + (_figures(one) if "ratio" in one else f"  {one['not_reached']}")
    yield f"\n{'the audit, and here':56}{'Tiered':>16}{'the plan':>16}"
    for each in found["audit"]:
        pairs = (
            f"{audit:.2f}, {'-' if here is None else f'{here:.2f}'}"
            for audit, here in zip(each["audit"], each["here"], strict=True)
        )
        yield f"{each['row']:56}" + "".join(f"{pair:>16}" for pair in pairs)


def _figures(one: Mapping[str, Any]) -> str:
    times = "".join(f"{1e3 * one[key]:12.1f}" for key in ("forward_s", "backward_s", "stalled_s"))
    sizes = "".join(f"{one[key] / GB:12.2f}" for key in ("peak_bytes", "sent_bytes"))
    return f"{one['ratio']:12.3f}{times}{sizes}{one['link_out_busy']:12.3f}{one['link_back_busy']:12.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=float, default=53.0, help="GB/s each way")
    parser.add_argument("--device", type=float, default=4.3, help="TB/s of device memory")
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "simulated.json")
    options = parser.parse_args()
    rates = Rates(device=options.device * 1e12, to_host=options.link * GB, to_device=options.link * GB)
    found = run(rates)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
