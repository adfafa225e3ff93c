"""Healthy trainings that are unusual, and how many sentences of ``disthooks report`` blame something in them.

    make bench NAME=healthy                  # or: python benchmarks/healthy.py --seeds 0 1 2 --kinds frozen_later

Each kind of training is a class below: 110 steps of a tiny model on the CPU, in which nothing is wrong. A layer is
frozen, a loss is negative, an expert is chosen rarely. Each of them runs in one process, and in two processes with
data of their own under DistributedDataParallel (gloo). It is logged with three sets of statistics (the norm,
``stats.standard()``, ``stats.full()``), in each step, in each seventh and in each fiftieth. The report's own code then
reads the log. Every sentence that says that something went wrong is a false alarm: there should be none. ``--busy 4``
has four more processes compute all the time, as on a machine that does other work too.

``--draws`` adds logs of independent numbers, so many steps of each of some distributions, on one rank and on two: the
report promises at most one sentence in 100,000 such steps.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

import disthooks as dh
from disthooks.report.log import read
from disthooks.report.loop import changes
from disthooks.report.sentences import verdict
from disthooks.report.timeline import timeline

STEPS = 110
SETS: dict[str, Callable[[], Any]] = {
    "norm": lambda: [dh.stats.Norm(), dh.stats.Loss()],
    "standard": dh.stats.standard,
    "full": dh.stats.full,
}
EVERY = (1, 7, 50)
RESULT = pathlib.Path(__file__).parent / "results" / "healthy.json"
_BLAMES = re.compile(r"(Steps?|Rank) \d")
KINDS: dict[str, type[Training]] = {}  # each class below, by its name


class Training:
    """A training of a small model on a task that does not change; each kind changes one thing."""

    rate, batch = 3e-3, 16

    def __init_subclass__(cls) -> None:
        name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls.__name__).strip("_")
        KINDS[name] = cls

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.chance = random.Random(seed)
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.model = self.built()
        self.optimizer = self.optimized()
        self.forward: Callable[[int], torch.Tensor] = self.loss

    def built(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def optimized(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.rate)

    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return torch.randn(many or self.batch, 8)

    def targets(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.teacher(x) + 0.3 * torch.randn(len(x), 4)

    def before(self, step: int) -> None:
        """What the loop changes before a step."""

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        return functional.mse_loss(self.model(x), self.targets(x))

    def step(self, step: int, note: Callable[[torch.Tensor], Any]) -> None:
        self.before(step)
        self.optimizer.zero_grad()
        loss = self.forward(step)
        note(loss)
        loss.backward()
        self.optimizer.step()


class Plain(Training):
    pass


class PlainSgd(Training):
    def optimized(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


# -- losses below zero, and losses that are zero at times


class Critic(Training):
    """The loss of a Wasserstein critic, of both signs."""

    def loss(self, step: int) -> torch.Tensor:
        return self.model(torch.randn(16, 8)).mean() - self.model(torch.randn(16, 8) + 0.3).mean()


class PolicyGradient(Training):
    def loss(self, step: int) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=self.model(self.inputs(step)))
        action = chosen.sample()
        return -(chosen.log_prob(action) * torch.randn(self.batch)).mean()


class SparseAdvantages(Training):
    """Rewards are rare, so that most steps have neither a loss nor a gradient."""

    def loss(self, step: int) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=self.model(self.inputs(step)))
        reward = (torch.rand(self.batch) < 0.02) * torch.randn(self.batch)
        return -(chosen.log_prob(chosen.sample()) * reward).mean()


class Density(Training):
    """The negative log-likelihood of a density, which falls below zero."""

    def loss(self, step: int) -> torch.Tensor:
        mean, spread = self.model(self.inputs(step)).chunk(2, 1)
        return functional.gaussian_nll_loss(mean, torch.zeros_like(mean), (3 * spread - 2).exp())


class TripletMargin(Training):
    """The loss is exactly 0 once all triplets are apart."""

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        return functional.triplet_margin_loss(self.model(x), self.model(x + 0.01), self.model(-x), margin=0.5)


# -- parameters that begin or end to train


class UnfrozenLater(Training):
    def before(self, step: int) -> None:
        self.model[0].requires_grad_(step >= 50)


class FrozenLater(Training):
    def before(self, step: int) -> None:
        self.model[0].requires_grad_(step < 50)


class UnfrozenOneByOne(Training):
    def before(self, step: int) -> None:
        for place, begin in ((0, 70), (2, 35)):
            self.model[place].requires_grad_(step >= begin)


class RateOfAGroupZero(Training):
    def optimized(self) -> torch.optim.Optimizer:
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2:].parameters()}]
        return torch.optim.AdamW(groups, lr=self.rate)

    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * (step >= 50)


class Lora(Training):
    def built(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
        model.add_module("down", nn.Linear(8, 2, bias=False))
        model.add_module("up", nn.Linear(2, 4, bias=False))
        nn.init.zeros_(model.up.weight)
        return model

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        base = self.model[2](self.model[1](self.model[0](x)))
        return functional.mse_loss(base + self.model.up(self.model.down(x)), self.targets(x))


class ReplacedLayer(Training):
    """A layer is started again from new weights, in place."""

    def before(self, step: int) -> None:
        if step == 50:
            self.model[2].reset_parameters()


class DiscriminatorFirst(Training):
    """One part alone trains first; then the two parts take turns."""

    def before(self, step: int) -> None:
        is_first = step < 30 or step % 2 == 0
        self.model[:2].requires_grad_(not is_first)
        self.model[2:].requires_grad_(is_first)


# -- parts of the model that do not work in each step


class Parts(Training):
    """A trunk and four parts of which a step uses some."""

    parts = 4

    def built(self) -> nn.Module:
        parts = nn.ModuleList(nn.Linear(16, 4) for _ in range(self.parts))
        return nn.ModuleDict({"trunk": nn.Sequential(nn.Linear(8, 16), nn.Tanh()), "parts": parts})

    def used(self, step: int) -> Any:
        return range(self.parts)

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        hidden = self.model.trunk(x)
        found = [functional.mse_loss(self.model.parts[part](hidden), self.targets(x)) for part in self.used(step)]
        return torch.stack(found).sum()


class RareExpert(Parts):
    """Each sample goes to one expert, one of which gets few of them and is multiplied by what it got."""

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        hidden, weights = self.model.trunk(x), torch.tensor([0.5, 0.3, 0.19, 0.005])
        gates = functional.one_hot(torch.multinomial(weights, self.batch, replacement=True), 4).float()
        columns = [gates[:, part : part + 1] for part in range(4)]
        out = sum(part(hidden * gate) * gate for part, gate in zip(self.model.parts, columns, strict=True))
        return functional.mse_loss(out, self.targets(x))


class AlternatingTasks(Parts):
    def used(self, step: int) -> Any:
        return [step % 2]


class RandomTasks(Parts):
    def used(self, step: int) -> Any:
        return [self.chance.choices(range(4), (8, 4, 2, 1))[0]]


class AuxiliaryHead(Parts):
    """A second loss in each ninth step."""

    def used(self, step: int) -> Any:
        return [0, 1] if step % 9 == 0 else [0]


class TasksInPhases(Parts):
    def used(self, step: int) -> Any:
        return [step // 28]


class StochasticDepth(Training):
    rate_of_drops = 0.3

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        hidden = self.model[1](self.model[0](x))
        keeps = float(self.chance.random() > self.rate_of_drops)
        hidden = hidden + self.model[3](self.model[2](hidden * keeps)) * keeps
        return functional.mse_loss(self.model[4](hidden), self.targets(x))


class StochasticDepthRare(StochasticDepth):
    rate_of_drops = 0.04


class ZeroedBranch(Training):
    """A branch is multiplied by a gate that is closed in some phases."""

    def built(self) -> nn.Module:
        model = super().built()
        model.add_module("gate", Gate())
        return model

    def before(self, step: int) -> None:
        self.model.gate.scale = float(step % 40 < 25)

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        hidden = self.model[1](self.model[0](x))
        hidden = hidden + self.model.gate(self.model[3](self.model[2](hidden)))
        return functional.mse_loss(self.model[4](hidden), self.targets(x))


class Gate(nn.Module):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Mask(nn.Module):
    """Minus infinity where a token must not look."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)


class MaskOfInfinity(Training):
    def built(self) -> nn.Module:
        names = {"mask": Mask(), "one": nn.Linear(8, 16), "two": nn.Linear(8, 16), "out": nn.Linear(8, 4)}
        return nn.ModuleDict(names)

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(4, 6, 8)
        scores = self.model.one(x) @ self.model.two(x).mT / 4 + self.model.mask(x)
        return functional.mse_loss(self.model.out(scores.softmax(-1) @ x), x[..., :4].cumsum(1) / 3)


class RareRows(Training):
    """Embeddings of which many rows are rare."""

    def built(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(200, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(self, step: int) -> torch.Tensor:
        words = (torch.rand(self.batch).pow(4) * 200).long()
        return functional.cross_entropy(self.model(words), words % 4)


class RareTable(Parts):
    """A table of embeddings that a step has use for in one of 15."""

    def used(self, step: int) -> Any:
        return [0, 3] if self.chance.random() < 1 / 15 else [0]


# -- data


class RandomLengths(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step, self.chance.choice((2, 4, 8, 16, 64)))


class BatchRamp(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step, 4 * 2 ** (step // 25))


class SmallLastBatch(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step, 1 if step % 20 == 19 else 16)


class Curriculum(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step) * (0.5 + step / 60)


class CurriculumInPhases(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step) * (0.5, 0.8, 1.2, 1.8)[step // 28]


class CyclicData(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step) * (1 + 0.8 * math.sin(step / 5))


class LabelNoise(Training):
    def targets(self, x: torch.Tensor) -> torch.Tensor:
        is_noise = torch.rand(len(x), 1) < 0.1
        return torch.where(is_noise, 2 * torch.randn(len(x), 4), super().targets(x))


class HeavyTails(Training):
    def targets(self, x: torch.Tensor) -> torch.Tensor:
        return super().targets(x) + 0.1 * torch.distributions.StudentT(3.0).sample((len(x), 4))


class FewSamples(Training):
    batch = 1


class SparseInputs(Training):
    def inputs(self, step: int, many: int | None = None) -> torch.Tensor:
        return super().inputs(step) * (torch.rand(self.batch, 8) < 0.1)


# -- the loop


class WarmRestarts(Training):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * (1.01 + math.cos(math.pi * (step % 30) / 30)) / 2


class WarmUp(Training):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (step + 1) / 60)


class OneCycle(Training):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * 10 ** (-abs(step - 40) / 30)


class RateDrops(Training):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * 0.1 ** (step // 40)


class DecaySwitchedOn(Training):
    def before(self, step: int) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.5 * (step >= 50)


class DropoutSwitchedOff(Training):
    def built(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))

    def before(self, step: int) -> None:
        self.model.train(step < 50)


class RewardScale(Training):
    """The loss is scaled by what it was so far."""

    def loss(self, step: int) -> torch.Tensor:
        found = super().loss(step)
        self.mean = 0.9 * getattr(self, "mean", float(found.detach())) + 0.1 * float(found.detach())
        return found / self.mean


class LossScale(Training):
    """Scaled as for float16 and unscaled before the step: the scale doubles, and a step is left out at times."""

    def step(self, step: int, note: Callable[[torch.Tensor], Any]) -> None:
        self.optimizer.zero_grad()
        loss = self.forward(step)
        note(loss)
        scale = 2.0 ** (8 + step // 20)
        (loss * scale).backward()
        for parameter in self.model.parameters():
            parameter.grad.div_(scale)
        self.optimizer.step()


class SeveralLosses(Training):
    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        out = self.model(x)
        return functional.mse_loss(out, self.targets(x)) + 0.1 * out.abs().mean() + max(0, step - 60) / 200 * out.std()


class LossSwitchedOn(Training):
    """A small penalty joins at step 60."""

    def loss(self, step: int) -> torch.Tensor:
        found = super().loss(step)
        return found + (0.05 * self.model[0].weight.square().sum() if step >= 60 else 0.0)


class AverageOfWeights(Training):
    """A copy of the model follows it, and is evaluated each tenth step."""

    def before(self, step: int) -> None:
        if not step:
            self.average = copy.deepcopy(self.model)
        for slow, fast in zip(self.average.parameters(), self.model.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)


class EvaluationInside(Training):
    """The model itself is evaluated between steps, on other data."""

    def before(self, step: int) -> None:
        if step % 10 == 5:
            self.model.eval()
            with torch.no_grad():
                self.model(3 * torch.randn(64, 8))
            self.model.train()


class Accumulated(Training):
    def step(self, step: int, note: Callable[[torch.Tensor], Any]) -> None:
        self.optimizer.zero_grad()
        for _ in range(1 + step // 30):
            loss = self.forward(step)
            note(loss)
            (loss / (1 + step // 30)).backward()
        self.optimizer.step()


class Adversary(Training):
    """A generator against a discriminator that has an optimizer of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.other = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.of_other = torch.optim.AdamW(self.other.parameters(), lr=self.rate)

    def loss(self, step: int) -> torch.Tensor:
        x = self.inputs(step)
        made, true = self.model(x), self.targets(x)
        self.of_other.zero_grad()
        wrong = functional.softplus(self.other(made.detach())) + functional.softplus(-self.other(true))
        wrong.mean().backward()
        self.of_other.step()
        return functional.softplus(-self.other(made)).mean()


class Resumed(Training):
    """The weights and the optimizer are those of an earlier training."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        for step in range(60):
            self.step(step, lambda loss: None)


class Converged(Training):
    """A task that is learned exactly: gradients fall by decades."""

    rate = 2e-2

    def targets(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * 0.1


class SignSteps(Training):
    def optimized(self) -> torch.optim.Optimizer:
        return torch.optim.Rprop(self.model.parameters(), lr=1e-3)


class Normalised(Training):
    def built(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Recurrent(Training):
    """Sequences of random lengths."""

    def built(self) -> nn.Module:
        return nn.ModuleDict({"cell": nn.GRU(8, 16, batch_first=True), "out": nn.Linear(16, 4)})

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(8, self.chance.randrange(2, 12), 8)
        return functional.mse_loss(self.model.out(self.model.cell(x)[0][:, -1]), x.mean(1)[:, :4])


del KINDS["parts"]  # a base class


class Case(NamedTuple):
    """One training, and how it is logged."""

    ranks: int
    kind: str
    statistics: str
    every: int
    seed: int

    @property
    def way(self) -> str:
        return f"{self.statistics}/{self.every}/{self.seed}, {self.ranks} rank{'s' * (self.ranks > 1)}"

    def file(self, folder: pathlib.Path) -> pathlib.Path:
        return folder / f"{'-'.join(map(str, self))}.jsonl"


class LossOfRank(nn.Module):
    """What DistributedDataParallel wraps: its forward is the loss of a step of this rank."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self._loss = training.model, training.loss

    def forward(self, step: int) -> torch.Tensor:
        return self._loss(step)


def logged(case: Case, file: pathlib.Path, rank: int = 0) -> None:
    """One training, logged to ``file``."""
    training = KINDS[case.kind](case.seed)
    model: nn.Module = training.model
    if case.ranks > 1:
        torch.manual_seed(1_000 * case.seed + rank)  # the weights are the same on all ranks, and the data are not
        training.chance = random.Random(1_000 * case.seed + rank)
        model = nn.parallel.DistributedDataParallel(LossOfRank(training), find_unused_parameters=True)
        training.forward = model
    sinks, stats = [dh.sinks.Jsonl(file)], SETS[case.statistics]()
    with dh.gradients(model, training.optimizer, stats=stats, sinks=sinks, every=case.every) as watch:
        for step in range(STEPS):
            training.step(step, watch.note_loss)


def work(rank: int, port: int, cases: Sequence[Case], folder: pathlib.Path) -> None:
    """All trainings of one of several ranks."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(cases[0].ranks))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what DistributedDataParallel says of unused parameters
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for number, case in enumerate(cases):
        logged(case, case.file(folder), rank)
        if rank == 0 and number % 50 == 49:
            print(f"{case.ranks} ranks: {number + 1} of {len(cases)}", flush=True)
    dist.destroy_process_group()


def compute(parent: int) -> None:
    """Keep a core busy while the process ``parent`` lives."""
    while os.getppid() == parent:
        pass


@contextlib.contextmanager
def busy(many: int) -> Iterator[None]:
    """Some more processes that compute all the time."""
    processes = [mp.get_context("spawn").Process(target=compute, args=(os.getpid(),), daemon=True) for _ in range(many)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def blamed(file: pathlib.Path) -> list[str]:
    """The sentences of the report that blame something: of what went wrong, of a norm, of a rank.

    What the loop itself changed is told and blamed on nobody, so it does not count.
    """
    (run,) = read(file).runs
    found = timeline(run)
    noted = [culprit.text for culprit in found.culprits if culprit.strength == "noted"]
    noted += [change.text for change in changes(run)]
    told = [culprit.text for culprit in found.culprits if culprit.strength != "noted"]
    return told + [text for text in verdict(run, found) if _BLAMES.match(text) and text not in [*told, *noted]]


# -- independent numbers

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda normal: 3 + 0.3 * normal,
    "lognormal": lambda normal: (0.3 * normal).exp(),
    "wide lognormal": lambda normal: normal.exp(),
    "chi-square": lambda normal: normal.square(),
    "both signs": lambda normal: normal,
    "zero at times": lambda normal: normal.exp() * (normal > 1.0),
}


def drawn(kind: str, ranks: int, steps: int, seed: int, file: pathlib.Path) -> None:
    """A log of independent losses and gradient norms."""
    normal = torch.randn(steps, 2, ranks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    records = []
    for step, numbers in enumerate(DRAWS[kind](normal)):
        record: dict[str, Any] = {"step": step}
        for name, of_ranks in zip(("loss", "grad_norm"), numbers, strict=True):
            record[name] = float(of_ranks.mean())
            if ranks > 1:
                most = int(of_ranks.argmax())
                record |= {f"{name}/max_rank": float(of_ranks[most]), f"{name}/argmax_rank": most}
                record[f"{name}/mean_rank"] = record[name]
        records.append(record)
    records[0]["about"] = {"ranks": ranks}
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def train(arguments: argparse.Namespace, folder: pathlib.Path) -> list[Case]:
    """Make all trainings, each with a log in ``folder``."""
    ways = itertools.product(
        arguments.ranks, arguments.kinds or KINDS, arguments.sets, arguments.every, arguments.seeds
    )
    cases = [Case(*way) for way in ways]
    if not arguments.reread:
        for case in cases:
            case.file(folder).unlink(missing_ok=True)
        with busy(arguments.busy):
            for case in [case for case in cases if case.ranks == 1]:
                with contextlib.redirect_stderr(io.StringIO()):
                    logged(case, case.file(folder))
            for ranks in {case.ranks for case in cases if case.ranks > 1}:
                of_ranks = [case for case in cases if case.ranks == ranks]
                mp.spawn(work, (arguments.port + ranks, of_ranks, folder), ranks)
    return cases


def main(words: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--every", nargs="*", type=int, default=EVERY)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--busy", type=int, default=0, help="processes that compute all the time beside the trainings")
    parser.add_argument("--port", type=int, default=29_711)
    parser.add_argument("--draws", type=int, default=20_000, help="steps of each kind of independent numbers")
    parser.add_argument("--folder", type=pathlib.Path, help="where the logs stay; a temporary one by default")
    parser.add_argument("--reread", action="store_true", help="judge the logs in --folder again, without a training")
    parser.add_argument("--json", type=pathlib.Path, default=RESULT, help="where the result is written")
    arguments = parser.parse_args(words)
    begun = time.perf_counter()
    blames = collections.defaultdict[str, list[str]](list)
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or pathlib.Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "drawn.jsonl"
        cases = train(arguments, folder)
        for case in cases:
            blames[case.kind] += [f"{case.way}: {text}" for text in blamed(case.file(folder))]
        draws = {}
        for kind in DRAWS if arguments.draws else ():
            for ranks in (1, 2):
                drawn(kind, ranks, arguments.draws, arguments.seeds[0], file)
                draws[f"{kind}, {ranks} ranks"] = blamed(file)
    for kind, texts in [*blames.items(), *draws.items()]:
        print(f"{kind:24} {len(texts):3}  {texts[0] if texts else ''}")
    result = {
        "kinds": len(blames),
        "trainings": len(cases),
        "ranks": arguments.ranks,
        "seeds": arguments.seeds,
        "busy_processes": arguments.busy,
        "sentences_that_blame": sum(map(len, blames.values())),
        "trainings_blamed": len({(kind, text.split(":")[0]) for kind, texts in blames.items() for text in texts}),
        "steps_drawn": len(draws) * arguments.draws,
        "sentences_about_draws": sum(map(len, draws.values())),
        "seconds": round(time.perf_counter() - begun),
        "blames": {kind: texts for kind, texts in [*blames.items(), *draws.items()] if texts},
    }
    print(json.dumps({name: value for name, value in result.items() if name != "blames"}, indent=1))
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
