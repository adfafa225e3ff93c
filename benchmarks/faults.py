"""Faults put into the training of a small GPT on several ranks, and whether ``disthooks report`` names them.

    make bench-faults                        # or: python benchmarks/faults.py --faults 200 --clean 10000

Two to four processes train a GPT of 30,000 parameters on text under DistributedDataParallel (gloo), one training after
the other, with ``stats: full`` and copies compared in every step. In each training one fault happens, at a random step,
on a random rank, in a random layer:

- ``forward``, ``backward``: a bit of one element of a product flips, in the output of a layer, or in the gradient of
  its input;
- ``gradient``: a bit of one element of one rank's gradient flips, before the reduction;
- ``state``: a bit of one element of the optimizer's state flips on one rank;
- ``batch``: one rank gets random tokens, or wrong targets;
- ``rate``: the learning rate jumps;
- ``slow``: one rank sleeps in each step, before its forward or in it;
- ``seed``: one rank begins with other weights;
- ``dead``: all weights of a layer become zero on all ranks;
- ``nan``: one element of a layer's output, or of one gradient, becomes NaN.

The bit is one of the exponent, and its element becomes at least 256 times the largest of its tensor: what a smaller
change does to a norm is less than what a batch does, and ``disthooks diff`` finds it. The verdict counts as right if
kind, module or parameter, rank and step (one more or less) are right. Trainings without a fault count the verdicts that
name something: false alarms.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import disthooks as dh
from disthooks.report.culprit import Culprit, culprits
from disthooks.report.log import read

LAYERS, WIDTH, TOKENS, BATCH = 3, 32, 32, 4
STEPS = 70
FACTOR = 256.0
KINDS = ("forward", "backward", "gradient", "state", "batch", "rate", "slow", "seed", "dead", "nan")
PRODUCTS = [f"blocks.{i}.{name}" for i in range(LAYERS) for name in ("qkv", "out", "up", "down")]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Attention(WIDTH) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Fault(NamedTuple):
    """What goes wrong; ``kind`` "" for nothing."""

    kind: str
    seed: int
    step: int
    rank: int
    where: str
    more: str = ""
    amount: float = 0.0


def draw(seed: int, kind: str, world: int, steps: int = STEPS) -> Fault:
    """A fault of ``kind``."""
    chance = random.Random(seed)
    step, rank, where = chance.randrange(25, steps - 15), chance.randrange(world), chance.choice(PRODUCTS)
    more, amount = "", 0.0
    if kind == "batch":
        more = chance.choice(("random", "targets"))
    elif kind == "rate":
        amount = chance.choice((4.0, 10.0, 30.0))
    elif kind == "slow":
        more, amount = chance.choice(("input", "forward")), chance.uniform(0.15, 0.3)
    elif kind == "seed":
        step, rank = 0, chance.randrange(1, world)
    elif kind == "nan":
        more = chance.choice(("forward", "gradient"))
    elif kind == "state":
        more = chance.choice(("exp_avg", "exp_avg_sq"))
    elif kind == "dead":
        where = chance.choice([name for name in PRODUCTS if name.endswith(("up", "out", "down"))])
    return Fault(kind, seed, step, rank, where, more, amount)


def flipped(tensor: torch.Tensor, fault: Fault) -> torch.Tensor:
    """A copy of ``tensor`` in which one bit of the exponent of one element is 1, where it was 0.

    The element then is at least :data:`FACTOR` times the largest of the tensor.
    """
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    bits, values, largest = copy.view(torch.int32).view(-1), copy.view(-1), float(copy.abs().max())
    chance = random.Random(fault.seed + 1)
    for _ in range(100_000):
        place, bit = chance.randrange(len(bits)), chance.randrange(23, 31)
        if not int(bits[place]) >> bit & 1:
            bits[place] |= 1 << bit
            if not abs(float(values[place])) <= FACTOR * largest:
                return copy
            bits[place] ^= 1 << bit
    raise RuntimeError("no bit is left to flip")


class Changed(torch.autograd.Function):
    """Another value in forward, the same gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


def arm(model: Gpt, fault: Fault, rank: int, now: list[int]) -> None:
    """Put the hooks on that make the fault, before disthooks puts on its own."""
    module = model.get_submodule(fault.where)
    is_here = rank == fault.rank

    def spoiled(tensor: torch.Tensor) -> torch.Tensor:
        if fault.kind != "nan":
            return flipped(tensor, fault)
        copy = tensor.detach().clone()
        copy.view(-1)[fault.seed % copy.numel()] = float("nan")
        return copy

    def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        happens = is_here and now[0] == fault.step
        return Changed.apply(output, spoiled(output)) if happens else output

    def on_input(module: nn.Module, args: Any) -> None:
        if is_here and now[0] == fault.step:
            args[0].register_hook(spoiled)

    def on_gradient(grad: torch.Tensor) -> torch.Tensor | None:
        return spoiled(grad) if is_here and now[0] == fault.step else None

    def be_slow(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        time.sleep(fault.amount if is_here and now[0] >= fault.step else 0.0)

    {
        "forward": lambda: module.register_forward_hook(on_output),
        "nan forward": lambda: module.register_forward_hook(on_output),
        "backward": lambda: module.register_forward_pre_hook(on_input),
        "gradient": lambda: module.weight.register_hook(on_gradient),
        "nan gradient": lambda: module.weight.register_hook(on_gradient),
        "slow forward": lambda: module.register_forward_hook(be_slow),
    }.get(f"{fault.kind} {fault.more}".strip(), lambda: None)()


def batch_of(text: torch.Tensor, fault: Fault, seed: int, step: int, rank: int, vocabulary: int) -> Any:
    """The tokens and the targets of one rank in one step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    begins = torch.randint(len(text) - TOKENS - 1, (BATCH,), generator=generator)
    whole = torch.stack([text[begin : begin + TOKENS + 1] for begin in begins])
    if fault.kind == "batch" and (step, rank) == (fault.step, fault.rank):
        if fault.more == "random":
            whole = torch.randint(vocabulary, whole.shape, generator=generator)
        else:
            return whole[:, :-1], torch.randint(vocabulary, (BATCH, TOKENS), generator=generator)
    return whole[:, :-1], whole[:, 1:]


def train(
    rank: int, fault: Fault, seed: int, steps: int, text: torch.Tensor, vocabulary: int, file: pathlib.Path
) -> None:
    """One training, logged to ``file``."""
    torch.manual_seed(seed)
    model = Gpt(vocabulary)
    ddp = nn.parallel.DistributedDataParallel(model)
    if fault.kind == "seed" and rank == fault.rank:
        torch.manual_seed(seed + 1)
        model.load_state_dict(Gpt(vocabulary).state_dict())
    now = [0]
    if fault.kind:
        arm(model, fault, rank, now)
    is_late = (fault.kind, fault.more, fault.rank) == ("slow", "input", rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = {
        "check_replicas": 1,
        "watch": {"every": 1, "stats": "full", "sinks": [{"kind": "Jsonl", "path": str(file)}]},
    }
    with dh.prepare(ddp, optimizer, config) as prepared:
        assert prepared.gradients is not None
        for step in range(steps):
            now[0] = step
            happens = step == fault.step
            time.sleep(fault.amount if is_late and step >= fault.step else 0.0)
            tokens, targets = batch_of(text, fault, seed, step, rank, vocabulary)
            if fault.kind == "dead" and happens:
                with torch.no_grad():
                    for parameter in model.get_submodule(fault.where).parameters():
                        parameter.zero_()
                        parameter.requires_grad_(True)
            if (
                fault.kind == "dead" and step >= fault.step
            ):  # it stays dead, as a layer does whose outputs are all cut off
                with torch.no_grad():
                    for parameter in model.get_submodule(fault.where).parameters():
                        parameter.zero_()
            loss = nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), targets.flatten())
            prepared.gradients.note_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            if fault.kind == "rate" and happens:
                optimizer.param_groups[0]["lr"] *= fault.amount
            if fault.kind == "state" and happens and rank == fault.rank:
                spoil_state(optimizer.state[model.get_submodule(fault.where).weight], fault)
            optimizer.step()


def spoil_state(state: dict[str, torch.Tensor], fault: Fault) -> None:
    state[fault.more].copy_(flipped(state[fault.more], fault))


def work(rank: int, world: int, port: int, cases: list[tuple[Fault, int, int]], folder: str) -> None:
    """All trainings of one rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what the watchers say of each fault
    dist.init_process_group("gloo")
    text, vocabulary = corpus()
    for number, (fault, seed, steps) in enumerate(cases):
        train(rank, fault, seed, steps, text, vocabulary, pathlib.Path(folder, f"{world}-{number}.jsonl"))
        if rank == 0 and number % 10 == 9:
            print(f"{world} ranks: {number + 1} of {len(cases)}", flush=True)
    dist.destroy_process_group()


def corpus() -> tuple[torch.Tensor, int]:
    """An old page of this project's documentation, which no longer changes, as the numbers of its characters."""
    text = (pathlib.Path(__file__).parent / "data" / "text.md").read_text(encoding="utf-8")
    common = [letter for letter, _ in collections.Counter(text).most_common(95)]
    places = {letter: place for place, letter in enumerate(common)}
    return torch.tensor([places.get(letter, 0) for letter in text]), len(common)


#: For each kind of fault the kinds of culprits that are right.
RIGHT: dict[str, set[str]] = {
    "forward": {"forward", "nonfinite"},
    "backward": {"backward", "nonfinite"},
    "gradient": {"gradient", "nonfinite"},
    "state": {"replicas", "update"},
    "batch": {"batch"},
    "rate": {"learning rate"},
    "slow": {"slow"},
    "seed": {"weights"},
    "dead": {"dead"},
    "nan": {"nonfinite"},
}


def wrong_in(fault: Fault, culprit: Culprit | None) -> list[str]:
    """What of a verdict is wrong: "missed", or some of "kind", "where", "rank" and "step"."""
    if culprit is None:
        return ["missed"]
    wrong = [] if culprit.kind in RIGHT[fault.kind] else ["kind"]
    names: dict[str, set[str]] = {
        "gradient": {f"{fault.where}.weight"},
        "state": {f"{fault.where}.weight"},
        "nan": {fault.where} if fault.more == "forward" else {f"{fault.where}.weight"},
        "slow": {fault.more},
    }
    if fault.kind in ("forward", "backward", "dead") or fault.kind in names:
        allowed = names.get(fault.kind, {fault.where})
        wrong += [] if culprit.where in allowed else ["where"]
    if fault.kind not in ("rate", "dead"):
        wrong += [] if culprit.rank == fault.rank else ["rank"]
    return wrong + ([] if abs(culprit.step - fault.step) <= 1 else ["step"])


def judge(file: pathlib.Path) -> list[Culprit]:
    """The culprits of the run in ``file``."""
    (run,) = read(file).runs
    return culprits(run)


def run_all(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    worlds = (2, 3, 4)
    cases: dict[int, list[tuple[Fault, int, int]]] = {world: [] for world in worlds}
    kinds = arguments.kinds or KINDS
    for number in range(arguments.faults):
        seed, world = arguments.seed + number, worlds[number // len(kinds) % 3]
        cases[world].append((draw(seed, kinds[number % len(kinds)], world), seed, STEPS))
    clean = Fault("", 0, -1, -1, "blocks.0.up")
    for number in range(-(-arguments.clean // arguments.length)):
        cases[worlds[number % 3]].append((clean, arguments.seed + 100_000 + number, arguments.length))
    begun = time.perf_counter()
    for place, world in enumerate(worlds):
        if cases[world] and not arguments.reread:
            mp.spawn(work, (world, arguments.port + place, cases[world], str(folder)), world)
    return score(cases, folder) | {"seconds": round(time.perf_counter() - begun)}


def score(cases: dict[int, list[tuple[Fault, int, int]]], folder: pathlib.Path) -> dict[str, Any]:
    """The table of right verdicts, and what is wrong in the others."""
    counts: dict[str, list[int]] = {}
    failures, alarms, clean_steps = [], [], 0
    for world, several in cases.items():
        for number, (fault, seed, steps) in enumerate(several):
            found = judge(folder / f"{world}-{number}.jsonl")
            if not fault.kind:
                clean_steps += steps
                alarms += [f"{world} ranks, seed {seed}: {culprit.text}" for culprit in found]
                continue
            wrong = wrong_in(fault, found[0] if found else None)
            counts.setdefault(fault.kind, [0, 0])
            counts[fault.kind][0] += not wrong
            counts[fault.kind][1] += 1
            if wrong:
                text = found[0].text if found else "nothing stands out"
                failures.append(f"{world}-{number} {wrong} {fault}: {text}")
    right, many = (sum(count[i] for count in counts.values()) for i in (0, 1))
    return {
        "right": right,
        "faults": many,
        "by_kind": {kind: f"{good} of {of}" for kind, (good, of) in counts.items()},
        "clean_steps": clean_steps,
        "false_alarms": len(alarms),
        "alarms": alarms,
        "failures": failures,
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="how many trainings with a fault")
    parser.add_argument("--clean", type=int, default=10_000, help="how many steps without a fault")
    parser.add_argument("--length", type=int, default=500, help="steps of a training without a fault")
    parser.add_argument("--seed", type=int, default=5_000, help="the first seed")
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--folder", type=pathlib.Path, help="where the logs stay; a temporary one by default")
    parser.add_argument("--reread", action="store_true", help="judge the logs in --folder again, without a training")
    parser.add_argument("--port", type=int, default=29_611)
    parser.add_argument("--json", type=pathlib.Path, help="where the result is written")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or pathlib.Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        result = run_all(arguments, folder)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
