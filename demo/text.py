"""Real text that every machine has: the sources of Python's standard library, as bytes.

Whole files are held out, never parts of one: a file whose SHA-256 begins with a byte below 26 (about one in
ten) is held out, the others are trained on. The hash is of the contents, so two equal files stay on one side,
and the split needs no list and no random number.
"""

from __future__ import annotations

import hashlib
import pathlib
import sysconfig
from typing import NamedTuple

import torch

# Not the library (installed packages), not always installed (tests), or tables made by a program, so alike
# that a held-out one would teach nothing about text not seen (encodings, pydoc_data).
SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data", "__pycache__"),
}
HELD_OUT_BELOW = 26  # of 256


class Text(NamedTuple):
    """Bytes (uint8) to train on and held out, and how many files each came from."""

    train: torch.Tensor
    held_out: torch.Tensor
    train_files: int
    held_out_files: int


def load(folder: str | None = None) -> Text:
    """Read every ``*.py`` of the standard library, in the order of the paths.

    Raises:
        SystemExit: when this Python has no sources on disk.
    """
    root = pathlib.Path(folder or sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(root.rglob("*.py")) if SKIPPED.isdisjoint(path.relative_to(root).parts))
    files = [content for path in paths if (content := path.read_bytes())]
    held_out = [content for content in files if is_held_out(content)]
    train = [content for content in files if not is_held_out(content)]
    if not train or not held_out:
        raise SystemExit(f"no sources (*.py) to train on under {root}: use a Python that has its library as files")
    return Text(_join(train), _join(held_out), len(train), len(held_out))


def is_held_out(content: bytes) -> bool:
    """Whether a file with this content is held out."""
    return hashlib.sha256(content).digest()[0] < HELD_OUT_BELOW


def _join(files: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\0".join(files)), dtype=torch.uint8)  # a zero byte: the next file


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The windows of ``context`` bytes at ``starts``, and the bytes that follow each byte of them."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def batch(
    text: torch.Tensor, size: int, context: int, seed: int, step: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows drawn at random, the same for the same seed, step and rank whatever was drawn before."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    return windows(text, torch.randint(len(text) - context, (size,), generator=draw), context)


def fixed_starts(text: torch.Tensor, count: int, context: int) -> torch.Tensor:
    """Where the ``count`` windows begin that the model is always tested on: evenly over all of ``text``."""
    return torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()
