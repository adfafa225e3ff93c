"""``in_chunks``: changes a model so that its cross entropy computes the logits in chunks, and never has all of them."""

# [Note: logits that nobody computes]
# A script gives the output of its last linear layer to a cross entropy, often after `.float()`, a slice and a view. To
# predict the same script with torch's `linear_cross_entropy`, the layer returns an object in place of the logits. It
# follows what the script does with the shape, and the cross entropy takes the hidden states and the weight in its
# place. Only how many rows are left matters to a step on fake tensors, and not which ones. A script that does anything
# else with its logits gets an error; then the change is only estimated.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._mode_utils import no_dispatch

from disthooks.errors import UsageError

#: What a script does with the shape of logits.
_SHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous")


class Logits:
    """Stands for ``head(hidden)``. See [Note: logits that nobody computes].

    >>> head, hidden, labels = nn.Linear(8, 50), torch.ones(2, 16, 8), torch.zeros(2, 16, dtype=torch.int64)
    >>> logits = Logits(hidden, head).float()[:, :-1].reshape(-1, 50)
    >>> logits.shape
    torch.Size([30, 50])
    >>> functional.cross_entropy(logits, labels[:, 1:].flatten()).shape
    torch.Size([])
    """

    def __init__(self, hidden: torch.Tensor, head: nn.Linear, rows: torch.Tensor | None = None) -> None:
        self._hidden, self._head = hidden, head
        with no_dispatch():
            shape = *hidden.shape[:-1], head.out_features
            self._rows = torch.empty(shape, device="meta") if rows is None else rows

    def __getattr__(self, name: str) -> Any:
        if name in ("float", "to", "type_as"):
            return lambda *args, **kwargs: self
        if name in _SHAPES:
            return functools.partial(self._reshaped, name)
        if name in ("shape", "ndim", "size", "dim", "dtype", "device"):
            return getattr(self._hidden if name in ("dtype", "device") else self._rows, name)
        raise UsageError(f"logits that are computed in chunks have no {name!r}")

    def __getitem__(self, index: Any) -> Logits:
        return self._reshaped("__getitem__", index)

    def _reshaped(self, name: str, *args: Any) -> Logits:
        with no_dispatch():
            rows = getattr(self._rows, name)(*args)
        if rows.shape[-1:] != self._rows.shape[-1:]:
            raise UsageError("logits that are computed in chunks keep all classes of a row together")
        return Logits(self._hidden, self._head, rows)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        if function is not functional.cross_entropy or not isinstance(args[0], cls):
            raise UsageError(f"logits that are computed in chunks cannot be given to {function.__name__}")
        return args[0]._loss(*args[1:], **kwargs)

    def _loss(self, target: torch.Tensor, **given: Any) -> torch.Tensor:
        hidden, head = self._hidden.flatten(0, -2)[: self._rows.shape[:-1].numel()], self._head
        kwargs = {name: given[name] for name in ("weight", "ignore_index", "reduction", "label_smoothing")}
        kwargs |= {"linear_bias": head.bias, "options": nn.LinearCrossEntropyOptions()}
        return functional.linear_cross_entropy(hidden, head.weight, target, **kwargs)


def in_chunks(head: str) -> Callable[[nn.Module], None]:
    """A change of a model: the cross entropy of what its linear layer ``head`` gives works in chunks."""

    def change(model: nn.Module) -> None:
        layer: Any = model.get_submodule(head)
        layer.forward = lambda hidden: Logits(hidden, layer)

    return change
