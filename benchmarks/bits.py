"""Single bits flipped in the training of a small GPT on several ranks, and whether ``disthooks diff`` names them.

    make bench NAME=bits                     # or: python benchmarks/bits.py --bits 100

Two and three processes train the GPT of benchmarks/faults.py under DistributedDataParallel (gloo) with
``stats.Fingerprints()`` in every step: once as it is, and once for each flipped bit. A random bit of a random element
flips at a random step on a random rank, in the output of a layer, in a gradient before its reduction, or in a weight.
The verdict counts as right if step, module or parameter, and rank are right.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import PRODUCTS, Changed, Fault, Gpt, batch_of, corpus
from torch import nn

import disthooks as dh
from disthooks.report.diff import compare
from disthooks.report.log import read

STEPS = 6
KINDS = ("output", "gradient", "weight")


class Bit(NamedTuple):
    """The bit that flips; ``kind`` "" for none."""

    kind: str
    seed: int
    step: int
    rank: int
    where: str


def draw(seed: int, world: int) -> Bit:
    chance = random.Random(seed)
    return Bit(KINDS[seed % 3], seed, chance.randrange(STEPS), chance.randrange(world), chance.choice(PRODUCTS))


def flipped(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy of ``tensor`` in which one bit is another."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    bits, chance = copy.view(torch.int32).view(-1), random.Random(seed)
    mask = 1 << chance.randrange(32)
    bits[chance.randrange(len(bits))] ^= mask - (mask >> 31 << 32)
    return copy


def train(rank: int, bit: Bit, text: torch.Tensor, vocabulary: int, file: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Gpt(vocabulary)
    ddp, now = nn.parallel.DistributedDataParallel(model), [0]
    module = model.get_submodule(bit.where)

    def happens() -> bool:
        return rank == bit.rank and now[0] == bit.step

    def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return Changed.apply(output, flipped(output, bit.seed)) if happens() and bit.kind == "output" else output

    def on_gradient(grad: torch.Tensor) -> torch.Tensor:
        return flipped(grad, bit.seed) if happens() and bit.kind == "gradient" else grad

    module.register_forward_hook(on_output)
    module.weight.register_hook(on_gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sinks = [dh.sinks.Jsonl(file)]
    with dh.gradients(ddp, optimizer, stats=[dh.stats.Fingerprints()], sinks=sinks, every=1):
        for step in range(STEPS):
            now[0] = step
            tokens, targets = batch_of(text, Fault("", 0, -1, -1, bit.where), 0, step, rank, vocabulary, "")
            if happens() and bit.kind == "weight":
                module.weight.data.copy_(flipped(module.weight, bit.seed))
            loss = nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def work(rank: int, world: int, port: int, bits: list[Bit], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    text, vocabulary = corpus()
    for number, bit in enumerate(bits):
        train(rank, bit, text, vocabulary, pathlib.Path(folder, f"{world}-{number}.jsonl"))
    dist.destroy_process_group()


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", type=int, default=100, help="how many bits flip, each in a training of its own")
    parser.add_argument("--seed", type=int, default=9_000, help="the first seed")
    parser.add_argument("--port", type=int, default=29_641)
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    arguments = parser.parse_args(words)
    right, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 3):
            share = [arguments.seed + number for number in range(arguments.bits) if number % 2 == world - 2]
            bits = [Bit("", 0, -1, -1, PRODUCTS[0]), *(draw(seed, world) for seed in share)]
            mp.spawn(work, (world, arguments.port + world, bits, folder), world)
            (base,) = read(pathlib.Path(folder, f"{world}-0.jsonl")).runs
            for number, bit in enumerate(bits[1:], 1):
                (run,) = read(pathlib.Path(folder, f"{world}-{number}.jsonl")).runs
                first = compare(base, run).first
                named = first is not None and (first.step, first.rank) == (bit.step, bit.rank)
                names = {"gradient": {f"{bit.where}.weight"}}.get(bit.kind, {bit.where, f"{bit.where}.weight"})
                if named and first is not None and first.where in names:
                    right += 1
                else:
                    wrong.append(f"{world} ranks: {bit}: {first}")
    result = {"right": right, "bits": right + len(wrong), "wrong": wrong}
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
