"""Small random programs: views of views, operators that save them, in-place edits and backwards, in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Context = contextlib.AbstractContextManager[object]
#: What to do, to which tensors, with which choices; each number is taken modulo what there is to choose from.
Step = tuple[int, int, int, int]

SHAPES = [(4, 6), (2, 3, 4), (40, 40), (), (0, 3), (7,), (1, 2, 4, 4), (33, 64)]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float16]
CLASSES = (RuntimeError, TypeError, IndexError, ValueError, ArithmeticError)


class Save(torch.autograd.Function):
    """Saves what it is given and notes, in backward, every bit of what it is given back."""

    @staticmethod
    def forward(ctx: Any, notes: list, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.notes = notes
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        saved = ctx.saved_tensors
        ctx.notes.append([told(tensor) for tensor in saved])
        return (None, grad, *[None] * len(saved))


def told(tensor: torch.Tensor | None) -> object:
    """All there is to know of a tensor, comparable; every NaN is alike, minus zero is not zero."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), flags, repr(tensor.tolist())


def _extent(x: torch.Tensor) -> int:
    """Elements from the first to the last of ``x``: further on may lie another chunk, with a counter of its own."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _strided(x: torch.Tensor, size: tuple, stride: tuple, offset: int) -> torch.Tensor:
    reach = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return x.as_strided(size, stride, x.storage_offset() + offset) if reach <= _extent(x) else x


def _lengthen(x: torch.Tensor) -> None:
    storage = x.untyped_storage()
    before = storage.nbytes()
    storage.resize_(2 * before)
    torch.empty(0, dtype=torch.uint8).set_(storage)[before:].zero_()


VIEWS: list[Callable[[torch.Tensor, int], torch.Tensor | tuple[torch.Tensor, ...]]] = [
    lambda x, k: x.transpose(-1, -2),
    lambda x, k: x.narrow(k % x.dim(), k % 2, max(0, x.shape[k % x.dim()] - 1 - k % 3)),
    lambda x, k: x[..., k % 3 :: 1 + k % 3],
    lambda x, k: x.unsqueeze(0).expand(1 + k % 3, *x.shape),
    lambda x, k: _strided(x, (max(1, x.numel() // 2),), (2,), k % 3),
    lambda x, k: _strided(x, (3, 1 + k % 4), (1, 1 + k % 2), k % 5),
    lambda x, k: _strided(x, (2 + k % 3, 2), (2, 5), k % 7),
    lambda x, k: _strided(x, (2, 3), (0, 1 + k % 2), k % 3),
    lambda x, k: x.unfold(k % x.dim(), 2, 1 + k % 2),
    lambda x, k: x.diagonal(k % 2, -2, -1),
    lambda x, k: x.view(-1),
    lambda x, k: x.real if k % 2 else x.imag,
    lambda x, k: x.conj(),
    lambda x, k: torch._neg_view(x.clone()),  # of one without history torch itself loses track
    lambda x, k: x.conj().imag,
    lambda x, k: torch.view_as_real(x),
    lambda x, k: torch.view_as_complex(x.unflatten(-1, (-1, 2))),
    lambda x, k: x.view(torch.int32 if k % 2 else torch.uint8),
    lambda x, k: x.view(torch.bfloat16),
    lambda x, k: x.contiguous(memory_format=torch.channels_last),
    lambda x, k: x[:0],
    lambda x, k: x.reshape(-1)[k % x.numel()],
    lambda x, k: x.flip(0),
    lambda x, k: x.detach(),
    lambda x, k: x.movedim(0, -1),
    lambda x, k: x.split(1 + k % 2)[-1],
    lambda x, k: x.clone().unsafe_chunk(2),
    lambda x, k: x.squeeze(),
    lambda x, k: x.unflatten(-1, (2, -1)),
    lambda x, k: x.detach()[k % 2 :].requires_grad_(),
    lambda x, k: x.select(k % x.dim(), 0),
    lambda x, k: x.swapaxes(0, -1)[..., 1:],
]
OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x * y,
    lambda x, y: x * x,
    lambda x, y: (x / 4).exp(),
    lambda x, y: x.exp(),
    lambda x, y: x.sigmoid(),
    lambda x, y: x.tanh(),
    lambda x, y: x.relu(),
    lambda x, y: x @ y,
    lambda x, y: x @ x.mT,
    lambda x, y: F.linear(x, y),
    lambda x, y: x.prod(),
    lambda x, y: x.prod(-1),
    lambda x, y: F.max_pool1d(x, 2),
    lambda x, y: F.max_pool2d(x, 2),
    lambda x, y: x.softmax(-1),
    lambda x, y: x.log_softmax(0),
    lambda x, y: F.layer_norm(x, x.shape[-1:]),
    lambda x, y: x / (y + 2),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: x.cumprod(0),
    lambda x, y: x.amax(-1),
    lambda x, y: x.norm(),
    lambda x, y: F.gelu(x),
    lambda x, y: x.std(),
    lambda x, y: x**3,
    lambda x, y: x.abs().sqrt(),
    lambda x, y: x.index_select(0, torch.tensor([0, 0])),
    lambda x, y: x.sort(-1)[0],
    lambda x, y: F.rrelu(x, 0.25, 0.25, training=True),
    lambda x, y: x.clone(),
    lambda x, y: x.logsumexp(-1),
    lambda x, y: torch.addcmul(x, x, y),
    lambda x, y: x.sigmoid_(),
    lambda x, y: x.mul_(y.detach()),  # with a history torch saves x itself, in a cycle that nothing breaks
    lambda x, y: x.exp_(),
]
EDITS: list[Callable[[torch.Tensor], object]] = [
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1),
    lambda x: x.zero_(),
    lambda x: x.view(-1)[0].fill_(3),
    lambda x: x.detach().add_(1),
    lambda x: x.copy_(x.flip(0)),
    lambda x: x.relu_(),
    lambda x: x.t_(),
    lambda x: x.squeeze_(0),
    lambda x: x.resize_(min(x.numel(), _extent(x))),
    lambda x: x.set_(x.clone()),
    lambda x: x.detach()[..., :1].neg_(),
    lambda x: x.requires_grad_(),
    _lengthen,
]


class Machine:
    """Runs one program under one context and notes everything that can be seen of it."""

    def __init__(self, dtype: int, shape: int, hooks: Callable[[], Context]) -> None:
        # torch keeps the unfinished nodes of a backward that failed in its thread's queue, latest first, for as long as
        # later graphs run: one from before them all empties it.
        self.oldest = torch.ones(1, requires_grad=True).exp()
        generator = torch.Generator().manual_seed(dtype * 100 + shape)
        kind, size = DTYPES[dtype % len(DTYPES)], SHAPES[shape % len(SHAPES)]
        wide = torch.complex64 if kind.is_complex else torch.float32
        self.leaf, plain = (torch.randn(size, dtype=wide, generator=generator).to(kind) for _ in range(2))
        self.leaf.requires_grad_()
        self.tensors = [self.leaf, self.leaf * 1.5, plain, self.leaf + 1]
        self.anchor = torch.ones(1, requires_grad=True)
        self.roots: list[torch.Tensor] = []
        self.notes: list[object] = []
        self.hooks = hooks

    def run(self, blocks: list[list[Step]]) -> list[object]:
        """Every second block runs under the hooks; then every root is differentiated."""
        for number, block in enumerate(blocks):
            with contextlib.nullcontext() if number % 2 else self.hooks():
                for step in block:
                    self._step(step)
        for number in range(len(self.roots)):
            self._backward(number, False)
        return self.notes

    def _step(self, step: Step) -> None:
        verb, i, j, k = step
        x, y = self.tensors[i % len(self.tensors)], self.tensors[j % len(self.tensors)]
        try:
            (self._view, self._apply, self._apply, self._save, self._edit, self._other)[verb % 6](x, y, i, k)
        except CLASSES as error:
            self.notes.append(kind_of(error))

    def _view(self, x: torch.Tensor, y: torch.Tensor, i: int, k: int) -> None:
        made = VIEWS[k % len(VIEWS)](x, k // len(VIEWS))
        for tensor in made if isinstance(made, tuple) else (made,):
            self._new(tensor)

    def _apply(self, x: torch.Tensor, y: torch.Tensor, i: int, k: int) -> None:
        self._new(OPERATORS[k % len(OPERATORS)](x, y), root=True)

    def _save(self, x: torch.Tensor, y: torch.Tensor, i: int, k: int) -> None:
        self._new(Save.apply(self.notes, self.anchor, x, y, *(self.tensors[-3:] if k % 2 else ())), root=True)

    def _edit(self, x: torch.Tensor, y: torch.Tensor, i: int, k: int) -> None:
        with torch.set_grad_enabled(bool(k % 3)):
            EDITS[k // 3 % len(EDITS)](x)

    def _other(self, x: torch.Tensor, y: torch.Tensor, i: int, k: int) -> None:
        if k % 4 == 0:  # gone; what saved it stays
            self.tensors[i % len(self.tensors)] = self.leaf
        elif k % 4 == 1 and self.roots:
            self._backward(i % len(self.roots), bool(k & 4))
        elif k % 4 == 2 and self.roots:
            self._peek(self.roots[i % len(self.roots)].grad_fn)
        elif self.roots:
            del self.roots[i % len(self.roots)]

    def _new(self, tensor: torch.Tensor, root: bool = False) -> None:
        if tensor.numel() <= 6000:
            self.tensors.append(tensor)
            if root and tensor.requires_grad:
                self.roots.append(tensor)

    def _backward(self, number: int, retain: bool) -> None:
        root = self.roots[number]
        wanted = [self.leaf, self.anchor]
        for again in (True, False) if retain else (False,):
            try:
                found = torch.autograd.grad(
                    root, wanted, torch.ones_like(root), retain_graph=again or number % 2 == 0, allow_unused=True
                )
                self.notes.append([told(grad) for grad in found])
            except CLASSES as error:
                self.notes.append(kind_of(error))
        self.oldest.backward(retain_graph=True)

    def _peek(self, node: Any) -> None:
        for name in sorted(name for name in dir(node) if name.startswith("_saved_")):
            try:
                value = getattr(node, name)
                self.notes.append(told(value) if isinstance(value, torch.Tensor) else name)
            except CLASSES as error:
                self.notes.append(kind_of(error))


def kind_of(error: Exception) -> str:
    """What kind of error it is; in-place errors are told by torch's own words."""
    changed = ("modified by an inplace operation", "has been modified inplace", "new_fn INTERNAL ASSERT", "setStorage")
    if any(words in str(error) for words in changed):
        return "modified in place"
    return next(kind.__name__ for kind in CLASSES if isinstance(error, kind))
