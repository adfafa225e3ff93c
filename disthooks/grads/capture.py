"""``capture``: the call of a module that made a bad step, found and written to a folder, to be replayed elsewhere."""

# [Note: which call is captured]
# The calls of a bad step are made again twice. In the first run `BadCallFinder` looks at what goes into each module and
# comes out of it, and the host waits for each answer. The first module whose output is not finite made it if its inputs
# were finite. If they were not, code between modules made it, and the innermost module around with finite inputs is
# named. `-inf` in an input is a mask that somebody made on purpose. In backward the gradient of an output is what a
# call is given, and the gradients of its inputs and weights are what it makes. In the second run `CallTaker` copies
# what this one call gets. A weight is copied when the module that owns it is called: FSDP and ZeRO-3 have gathered it
# then, in the dtype that the forward computes with.
# A checkpoint calls modules again in backward. Such calls are passed over, and so are replicas of nn.DataParallel.
#
# [Note: half a capture]
# A capture is written to a hidden folder beside its place, which gets its name at the end. So a folder with the name of
# a capture is whole, also if the process is killed. It has JSON and safetensors, and no pickle.

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import pathlib
import platform
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import canonical_name
from disthooks._tensors import elements_of, exotic, floats_of, format_bytes
from disthooks._torch import in_backward, in_transform
from disthooks.grads.call_context import CallContext

_MOST = 2**30  # bytes of one capture


def badness(tensors: Iterable[torch.Tensor]) -> int:
    """3 if a tensor has NaN, else 2 if one has ``inf``, else 1 if one has ``-inf``, else 0. The host waits.

    >>> [badness([torch.tensor([1.0, other])]) for other in (1.0, -torch.inf, torch.inf, torch.nan)]
    [0, 1, 2, 3]
    """
    worst = 0
    for tensor in tensors:
        found = elements_of(tensor.detach())
        found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
        if found.numel() == 0 or found.is_meta or found.untyped_storage().nbytes() == 0:
            continue
        found = found.float() if found.dtype.itemsize == 1 else found  # torch has no extremes of 8-bit floats
        low, high = torch.stack(torch.aminmax(found)).tolist()
        worst = max(worst, 3 if low != low else 2 if high == torch.inf else int(low == -torch.inf))
    return worst


def is_made(made: int, given: int) -> bool:
    """Whether what is this bad was made, from what was given."""
    return given < 2 <= made or given == 0 < made


class BadCall(NamedTuple):
    """A call of a module that made a step bad: its name, and its number among the calls since the last step."""

    module: str
    number: int
    in_backward: bool


class _Calls(Attachment):
    """Hooks on all modules that run in Python."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self._counts: collections.Counter[str] = collections.Counter()
        self._running: list[tuple[nn.Module, Any]] = []
        self.modules: dict[str, nn.Module] = {}
        without: set[int] = set()  # compiled or scripted: a new hook would not be called, or compile them again
        for name, module in itertools.chain.from_iterable(model.named_modules() for model in models):
            is_compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
            if is_compiled or isinstance(module, torch.jit.ScriptModule):
                without |= {id(part) for part in module.modules()}
            if id(module) not in without:
                self.modules[canonical_name(name)] = module  # a wrapper comes before the module in it
        for name, module in self.modules.items():
            before, after = UncopiedHook(functools.partial(self._enter, name)), UncopiedHook(self._leave)
            self.on_remove(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.on_remove(module.register_forward_hook(after).remove)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward() or in_transform() or getattr(module, "_is_replica", False):
            return
        call = BadCall(name, self._counts[name], False)
        self._counts[name] += 1
        with _nothing_raised(self):
            self._running.append((module, self.begin(call, module, args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or in_transform() or not any(each[0] is module for each in self._running):
            return
        while (frame := self._running.pop())[0] is not module:
            pass  # a call inside of this one has raised an error, and its hook was not called
        with _nothing_raised(self):
            self.end(frame[1], output)

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def end(self, begun: Any, output: Any) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _nothing_raised(attached: Attachment) -> Iterator[None]:
    """An error on this rank would leave the others waiting: a subclass of tensors may raise anything."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        attached.remove()
        warnings.warn(f"rerun(capture=): {type(error).__name__}: {error}; training goes on", stacklevel=2)


class _Seen:
    """What a call of a module was given, in forward and in backward."""

    __slots__ = ("call", "gradients", "inputs")

    def __init__(self, call: BadCall, inputs: int) -> None:
        self.call, self.inputs = call, inputs
        self.gradients: int | None = None  # of its outputs


class BadCallFinder(_Calls):
    """Finds the call that made a bad step, while its calls are made again. See [Note: which call is captured].

    Attributes:
        found: the call; None if no module made what is not finite.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softplus(), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(model[2].weight, torch.inf)
    >>> with BadCallFinder([model]) as finder:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> finder.found
    BadCall(module='2', number=0, in_backward=False)
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.found: BadCall | None = None
        self._is_over = False
        # For each tensor the calls that got it, and those that made it, in their order.
        self._of: Any = WeakIdKeyDictionary()
        super().__init__(models)

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> _Seen:
        given = floats_of((args, kwargs))
        seen = _Seen(call, 0 if self._is_over else badness(given))
        for tensor in (*given, *weights_of(module).values()):
            self._hook(tensor, seen, 0)
        return seen

    def end(self, begun: _Seen, output: Any) -> None:
        made = floats_of(output)
        for tensor in made:
            self._hook(tensor, begun, 1)
        bad = 0 if self._is_over else badness(made)
        if bad >= 2 or is_made(bad, begun.inputs):
            around = [begun, *(seen for _, seen in reversed(self._running))]
            self._is_over = True
            self.found = next((seen.call for seen in around if is_made(bad, seen.inputs)), None)

    def _hook(self, tensor: torch.Tensor, seen: _Seen, place: int) -> None:
        if not tensor.requires_grad:
            return
        version, calls = self._of.get(tensor, (None, ([], [])))
        if version != tensor._version:
            calls = ([], [])
            self._of[tensor] = tensor._version, calls
            self.on_remove(tensor.register_hook(functools.partial(self._look, calls)).remove)  # type: ignore[no-untyped-call]
        calls[place].append(seen)

    def _look(self, calls: tuple[list[_Seen], list[_Seen]], gradient: torch.Tensor) -> None:
        if self._is_over:
            return
        with _nothing_raised(self):
            got, made = calls
            bad = badness(floats_of(gradient))
            makers = [seen.call for seen in reversed(got) if bad and seen.gradients == 0]
            if makers:
                self._is_over, self.found = True, makers[0]._replace(in_backward=True)
            for seen in made:
                seen.gradients = max(bad, seen.gradients or 0)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the module itself, without those of modules inside. FSDP1 has them as plain attributes."""
    plain = {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}
    return plain | {name: each for name, each in module._parameters.items() if each is not None}


class CallTaker(_Calls):
    """Copies what one call of a module gets, while the calls of a step are made again.

    Args:
        call: which call.
        device: whose random numbers are noted.
    """

    def __init__(self, models: Sequence[nn.Module], call: BadCall, device: torch.device) -> None:
        self._call, self._device, self._room = call, device, _MOST
        self._is_inside = self.is_whole = False
        self._facts: dict[str, Any] = {"call": call.number, "module": call.module, "in_backward": call.in_backward}
        self._left_out: list[str] = []
        self._tensors: dict[str, torch.Tensor] = {}
        super().__init__(models)

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> bool:
        is_this = call == self._call._replace(in_backward=False) and not self.is_whole
        if is_this:
            self._is_inside = True
            kind = type(module)
            kind = kind.__bases__[-1] if "FSDPModule" in [each.__name__ for each in kind.__bases__] else kind
            context, random = CallContext.now(self._device).to_json()
            self._tensors |= random
            self._facts |= {
                "class": kind.__name__,
                "context": context,
                "args": [self._encoded(each, f"input.{place}") for place, each in enumerate(args)],
                "kwargs": {name: self._encoded(each, f"input.{name}") for name, each in kwargs.items()},
                "training": [canonical_name(name) for name, part in module.named_modules() if part.training],
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
            for name, buffer in module.named_buffers():
                self._take(f"state.{canonical_name(name)}", buffer)
        if self._is_inside:
            prefix = call.module.removeprefix(self._call.module).removeprefix(".")
            for name, weight in weights_of(module).items():
                self._take(f"state.{prefix}{'.' if prefix else ''}{name}", weight)
        return is_this

    def end(self, begun: bool, output: Any) -> None:
        if not begun:
            return
        self._is_inside, self.is_whole = False, True
        for place, tensor in enumerate(floats_of(output)):
            if tensor.requires_grad and self._call.in_backward:
                take = functools.partial(self._take_gradient, f"gradient.{place}")
                self.on_remove(tensor.register_hook(take).remove)  # type: ignore[no-untyped-call]

    def _take_gradient(self, name: str, gradient: torch.Tensor) -> None:
        with _nothing_raised(self):
            self._take(name, gradient)

    def _encoded(self, value: Any, name: str) -> Any:
        """What JSON can hold; a tensor is taken, and stands there as a dict with its name."""
        if isinstance(value, torch.Tensor):
            return {"tensor": name} if self._take(name, value) else None
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self._encoded(each, f"{name}.{key}") for key, each in value.items()}}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self._encoded(each, f"{name}.{i}") for i, each in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self._left_out.append(f"{name}: a {type(value).__name__}")
        return None

    def _take(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self._tensors:
            return True
        why = exotic(tensor.detach()) or ("too large" if tensor.nbytes > self._room else "")
        if why:
            self._left_out.append(f"{name}: {why}, {format_bytes(tensor.nbytes)}")
            return False
        self._room -= tensor.nbytes
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if tensor.requires_grad:
            self._facts.setdefault("needs_gradient", []).append(name)
        return True

    def write(self, folder: pathlib.Path, about: dict[str, Any]) -> int:
        """Write the capture; which of the folders for this step and rank it is, from 1, and 0 if there is none.

        Args:
            folder: where the captures of a run are.
            about: more to be written; it has ``step`` and ``rank``.

        See [Note: half a capture].
        """
        if not self.is_whole:
            return 0
        from safetensors.torch import save_file

        places = (capture_folder(folder, about["step"], about["rank"], each) for each in itertools.count(1))
        number, place = next((number, each) for number, each in enumerate(places, 1) if not each.exists())
        part = place.with_name(f".{place.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            save_file(self._tensors, part / "tensors.safetensors")
            facts = about | self._facts | {"left_out": self._left_out}
            (part / "capture.json").write_text(json.dumps(facts), encoding="utf-8")
            part.rename(place)
        except Exception as error:  # safetensors has errors of its own
            shutil.rmtree(part, ignore_errors=True)
            warnings.warn(f"{place} cannot be written: {error}; training goes on", stacklevel=2)
            return 0
        return number


def capture_folder(folder: pathlib.Path, step: int, rank: int, number: int = 1) -> pathlib.Path:
    """
    >>> capture_folder(pathlib.Path("captures"), 37, 1), capture_folder(pathlib.Path("captures"), 37, 1, 2).name
    (PosixPath('captures/step-37.rank-1'), 'step-37.rank-1.2')
    """
    return folder / f"step-{step}.rank-{rank}{f'.{number}' if number > 1 else ''}"
