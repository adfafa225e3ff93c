"""Lazy modules get their sizes by a dry run, as torch asks; they have no memory either."""

from __future__ import annotations

import torch
from torch import nn

from disthooks import explain
from disthooks.predict.fake.lazy import has_lazy
from tests.support.predicted import beside


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv1d(6, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def test_a_lazy_model_saves_what_a_real_one_saves() -> None:
    assert beside(lambda: (lazy(), torch.ones(4, 3, 8)), peaks=False).wrong() == {}


def test_a_lazy_model_that_exists_is_explained_and_stays_lazy() -> None:
    model, x = lazy(), torch.ones(4, 3, 8)
    said = explain(model, x, device="cpu", dtype="bf16", optimizer="adamw")
    assert has_lazy(model)
    model(x)
    assert explain(model, x, device="cpu", dtype="bf16", optimizer="adamw").state == said.state
