"""Spikes that are induced in the training of a GPT, and what each rule makes of them.

    make bench NAME=spikes                   # or: python benchmarks/spikes.py --seeds 10 --jobs 2

A GPT of a million parameters is trained on text (the sources of Python's standard library, as bytes) by AdamW, one
training after the other. In each training one fault happens, at a step that the seed draws:

- ``batch``: one batch of random bytes;
- ``rate``: the learning rate is four times as large for 20 steps;
- ``bits``: a bit of the exponent of one element flips in backward, in the gradient of a layer's output, so that its
  element becomes at least 256 times the largest.

Each training runs under every rule. Two figures come of each. The spike score is the share of steps whose loss is above
the mean of the 128 before by six standard deviations, as in OLMo's monitor. The loss is that on the same few windows of
held-out text before each step: a training batch of 256 bytes would hide a spike in its noise. The other figure is the
loss on 256 such windows at the end, less that of the training without a fault and without a rule.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import os
import pathlib
import platform
import random
import statistics
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

import disthooks as dh

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "demo"))

CONTEXT, BATCH = 32, 8
STEPS, WARMUP, RATE = 240, 30, 1e-2
KINDS = ("batch", "rate", "bits")
RULES: dict[str, Any] = {
    "nothing": lambda: [],
    "ClipNorm": lambda: [dh.SkipNonFinite(), dh.ClipNorm(1.0)],
    "ZClip": lambda: [dh.SkipNonFinite(), dh.ClipZScore()],
    "AdaGC": lambda: [dh.SkipNonFinite(), dh.AdaGC()],
    "SkipSpike": lambda: [dh.SkipNonFinite(), dh.SkipSpike()],
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Training(NamedTuple):
    """One training: the fault ("" for none), the rule, the seed, how many steps, and the size of the model."""

    kind: str
    rule: str
    seed: int
    steps: int = STEPS
    layers: int = 5
    width: int = 128

    @property
    def at(self) -> int:
        """The step of the fault."""
        return random.Random(self.seed).randrange(190, 220)


def flipped(grad: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy in which one bit of the exponent of one element is 1, where it was 0."""
    copy, chance = grad.detach().clone().contiguous(), random.Random(seed)
    bits, values, largest = copy.view(torch.int32).view(-1), copy.view(-1), float(copy.abs().max())
    while True:
        place, bit = chance.randrange(len(bits)), chance.randrange(23, 31)
        if not int(bits[place]) >> bit & 1:
            bits[place] |= 1 << bit
            if 256 * largest <= abs(float(values[place])) < math.inf:
                return copy
            bits[place] ^= 1 << bit


def run(training: Training) -> dict[str, Any]:
    """The losses of one training, and its loss on held-out text."""
    from text import batch, fixed_starts, load, windows

    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    text, model = load(), Gpt(training.layers, training.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.1, foreach=True)
    now, losses = [0], list[float]()
    held_out = windows(text.held_out, fixed_starts(text.held_out, BATCH, CONTEXT), CONTEXT)
    where = model.blocks[random.Random(training.seed + 1).randrange(training.layers)]

    def flip(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if training.kind == "bits" and now[0] == training.at and output.requires_grad:
            output.register_hook(lambda grad: flipped(grad, training.seed))

    where.register_forward_hook(flip)
    with dh.gradients(model, optimizer, rules=RULES[training.rule](), stats=[dh.stats.Loss()], every=1) as watch:
        for step in range(training.steps):
            now[0] = step
            tokens, targets = batch(text.train, BATCH, CONTEXT, training.seed, step, 0)
            if training.kind == "batch" and step == training.at:
                draw = torch.Generator().manual_seed(step)
                tokens, targets = (torch.randint(256, tokens.shape, generator=draw) for _ in range(2))
            is_fast = training.kind == "rate" and training.at <= step < training.at + 20
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * (4.0 if is_fast else 1.0)
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(float(model(*held_out)))
            loss = model(tokens, targets)
            loss.backward()
            watch.note_loss(loss)
            optimizer.step()
    with torch.no_grad():
        starts = fixed_starts(text.held_out, 256, CONTEXT)
        final = float(model(*windows(text.held_out, starts, CONTEXT)))
    return {"training": training, "losses": losses, "held_out": final}


def spikes(losses: list[float]) -> list[int]:
    """The steps whose loss is above the mean of the 128 before by six standard deviations."""
    seen: list[float] = []
    found = []
    for step, loss in enumerate(losses):
        last = seen[-128:]
        if len(last) >= 64 and not loss <= statistics.fmean(last) + 6 * statistics.stdev(last):
            found.append(step)
        seen.append(loss if math.isfinite(loss) else 10.0)
    return found


def result(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures for each fault and rule."""
    of = {found_of["training"][:3]: found_of for found_of in found}
    rows: dict[str, dict[str, dict[str, float]]] = collections.defaultdict(dict)
    seeds = sorted({seed for kind, _, seed in of if kind})
    for kind in KINDS:
        for rule in RULES:
            scores, excess = [], []
            for seed in seeds:
                each = of[kind, rule, seed]
                scores.append(len(spikes(each["losses"])) / len(each["losses"]))
                excess.append(each["held_out"] - of["", "nothing", seed]["held_out"])
            finite = [value if math.isfinite(value) else 10.0 for value in excess]
            rows[kind][rule] = {
                "spike_score": round(statistics.fmean(scores), 5),
                "trainings_with_a_spike": sum(score > 0 for score in scores),
                "held_out_loss_added": round(statistics.fmean(finite), 4),
                "held_out_loss_added_most": round(max(finite), 4),
            }
    return {"faults": rows}


def draw(found: dict[str, Any], file: pathlib.Path) -> None:
    """The loss around the fault of the first seed, for each fault and rule, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    axes = figure.subplots(1, len(KINDS), sharey=True)
    for axis, kind in zip(axes, KINDS, strict=True):
        for rule in RULES:
            at, losses = found["curves"][kind][rule]
            steps = range(max(0, at - 20), min(len(losses), at + 60))
            axis.plot([step - at for step in steps], [losses[step] for step in steps], label=rule, linewidth=1.1)
        axis.set(title=kind, xlabel="steps after the fault")
    axes[0].set(ylabel="held-out loss, median of seeds")
    axes[-1].legend(fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "disthooks"}):
        figure.savefig(file, metadata={"Date": None})


def curves(found: list[dict[str, Any]]) -> dict[str, Any]:
    """For each fault and rule the median loss of the seeds, with the fault at one step."""
    made: dict[str, Any] = collections.defaultdict(dict)
    for kind in KINDS:
        for rule in RULES:
            these = [each for each in found if each["training"][:2] == (kind, rule)]
            rows = [each["losses"][each["training"].at - 40 : each["training"].at + 80] for each in these]
            made[kind][rule] = 40, [round(statistics.median(column), 4) for column in zip(*rows, strict=False)]
    return made


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100)  # the rule's defaults were chosen on seeds 0 to 9
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "spikes.json")
    parser.add_argument("--figure", type=pathlib.Path, default=ROOT / "docs" / "img" / "spikes.svg")
    options = parser.parse_args()
    seeds, size = range(options.first_seed, options.first_seed + options.seeds), (options.layers, options.width)
    work = [Training(kind, rule, seed, STEPS, *size) for kind in KINDS for rule in RULES for seed in seeds]
    work += [Training("", "nothing", seed, STEPS, *size) for seed in seeds]
    found = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for each in pool.imap_unordered(run, work):
            found.append({**each, "training": Training(*each["training"])})
            print(f"{len(found)} of {len(work)}: {each['training']}", file=sys.stderr)
    told = {**result(found), "curves": curves(found)}
    for kind, rows in told["faults"].items():
        for rule, row in rows.items():
            print(f"{kind:6s} {rule:11s} {row}")
    model = sum(parameter.numel() for parameter in Gpt(*size).parameters())
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    settings = {"parameters": model, "seeds": options.seeds, "steps": STEPS, "rate": RATE, **machine}
    options.json.write_text(json.dumps({"settings": settings, **told}, indent=1) + "\n")
    draw(told, options.figure)


if __name__ == "__main__":
    main()
