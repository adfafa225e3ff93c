"""Models as people write them: what they save and hold is predicted to the byte, and what cannot be known is named."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from disthooks import explain
from disthooks.predict.explanation import Explanation
from tests.support import oracle
from tests.support.predicted import Beside


class Model(nn.Module):
    """Its forward is a function of its parts and of the inputs."""

    def __init__(self, forward: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), forward

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.parts, *inputs)


def packed(parts: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(parts[0](sequence)[0], batch_first=True)[0]


def experts(parts: Any, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Backward reads the masks once more."""
    made = x.clone()
    for kind, part in enumerate(parts):
        mask = kinds == kind
        made[mask] = part(x[mask]).to(made.dtype)
    return made


def skipped(parts: Any, x: torch.Tensor) -> torch.Tensor:
    """Each layer has a rate of its own, and the first one is never skipped."""
    for rate, part in zip(torch.linspace(0, 0.5, len(parts)).tolist(), parts, strict=True):
        x = part(x) * (torch.rand(len(x), 1) > rate) if rate else part(x)
    return x


def masked(parts: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask is of floats, as many libraries make them, and the model asks what it masks."""
    bias = (1.0 - mask.float()) * -10000.0
    return parts[0](x)[(bias < 0).nonzero(as_tuple=True)].exp()


def ragged(parts: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([parts[0](x), parts[0](y)], layout=torch.jagged)
    return torch.nested.to_padded_tensor(rows.relu(), 0.0)


def lin() -> nn.Linear:
    return nn.Linear(16, 16)


INT, X = torch.arange(24).reshape(4, 6) % 10, torch.randn(8, 16)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "packed sequences": (
        lambda: Model(packed, nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True)),
        (torch.randn(4, 10, 16), torch.tensor([10, 3, 7, 5])),
    ),
    "experts by masks": (lambda: Model(experts, lin(), lin()), (X, torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]))),
    "rates of skipped layers": (lambda: Model(skipped, lin(), lin(), lin()), (X,)),
    "a mask of floats": (lambda: Model(masked, lin()), (X, torch.arange(8) % 3 != 0)),
    "rows of several lengths": (lambda: Model(ragged, lin()), (X[:3], X[3:])),
    "sparse gradients": (lambda: Model(lambda parts, x: parts[0](x).tanh(), nn.Embedding(10, 4, sparse=True)), (INT,)),
    "bags of embeddings": (lambda: Model(lambda parts, x: parts[0](x).tanh(), nn.EmbeddingBag(10, 4)), (INT,)),
    "a mean of losses": (lambda: Model(lambda parts, x: F.mse_loss(parts[0](x).tanh(), x), lin()), (X,)),
    "a transposed batch norm": (
        lambda: Model(lambda parts, x: parts[1](parts[0](x.mT).mT), nn.BatchNorm1d(16), lin()),
        (torch.randn(4, 6, 16),),
    ),
    "a CTC loss": (
        lambda: Model(lambda parts, x, *rest: F.ctc_loss(parts[0](x).log_softmax(-1), *rest), lin()),
        (torch.randn(20, 2, 16), torch.randint(1, 10, (2, 5)), torch.full((2,), 20), torch.tensor([5, 3])),
    ),
    "a list of tensors": (
        lambda: Model(lambda parts, x, n: parts[0](x) * torch.tensor([n[0], n[1]]).sum(), lin()),
        (X, INT[0]),
    ),
}


def compared(name: str, autocast: oracle.MakeContext | None = None) -> Beside:
    make, inputs = MODELS[name]
    make()(*inputs)  # jagged tensors share a tensor of 60 bytes, which torch makes at their first use in a process
    said = explain(make, *inputs, device="cpu", loss=oracle.loss_of, autocast=autocast and torch.bfloat16)
    return Beside(said, oracle.measure(make(), inputs, autocast))


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_and_peak_are_those_of_a_real_step(name: str) -> None:
    found = compared(name)
    assert found.wrong() == {}
    assert found.peak_off == 0
    assert found.predicted.unknown == ()


@pytest.mark.parametrize("name", ["a CTC loss", "a mean of losses", "a mask of floats"])
def test_saved_bytes_and_peak_are_those_of_a_real_step_under_autocast(name: str) -> None:
    found = compared(name, lambda: torch.autocast("cpu", torch.bfloat16))
    assert found.wrong() == {}
    assert found.peak_off == 0


@pytest.mark.parametrize("name", MODELS)
def test_it_runs_as_on_a_gpu(name: str) -> None:
    make, inputs = MODELS[name]
    assert explain(make, *inputs, device="cuda", autocast="bf16").saved_bytes > 0


def named(said: Explanation) -> set[str]:
    return {each.what for each in said.unknown}


def test_a_random_number_that_decides_is_named_and_a_rate_below_one_half_skips_nothing() -> None:
    model = Model(lambda parts, x: parts[0](x) if torch.rand([]) < 0.3 else parts[0](x).tanh(), lin())
    said = explain(model, X, device="cpu")
    assert said.by_operator["aten.tanh"] == X.nbytes
    assert named(said) == {"a random number that the model reads"}


def test_what_is_assumed_while_the_model_is_built_is_named() -> None:
    def build() -> nn.Module:
        return lin() if torch.randn(3).sum() > 0 else nn.Identity()

    assert named(explain(build, X, device="cpu")) == {"the value of a tensor (.item())"}


def test_code_of_torch_compile_is_named() -> None:
    said = explain(lambda: nn.Sequential(torch.compile(lin()), nn.ReLU()), X, device="cpu")
    assert named(said) == {"what the code of torch.compile saves"}
    assert said.saved_bytes == 2 * X.nbytes


def test_hooks_of_the_model_itself_are_named() -> None:
    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return parts[0](x).tanh()

    said = explain(Model(forward, lin()), X, device="cuda")
    assert named(said) == {"what the model's own saved-tensor hooks keep"}
    assert "not known: what the model's own saved-tensor hooks keep; assumed: that it is on the device" in str(said)
    assert torch.autograd.graph.saved_tensors_hooks.__enter__.__module__ == "torch.autograd.graph"


def test_operators_of_other_threads_are_named() -> None:
    def forward(parts: Any, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(parts[0](x)))
        thread.start()
        thread.join()
        return made[0].tanh()

    assert named(explain(Model(forward, lin()), X, device="cpu")) == {"operators in a thread that the model started"}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_is_around_the_call_changes_nothing(around: Callable[[], Any]) -> None:
    model = nn.Sequential(lin(), nn.ReLU())
    expected = explain(model, X, device="cpu").saved_bytes
    with around():
        assert explain(model, X, device="cpu").saved_bytes == expected


def test_two_threads_predict_while_a_third_one_trains() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(lin(), nn.ReLU()) for _ in range(20)])

    def state() -> tuple[Any, ...]:
        return nn.Module._apply, nn.init._no_grad_trunc_normal_, torch.UntypedStorage.resize_, dict(os.environ)

    expected, before = explain(make, X, device="cpu"), state()
    found: list[Any] = []
    stop = threading.Event()

    def predict() -> None:
        found.extend(explain(make, X, device="cpu") for _ in range(2))

    def train() -> None:
        model = make()
        while not stop.is_set():
            model(X).sum().backward()
            model.to(torch.float64).to(torch.float32)
        found.append({type(each) for each in model.parameters()})

    threads = [threading.Thread(target=predict) for _ in range(2)]
    trainer = threading.Thread(target=train)
    for each in (trainer, *threads):
        each.start()
    for each in threads:
        each.join()
    stop.set()
    trainer.join()
    *said, kinds = found
    assert kinds == {nn.Parameter}
    assert [(each.by_module, each.peak_bytes) for each in said] == [(expected.by_module, expected.peak_bytes)] * 4
    assert state() == before
