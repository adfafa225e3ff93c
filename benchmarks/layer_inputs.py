"""Every layer of a Llama under its checkpoint, and where the inputs of the layers are until backward.

    make bench NAME=layer_inputs               # or: python benchmarks/layer_inputs.py --rounds 7 --device cuda

Three ways take turns, a step of each a round: the inputs stay in memory; transformers' own ``offload=True``, which puts
torch's ``save_on_cpu`` around each checkpoint; and ``save_activations(model, "model.layers.*", store)``. The store is
``OnCpu`` on a GPU. On a CPU it is ``OnDisk``, and ``save_on_cpu`` is there without page-locked memory, which
``offload=True`` asks for and a machine without a GPU does not have: it copies from memory to memory. There are two
batches: in the long one the inputs of the layers are most of the memory; in the short one they are little, and no way
can help. For each way the memory held after forward, the peak over the step (both less what was in use before) and the
time of a step are printed as medians and written as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import pathlib
import statistics
import tempfile
import time
import warnings
from typing import Any

import torch
from disk import RESULTS, machine
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import disthooks as dh
from disthooks._tensors import format_bytes

STAY, THEIRS, OURS = "inputs stay", "transformers offload=True", "disthooks"
LAYERS, HIDDEN = 24, 256
BATCHES = {"full": {"long": (16, 512), "short": (1, 64)}, "small": {"long": (2, 128), "short": (1, 16)}}


def enable(model: LlamaForCausalLM, offload: bool) -> None:
    """Checkpoint each layer, and with ``offload`` move its input as transformers does."""
    with warnings.catch_warnings():
        # transformers 5 renames this method, and older versions have no other.
        warnings.simplefilter("ignore", FutureWarning)
        has_pins = torch.accelerator.is_available()
        options = {"offload": True} if offload and has_pins else {}
        model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
    if offload and not has_pins:

        def moved(function: Any, *args: Any) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return checkpoint(function, *args, use_reentrant=False)

        for layer in model.model.layers:
            layer._gradient_checkpointing_func = moved


def step(model: LlamaForCausalLM, tokens: torch.Tensor, way: str, store: Any) -> dict[str, float]:
    """One step of ``way``: seconds, and bytes beyond those in use before."""
    cuda = tokens.is_cuda
    enable(model, offload=way == THEIRS)
    model.zero_grad()
    gc.collect()
    torch.cuda.reset_peak_memory_stats() if cuda else dh.memory.reset_peak_resident()
    now = torch.cuda.memory_allocated if cuda else dh.memory.resident
    peak = torch.cuda.max_memory_allocated if cuda else dh.memory.peak_resident
    hooks = dh.save_activations(model, "model.layers.*", store) if way == OURS else contextlib.nullcontext()
    before, begin = now(), time.perf_counter()
    with hooks as saving:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        if way == OURS and not cuda:
            store.wait()
        held = now() - before
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        moved = saving.report().moved if way == OURS else 0
    return {"seconds": seconds, "held_bytes": held, "peak_bytes": peak() - before, "moved_bytes": moved}


def run(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The medians of each way on each batch; the gradients of all ways are compared with the first's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config).to(args.device).train()
    store = dh.OnDisk(folder) if args.device == "cpu" else dh.OnCpu()
    found: dict[str, Any] = {}
    for name, (rows, length) in BATCHES[args.size].items():
        tokens = torch.randint(256, (rows, length), device=args.device)
        figures: dict[str, list[dict[str, float]]] = {STAY: [], THEIRS: [], OURS: []}
        truth: list[torch.Tensor] = []
        for number in range(-1, args.rounds):
            ways = list(figures)
            for way in ways[number % 3 :] + ways[: number % 3]:
                figure = step(model, tokens, way, store)
                grads = [p.grad.clone() for p in model.parameters()]
                truth = truth or grads
                if not all(map(torch.equal, grads, truth)):
                    raise SystemExit(f"the gradients of {way!r} are other bits")
                figures[way] += [figure] if number >= 0 else []
        rows_of = {
            way: {key: statistics.median(s[key] for s in each) for key in each[0]} for way, each in figures.items()
        }
        for row in rows_of.values():
            row["ratio"] = round(row["seconds"] / rows_of[STAY]["seconds"], 3)
            row["seconds"] = round(row["seconds"], 4)
        found[name] = {
            "rows": rows,
            "length": length,
            "inputs_bytes": LAYERS * tokens.numel() * HIDDEN * 4,
            "ways": rows_of,
        }
    return found


def show(found: dict[str, Any]) -> None:
    for name, batch in found.items():
        inputs = format_bytes(batch["inputs_bytes"])
        print(f"{name}: {batch['rows']} rows of {batch['length']} tokens, the inputs of {LAYERS} layers are {inputs}")
        print(f"  {'':26}{'after forward':>14}{'peak':>12}{'moved':>12}{'step':>10}{'ratio':>8}")
        for way, row in batch["ways"].items():
            sizes = "".join(
                f"{format_bytes(int(row[key])):>{n}}"
                for key, n in zip(("held_bytes", "peak_bytes", "moved_bytes"), (14, 12, 12), strict=True)
            )
            print(f"  {way:26}{sizes}{row['seconds']:9.3f}s{row['ratio']:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(BATCHES), default="full", help="small: to see that it runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where the file lives; default the system's temporary one")
    parser.add_argument("--json", type=pathlib.Path, help="default results/layer_inputs.json; of a small run, nowhere")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least one")
    about = machine(args.device)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        found = run(args, folder)
    show(found)
    file = args.json or (RESULTS / "layer_inputs.json" if args.size == "full" else None)
    if file is not None:
        file.write_text(json.dumps({"rounds": args.rounds, "machine": about, "batches": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
