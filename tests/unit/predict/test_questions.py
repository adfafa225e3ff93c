"""The fourteen questions, with figures that are computed here in another way."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from disthooks.predict.answers.advice import checkpointed
from disthooks.predict.answers.fits import fits
from disthooks.predict.answers.questions import Answer, answers
from disthooks.predict.explain import explain_built
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation

WIDE, DEEP = 128, 4
BLOCK = 4 * (WIDE * 4 * WIDE + 4 * WIDE * WIDE)
HEAD = 4 * WIDE * 10


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[self.block() for _ in range(DEEP)])
        self.head = nn.Linear(WIDE, 10, bias=False)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, 4 * WIDE, bias=False), nn.GELU(), nn.Linear(4 * WIDE, WIDE, bias=False))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(x)).mean()


@pytest.fixture(scope="module")
def builder() -> Builder:
    return Builder(Blocks, (torch.empty(512, WIDE),))


@pytest.fixture(scope="module")
def situation() -> Situation:
    return Situation(device="cpu", optimizer=functools.partial(torch.optim.AdamW, foreach=False))


@pytest.fixture(scope="module")
def found(builder: Builder, situation: Situation) -> list[Answer]:
    explanation = explain_built(builder, situation)
    return answers(explanation, fits(builder, situation, 32 << 20), builder)


def test_all_questions_are_answered(found: list[Answer]) -> None:
    assert len(found) == 14 + 3
    assert len({each.question for each in found}) == 17
    assert [each.question for each in found if each.source == "ask"] == ["What is the longest sequence?"]
    assert all(each.answer.endswith(".") for each in found)


def test_units_by_hand(found: list[Answer]) -> None:
    assert found[1].figures == {"whole": DEEP * BLOCK + HEAD, "blocks": 2 * BLOCK + HEAD}
    assert found[15].figures == {"unit": BLOCK}


def test_sizes_are_those_of_fits(found: list[Answer], builder: Builder, situation: Situation) -> None:
    size = found[2].figures["size"]
    assert explain_built(builder, replace(situation, batch=size)).peak_bytes <= 32 << 20
    assert explain_built(builder, replace(situation, batch=size + 1)).peak_bytes > 32 << 20


def test_shards_by_hand(found: list[Answer]) -> None:
    weights = DEEP * BLOCK + HEAD
    state = 4 * weights  # and its gradients and two moments; each has a step of 4 bytes
    hsdp, fsdp = found[11].figures["hsdp"], found[11].figures["fsdp"]
    assert hsdp == pytest.approx(state / 8, abs=64)
    assert fsdp == pytest.approx(state / 64, abs=64)
    assert found[12].figures["more"] == weights // 8 - weights // 64
    assert found[13].figures["more"] == weights - weights // 64


def test_the_optimizer_on_the_host_leaves_forward_and_backward(
    found: list[Answer], builder: Builder, situation: Situation
) -> None:
    without = explain_built(builder, replace(situation, optimizer=None)).peak_bytes
    assert found[5].figures["peak"] == without


def test_checkpoints_are_further_steps(found: list[Answer], builder: Builder, situation: Situation) -> None:
    names = [f"layers.{number}" for number in range(DEEP)]
    each = explain_built(builder, replace(situation, change=checkpointed(names))).peak_bytes
    assert found[6].figures["each block"] == each < found[6].figures["as it is"]
    assert found[6].source == found[7].source == found[8].source == "run"


def test_without_a_builder_no_step_is_run(builder: Builder) -> None:
    alone = answers(explain_built(builder, Situation(device="cpu")))
    assert {each.source for each in alone} == {"record", "formula", "ask"}
    assert "optimizer" in alone[5].answer
    assert alone[5].source == "ask"
