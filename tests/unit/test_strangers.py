"""Models with odd tensors and odd outputs: watchers leave their forward alone, and say what they cannot measure."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import disthooks as dh
from disthooks import stats
from disthooks._registry import own_kinds
from disthooks.errors import NotSeenError, UsageError
from tests.support.functions import Made

LENGTHS = torch.tensor([5, 3, 2])


class Recurrent(nn.Module):
    """It gives a packed sequence to a layer and gets one back, and another inside of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8)

    def forward(self, x: torch.Tensor) -> PackedSequence:
        return self.rnn(pack_padded_sequence(x.unsqueeze(1).expand(-1, 3, -1), LENGTHS))[0]


@dataclasses.dataclass
class Output:
    y: torch.Tensor
    me: Any = None  # the output itself, as the parent of a tree's node leads back to the node

    @property
    def loss(self) -> torch.Tensor:
        raise RuntimeError("no labels were given")


def as_output(x: torch.Tensor) -> Output:
    output = Output(x)
    output.me = output
    return output


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.fc(x)
        yield self.fc(x).relu()


class Silent(nn.Module):
    """It returns nothing, and keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.result: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        self.result = self.fc(x).relu()


class Propagating(nn.Module):
    """A sparse matrix times a layer's output, as in a graph network."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        matrix = torch.eye(5) + torch.eye(5).roll(1, 0)
        self.register_buffer("matrix", matrix.to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.matrix, self.fc(x))


class Stubborn(torch.Tensor):
    """A user's subclass that refuses what watchers do with a tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("reshape", "aminmax", "view", "contiguous", "clone"):
            raise ValueError(f"{func.__name__} is refused")
        return super().__torch_function__(func, types, args, kwargs or {})


def nested(layout: torch.layout, x: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[:3]], layout=layout)


def wide(*after: Callable[..., Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, dtype=dtype), *map(Made, after))


def per_row(layout: torch.layout) -> nn.Module:
    parts = Made(functools.partial(nested, layout)), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
    return nn.Sequential(*parts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "packed": Recurrent,
    "nested, strided": lambda: per_row(torch.strided),
    "nested, jagged": lambda: per_row(torch.jagged),
    "sparse output, COO": lambda: wide(torch.relu, torch.Tensor.to_sparse),
    "sparse output, CSR": lambda: wide(torch.relu, torch.Tensor.to_sparse_csr),
    "sparse buffer, COO": lambda: Propagating(torch.sparse_coo),
    "sparse buffer, CSR": lambda: Propagating(torch.sparse_csr),
    "complex": lambda: nn.Sequential(
        Made(lambda x: x.to(torch.complex64)), nn.Linear(4, 8, dtype=torch.complex64), Made(torch.conj)
    ),
    "bfloat16": lambda: nn.Sequential(
        Made(torch.Tensor.bfloat16),
        nn.Linear(4, 8, dtype=torch.bfloat16),
        nn.LayerNorm(8, dtype=torch.bfloat16),
    ),
    "an empty batch": lambda: nn.Sequential(Made(lambda x: x[:0]), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    "a dataclass": lambda: wide(as_output),
    "a generator": Generating,
    "None": Silent,
    "mkldnn": lambda: wide(torch.Tensor.to_mkldnn, torch.Tensor.to_dense),
    "a subclass that refuses": lambda: wide(lambda x: x.as_subclass(Stubborn), lambda x: x.as_subclass(torch.Tensor)),
}
#: Errors that say at once what cannot be done, by the model and what watches it.
REFUSED = {
    ("complex", "Extremes"): "have no order",
    ("complex", "Moments"): "have no order",
    ("a dataclass", "explain"): "no labels were given",
    ("a generator", "explain"): "no tensor that the model returns",
    ("None", "explain"): "no tensor that the model returns",
    ("a subclass that refuses", "explain"): "one step of",
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def tensors_in(output: Any, model: nn.Module) -> list[torch.Tensor]:
    """The tensors of an output, as dense ones that have a gradient."""
    if output is None:
        return [model.result]  # type: ignore[list-item]
    if isinstance(output, Output):
        return [output.y]
    if isinstance(output, torch.Tensor):
        if output.is_nested and output.layout is torch.strided:
            return [torch.cat([each.flatten() for each in output.unbind()])]
        if output.is_nested:
            return [output.values()]
        return [output.to_dense() if output.layout is not torch.strided else output]
    if isinstance(output, PackedSequence):
        return [output.data]
    return list(output)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """The outputs and the gradients of one step."""
    model.zero_grad()
    torch.manual_seed(1)
    outputs = tensors_in(model(torch.randn(5, 4)), model)
    torch.stack([each.abs().square().sum() for each in outputs]).sum().backward()
    gradients = [each.grad.clone() for each in model.parameters()]  # type: ignore[union-attr]
    if optimizer is not None:
        optimizer.step()
    return [each.detach().clone() for each in outputs] + gradients


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def traced(model: nn.Module) -> list[torch.Tensor]:
    with dh.trace(model, print=None) as trace:
        found = step(model)
    assert str(trace.report())
    return found


def blamed(model: nn.Module) -> list[torch.Tensor]:
    with dh.blame(model) as blame:
        found = step(model)
    assert not blame.report().found
    return found


def kept(model: nn.Module, copy: bool) -> list[torch.Tensor]:
    with dh.features(model, "*", copy=copy) as seen:
        found = step(model)
    assert set(seen) == {name for name, _ in model.named_modules()}
    return found


def measured(model: nn.Module, stat: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dh.gradients(model, optimizer, stats=[stat()]):
            return step(model, optimizer)


def stored(model: nn.Module, *stages: Any) -> list[torch.Tensor]:
    saving = dh.save_activations(model, "*", *stages, at_least=0)
    found = step(model)
    assert saving.report().held == 0
    return found


def explained(model: nn.Module) -> list[torch.Tensor]:
    assert str(dh.explain(model, torch.randn(5, 4), device="cpu"))
    return step(model)


WATCHERS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "trace": traced,
    "blame": blamed,
    "features": functools.partial(kept, copy=False),
    "copied features": functools.partial(kept, copy=True),
    "OnCpu": lambda model: stored(model, dh.OnCpu()),
    "OnDisk": lambda model: stored(model, dh.OnDisk("/tmp")),
    "Recompute": lambda model: stored(model, dh.Recompute(), dh.OnDisk("/tmp")),
    "Functions": lambda model: stored(model, dh.Functions(lambda tensor: tensor, lambda tensor: tensor)),
    "explain": explained,
    **{kind.name: functools.partial(measured, stat=kind.target) for kind in own_kinds("stat")},
}


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_watching_changes_no_bit_of_a_strange_model_or_is_refused_in_a_sentence(name: str, watcher: str) -> None:
    expected = step(made(name))
    if (name, watcher) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name, watcher]):
            WATCHERS[watcher](made(name))
    else:
        assert same(WATCHERS[watcher](made(name)), expected)


def test_a_trace_has_the_shapes_and_bytes_of_odd_tensors() -> None:
    found = {}
    for name, layer in (
        ("packed", "rnn"),
        ("nested, strided", "1"),
        ("nested, jagged", "1"),
        ("sparse output, COO", "2"),
    ):
        model = made(name)
        with dh.trace(model, layer, print=None) as trace:
            output = step(model)[0]
        found[name] = [(each.shape, each.nbytes) for each in trace.events if each.kind == "forward"]
    assert found["packed"] == [(((10, 8), (5,), None, None, (1, 3, 8)), 4 * 80 + 8 * 5 + 4 * 24)]
    assert found["nested, strided"] == [((2, None, 8), 4 * 5 * 8)]
    assert found["nested, jagged"] == [((2, None, 8), 4 * 5 * 8 + 8 * 3)]
    count = int((output != 0).sum())
    assert found["sparse output, COO"] == [((5, 8), (4 + 2 * 8) * count)]


@pytest.mark.parametrize("name", ["nested, strided", "nested, jagged", "sparse output, COO", "sparse output, CSR"])
@pytest.mark.filterwarnings("ignore")
def test_elements_of_odd_outputs_that_are_not_finite_are_seen(name: str) -> None:
    model = made(name)
    layer = "1" if "nested" in name else "0"
    with torch.no_grad():
        model.get_submodule(layer).bias[0] = torch.inf  # type: ignore[union-attr, index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        dh.gradients(model, optimizer, stats=[stats.Activations(modules=["1", "2"])]) as watch,
        dh.blame(model) as blame,
    ):
        model(torch.randn(5, 4))
        optimizer.step()
    assert watch.latest["activation_nonfinite/module/2"] == 5
    assert [each.module for each in blame.report().found] == [layer]


def test_what_cannot_be_read_is_counted_and_said() -> None:
    model = made("mkldnn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.Activations()]) as watch, dh.blame(model) as blame:
        with pytest.warns(UserWarning, match=r"leave out a tensor of '1' \(Made\).*torch._mkldnn"):
            step(model, optimizer)
        with warnings.catch_warnings(record=True) as said:
            step(model, optimizer)
    assert not [each for each in said if "leave out" in str(each.message)]
    assert watch.latest["activation_unread"] == watch.latest["activation_unread/module/1"] == 1
    assert "in the layout torch._mkldnn" in str(blame.report())
    model = made("a subclass that refuses")
    with dh.features(model, "1", "2", copy=True) as seen:
        model(torch.randn(5, 4))
    assert seen["2"].shape == (5, 8)
    with pytest.raises(NotSeenError, match=r"could not be kept \(ValueError: clone is refused\)"):
        seen["1"]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_tensor_counts_with_its_values_and_indices(layout: torch.layout) -> None:
    n = 100_000
    places = torch.stack([torch.arange(n), torch.arange(n).flip(0)])
    matrix = torch.sparse_coo_tensor(places, torch.ones(n), (n, n)).coalesce()
    held = {torch.sparse_coo: n * 20, torch.sparse_csr: n * 12 + 8 * (n + 1), torch.sparse_csc: n * 12 + 8 * (n + 1)}
    matrix = matrix if layout is torch.sparse_coo else matrix.to_sparse(layout=layout)
    fc = nn.Linear(4, 4)
    with dh.saving(dh.OnDisk("/tmp")) as saving:
        torch.sparse.mm(matrix, fc(torch.ones(n, 4))).sum()
    assert saving.report().kept_by["sparse"] == held[layout]
    assert saving.report().record()["saved/kept/sparse"] == held[layout]


def test_explain_predicts_the_parts_of_sparse_and_jagged_tensors() -> None:
    n = 1_000
    model = Propagating(torch.sparse_coo)
    model.matrix = torch.eye(n).to_sparse()
    said = dh.explain(model, torch.randn(n, 4), device="cpu")
    saved = {(each.kind, each.nbytes) for each in said.record.saved}
    assert ("buffer", 4 * n) in saved  # the values
    assert ("buffer", 16 * n) in saved  # and the indices
    assert not said.unknown
    said = dh.explain(made("nested, jagged"), torch.randn(5, 4), device="cpu")
    assert (said.by_module["1"], said.by_module["2"], said.saved_bytes) == (4 * 5 * 4 + 8 * 3, 4 * 5 * 8, 264)
    said = dh.explain(made("sparse output, CSR"), torch.randn(5, 4), device="cpu")
    assert {each.what for each in said.unknown} == {"how many elements a sparse tensor has"}
