"""Train a byte-level GPT on Python's own library, its saved tensors on disk; see README.md beside this file."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import options as cli
import torch
from measure import Measure
from model import TINY, Shape
from predict import predict
from progress import Bar
from ranks import Ranks, start, stop
from rich.console import Console
from table import gradient_summary, show
from torch.distributed.elastic.multiprocessing.errors import record
from trainer import Trainer

import disthooks as dh
import disthooks.memory
from disthooks._handles import Attachment
from disthooks.config import SavingPlan
from disthooks.report.document import document
from disthooks.report.log import read
from disthooks.report.page.page import page
from disthooks.saved.attach import SavingHandle
from disthooks.saved.pipeline import Pipeline, pipeline

WARM_UP_STEPS = 2
PAIRS = 4  # of blocks, at least: their ratios show how sure the ratio of times is
LEAST = 2 * PAIRS + WARM_UP_STEPS + 4  # forwards with backward of the shortest run: the blocks, and what is before them
MODES = {"alternate": (False, True), "never": (False,), "always": (True,)}
BEGAN = time.monotonic()


@record  # so that the launcher shows the error of the rank that failed
def main() -> None:
    """Set up, train, and print the table on rank 0."""
    options = cli.parse()
    ranks = start(options.engine)
    console = Console(quiet=not ranks.first)
    options.run.mkdir(parents=True, exist_ok=True)
    announce(console, options, ranks)
    shape, summary = train(options, ranks, console)
    stop()
    if ranks.first:
        summary |= predict(options, ranks, shape, options.hooks or [("blocks.*", to_disk(options.directory))])
        summary |= report(options.run / "gradients.jsonl")
        summary["seconds"] = time.monotonic() - BEGAN
        (options.run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        show(summary, console)


def report(log: pathlib.Path) -> dict[str, Any]:
    """Write the page of what was logged, as `disthooks report -o` does."""
    runs = read(log).runs if log.exists() else []
    if not runs:  # a configuration of the user's logs somewhere else
        return {}
    page_file = log.with_name("report.html")
    page_file.write_text(page("report", document(runs[-1], str(log))), encoding="utf-8")
    return {"report_page": str(page_file)}


def announce(console: Console, options: argparse.Namespace, ranks: Ranks) -> None:
    """Say what is run where, and make freed memory go back to the system when it is the CPU's."""
    console.print(f"{ranks.world} process(es) on {ranks.device.type}, engine {options.engine}; logs in {options.run}")
    if cli.in_memory(options.directory):
        console.print(f"[bold]{options.directory} is memory, not a disk[/]: choose another --directory to free any")
    if ranks.device.type == "cpu" and not disthooks.memory.release_promptly():
        console.print("this C library has no mallopt: peaks may not fall")


def train(options: argparse.Namespace, ranks: Ranks, console: Console) -> tuple[Shape, dict[str, Any]]:
    """The whole run: held-out loss, warm-up, proof, measured blocks of steps, held-out loss again."""
    trainer = Trainer(options, ranks, TINY if options.tiny else Shape())
    slowest = ranks.max([timed(functools.partial(trainer.gradients, 0))[1]])[0]
    if LEAST * slowest > options.limit:
        console.print(f"a step takes {slowest:.0f} s here: a smaller model is trained, so that there are enough steps")
        trainer = Trainer(options, ranks, TINY)
    before, took = timed(trainer.held_out)
    log = options.run / "gradients.jsonl"
    log.unlink(missing_ok=True)
    with watch(trainer, log) as trainer.watch:
        for number in range(WARM_UP_STEPS):
            _, seconds = trainer.step(number)
        same = proof(trainer)
        measure = Measure(ranks, options.run)
        run_blocks(trainer, measure, console, seconds, reserve=took)
    return trainer.shape, {
        "engine": options.engine,
        "world": ranks.world,
        "device": ranks.device.type,
        "parameters": trainer.parameters,
        "bytes_per_step": options.batch * trainer.shape.context * ranks.world,
        "files": [trainer.text.train_files, trainer.text.held_out_files],
        "directory": options.directory,
        **same,
        **measure.summary(),
        "held_out_first": before,
        "held_out_last": trainer.held_out(),
        "gradients": gradient_summary(log) if ranks.first else {},
    }


def timed(function: Any) -> tuple[float, float]:
    """What ``function()`` returns, and how many seconds it took."""
    began = time.monotonic()
    return function(), time.monotonic() - began


def watch(trainer: Trainer, log: pathlib.Path) -> Attachment:
    """Clip the gradient and log what it was, on every engine by the same call."""
    if trainer.options.hooks:
        return trainer.options.hooks.watch(trainer.engine, trainer.optimizer)
    return dh.gradients(
        trainer.engine,
        trainer.optimizer,
        rules=[dh.ClipNorm(trainer.options.clip)],
        stats=[*dh.stats.full(), dh.stats.MaxAbs()],
        sinks=[dh.sinks.Jsonl(log)],
        every=1,
    )


def save(trainer: Trainer) -> SavingHandle | SavingPlan:
    """Send what autograd saves in the blocks to disk, until ``remove()``."""
    if trainer.options.hooks:
        return trainer.options.hooks.save(trainer.model)
    return dh.save_activations(trainer.model, "blocks.*", to_disk(trainer.options.directory))


@functools.cache
def to_disk(directory: str) -> Pipeline:
    """Tensors of 4 KiB and more go to a file. All blocks have one store, since it learns the order of reads."""
    return pipeline(dh.OnDisk(directory), at_least="4 KiB")


def proof(trainer: Trainer) -> dict[str, Any]:
    """Compare the gradients of one batch without saving, again without, and with it, bit for bit."""
    first, again = trainer.gradients(WARM_UP_STEPS), trainer.gradients(WARM_UP_STEPS)
    with save(trainer):
        saved = trainer.gradients(WARM_UP_STEPS)
    unsteady, changed = trainer.ranks.sum([differ(first, again), differ(first, saved)])
    if changed and not unsteady:
        raise AssertionError(f"{changed:.0f} gradients are not the same with saved tensors on disk")
    return {"gradients_changed": int(changed), "gradients_unsteady": int(unsteady), "gradients_compared": len(first)}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """How many of the tensors are not the same bits."""
    return sum(not torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one)


def run_blocks(trainer: Trainer, measure: Measure, console: Console, seconds: float, reserve: float) -> None:
    """Take turns between the modes until the steps are done, or the time is; all ranks stop alike.

    Where steps are slow, or few were asked for, a block has fewer steps, so that there are some pairs of blocks.
    """
    options, ranks = trainer.options, trainer.ranks
    modes = MODES[options.save]
    fit = (options.limit - (time.monotonic() - BEGAN) - reserve) / (1.3 * seconds)
    least = -ranks.max([-fit])[0]  # of the slowest rank
    block = max(1, min(options.block, int(min(least, options.steps)) // (PAIRS * len(modes))))
    rounds = options.steps // (block * len(modes))
    number = WARM_UP_STEPS
    with Bar(rounds * len(modes) * block, console, ranks.first) as bar:
        for done in range(1, rounds + 1):
            began = time.monotonic()
            for saved in modes:
                run_block(trainer, measure, bar, range(number, number + block), saved)
                number += block
            now = time.monotonic()
            is_over = ranks.max([now - BEGAN + (now - began) + reserve])[0] > options.limit
            if PAIRS <= done < rounds and is_over:
                console.print(f"stopping early: one more round would pass --limit {options.limit:.0f} s")
                break


def run_block(trainer: Trainer, measure: Measure, bar: Bar, numbers: range, saved: bool) -> None:
    """Some steps in one mode; attaching and detaching are outside the clock, as they happen once in a run."""
    with saving(trainer, measure, saved), measure.block(saved) as taken:
        for number in numbers:
            loss, seconds = trainer.step(number)
            taken.append((number, loss, seconds))
            bar.step("saved" if saved else "plain", loss, seconds)
    bar.line()


@contextlib.contextmanager
def saving(trainer: Trainer, measure: Measure, on: bool) -> Iterator[None]:
    """Saved tensors on disk while inside, if ``on``."""
    attached = save(trainer) if on else None
    yield
    if attached is not None:
        attached.remove()
        measure.add_report(attached.report())


if __name__ == "__main__":
    main()
