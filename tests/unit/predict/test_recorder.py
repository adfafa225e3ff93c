"""The recorder counts what autograd holds, each memory once, and the memory that comes and goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from disthooks import explain
from disthooks.errors import UsageError
from disthooks.predict.fake.builder import Builder


def test_two_views_of_one_memory_count_once() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.neg()
            return y[:2].exp() * y[2:].sin()

    said = explain(Views(), torch.ones(4, 8, requires_grad=True), device="cpu")
    # y by sin, and the results of exp and sin; each memory is counted whole.
    assert said.saved_bytes == 4 * 8 * 4 + 2 * (2 * 8 * 4)


def test_a_graph_that_the_forward_drops_does_not_count() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.exp().exp()
            return x.neg()

    assert explain(Drops(), torch.ones(8, requires_grad=True), device="cpu").saved_bytes == 0


def test_batch_and_length_are_set_in_the_inputs_or_in_the_function() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    small = explain(model, tokens, device="cpu").by_module["1"]
    assert explain(model, tokens, device="cpu", batch=6, seq=16).by_module["1"] == 6 * small

    def build(batch: int = 2, seq_len: int = 8) -> tuple[nn.Module, torch.Tensor]:
        return model, torch.zeros(batch, seq_len, dtype=torch.int64)

    assert explain(build, device="cpu", batch=6, seq=16).by_module["1"] == 6 * small
    assert (Builder(build).size("batch"), Builder(build).size("seq")) == (2, 8)


@pytest.mark.parametrize("given", [lambda: 3, lambda: nn.Linear(1, 1)], ids=["a number", "no inputs"])
def test_what_is_no_model_with_inputs_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="module"):
        explain(given, device="cpu")  # type: ignore[arg-type]
