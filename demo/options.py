"""What can be asked of the demo, checked before anything is started."""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile

from disthooks.config import Plan, from_config
from disthooks.errors import UsageError

# Attach in every second block of steps, never, or always; the last two are for comparing whole runs.
SAVE = ("alternate", "never", "always")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; a wrong one ends the program with a line that says what is right."""
    parser = argparse.ArgumentParser(
        prog="demo/train.py",
        usage="%(prog)s [options]; --help lists them",  # each rank prints it, so a line is enough
        description="Train a byte-level GPT with its blocks' saved tensors on disk.",
    )
    _add_training(parser)
    _add_places(parser)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.steps, options.batch, options.windows = min(options.steps, 8), min(options.batch, 2), 16
    if options.steps < 2 * options.block and options.save == "alternate":
        parser.error(f"--steps {options.steps}: give at least two blocks of --block {options.block} steps")
    if options.directory is None:
        options.directory = real_disk()
    return options


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine", choices=("ddp", "fsdp2", "plain"), default="ddp", help="plain: one process, for debugging")
    add("--save", choices=SAVE, default="alternate", help="when saved tensors go to disk (default: every second block)")
    add("--steps", type=_positive, default=32, help="most steps after the warm-up")
    add("--block", type=_positive, default=4, help="steps between one switch of --save alternate and the next")
    add("--batch", type=_positive, default=8, help="windows of text a rank takes each step")
    add("--windows", type=_positive, default=128, help="held-out windows the model is tested on")
    add("--rate", type=_positive_float, default=1e-3, help="learning rate")
    add("--clip", type=_positive_float, default=1.0, help="largest norm of the whole gradient")
    add("--seed", type=int, default=0)
    add(
        "--limit",
        type=_positive_float,
        default=80.0,
        help="seconds after which no blocks of steps begin, if there were four pairs",
    )
    add("--tiny", action="store_true", help="a model and a run small enough for a test")


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=_directory,
        help="where the file with the saved tensors lives (default: a disk for temporary files)",
    )
    parser.add_argument("--hooks", type=_plan, help="attach what this YAML file says instead (demo/hooks.yaml)")
    parser.add_argument("--run", type=pathlib.Path, default="runs/demo", help="folder for the logs")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def _directory(text: str) -> str:
    if not os.path.isdir(text) or not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory that can be written to")
    return text


def _plan(path: str) -> Plan:
    try:
        return from_config(path)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def real_disk() -> str:
    """The first folder for temporary files that is not memory itself, or the usual one if all are."""
    usual = tempfile.gettempdir()
    places = [usual, "/var/tmp", os.getcwd()]
    return next((place for place in places if os.access(place, os.W_OK) and not in_memory(place)), usual)


def in_memory(directory: str) -> bool:
    """Whether ``directory`` is on tmpfs or ramfs, where moving a tensor there frees nothing; Linux only."""
    try:
        mounts = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    path = os.path.realpath(directory)
    kinds = {line.split()[1]: line.split()[2] for line in mounts}
    while path not in kinds and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return kinds.get(path) in ("tmpfs", "ramfs")
