"""A fake run changes nothing of the user's, and a model in it has no memory."""

from __future__ import annotations

import contextlib
import os
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from disthooks import explain
from disthooks.errors import UsageError
from disthooks.predict.cuda import autocast, substitutes
from disthooks.predict.cuda.overrides import has_kernel
from disthooks.predict.fake.lazy import has_lazy
from tests.support.predicted import beside


def state() -> list[object]:
    """What a fake run may change of this process."""
    module = nn.modules.module
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.get_default_dtype(),
        {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"},  # an import sets it
        nn.Module._apply,
        FakeTensor.__deepcopy__,
        torch.UntypedStorage.resize_,
        torch.ctc_loss,
        (torch.autocast.__init__, torch.autocast.__enter__, torch.autocast.__exit__),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        [has_kernel(name, "AutocastCPU") for name in autocast.differing()],
        [has_kernel(name, "AutogradCPU") for name in substitutes._KERNELS],
        nn.init._no_grad_trunc_normal_,
        list(module._global_forward_pre_hooks),
        list(module._global_forward_hooks),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.is_autocast_enabled("cpu"),
        os.getcwd(),
    ]


class Careless(nn.Module):
    """Changes what belongs to the process, in its constructor and in its forward; fails if it is asked to."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        random.seed(7)
        torch.set_default_dtype(torch.float64)
        self.linear, self.error = nn.Linear(4, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        made: torch.Tensor = self.linear(x)
        torch.set_grad_enabled(False)
        torch.set_default_device("cpu")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.set_autocast_enabled("cpu", True)
        os.chdir("/")
        if self.error is not None:
            raise self.error
        return made


@pytest.mark.parametrize("error", [None, ValueError("this model\nis careless"), KeyboardInterrupt()], ids=repr)
def test_nothing_of_the_process_is_changed(error: BaseException | None) -> None:
    before = state()
    told = UsageError if isinstance(error, ValueError) else KeyboardInterrupt
    for device in ("cpu", "a100"):
        with contextlib.nullcontext() if error is None else pytest.raises(told):
            explain(lambda: (Careless(error), torch.ones(2, 4)), device=device, autocast="bf16")
    assert state() == before


def test_an_error_of_the_users_code_is_one_line_that_says_where() -> None:
    with pytest.raises(UsageError, match=r"one step of Careless: ValueError: this model is careless \(.*\.py:\d+\)$"):
        explain(lambda: (Careless(ValueError("this model\nis careless")), torch.ones(2, 4)), device="cpu")


def test_a_module_that_is_given_is_not_changed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, x, device="cpu", optimizer="adamw", dtype="bf16", autocast="bf16")
    after = model.state_dict()
    assert all(type(each) in (torch.Tensor, nn.Parameter) for each in [*model.parameters(), *model.buffers()])
    assert all(torch.equal(after[name], value) and after[name].dtype is value.dtype for name, value in before.items())
    assert all(each.grad is None for each in model.parameters())


def test_a_module_without_memory_is_explained_as_one_with_memory() -> None:
    with torch.device("meta"):
        without = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    real = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.ones(8, 64)
    assert explain(without, x, device="cpu").by_module == explain(real, x, device="cpu").by_module


def test_a_model_that_no_machine_could_hold_is_explained() -> None:
    """Its weights are 4 TiB. So they have no memory, neither when they are built nor in the step."""
    said = explain(lambda: (nn.Linear(1 << 20, 1 << 20, bias=False), torch.empty(2, 1 << 20)), device="cpu")
    assert said.saved_bytes == 2 * 4 << 20
    assert said.peak_bytes > 8 << 40  # the weights and their gradients


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
