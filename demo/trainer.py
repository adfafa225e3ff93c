"""The model, its text and its optimizer; one step, and what the model makes of text it never saw."""

from __future__ import annotations

import argparse
import math
import time

import text
import torch
from model import GPT, Shape
from ranks import Ranks, on_engine

from disthooks.grads.attachment import Gradients

BITS = 1 / math.log(2)  # a nat in bits
WARM_UP = 10  # steps over which the learning rate rises


class Trainer:
    """Trains ``model`` (the bare one) through ``engine`` (what runs it: itself, or the wrapper of DDP)."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks, shape: Shape) -> None:
        self.options, self.ranks, self.shape = options, ranks, shape
        self.text = text.load()
        torch.manual_seed(options.seed)  # the same weights on every rank
        self.model = GPT(self.shape).to(ranks.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.engine = on_engine(options.engine, self.model, self.model.blocks, ranks)
        self.watch: Gradients | None = None  # what logs the steps, if anything does
        self.optimizer = torch.optim.AdamW(self.engine.parameters(), lr=options.rate, betas=(0.9, 0.95))

    def step(self, number: int) -> tuple[float, float]:
        """The loss on this rank's batch (bits per byte), and the seconds that the whole step took."""
        began = time.perf_counter()
        loss = self._backward(number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.rate * min(1.0, (number + 1) / WARM_UP)
        self.optimizer.step()  # disthooks clips and counts on its way in
        self.optimizer.zero_grad()
        self.ranks.synchronise()
        return loss.item() * BITS, time.perf_counter() - began

    def gradients(self, number: int) -> dict[str, torch.Tensor]:
        """The gradients that step ``number`` would use, without taking it."""
        self._backward(number)
        found = {name: local(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad()
        return found

    @torch.no_grad()
    def held_out(self) -> float:
        """Bits per byte on the held-out windows, the same ones each time, shared out among the ranks."""
        count, size = self.options.windows, self.options.batch
        starts = text.fixed_starts(self.text.held_out, count, self.shape.context)
        # Every rank runs as many batches as the others (a sharded model needs them all); the rest weighs nothing.
        each = -(-count // (self.ranks.world * size)) * size
        mine = torch.arange(each) * self.ranks.world + self.ranks.rank
        total = 0.0
        for rows in mine.split(size):
            batch = text.windows(self.text.held_out, starts[rows % count], self.shape.context)
            losses = self.engine(*self._on_device(batch)).double().view(size, -1).mean(dim=1).cpu()
            total += float((losses * (rows < count)).sum())
        return self.ranks.sum([total])[0] / count * BITS

    def _backward(self, number: int) -> torch.Tensor:
        options, ranks = self.options, self.ranks
        batch = text.batch(self.text.train, options.batch, self.shape.context, options.seed, number, ranks.rank)
        loss = self.engine(*self._on_device(batch)).mean()
        if self.watch is not None:
            self.watch.note_loss(loss)
        loss.backward()
        return loss.detach()

    def _on_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[0].to(self.ranks.device), batch[1].to(self.ranks.device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
