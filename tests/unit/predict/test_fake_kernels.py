"""What a fake tensor cannot know is assumed and named, and nothing waits for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from disthooks import explain
from disthooks.errors import UsageError
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake import kernels
from disthooks.predict.fake.fake_run import fake_run
from tests.support.predicted import beside


class Asking(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.linear(x))


def asked(change: Callable[[torch.Tensor], torch.Tensor]) -> Explanation:
    return explain(lambda: (Asking(change), torch.randn(8, 4)), device="cpu")


def test_an_item_is_assumed_and_named() -> None:
    said = asked(lambda y: y * y.sum().item())
    assert [(each.what, each.assumed) for each in said.unknown] == [("the value of a tensor (.item())", "0.0")]


def test_a_question_for_what_should_not_be_is_answered_with_no() -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y.exp()

    assert asked(change).by_operator["aten.exp"] == 8 * 4 * 4


def test_elements_that_nobody_knows_all_count() -> None:
    said = asked(lambda y: y[y > 0].exp())
    assert said.by_operator["aten.exp"] == 8 * 4 * 4
    assert [each.assumed for each in said.unknown] == ["all 32 elements count"]


def test_a_loop_that_waits_for_another_value_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_ANSWERS", 200)

    def change(y: torch.Tensor) -> torch.Tensor:
        while y.detach().abs().max() > 0.5:
            y = y / 2
        return y

    with pytest.raises(UsageError, match="reads values of tensors in a loop"):
        asked(change)


def test_an_operator_without_a_fake_kernel_is_named_if_it_cannot_run_on_zeros() -> None:
    with torch.library._scoped_library("disthooks_tests", "FRAGMENT") as library:
        library.define("picky(Tensor x) -> Tensor")

        def picky(x: torch.Tensor) -> torch.Tensor:
            if not x.any():
                raise ValueError("zeros")
            return x.clone()

        library.impl("picky", picky, "CPU")
        operator = torch.ops.disthooks_tests.picky
        said = asked(lambda y: y.exp() + operator(y.detach()))
    assert said.by_operator["aten.exp"] == 8 * 4 * 4
    assert ("disthooks_tests.picky", "its result has the shape of its first tensor") in [
        (each.what, each.assumed) for each in said.unknown
    ]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_ctc_loss_saves_what_a_real_one_saves(reduction: str, kind: Callable[[list[int]], object]) -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.ctc_loss(
                x.log_softmax(-1), targets, kind([10, 10]), kind([3, 4]), reduction=reduction, zero_infinity=True
            )

    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return Loss(), (torch.ones(10, 2, 5, requires_grad=True), torch.ones(2, 7, dtype=torch.int32))

    assert beside(build, peaks=False).wrong() == {}


def test_a_multilabel_margin_loss_of_one_row_has_no_dimension() -> None:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return nn.MultiLabelMarginLoss(), (torch.ones(5, requires_grad=True), torch.tensor([3, 0, -1, 1, 2]))

    assert beside(build, peaks=False).wrong() == {}


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_two_dtypes_is_refused_as_in_a_run(bias: bool) -> None:
    def run() -> None:
        torch.nn.functional.linear(
            torch.ones(2, 4), torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4) if bias else None
        )

    with pytest.raises(RuntimeError, match="dtype"):
        run()
    with fake_run(), pytest.raises(RuntimeError, match="dtype"):
        run()
