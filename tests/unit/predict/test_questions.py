"""The fourteen questions, with figures that are computed here in another way."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from disthooks.predict.answers.advice import checkpointed
from disthooks.predict.answers.fits import fits
from disthooks.predict.answers.questions import Answer, answers
from disthooks.predict.engines.spec import EngineSpec
from disthooks.predict.explain import explain, explain_built
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation

WIDE, DEEP = 128, 4
LINEAR = 4 * (WIDE * 4 * WIDE)


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


def test_sizes_are_those_of_fits(found: list[Answer], builder: Builder, situation: Situation) -> None:
    size = found[2].figures["size"]
    assert explain_built(builder, replace(situation, batch=size)).peak_bytes <= 32 << 20
    assert explain_built(builder, replace(situation, batch=size + 1)).peak_bytes > 32 << 20


def reduced_in(dtype: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)}


#: The number of the answer, its figure, and the engine whose peak it is.
ENGINES: list[tuple[int, str, EngineSpec]] = [
    (1, "the whole model as one unit", EngineSpec("fsdp2", 8, wrap=None)),
    (1, "a unit for each Linear", EngineSpec("fsdp2", 8, wrap="Linear")),
    (4, "1", EngineSpec()),
    (4, "2", EngineSpec("fsdp2", 2)),
    (4, "64", EngineSpec("fsdp2", 64)),
    (4, "ddp", EngineSpec("ddp", 8)),
    (9, "reduced in bfloat16", EngineSpec("fsdp2", 8, options=reduced_in(torch.bfloat16))),
    (9, "reduced in float32", EngineSpec("fsdp2", 8, options=reduced_in(torch.float32))),
    (10, "FSDP on 8 ranks that computes in bfloat16", EngineSpec("fsdp2", 8, dtype=torch.bfloat16)),
    (11, "HSDP in groups of 8", EngineSpec("hsdp", 64, mesh=(8, 8))),
    (12, "resharded to 8", EngineSpec("fsdp2", 64, options={"reshard_after_forward": 8})),
    (13, "not resharded", EngineSpec("fsdp2", 64, options={"reshard_after_forward": False})),
]


@pytest.mark.parametrize(("number", "figure", "engine"), ENGINES, ids=[figure for _, figure, _ in ENGINES])
def test_what_engines_need_is_what_explain_says(
    found: list[Answer], builder: Builder, situation: Situation, number: int, figure: str, engine: EngineSpec
) -> None:
    said = explain(builder, device="cpu", optimizer=situation.optimizer, engine=engine)
    assert found[number].figures[figure] == said.peak_bytes
    assert found[number].source == "run"


def test_meshes_cost_what_is_kept(found: list[Answer]) -> None:
    assert found[11].figures["FSDP on 64 ranks"] < found[12].figures["resharded to 8"]
    assert found[12].figures["resharded to 8"] < found[13].figures["not resharded"] < 32 << 20
    assert "It fits in 32.0 MiB." in found[13].answer


def test_the_unit_with_most_gathered_parameters(found: list[Answer]) -> None:
    assert found[15].figures == {"unit": 2 * LINEAR}  # the parameters, and the buffer in which they arrive
    assert "layers.0.0:" in found[15].answer


def test_an_engine_that_was_asked_for_is_the_one_that_answers(builder: Builder) -> None:
    asked = EngineSpec("fsdp2", 4, wrap="GELU", dtype=torch.bfloat16)
    said = explain(builder, device="cpu", engine=asked)
    found = answers(said, None, builder, ranks=(2, 4))
    assert found[4].figures["4"] == said.peak_bytes
    assert list(found[1].figures)[1] == "a unit for each GELU"
    assert found[11].figures["FSDP on 4 ranks"] == said.peak_bytes


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
    assert {each.source for each in alone} == {"record", "ask"}
    assert "optimizer" in alone[5].answer
    assert alone[5].source == "ask"
