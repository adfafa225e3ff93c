"""Law 19, predicted is measured: the saved bytes of every module in torch's own database, to the byte.

`make test-full` takes every input, in training and in evaluation, with autocast and without; otherwise the first two of
each module, in training and without autocast.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.ops import FULL, quiet
from tests.support.predicted import beside

pytestmark = pytest.mark.second_tier

bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)


class Case:
    """A module of the database with one of its inputs.

    Calling it builds both, in a fake run or for real.
    """

    def __init__(self, info: Any, given: Any, training: bool) -> None:
        self._info, self._given, self._training = info, given, training

    def __call__(self) -> tuple[nn.Module, Any]:
        constructor, forward = self._given.constructor_input, self._given.forward_input
        module = self._info.module_cls(*constructor.args, **constructor.kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _copy, (forward.args, forward.kwargs))
        if kwargs:
            kwargs = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        return module.to(torch.float32).train(self._training), kwargs or args


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """No leaf, because a module may not change a leaf in place; and without the history that the database gave it."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def cases(info: Any) -> Iterator[Case]:
    for training in (True, False) if FULL else (True,):
        random.seed(0)
        torch.default_generator.manual_seed(0)
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
        given = (Case(info, each, training) for each in inputs if each.forward_input is not None)
        yield from given if FULL else itertools.islice(given, 2)


def has_gradient(case: Case) -> bool:
    """Whether the module runs, and its output requires a gradient."""
    module, inputs = case()
    try:
        output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    except Exception:
        return False  # the database has inputs that a module refuses
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(output))


@pytest.mark.parametrize("autocast", [None, bfloat16] if FULL else [None], ids=lambda each: "autocast" if each else "")
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_saved_bytes_are_those_of_a_real_step(info: Any, autocast: Any) -> None:
    wrong: dict[str, Any] = {}
    with quiet():
        found = list(enumerate(cases(info)))
        tested = [(number, case) for number, case in found if has_gradient(case)]
        for number, case in tested:
            try:
                told: Any = beside(case, autocast, peaks=False).wrong()
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
            if told:
                wrong[f"{info.name} {number} of {len(found)}"] = told
    assert tested or not found
    assert wrong == {}
