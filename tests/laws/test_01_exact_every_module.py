"""Law 1, exact, for every module in torch's own database, in place and wrapped.

Outputs, gradients and buffers by bits.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_map_only

import disthooks as dh
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.report import SavedReport
from tests.support.ops import (
    Outcome,
    Tally,
    differentiable,
    each_dtype,
    gradients,
    outcome,
    pipelines,
    quiet,
    share,
    some,
    tensors,
)
from tests.support.switch import KIND

pytestmark = pytest.mark.any_device


@dataclasses.dataclass
class Case:
    """A module of the database, one of its inputs, and the reports of what was attached for each store."""

    info: Any
    given: Any
    dtype: torch.dtype
    training: bool
    lines: Mapping[str, Pipeline]
    reports: dict[str, list[Callable[[], SavedReport]]]

    def run(self, way: str, twice: bool, store: str) -> Outcome:
        return outcome(functools.partial(self._run, way, twice, store))

    def build(self) -> nn.Module:
        constructor = self.given.constructor_input
        module = self.info.module_cls(*constructor.args, **constructor.kwargs)
        return module.to(self.dtype).train(self.training)

    def _attached(self, module: nn.Module, way: str, store: str) -> Callable[..., Any]:
        if not store:
            return module
        if way == "wrapped":
            wrapper = dh.SaveWith(module, self.lines[store])
            self.reports[store].append(wrapper.report)
            return wrapper
        self.reports[store].append(dh.save_activations(module, "", self.lines[store]).report)
        return module

    def _run(self, way: str, twice: bool, store: str, noted: Outcome) -> None:
        module = self.build()
        called = self._attached(module, way, store)
        # Copies: no module may change a leaf in place, and the next run wants the inputs as they were.
        given = (self.given.forward_input.args, self.given.forward_input.kwargs)
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, given)
        result = called(*args, **kwargs)
        noted.outputs = [tensor.detach() for tensor in [*tensors(result), *module.buffers()]]
        by = differentiable((given, list(module.parameters())))
        first, along = gradients(differentiable(result), by, create_graph=twice)
        noted.gradients = [gradient if gradient is None else gradient.detach() for gradient in first]
        noted.gradients += gradients(differentiable(first), [*by, *along])[0]


def cases(info: Any, dtype: torch.dtype, lines: Mapping[str, Pipeline], reports: Any) -> Iterator[Case]:
    for training in (True, False):
        inputs = info.module_inputs_func(info, KIND, dtype, requires_grad=True, training=training)
        for given in some(given for given in inputs if given.forward_input is not None):
            yield Case(info, given, dtype, training, lines, reports)


def summed(reports: list[Callable[[], SavedReport]]) -> SavedReport:
    return sum((report() for report in reports), SavedReport())


@pytest.mark.first_tier(dtype=(torch.bfloat16,))
@pytest.mark.full_tier(dtype=(torch.float32,))
@each_dtype
def test_gradients_of_every_module(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    lines, tally = pipelines(tmp_path), Tally(dtype, {})
    with quiet():
        for info, stores in share(module_db, lambda info: info.dtypes, dtype):
            ways = ("wrapped", "in place")
            orders = (False, True) if info.supports_gradgrad else (False,)
            kinds = {
                f"{way}, {'double backward' if twice else 'first order'}": (way, twice)
                for way in ways
                for twice in orders
            }
            reports: dict[str, list[Callable[[], SavedReport]]] = {store: [] for store in stores}
            samples = 0
            for case in cases(info, dtype, lines, reports):
                samples += 1
                for kind, how in kinds.items():
                    tally.check(info.name, kind, stores, functools.partial(case.run, *how))
            for store in stores:
                assert all(report().calls for report in reports[store]), f"{info.name} ran without hooks"
                tally.add(info.name, store, samples, functools.partial(summed, reports[store]))
    tally.finish()


def test_nothing_is_refused_in_place() -> None:
    for info in module_db:
        with quiet():
            module = next(cases(info, torch.float32, {}, {})).build()
        dh.save_activations(module, "", dh.OnCpu()).remove()
