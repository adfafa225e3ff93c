"""Faults put into the training of a small GPT on several ranks, and whether ``disthooks report`` names them.

    make bench NAME=faults                   # or: python benchmarks/faults.py --faults 200 --clean 10000

Two to four processes train a GPT of 30,000 parameters on text under DistributedDataParallel, ``fully_shard`` or ZeRO 2
(gloo), one training after the other. In each training one fault happens, at a random step, on a random rank, in a
random layer:

- ``forward``, ``backward``: a bit of one element of a product flips, in the output of a layer, or in the gradient of
  its input;
- ``gradient``: a bit of one element of one rank's gradient flips, before the reduction;
- ``weight``, ``state``: a bit of one element of a weight, or of the optimizer's state, flips on one rank;
- ``batch``: one rank gets random tokens, or wrong targets;
- ``rate``: the learning rate jumps;
- ``slow``: one rank sleeps in each step, before its forward or in it;
- ``seed``: one rank begins with other weights;
- ``dead``: all weights of a layer become zero on all ranks;
- ``nan``: one element of a layer's output, or of one gradient, becomes NaN;
- ``two``: two of them in one training: a slow rank and a bit that flips, or a NaN ten steps after a bit that flips.

The bit is one of the exponent, and its element becomes at least 256 times the largest of its tensor: what a smaller
change does to a norm is less than what a batch does, and ``disthooks diff`` finds it. By default ``stats: full`` logs
every step, and copies are compared after each; ``--ways`` takes other engines, statistics and comparisons:

    python benchmarks/faults.py --ways ddp/readme/0 fsdp2/standard/10

A fourth word makes the training itself unusual, though it is healthy without the fault:

    python benchmarks/faults.py --ways ddp/full/1/{mask,depth,negative,frozen,lengths} --faults 24

- ``mask``: a module returns minus infinity where a token must not look;
- ``depth``: stochastic depth, each part of a block is left out in three steps of ten;
- ``negative``: the loss is below 0 for the most part of the training;
- ``frozen``: the first block begins to train in step 20;
- ``lengths``: each rank has sequences of another length in each step.

Three things are counted. **Power**: the first sentence is right in all that these statistics can know of the kind, the
module or parameter, the rank, and a range of steps that holds the step (:func:`knows`). **Honesty**: no sentence is
false, whatever was looked at (:func:`false_in`). **Alarms**: sentences about trainings without a fault.
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
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import disthooks as dh
from disthooks.report.culprit import Culprit
from disthooks.report.log import read
from disthooks.report.timeline import timeline

LAYERS, WIDTH, TOKENS, BATCH = 3, 32, 32, 4
STEPS, LONG = 70, 220  # of a training of which every step is logged, and of one of which every tenth is
FACTOR = 256.0
KINDS = ("forward", "backward", "gradient", "state", "batch", "rate", "slow", "seed", "dead", "nan", "weight", "two")
ENGINES = ("ddp", "fsdp2", "zero2")
PRODUCTS = [f"blocks.{i}.{name}" for i in range(LAYERS) for name in ("qkv", "out", "up", "down")]


#: Trainings that are unusual.
UNUSUAL = ("mask", "depth", "negative", "frozen", "lengths")
LEFT_OUT, TRAINS_FROM, SUBTRACTED = 0.3, 20, 4.0


class Mask(nn.Module):
    """Minus infinity where a token must not look."""

    def forward(self, tokens: int) -> torch.Tensor:
        return torch.full((tokens, tokens), float("-inf")).triu(1)


class Attention(nn.Module):
    def __init__(self, width: int, has_mask: bool = False) -> None:
        super().__init__()
        self.mask = Mask() if has_mask else None
        self.keeps = (1.0, 1.0)  # 0.0 for a part that this step leaves out
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.keeps
        parts = self.qkv(self.norm1(x) * first).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        mask = None if self.mask is None else self.mask(x.shape[1])
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2)) * first
        return x + self.down(self.act(self.up(self.norm2(x) * second))) * second


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, training: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Attention(WIDTH, training == "mask") for _ in range(LAYERS))
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


class Way(NamedTuple):
    """An engine, what is logged, after how many steps copies are compared (0 for never), and what is unusual."""

    engine: str
    statistics: str
    checks: int
    training: str = ""

    @property
    def steps(self) -> int:
        return LONG if self.statistics == "readme" else STEPS

    def config(self, file: pathlib.Path) -> dict[str, Any]:
        """What disthooks is told; "readme" is what README shows."""
        watch: dict[str, Any] = {"every": 1, "stats": self.statistics}
        if self.statistics == "readme":
            readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
            watch = yaml.safe_load(readme.split("```yaml\n")[1].split("```")[0])["watch"]
        watch["sinks"] = [{"kind": "Jsonl", "path": str(file)}]
        return {"watch": watch} | ({"check_replicas": self.checks} if self.checks else {})


class Case(NamedTuple):
    """One training."""

    way: Way
    faults: tuple[Fault, ...]
    seed: int
    steps: int


def draw(seed: int, kind: str, world: int, way: Way) -> tuple[Fault, ...]:
    """The faults of one training."""
    if kind != "two":
        return (draw_one(seed, kind, world, way.steps),)
    first = draw_one(seed, "forward", world, way.steps)
    if seed % 2:
        return (draw_one(seed, "slow", world, way.steps)._replace(step=first.step // 2), first)
    # the rank goes on with the step of the first fault, whose jump is over by then
    return (first._replace(step=first.step - 10), draw_one(seed + 1, "nan", world, way.steps)._replace(step=first.step))


def draw_one(seed: int, kind: str, world: int, steps: int) -> Fault:
    """A fault of ``kind``, in the last two thirds of the steps."""
    chance = random.Random(seed)
    begin = 25 if steps == STEPS else 150
    step, rank, where = chance.randrange(begin + 10, steps - 15), chance.randrange(world), chance.choice(PRODUCTS)
    more, amount = "", 0.0
    if kind == "batch":
        more = chance.choice(("random", "targets"))
    elif kind == "rate":
        amount = chance.choice((4.0, 10.0, 30.0))
    elif kind == "slow":
        more, amount = chance.choice(("input", "forward")), chance.uniform(0.15, 0.3)
        step -= 60 if steps == LONG else 0  # so that some steps after it are logged
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


def arm(model: Gpt, fault: Fault, rank: int, now: list[int], is_sharded: bool) -> None:
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
        # fully_shard makes other parameters, so a NaN begins in the backward of the module there
        "nan gradient": lambda: (
            module.register_forward_pre_hook(on_input) if is_sharded else module.weight.register_hook(on_gradient)
        ),
        "slow forward": lambda: module.register_forward_hook(be_slow),
    }.get(f"{fault.kind} {fault.more}".strip(), lambda: None)()


def batch_of(
    text: torch.Tensor, fault: Fault | None, seed: int, step: int, rank: int, vocabulary: int, training: str
) -> Any:
    """The tokens and the targets of one rank in one step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    tokens = TOKENS if training != "lengths" else int(torch.randint(4, TOKENS + 1, (), generator=generator))
    begins = torch.randint(len(text) - TOKENS - 1, (BATCH,), generator=generator)
    whole = torch.stack([text[begin : begin + tokens + 1] for begin in begins])
    if fault is not None and (step, rank) == (fault.step, fault.rank):
        if fault.more == "random":
            whole = torch.randint(vocabulary, whole.shape, generator=generator)
        else:
            return whole[:, :-1], torch.randint(vocabulary, (BATCH, tokens), generator=generator)
    return whole[:, :-1], whole[:, 1:]


def change(model: Gpt, case: Case, step: int) -> None:
    """Change what an unusual training changes before a step. In the step of a fault nothing is left out."""
    if case.way.training == "frozen":
        model.blocks[0].requires_grad_(step >= TRAINS_FROM)
    if case.way.training == "depth":
        chance, happens = random.Random(1009 * case.seed + step), any(fault.step == step for fault in case.faults)
        for block in model.blocks:
            first, second = (float(chance.random() > LEFT_OUT or happens) for _ in range(2))
            block.keeps = (first, second)


def train(rank: int, case: Case, text: torch.Tensor, vocabulary: int, file: pathlib.Path) -> None:
    """One training, logged to ``file``."""
    torch.manual_seed(case.seed)
    model, now = Gpt(vocabulary, case.way.training), [0]
    of_kind = {fault.kind: fault for fault in case.faults}
    for fault in case.faults:
        arm(model, fault, rank, now, case.way.engine == "fsdp2")
    wrapped, optimizer = wrap(model, case.way)
    if "seed" in of_kind and rank == of_kind["seed"].rank:
        torch.manual_seed(case.seed + 1)
        model.load_state_dict(Gpt(vocabulary, case.way.training).state_dict())
    with dh.prepare(wrapped, optimizer, case.way.config(file)) as prepared:
        assert prepared.gradients is not None
        for step in range(case.steps):
            now[0] = step
            change(model, case, step)
            for fault in case.faults:
                if (fault.kind, fault.more, fault.rank) == ("slow", "input", rank) and step >= fault.step:
                    time.sleep(fault.amount)
            bad = of_kind.get("batch")
            tokens, targets = batch_of(text, bad, case.seed, step, rank, vocabulary, case.way.training)
            with torch.no_grad():
                if "dead" in of_kind and step >= of_kind["dead"].step:  # it stays dead
                    for parameter in model.get_submodule(of_kind["dead"].where).parameters():
                        parameter.zero_()
                if "weight" in of_kind and step == of_kind["weight"].step and rank == of_kind["weight"].rank:
                    weight = local(model.get_submodule(of_kind["weight"].where).weight)
                    weight.copy_(flipped(weight, of_kind["weight"]))
            loss = nn.functional.cross_entropy(wrapped(tokens).flatten(0, 1), targets.flatten())
            loss = loss - SUBTRACTED * (case.way.training == "negative")
            prepared.gradients.note_loss(loss)
            step_of(wrapped, optimizer, loss, case.faults, step, rank, model)


def wrap(model: Gpt, way: Way) -> tuple[Any, Any]:
    """The model as the engine has it, and its optimizer."""
    if way.engine == "zero2":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        made = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
            config=config,
            dist_init_required=False,
        )
        return made[0], made[0]
    if way.engine == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*model.blocks, model]:
            fully_shard(block, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=2e-3)
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=way.training == "frozen")
    return ddp, torch.optim.AdamW(model.parameters(), lr=2e-3)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def step_of(
    wrapped: Any, optimizer: Any, loss: torch.Tensor, faults: tuple[Fault, ...], step: int, rank: int, model: Gpt
) -> None:
    """Backward and the optimizer's step, with what goes wrong there."""
    is_deepspeed = optimizer is wrapped
    if is_deepspeed:
        wrapped.backward(loss)
    else:
        optimizer.zero_grad()
        loss.backward()
    for fault in faults:
        if fault.kind == "rate" and step == fault.step:
            for group in optimizer.optimizer.param_groups if is_deepspeed else optimizer.param_groups:
                group["lr"] *= fault.amount
        if fault.kind == "state" and step == fault.step and rank == fault.rank:
            state = local(optimizer.state[model.get_submodule(fault.where).weight][fault.more])
            state.copy_(flipped(state, fault))
    optimizer.step()


def work(rank: int, world: int, port: int, cases: list[Case], folder: str) -> None:
    """All trainings of one rank."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what the watchers say of each fault
    dist.init_process_group("gloo")
    text, vocabulary = corpus()
    for number, case in enumerate(cases):
        train(rank, case, text, vocabulary, pathlib.Path(folder, f"{world}-{number}.jsonl"))
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
    "weight": {"replicas", "forward", "nonfinite"},
    "batch": {"batch"},
    "rate": {"learning rate"},
    "slow": {"slow"},
    "seed": {"weights"},
    "dead": {"dead"},
    "nan": {"nonfinite"},
}
#: A jump without a cause, and a model that can no longer be saved, may come of each of them.
LESS = {"jump", "nonfinite", "loss"}


def knows(way: Way, fault: Fault, world: int) -> set[str]:
    """What a log can tell of a fault: some of "kind", "where", "rank" and "step"; nothing if it cannot see it."""
    kind = fault.kind
    of_all = kind in ("rate", "dead")  # it is so on all ranks
    everything = {"kind", "where", "step"} | (set() if of_all else {"rank"})
    if way.engine != "ddp" and kind in ("seed", "state", "gradient"):
        return set()  # nobody has a copy, and a gradient or a state of one rank is part of that of all
    if way.engine == "fsdp2" and kind == "slow" and fault.more == "forward":
        return set()  # the others wait for its weights in their own forward
    if kind in ("seed", "state"):
        if not way.checks:
            return set()
        # Of two copies it can be unknown which is right.
        return everything - ({"rank"} if world == 2 else set()) - ({"where"} if kind == "seed" else set())
    sees_outputs = way.statistics == "full" or (way.statistics == "readme" and fault.step % 10 == 0)
    if kind == "nan" and fault.more == "forward" and not sees_outputs:
        everything -= {"where"}  # which output it was is known if the outputs of this step are logged
    if way.statistics == "standard":
        found = everything if kind == "nan" else set()
        has_copies = kind == "weight" and way.engine == "ddp" and way.checks
        return found | ({"kind", "where", "step"} if has_copies else set())
    if kind == "weight":
        return {"kind", "step"} | ({"where"} if way.engine == "ddp" else set())
    if way.statistics == "readme" and kind in ("forward", "backward", "gradient", "batch") and fault.step % 10:
        return set()  # the step is not logged, and what it did does not last
    return everything


def places(fault: Fault) -> set[str]:
    """The modules and parameters that are right to name."""
    if fault.kind in ("state", "gradient"):
        return {f"{fault.where}.weight"}
    if fault.kind == "weight":
        return {fault.where, f"{fault.where}.weight"}
    if fault.kind == "nan" and fault.more == "gradient":
        return {fault.where, f"{fault.where}.weight"}
    return {"slow": {fault.more}, "seed": {""}, "rate": {""}, "batch": {""}}.get(fault.kind, {fault.where})


def wrong_in(fault: Fault, culprit: Culprit | None, known: set[str]) -> list[str]:
    """What of a verdict is wrong: "missed", or some of what can be known."""
    if culprit is None:
        return ["missed"]
    is_right = {
        "kind": culprit.kind in RIGHT[fault.kind],
        "where": culprit.where in places(fault),
        "rank": culprit.rank == fault.rank,
        "step": culprit.first - 1 <= fault.step <= culprit.step + 1,
    }
    return [name for name, right in is_right.items() if name in known and not right]


def false_in(faults: tuple[Fault, ...], culprit: Culprit) -> list[str]:
    """What of a sentence is false, whatever the log can tell: of each fault it may say less, and nothing else."""
    wrong = []
    for fault in faults:
        if culprit.step < fault.step:
            wrong.append("it is said of a step before it")
        elif culprit.rank not in (None, fault.rank) or (culprit.rank is not None and fault.kind in ("rate", "dead")):
            wrong.append("rank")
        elif culprit.first > fault.step or culprit.kind in LESS:
            return []  # it came of the fault later, or names no cause
        elif culprit.kind not in RIGHT[fault.kind]:
            wrong.append("kind")
        elif culprit.where and culprit.where not in places(fault):
            wrong.append("where")
        else:
            return []
    return wrong


def found_in(file: pathlib.Path) -> list[Culprit]:
    """The culprits of the run in ``file``, without what is noted, which is no fault."""
    (run,) = read(file).runs
    return [culprit for culprit in timeline(run).culprits if culprit.kind != "noted"]


#: There is no gradient of one rank in fully_shard's model, and DeepSpeed gives all ranks the weights of the first one.
NOT_ON = {"fsdp2": ("gradient", "seed"), "zero2": ("state", "seed")}


def run_all(arguments: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    worlds = (2, 3, 4)
    cases: dict[int, list[Case]] = {world: [] for world in worlds}
    kinds = arguments.kinds or KINDS
    for way in arguments.ways:
        for number in range(arguments.faults):
            seed, world = arguments.seed + number, worlds[(number + number // len(kinds)) % 3]
            kind = kinds[number % len(kinds)]
            if kind in NOT_ON.get(way.engine, ()):
                continue
            cases[world].append(Case(way, draw(seed, kind, world, way), seed, way.steps))
        for number in range(-(-arguments.clean // arguments.length)):
            cases[worlds[number % 3]].append(Case(way, (), arguments.seed + 100_000 + number, arguments.length))
    begun = time.perf_counter()
    for place, world in enumerate(worlds):
        if cases[world] and not arguments.reread:
            mp.spawn(work, (world, arguments.port + place, cases[world], str(folder)), world)
    ways = {"/".join(map(str, way)).rstrip("/"): score(cases, way, folder) for way in arguments.ways}
    first, *others = ways.values()
    return {**first, "seconds": round(time.perf_counter() - begun)} | ({"ways": ways} if others else {})


def score(cases: dict[int, list[Case]], way: Way, folder: pathlib.Path) -> dict[str, Any]:
    """The table of right verdicts, and what is wrong in the others."""
    counts: dict[str, list[int]] = {}
    failures, untrue, alarms, clean_steps = [], [], [], 0
    several = [(world, number, case) for world in cases for number, case in enumerate(cases[world])]
    for world, number, case in several:
        if case.way != way:
            continue
        found = found_in(folder / f"{world}-{number}.jsonl")
        if not case.faults:
            clean_steps += case.steps
            alarms += [f"{world} ranks, seed {case.seed}: {culprit.text}" for culprit in found]
            continue
        untrue += [
            f"{world}-{number} {false} {case.faults}: {culprit.text}"
            for culprit in found
            if (false := false_in(case.faults, culprit))
        ]
        for place, fault in enumerate(case.faults):
            known = knows(way, fault, world)
            told = found[place] if place < len(found) else None
            wrong = wrong_in(fault, told, known)
            kind = fault.kind if len(case.faults) == 1 else "two"
            count = counts.setdefault(kind, [0, 0, 0])
            count[2] += 1
            if known:
                count[0] += not wrong
                count[1] += 1
                if wrong:
                    text = told.text if told else "nothing stands out"
                    failures.append(f"{world}-{number} {wrong} {fault}: {text}")
    right, many = (sum(count[i] for count in counts.values()) for i in (0, 1))
    return {
        "right": right,
        "faults": many,
        "by_kind": {kind: f"{good} of {of}" for kind, (good, of, _) in counts.items()},
        "cannot_be_known": {kind: all_ - of for kind, (_, of, all_) in counts.items() if all_ > of},
        "false_sentences": untrue,
        "clean_steps": clean_steps,
        "false_alarms": len(alarms),
        "alarms": alarms,
        "failures": failures,
    }


def way_of(word: str) -> Way:
    engine, statistics, checks, *training = word.split("/")
    if not set(training) <= set(UNUSUAL):
        raise argparse.ArgumentTypeError(f"no such training: {training[0]}; there are {', '.join(UNUSUAL)}")
    return Way(engine, statistics, int(checks), *training)


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="how many trainings with a fault")
    parser.add_argument("--clean", type=int, default=10_000, help="how many steps without a fault")
    parser.add_argument("--length", type=int, default=500, help="steps of a training without a fault")
    parser.add_argument("--seed", type=int, default=5_000, help="the first seed")
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument(
        "--ways",
        nargs="*",
        type=way_of,
        default=[way_of("ddp/full/1")],
        help="engine/statistics/comparisons[/training]: ddp, fsdp2 or zero2; readme, standard or full; after how many "
        f"steps, or 0; one of {', '.join(UNUSUAL)}",
    )
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
