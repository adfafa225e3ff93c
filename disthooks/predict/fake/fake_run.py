"""``fake_run``: inside, modules and tensors have shapes and no memory, and operators compute nothing.

The private parts of torch that this needs are in this file.
"""

# [Note: models are built inside]
# A fake tensor and a real one do not mix well, so the model is built, or copied, inside the fake mode. There
# `Module.to()` fails in torch, because it swaps tensors that have weak references, and a deep copy of a fake parameter
# does not know its own storage. Both are replaced while the fake mode is on. Nothing of the user's is changed: a module
# that is given is copied without its memory, and the state of the process is put back (state.py).
#
# [Note: the lengths of a CTC loss]
# `torch.ctc_loss` takes lengths as lists or as tensors. For real tensors it makes lists of them, which autograd does
# not save. For fake tensors it keeps them as tensors, which autograd saves, and given lists it makes a real tensor. So
# the function is replaced by the same steps in Python, always with lists.

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils import _pytree as pytree

from disthooks.errors import UsageError
from disthooks.predict.fake.kernels import FakeKernels, lengths_of_targets
from disthooks.predict.fake.lazy import copy_lazy, new_buffer, new_parameter
from disthooks.predict.fake.state import replaced, state_put_back
from disthooks.predict.fake.values import Values

#: torch's numbers of reductions.
_MEAN, _SUM = 1, 2


@contextlib.contextmanager
def fake_run() -> Iterator[Fakes]:
    """Inside, every new tensor is fake, and what the code changes of this process's state is put back at the end.

    >>> with fake_run():
    ...     model = nn.Linear(10**6, 10**6).to(torch.bfloat16)
    >>> model.weight.dtype, model.weight.untyped_storage().nbytes() == 2 * 10**12
    (torch.bfloat16, True)
    """
    mode = FakeKernels()
    values = Values(mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_put_back())
        stack.enter_context(replaced(nn.Module, "_apply", _apply))
        stack.enter_context(replaced(FakeTensor, "__deepcopy__", _deepcopy))
        for kind, new in ((UninitializedParameter, new_parameter), (UninitializedBuffer, new_buffer)):
            stack.enter_context(replaced(kind, "__new__", new))
            stack.enter_context(replaced(kind, "__deepcopy__", copy_lazy))
        stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _filled))  # it looks at what it draws
        stack.enter_context(replaced(torch, "ctc_loss", functools.partial(_ctc_loss, mode)))
        stack.enter_context(replaced(torch, "tensor", _tensor))  # torch reads the memory of tensors in lists
        stack.enter_context(replaced(torch._VF, "_pad_packed_sequence", _padded))  # torch writes the lengths
        stack.enter_context(mode)
        stack.enter_context(values)
        yield Fakes(mode, values)


@contextlib.contextmanager
def as_if_real() -> Iterator[None]:
    """Inside, libraries that ask whether a tensor is fake are told that it is real.

    transformers asks that, and takes the ways then that it takes under a compiler.
    """
    library = sys.modules.get("transformers.utils.import_utils")
    if library is None or not hasattr(library, "is_fake_tensor"):
        yield
        return
    with replaced(library, "is_fake_tensor", lambda tensor: False):
        yield


@contextlib.contextmanager
def compiled_as_eager(fakes: Fakes) -> Iterator[None]:
    """Inside, compiled modules and functions run as they are written, and the prediction says so."""
    library = sys.modules.get("torch._dynamo.eval_frame")
    if library is None or not hasattr(library, "_callback_from_stance"):
        yield
        return

    def no_callback(callback: Any) -> None:
        if callable(callback):
            fakes.mode.told("what the code of torch.compile saves", "what it saves without torch.compile")

    with replaced(library, "_callback_from_stance", no_callback):
        yield


@contextlib.contextmanager
def hooks_of_the_model(fakes: Fakes) -> Iterator[None]:
    """Inside, the prediction says so if the model opens saved-tensor hooks of its own, ``save_on_cpu`` say.

    All fake tensors are of the CPU, so a copy to the host cannot be told from one to the device.
    """
    enter = saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> None:
        owner = str(getattr(hooks.pack_hook, "__module__", ""))
        if not owner.startswith(("disthooks.", "torch.utils.checkpoint")):
            fakes.mode.told("what the model's own saved-tensor hooks keep", "that it is on the device, and temporary")
        enter(hooks)

    with replaced(saved_tensors_hooks, "__enter__", entered):
        yield


class Fakes(NamedTuple):
    mode: FakeKernels
    values: Values

    def tell(self, told: Callable[[str, str], None]) -> None:
        """From now on call ``told`` with what could not be known, and with what was assumed instead."""
        self.mode.told = self.values.told = told

    def like(self, value: Any) -> Any:
        """``value`` with a fake tensor of the CPU in place of each real one."""

        def one(real: torch.Tensor) -> torch.Tensor:
            if isinstance(real, FakeTensor):
                self.values.doubt(real)
                return real
            if real.device.type != "cpu":
                return torch.empty_strided(
                    real.size(), real.stride(), dtype=real.dtype, requires_grad=real.requires_grad
                )
            fake: torch.Tensor = self.mode.from_tensor(real)
            self.values.give(fake, real)
            return fake

        return pytree.tree_map_only(torch.Tensor, one, value)

    def copy(self, model: nn.Module) -> nn.Module:
        tensors = [*model.parameters(), *model.buffers()]
        if tensors and all(isinstance(each, FakeTensor) for each in tensors):
            return model
        try:
            with FakeCopyMode(self.mode):
                made: nn.Module = copy.deepcopy(model)
        except Exception as error:
            raise UsageError(
                f"{type(model).__name__} cannot be copied without its memory ({type(error).__name__}: {error}): give "
                "the function that builds it instead"
            ) from error
        if any(each.device.type != "cpu" for each in tensors):
            _to_cpu(made)
        return made


def _to_cpu(model: nn.Module) -> None:
    """Give ``model`` fake tensors of the CPU in place of those of other devices; a tied weight stays one."""
    made: dict[int, Any] = {}

    def one(tensor: Any) -> Any:
        if tensor is None or tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in made:
            new: torch.Tensor = torch.empty_like(tensor, device="cpu")
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return made[id(tensor)]

    for module in model.modules():
        module._parameters.update({name: one(weight) for name, weight in module._parameters.items()})
        module._buffers.update({name: one(buffer) for name, buffer in module._buffers.items()})


def _ctc_loss(
    mode: FakeKernels,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``torch.ctc_loss`` as for real tensors. See [Note: the lengths of a CTC loss]."""
    is_batched = log_probs.dim() == 3
    if torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        # Autocast of the CPU casts the arguments of `torch.ctc_loss`, but not those of the operator below.
        log_probs = log_probs.float()
    rows = log_probs if is_batched else log_probs.unsqueeze(1)
    of_targets = lengths_of_targets(mode, targets, target_lengths)
    of_inputs = [rows.shape[0]] * rows.shape[1]  # their values change no shape
    losses: torch.Tensor = torch._ctc_loss(rows, targets.to(torch.int64), of_inputs, of_targets, blank, zero_infinity)[
        0
    ]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
    if reduction == _MEAN:
        return (losses / torch.tensor(of_targets, dtype=losses.dtype).clamp_min(1)).mean()
    if reduction == _SUM:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


_original_tensor: Callable[..., torch.Tensor] = torch.tensor


def _tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor`` of a list, with numbers in the place of fake tensors."""
    if isinstance(data, (list, tuple)):
        data = pytree.tree_map_only(FakeTensor, lambda each: each.tolist(), data)
    return _original_tensor(data, *args, **kwargs)


def _padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of a packed sequence, and their lengths; the operators are those of torch's C++."""
    sizes: list[int] = batch_sizes.tolist()
    steps, begin, row = len(sizes), 0, 0
    made = torch.full(
        (total if total and total > steps else steps, sizes[0], *data.shape[1:]), padding, dtype=data.dtype
    )
    for step in range(1, steps + 1):
        if step == steps or sizes[step] != sizes[begin]:
            rows = (step - begin) * sizes[begin]
            part = data[row : row + rows].view(step - begin, sizes[begin], *data.shape[1:])
            made[begin:step, : sizes[begin]].copy_(part)
            begin, row = step, row + rows
    lengths = torch.tensor([sum(size > index for size in sizes) for index in range(sizes[0])])
    return (made.transpose(0, 1) if batch_first else made), lengths


def _filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``Module._apply`` for fake parameters. See [Note: models are built inside]."""
    if recurse:
        for child in self.children():
            child._apply(fn)  # type: ignore[no-untyped-call]
    for weight in self._parameters.values():
        if weight is not None:
            with torch.no_grad():
                new = fn(weight)
                if new is not weight:
                    weight.data = new
                if weight.grad is not None:
                    weight.grad = fn(weight.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None and is_lazy(buffer):
            buffer.data = fn(buffer)  # it stays without a size
        elif buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy of a fake tensor. See [Note: models are built inside]."""
    found: torch.Tensor | None = memo.get(id(self))
    if found is None:
        found = self.detach().clone()
        found = nn.Parameter(found, self.requires_grad) if isinstance(self, nn.Parameter) else found
        if not isinstance(found, nn.Parameter):
            found.requires_grad_(self.requires_grad)
        memo[id(self)] = found
    return found
