"""What every store promises to those who write their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disthooks.errors import UsageError
from disthooks.saved.stores.base import _RENAMED, Store


class Plain(Store):
    """The least that a store has."""

    def put(self, tensor: torch.Tensor) -> Any:
        return tensor

    def get(self, ticket: Any) -> torch.Tensor:
        return ticket

    def drop(self, ticket: Any) -> None:
        pass


@pytest.mark.parametrize(("old", "new"), list(_RENAMED.items()))
def test_a_store_that_overrides_an_old_name_is_told_the_new_one(old: str, new: str) -> None:
    with pytest.raises(UsageError, match=f"Silent.{old}.*{new}"):
        type("Silent", (Plain,), {old: 0 if old == "worth" else lambda self, *args: None})
    assert hasattr(Plain, new)


def test_a_field_may_have_an_old_name() -> None:
    assert type("Counting", (Plain,), {"held": 3})().held == 3


def test_rest_lets_go_of_what_is_idle() -> None:
    calls: list[Any] = []
    type("Idle", (Plain,), {"release_idle": lambda self: calls.append(self)})().rest()
    assert len(calls) == 1
