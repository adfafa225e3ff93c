"""What advice saves is what another step saves, and its YAML is a configuration."""

from __future__ import annotations

import ast
import functools
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.predict.answers import snippets
from disthooks.predict.answers.advice import (
    Advice,
    Tried,
    advise,
    changes,
    cheapest,
    what_if,
)
from disthooks.predict.engines.spec import EngineSpec
from disthooks.predict.explain import explain_built
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation, _switch
from tests.support import oracle, zoo

ROWS, WIDE, DEEP = 1 << 20, 64, 8
ON_CPU = Situation(device="cpu", loss=oracle.loss_of)
SAVED = ROWS * WIDE * 4  # one activation: 256 MiB


class Deep(nn.Module):
    """Eight layers, each with a linear layer and a GELU, which save their inputs: two activations a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(DEEP)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out.mean()


@pytest.fixture(scope="module")
def builder() -> Builder:
    return Builder(Deep, (torch.empty(1, WIDE).expand(ROWS, WIDE),))


@pytest.fixture(scope="module")
def said(builder: Builder) -> Explanation:
    return explain_built(builder, Situation(batch=ROWS))


@pytest.fixture(scope="module")
def found(builder: Builder, said: Explanation) -> list[Advice]:
    # The first step of the first prediction of a plan in a process counts a scalar more, 512 bytes.
    explain_built(builder, replace(said.situation, plan=[("*", dh.OnCpu())]))
    tried: Tried = {}
    exact = changes(builder, said, limit=8 * SAVED, tried=tried)
    assert not {"cast", "quantize"} & {each.kind for each in exact}, "an exact change is enough"
    every = changes(builder, said, tried=tried)
    return every + [each for each in exact if each not in every]


def of_kind(found: list[Advice], kind: str) -> Advice:
    return next(each for each in found if each.kind == kind)


def test_offload_leaves_what_is_in_flight_and_what_an_operator_works_on(found: list[Advice], said: Explanation) -> None:
    offload = of_kind(found, "offload")
    in_flight, at_work = 512 << 20, 4 * SAVED + (1 << 20)  # and weights
    assert said.peak_bytes > 2 * DEEP * SAVED
    assert in_flight < offload.nbytes <= in_flight + at_work
    assert offload.saves == said.peak_bytes - offload.nbytes
    assert offload.is_exact
    assert not offload.is_estimate
    assert offload.kind in {each.kind for each in found}


def test_a_checkpoint_around_each_layer_leaves_its_input_alone(found: list[Advice]) -> None:
    once = of_kind(found, "checkpoint")
    assert DEEP * SAVED < once.nbytes < (DEEP + 6) * SAVED
    assert once.seconds > 0
    assert "checkpoint" in once.code


def test_saved_tensors_of_half_the_bytes(found: list[Advice], said: Explanation) -> None:
    cast = of_kind(found, "cast")
    assert DEEP * SAVED < cast.nbytes < (DEEP + 5) * SAVED < said.peak_bytes
    assert not cast.is_exact


def test_what_stays_fits_into_the_limit_and_moves_less_than_everything(found: list[Advice]) -> None:
    tiers, offload = of_kind(found, "tiers"), of_kind(found, "offload")
    assert offload.nbytes <= tiers.nbytes <= 8 * SAVED
    assert tiers.seconds < offload.seconds
    assert "OnDevice" in tiers.yaml


def test_the_yaml_is_read_and_does_what_was_said(
    found: list[Advice], builder: Builder, said: Explanation, tmp_path: pathlib.Path
) -> None:
    written = [each for each in found if each.yaml]
    assert {each.kind for each in written} >= {"offload", "recompute", "cast", "quantize", "tiers"}
    for number, each in enumerate(written):
        path = tmp_path / f"{number}.yaml"
        path.write_text(each.yaml)
        plan = dh.config.from_config(path)
        assert len(plan.saves) == 1
        if each.kind in ("offload", "cast"):
            again = explain_built(builder, replace(said.situation, plan=plan))
            assert again.needed_bytes == each.nbytes


def test_code_is_code(found: list[Advice]) -> None:
    build = Builder(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), (torch.empty(2, 256),))
    heavy = explain_built(build, Situation(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)))
    written = {each.title: each.code for each in [*found, *changes(build, heavy)] if not each.yaml}
    assert written["use an optimizer with 8-bit state"].endswith("AdamW8bit(model.parameters(), lr=1e-3)")
    assert "shard the model over 8 ranks (FSDP2)" in written
    for title, code in written.items():
        last = ast.parse(code).body[-1]
        assert not isinstance(last, ast.Expr) or isinstance(last.value, ast.Call), title


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("code", [snippets._TORCH, snippets._PARTS])
def test_the_code_of_a_loss_in_chunks_gives_the_same_loss(code: str, has_bias: bool) -> None:
    if code == snippets._TORCH and not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear cross entropy")
    hidden, labels = torch.randn(2, 16, 8, requires_grad=True), torch.randint(50, (2, 16))
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 50, has_bias)))
    names: dict[str, Any] = {"torch": torch, "model": model, "hidden": hidden, "labels": labels}
    exec(snippets._NAMES.format(head="0.0") + code, names)
    whole = nn.functional.cross_entropy(model(hidden).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(names["loss"], whole)
    torch.testing.assert_close(*(torch.autograd.grad(each, hidden)[0] for each in (names["loss"], whole)))


class Words(nn.Module):
    """Logits of the next word, with the loss as a script writes it: plain, in torch's chunks, or of squared logits."""

    def __init__(self, loss: str, words: int = 4096, wide: int = 64) -> None:
        super().__init__()
        self.kind, self.embed, self.head = loss, nn.Embedding(words, wide), nn.Linear(wide, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, labels = self.embed(tokens), tokens[:, 1:].flatten()
        if self.kind == "chunks":
            hidden = hidden.flatten(0, -2)[: labels.numel()]
            options: Any = nn.LinearCrossEntropyOptions()
            return nn.functional.linear_cross_entropy(  # type: ignore[attr-defined, no-any-return, unused-ignore]
                hidden, self.head.weight, labels, linear_bias=self.head.bias, options=options
            )
        logits = self.head(hidden) if self.kind == "plain" else self.head(hidden).square()
        logits = logits.float()[:, :-1, :].contiguous().view(-1, logits.size(-1))
        return nn.functional.cross_entropy(logits, labels)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no linear cross entropy")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_loss_in_chunks_is_predicted(device: str) -> None:
    def asked(kind: str) -> tuple[Builder, Explanation]:
        builder = Builder(functools.partial(Words, kind), (torch.zeros(8, 512, dtype=torch.int64),))
        return builder, explain_built(builder, Situation(device=device))

    advice = of_kind(changes(*asked("plain")), "loss")
    assert not advice.is_estimate
    assert advice.nbytes == asked("chunks")[1].peak_bytes < asked("plain")[1].peak_bytes / 8
    of_squares = of_kind(changes(*asked("squared")), "loss")
    assert of_squares.is_estimate
    assert all('head = model.get_submodule("head")' in each.code for each in (advice, of_squares))


class Switched(nn.Module):
    """As a model of transformers 4."""

    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self) -> None:
        """Checkpoint the layers."""


@pytest.mark.second_tier
def test_a_model_of_transformers_has_a_switch_of_its_own() -> None:
    builder = Builder(zoo.ZOO["llama"])
    said = explain_built(builder, ON_CPU)
    advice = of_kind(changes(builder, said), "checkpoint")
    assert advice.code == "model.activation_checkpointing_enable()"

    def change(model: nn.Module) -> None:
        exec(advice.code, {"model": model})

    assert explain_built(builder, replace(ON_CPU, change=change)).peak_bytes == advice.nbytes
    assert _switch(nn.Sequential(Switched())) == 'model.get_submodule("0").gradient_checkpointing_enable()'


def test_the_top_is_sorted_and_has_each_kind_once(builder: Builder, said: Explanation) -> None:
    top = advise(builder, said)
    assert len(top) == 3
    assert len({each.kind for each in top}) == 3
    assert all(0 < each.saves < said.peak_bytes and each.text for each in top)


def test_times_of_cuda_are_those_of_an_h100_if_no_gpu_is_named(found: list[Advice], said: Explanation) -> None:
    assert (said.situation.device, said.situation.hardware) == ("cuda", None)
    assert "(times of H100-SXM-80GB, roughly)" in of_kind(found, "offload").text


def test_the_page_has_the_step_of_each_advice_that_can_be_copied(builder: Builder, said: Explanation) -> None:
    tried: Tried = {}
    best = [of_kind(changes(builder, said, limit=8 * SAVED, tried=tried), kind) for kind in ("offload", "checkpoint")]
    steps = what_if(said, best, tried)
    assert [each["yaml"] for each in steps] == [best[0].yaml, best[1].code]
    assert [each["peak"]["nbytes"] for each in steps] == [each.nbytes for each in best]


def test_the_cheapest_change_fits_and_is_exact_if_one_is(builder: Builder, said: Explanation) -> None:
    limit = 8 * SAVED
    change = cheapest(builder, said, limit)
    assert change.nbytes <= limit
    assert change.is_exact
    assert not change.is_estimate
    assert cheapest(builder, said, 1000) is None


@pytest.mark.second_tier
def test_a_checkpoint_saves_in_a_real_step_what_was_said() -> None:
    """On the CPU, counted: the same change of the same model, for real."""
    from disthooks.predict.answers.snippets import checkpoint_code

    situation = Situation(device="cpu", loss=oracle.loss_of)
    builder = Builder(zoo.ZOO["gpt2"])
    before = explain_built(builder, situation)
    names = tuple(row.name for row in before.modules if row.kind == "GPT2Block")

    def change(model: nn.Module) -> None:
        exec(checkpoint_code(names), {"model": model})  # as somebody copies it

    after = explain_built(builder, replace(situation, change=change))
    model, inputs = zoo.build("gpt2")
    change(model)
    assert after.peak_bytes == oracle.measure(model, inputs).peak_bytes < before.peak_bytes


def test_the_temporaries_of_the_optimizer_go_without_foreach() -> None:
    builder = Builder(
        lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(16)]), (torch.empty(2, 512),)
    )
    said = explain_built(builder, Situation(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)))
    assert said.peak.phase == "optimizer"
    advice = next(each for each in changes(builder, said) if each.kind == "optimizer" and not each.is_estimate)
    weight = 512 * 512 * 4
    assert 12 * weight <= advice.saves <= 16 * weight  # foreach has one temporary for each weight at once


def test_the_advice_to_shard_is_a_step_with_fsdp() -> None:
    build = Builder(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), (torch.empty(2, 256),))
    said = explain_built(build, Situation(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False)))
    advice = next(each for each in changes(build, said) if each.kind == "shard")
    assert not advice.is_estimate
    with_fsdp = replace(said.situation, engine=EngineSpec("fsdp2", 8))
    assert advice.nbytes == explain_built(build, with_fsdp).peak_bytes == said.peak_bytes - advice.saves
