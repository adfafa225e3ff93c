"""Single bits that flip once, and whether a second run of the step undoes them (``watch.rerun``).

    make bench NAME=transient                # or: python benchmarks/transient.py --bits 200

Two and four processes train the GPT of benchmarks/faults.py under DistributedDataParallel, ``fully_shard`` and ZeRO 2
(gloo), two micro-batches a step: once without a fault, and once for each bit. The bit is one of the exponent of one
element, which becomes at least 256 times the largest of its tensor. It flips in one call of one rank: in an output of a
layer, in its input, or in the gradient of its output. Rules leave out steps that are not finite, and spikes.

Counted are the trainings in which a rule saw the fault: how many end with the bits of the training without it
("undone"), and how many of the others with those of a training in which nothing is run again ("as skipped"). The
training without a fault counts its calls: those of the loop, and those of one probe.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import BATCH, PRODUCTS, Changed, Fault, Gpt, batch_of, corpus, flipped, way_of, wrap
from torch import nn

import disthooks as dh

STEPS, EARLIEST, CALLS = 21, 17, 2
KINDS = ("output", "input", "gradient")
ENGINES = ("ddp", "fsdp2", "zero2")


class Bit(NamedTuple):
    """The bit that flips; ``kind`` "" for none."""

    kind: str
    seed: int
    step: int
    call: int
    rank: int
    where: str


def draw(seed: int, world: int) -> Bit:
    chance = random.Random(seed)
    step, call = chance.randrange(EARLIEST, STEPS), chance.randrange(CALLS)
    return Bit(KINDS[seed % 3], seed, step, call, chance.randrange(world), chance.choice(PRODUCTS))


def engine_of(model: Gpt, engine: str) -> tuple[Any, Any]:
    """The model as the engine has it, and its optimizer."""
    if engine != "zero2":
        return wrap(model, way_of(f"{engine}/standard/0"))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": CALLS,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    made = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return made[0], made[0]


def arm(module: nn.Module, bit: Bit, rank: int, now: list[int]) -> None:
    """Put the hooks on that flip the bit, once."""
    left = [1]

    def happens(kind: str) -> bool:
        is_now = bit.kind == kind and left[0] == 1 and (rank, *now) == (bit.rank, bit.step, bit.call)
        left[0] -= is_now
        return is_now

    def spoiled(tensor: torch.Tensor) -> torch.Tensor:
        return flipped(tensor, Fault("", bit.seed, bit.step, bit.rank, bit.where))

    def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: spoiled(grad) if happens("gradient") else grad)
        return Changed.apply(output, spoiled(output)) if happens("output") else output

    def on_input(module: nn.Module, args: Any) -> Any:
        return (Changed.apply(args[0], spoiled(args[0])),) if happens("input") else None

    module.register_forward_hook(on_output)
    module.register_forward_pre_hook(on_input)


def train(rank: int, engine: str, bit: Bit, has_rerun: bool, text: torch.Tensor, vocabulary: int) -> dict[str, Any]:
    """The bits of all weights at the end, what the records say of second runs, and how often the function ran."""
    torch.manual_seed(0)
    model = Gpt(vocabulary)
    now, calls = [-1, -1], [0]
    arm(model.get_submodule(bit.where), bit, rank, now)
    wrapped, optimizer = engine_of(model, engine)
    is_zero, records = optimizer is wrapped, []
    rules = [dh.SkipNonFinite(), dh.SkipSpike(window=64, least=16, loss=False)]
    attached = dh.gradients(
        wrapped, None if is_zero else optimizer, rules=rules, stats=[dh.stats.Norm()], sinks=[records.append], every=1
    )
    with attached as watch:

        def forward_backward(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            loss = nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), targets.flatten()) / CALLS
            wrapped.backward(loss) if is_zero else loss.backward()
            return loss.detach()

        call = watch.rerun(forward_backward) if has_rerun else forward_backward
        for step in range(STEPS):
            for micro in range(CALLS):
                now[:] = step, micro
                call(*batch_of(text, None, micro, step, rank, vocabulary, ""))
                if is_zero:
                    wrapped.step()
            if not is_zero:
                optimizer.step()
                optimizer.zero_grad()
    weights = wrapped.module if hasattr(wrapped, "module") else wrapped
    digest = [
        getattr(each, "_local_tensor", each).detach().view(torch.int32).long().sum() for each in weights.parameters()
    ]
    return {
        "weights": [int(each) for each in digest],
        "said": [record["rerun"] for record in records if "rerun" in record],
        "calls": calls[0],
    }


def work(rank: int, world: int, port: int, engine: str, bits: list[Bit], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo")
    text, vocabulary = corpus()
    clean = train(rank, engine, bits[0], True, text, vocabulary)
    found = [[clean, train(rank, engine, bits[0], False, text, vocabulary)]]
    for bit in bits[1:]:
        again = train(rank, engine, bit, True, text, vocabulary)
        differs = torch.tensor(float(again["weights"] != clean["weights"]))
        dist.all_reduce(differs)
        is_open = bool(again["said"]) and bool(differs)
        found.append([again, train(rank, engine, bit, False, text, vocabulary) if is_open else clean])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        pathlib.Path(folder, "found.json").write_text(json.dumps(everyone))
    dist.destroy_process_group()


def score(everyone: Any, bits: list[Bit], world: int) -> dict[str, Any]:
    """Counts over the trainings of one engine; the first one has no fault."""

    def weights(number: int, has_rerun: bool) -> Any:
        return [ranks[number][not has_rerun]["weights"] for ranks in everyone]

    clean = everyone[0][0][0]
    counts: dict[str, Any] = collections.Counter(unseen=0)
    counts["runs_again_without_a_fault"] = len(clean["said"]) + (clean["calls"] != CALLS * (STEPS + 1))
    counts["same_without_rerun"] = weights(0, True) == weights(0, False)
    wrong = []
    for number, bit in enumerate(bits[1:], 1):
        with_rerun = everyone[0][number][0]
        if not with_rerun["said"]:
            counts["unseen"] += 1
        elif weights(number, True) == weights(0, True):
            counts["undone"] += 1
        elif weights(number, True) == weights(number, False):
            counts["as_skipped"] += 1
            wrong.append(f"{bit}: {with_rerun['said']}")
        else:
            counts["worse"] += 1
            wrong.append(f"{bit}: {with_rerun['said']}")
    return {**counts, "wrong": wrong}


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", type=int, default=200, help="that a rule sees or not, over all engines")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--worlds", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--port", type=int, default=29_671)
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    arguments = parser.parse_args(words)
    ways = [(engine, world) for engine in arguments.engines for world in arguments.worlds]
    results = {}
    for place, (engine, world) in enumerate(ways):
        seeds = range(arguments.seed + place, arguments.seed + arguments.bits, len(ways))
        bits = [Bit("", 0, -1, -1, -1, PRODUCTS[0]), *(draw(seed // len(ways) * 7 + place, world) for seed in seeds)]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (world, arguments.port + place, engine, bits, folder), world)
            everyone = json.loads(pathlib.Path(folder, "found.json").read_text())
        results[f"{engine}, {world} ranks"] = score(everyone, bits, world)
        print(f"{engine}, {world} ranks: {json.dumps(results[f'{engine}, {world} ranks'])}", flush=True)
    names = ("undone", "as_skipped", "worse", "unseen", "runs_again_without_a_fault")
    total = {name: sum(row.get(name, 0) for row in results.values()) for name in names}
    seen = total["undone"] + total["as_skipped"] + total["worse"]
    result = {"bits": arguments.bits, "seen": seen, **total, "results": results}
    print(json.dumps({key: value for key, value in result.items() if key != "results"}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
