"""What is done to gradients between backward and the optimizer's step, beside what a step of training takes.

    make bench NAME=gradients                # or: python benchmarks/gradients.py --rounds 15
    python benchmarks/gradients.py --device cuda
    python benchmarks/gradients.py --sizes "100 small" "2,000 small" --threads 1 2 --foreach

A decoder-only transformer with about 100 parameters (27 million elements) and one with about 2,000 (26 million) are
trained; "100 small" and "2,000 small" are so many parameters of 64 to 4,096 elements. After each backward the ways
below take turns on copies of the same gradients, and the optimizer steps; medians are printed and written as JSON with
the machine they came from. What our statistics do in hooks during backward is timed there and added to them:

- nothing: the optimizer's step alone, which all the others include;
- torch ``clip_grad_norm_`` (foreach), and Lightning's ``grad_norm`` (one number for each parameter);
- wandb.watch-style: a histogram of 64 bins of every gradient, taken to the host, by wandb's own code where it is
  installed;
- naive: eleven statistics of every gradient, each taken to the host;
- ours: ``ClipNorm`` in a step that is not logged, alone and with all statistics attached; all statistics of
  ``stats.standard()`` in every step, with what is logged read and made into a record; and with the norms of weights and
  updates too.

Both ways of clipping are also run with a limit that the norm does not reach.

The targets: ``ClipNorm`` takes at most the time of torch's, and with the optimizer's step at most 0.95 of it; in a step
that is not logged statistics cost nothing beside it, except in hooks; all statistics take at most 3% of a training step
on the CPU (1% on a GPU) and an eighth of the naive loop.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import Block
from torch import nn

import disthooks as dh
from disthooks.grads.attachment import Gradients
from disthooks.grads.local_hooks import LocalGradientHooks

Way = Callable[[], None]
SIZES = {  # name: blocks, width, sequences, tokens
    "100 parameters": (8, 512, 8, 512),
    "2,000 parameters": (166, 112, 16, 256),
    "small": (2, 64, 2, 16),
}
SMALL = {"100 small": 100, "2,000 small": 2000}  # name: parameters


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int, width: int, vocabulary: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Vectors(nn.Module):
    """Parameters of 64 to 4,096 elements, whose gradients are twice themselves."""

    def __init__(self, many: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64 * (1 + i % 64)) for i in range(many))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.square().sum() for weight in self.weights]).sum()


def naive(model: nn.Module) -> Iterator[float]:
    """Eleven statistics of each gradient, as they are written by hand."""
    for parameter in model.parameters():
        grad = parameter.grad
        assert grad is not None
        yield from (grad.norm(p).item() for p in (1, 2, float("inf")))
        yield from (grad.mean().item(), grad.std().item(), grad.min().item(), grad.max().item())
        yield from ((grad == 0).float().mean().item(), (~torch.isfinite(grad)).sum().item())
        yield torch.histc(grad.abs(), 64).sum().item()
        yield parameter.norm().item()


def ways_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Way] | str]:
    """For each way what makes it ready and returns what it does before the optimizer's step; or why it is absent."""
    parameters = list(model.parameters())

    def ours(every: int = 1, **options: Any) -> Callable[[], Way]:
        def attach() -> Way:
            watch = dh.gradients(model, optimizer, every=every, **options)
            optimizer.step()  # the first step is logged, and is not what most steps are
            watch.flush()
            attached.append(watch)
            return lambda: None

        return attach

    everything = dh.stats.standard()
    return {
        "nothing": lambda: lambda: None,
        "torch clip_grad_norm_": lambda: lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0) and None,
        "torch clip_grad_norm_ below the limit": lambda: (
            lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9) and None
        ),
        "lightning grad_norm": _lightning(model),
        "wandb.watch histograms": _wandb(model),
        "naive statistics": lambda: lambda: sum(naive(model)) and None,
        "disthooks ClipNorm": ours(rules=[dh.ClipNorm(1.0)], every=50),
        "disthooks ClipNorm below the limit": ours(rules=[dh.ClipNorm(1e9)], every=50),
        "disthooks ClipNorm, nothing logged": ours(rules=[dh.ClipNorm(1.0)], stats=everything, every=50),
        "disthooks all statistics": ours(stats=everything),
        "disthooks ClipNorm and all statistics": ours(rules=[dh.ClipNorm(1.0)], stats=everything),
        "disthooks all statistics, weights and updates": ours(
            stats=[*everything, dh.stats.Weights(), dh.stats.Updates()]
        ),
    }


attached: list[Gradients] = []


def _lightning(model: nn.Module) -> Callable[[], Way] | str:
    try:
        from lightning.pytorch.utilities import grad_norm
    except ImportError as error:
        return f"not installed: {error}"
    return lambda: lambda: grad_norm(model, 2) and None


def _wandb(model: nn.Module) -> Callable[[], Way] | str:
    """The code that ``wandb.watch(log="gradients")`` runs in a hook for every gradient, without a run to log to."""
    try:
        from wandb.integration.torch.wandb_torch import TorchHistory
    except ImportError as error:
        return f"not installed: {error}"

    class Log:
        """Takes what would be sent."""

        @staticmethod
        def _log(values: dict[str, Any], commit: bool = True) -> None:
            pass

    def attach() -> Way:
        import wandb

        history, wandb.run = TorchHistory(), Log()
        named = list(model.named_parameters())

        def all_of_them() -> None:
            for name, parameter in named:
                history.log_tensor_stats(parameter.grad, f"gradients/{name}")

        return all_of_them

    return attach


@contextlib.contextmanager
def timed_hooks() -> Iterator[list[float]]:
    """The seconds that the hooks of our statistics take in backward."""
    total, true = [0.0], LocalGradientHooks._hook

    def timed(self: LocalGradientHooks, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        begin = time.perf_counter()
        result = true(self, index, grad)
        total[0] += time.perf_counter() - begin
        return result

    LocalGradientHooks._hook = timed  # type: ignore[method-assign]
    try:
        yield total
    finally:
        LocalGradientHooks._hook = true  # type: ignore[method-assign]


class Turns:
    """The ways taking turns on the gradients of one backward."""

    def __init__(self, size: str, device: str, foreach: bool = False) -> None:
        torch.manual_seed(0)
        blocks, width, sequences, length = SIZES.get(size, SIZES["small"])
        self.model: nn.Module = Vectors(SMALL[size]) if size in SMALL else Decoder(blocks, width)
        self.model.to(device)
        self.tokens = torch.randint(0, 2048, (sequences, length), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=not foreach, foreach=foreach)
        self.ways = ways_of(self.model, self.optimizer)
        self.seconds: dict[str, list[float]] = {name: [] for name, way in self.ways.items() if callable(way)}
        self.hooks: list[float] = []
        self.training: list[float] = []

    def round(self, number: int) -> None:
        """One backward, then every way on its gradients; each round begins with another way, number -1 warms up."""
        self.optimizer.zero_grad()
        with timed_hooks() as in_hooks, dh.gradients(self.model, self.optimizer, stats=dh.stats.standard(), every=1):
            begin = self._now()
            self.model(self.tokens).backward()
            backward = self._now() - begin - in_hooks[0]
        kept = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        names = list(self.seconds)
        first = max(number, 0) % len(names)
        gc.disable()
        for name in [*names[first:], *names[:first]]:
            taken = self._step(name, kept)
            if number >= 0:
                self.seconds[name].append(taken)
        gc.enable()
        if number >= 0:
            self.training.append(backward + self.seconds["nothing"][-1])
            self.hooks.append(in_hooks[0])

    def _step(self, name: str, kept: list[torch.Tensor]) -> float:
        act = self.ways[name]()  # type: ignore[operator]
        for parameter, grad in zip(self.model.parameters(), kept, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)
        begin = self._now()
        act()
        self.optimizer.step()
        for watch in attached:
            watch.flush()
        taken = self._now() - begin
        while attached:
            attached.pop().remove()
        return taken

    def _now(self) -> float:
        if self.tokens.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Medians, and what they say of the targets."""
        medians = {name: statistics.median(times) for name, times in self.seconds.items()}
        over = {name: taken - medians["nothing"] for name, taken in medians.items()}
        step, hooks = statistics.median(self.training), statistics.median(self.hooks)
        over = {name: taken + hooks * ("all statistics" in name) for name, taken in over.items()}
        ours, clip = over["disthooks all statistics"], over["disthooks ClipNorm"]
        limit = 0.01 if self.tokens.is_cuda else 0.03
        whole = {
            name: medians[f"disthooks {name}"] / medians["torch clip_grad_norm_" + name.removeprefix("ClipNorm")]
            for name in ("ClipNorm", "ClipNorm below the limit")
        }
        targets = {
            **{f"{name} and step, against torch's": (ratio, 0.95) for name, ratio in whole.items()},
            "statistics that are not logged, against ClipNorm and step": (
                medians["disthooks ClipNorm, nothing logged"] / medians["disthooks ClipNorm"],
                1.02,
            ),
            "clip against torch's": (clip / over["torch clip_grad_norm_"], 1.0),
            "all statistics, share of a training step": (ours / step, limit),
            "all statistics against the naive loop": (ours / over["naive statistics"], 0.125),
        }
        return {
            "parameters": len(list(self.model.parameters())),
            "elements": sum(p.numel() for p in self.model.parameters()),
            "training_step_seconds": round(step, 4),
            "added_milliseconds": {name: round(1e3 * taken, 3) for name, taken in over.items()},
            "not_run": {name: way for name, way in self.ways.items() if isinstance(way, str)},
            "targets": {
                k: {"figure": round(v, 4), "at_most": most, "met": v <= most} for k, (v, most) in targets.items()
            },
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--sizes", nargs="+", default=[name for name in SIZES if name != "small"], choices=[*SIZES, *SMALL]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--foreach", action="store_true", help="AdamW(foreach=True), and not fused=True")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    results = {}
    for size, threads in itertools.product(options.sizes, options.threads):
        torch.set_num_threads(threads)
        turns = Turns(size, options.device, options.foreach)
        for number in range(-1, options.rounds):
            turns.round(number)
        size = size if len(options.threads) == 1 else f"{size}, {threads} threads"
        results[size] = turns.result()
        print(f"{size}: a training step takes {results[size]['training_step_seconds']:.3f} s")
        for name, taken in results[size]["added_milliseconds"].items():
            print(f"  {name:40s} {taken:10.2f} ms")
        for name, why in results[size]["not_run"].items():
            print(f"  {name:40s} {why}")
        for name, target in results[size]["targets"].items():
            print(f"  {name}: {target['figure']} of at most {target['at_most']}")
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine |= {"python": platform.python_version(), "torch": torch.__version__, "rounds": options.rounds}
    machine |= {"threads": options.threads, "optimizer": "AdamW, foreach" if options.foreach else "AdamW, fused"}
    machine |= {"gpu": torch.cuda.get_device_name()} if options.device.startswith("cuda") else {}
    out = options.json or pathlib.Path(__file__).parent / "results" / f"gradients-{options.device}.json"
    pathlib.Path(out).write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
