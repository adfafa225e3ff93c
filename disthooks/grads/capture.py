"""``capture``: the call of a module that made a bad step, found and written to a folder, to be replayed elsewhere."""

# [Note: which call is captured]
# The calls of a bad step are made again twice. In the first run `BadCallFinder` looks at what goes into each module
# and comes out of it, and the host waits for each answer. The first module whose output has NaN or `inf` made it if
# its inputs had none. If they had, code between modules made it, and the innermost module around whose inputs had none
# is named. `-inf` may be a mask that somebody made on purpose, so a module that makes it is named only if that reaches
# the end of the model, or the inputs of the module that makes NaN. In backward the gradient of an output is what a
# call is given, and the gradients of its inputs and weights are what it makes. Each call gets aliases of its inputs:
# the gradient of a tensor is a sum over all who read it, and that of an alias is what this call alone has made. If the
# gradient of an output is bad and no call made that, code of the innermost module around with good gradients did. In
# the second run `CallTaker` copies what this one call gets. FSDP and ZeRO-3 may gather a weight only when the module
# that owns it is called: it is copied then, in the dtype that the forward computes with.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import canonical_name
from disthooks._tensors import elements_of, exotic, floats_of, format_bytes
from disthooks._torch import backward_id, in_backward, in_transform
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


class BadCall(NamedTuple):
    """A call of a module that made a step bad: its name, and its number among the calls since the last step."""

    module: str
    number: int
    in_backward: bool


class _Calls(Attachment):
    """Hooks on all modules that run in Python.

    Args:
        models: the models, each after what stands before the names of its modules.
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._counts: collections.Counter[str] = collections.Counter()
        self._running: list[tuple[nn.Module, Any]] = []
        without: set[int] = set()  # compiled: a new hook would not be called, or compile them again
        for prefix, model in models:
            modules: dict[str, nn.Module] = {}
            for name, module in model.named_modules():
                if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
                    without |= {id(part) for part in module.modules()}
                if id(module) not in without:
                    modules[prefix + canonical_name(name)] = module  # a wrapper comes before the module in it
            for name, module in modules.items():
                enter, leave = UncopiedHook(functools.partial(self._enter, name)), UncopiedHook(self._leave)
                self.on_remove(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                self.on_remove(module.register_forward_hook(leave).remove)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward() or in_transform() or getattr(module, "_is_replica", False):
            return None
        call = BadCall(name, self._counts[name], False)
        self._counts[name] += 1
        given = None
        with _nothing_raised(self):
            begun, given = self.begin(call, module, args, kwargs)
            self._running.append((module, begun))
        return given

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward() or in_transform() or not any(each[0] is module for each in self._running):
            return
        while (frame := self._running.pop())[0] is not module:
            pass  # a call inside of this one has raised an error, and its hook was not called
        with _nothing_raised(self):
            self.end(frame[1], output)

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What :meth:`end` gets, and the arguments that take the place of these; None for these themselves."""
        raise NotImplementedError

    def end(self, begun: Any, output: Any) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _nothing_raised(attached: Attachment) -> Iterator[None]:
    """An error on this rank would leave the others waiting: a subclass of tensors may raise anything."""
    try:
        yield
    except Exception as error:
        attached.remove()
        warnings.warn(f"rerun(capture=): {type(error).__name__}: {error}; training goes on", stacklevel=2)


class _Seen:
    """What a call of a module was given, in forward and in backward, and the calls around it, the innermost first."""

    __slots__ = ("around", "backward", "call", "gradients", "inputs")

    def __init__(self, call: BadCall, inputs: int, around: list[_Seen]) -> None:
        self.call, self.inputs, self.around = call, inputs, around
        self.gradients: int | None = None  # of its outputs
        self.backward = -1  # in which backward that was


class BadCallFinder(_Calls):
    """Finds the call that made a bad step, while its calls are made again. See [Note: which call is captured].

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softplus(), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(model[2].weight, torch.inf)
    >>> with BadCallFinder([("", model)]) as finder:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> finder.found
    BadCall(module='2', number=0, in_backward=False)
    """

    def __init__(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        self._found: BadCall | None = None
        self._mask: BadCall | None = None  # the first that made -inf
        self._found_mask: BadCall | None = None  # that one, if the model returned -inf
        self._is_over = False
        self._readers: Any = WeakIdKeyDictionary()  # of each weight
        super().__init__(models)

    @property
    def found(self) -> BadCall | None:
        """The call; None if no module made what is not finite."""
        return self._found or self._found_mask

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> tuple[_Seen, Any]:
        bad = 0 if self._is_over else badness(floats_of((args, kwargs)))
        seen, aliases = _Seen(call, bad, [each for _, each in reversed(self._running)]), {}
        for weight in weights_of(module).values():
            if weight.requires_grad:
                if weight not in self._readers:
                    self._hook(weight, functools.partial(self._look, self._readers.setdefault(weight, [])))
                self._readers[weight].append(seen)

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or exotic(tensor.detach()) is not None:
                return tensor
            if id(tensor) not in aliases:  # a module may ask whether two inputs are one
                aliases[id(tensor)] = tensor.view_as(tensor)
                self._hook(aliases[id(tensor)], functools.partial(self._look, [seen]))
            return aliases[id(tensor)]

        return seen, _mapped(alias, (args, kwargs))

    def end(self, begun: _Seen, output: Any) -> None:
        made = floats_of(output)
        for tensor in made:
            if tensor.requires_grad:
                self._hook(tensor, functools.partial(self._look_at_given, begun))
        bad = 0 if self._is_over else badness(made)
        if bad > 1:
            maker = next((seen for seen in (begun, *begun.around) if seen.inputs < 2), None)
            self._is_over = True
            if maker is not None:
                self._found = (maker.inputs and self._mask) or maker.call
        elif bad and not begun.inputs:
            self._mask = self._mask or begun.call
        if bad == 1 and not begun.around:
            self._found_mask = self._mask

    def _hook(self, tensor: torch.Tensor, look: Callable[[torch.Tensor], None]) -> None:
        self.on_remove(tensor.register_hook(look).remove)  # type: ignore[no-untyped-call]

    def _look(self, readers: list[_Seen], gradient: torch.Tensor) -> None:
        """The gradient that a call has made of its input, or several calls of one weight."""
        with _nothing_raised(self):
            makers = [seen for seen in readers if seen.gradients == 0 and seen.backward == backward_id()]
            if makers and not self._is_over and badness(floats_of(gradient)):
                # Of several calls it is not known which one made it, so the call around all of them is named.
                first, *others = makers
                around = [each for each in (first, *first.around) if all(each in (*o.around, o) for o in others)]
                self._blame(around)

    def _look_at_given(self, seen: _Seen, gradient: torch.Tensor) -> None:
        """The gradient of an output of a call, with what code around the call has made of it."""
        with _nothing_raised(self):
            bad = 0 if self._is_over else badness(floats_of(gradient))
            seen.gradients, seen.backward = max(bad, seen.gradients or 0), backward_id()
            if bad:
                self._blame(seen.around)

    def _blame(self, calls: Iterable[_Seen]) -> None:
        self._is_over = True
        maker = next((seen for seen in calls if seen.gradients == 0), None)
        self._found = None if maker is None else maker.call._replace(in_backward=True)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with the function of each tensor in tuples, lists and dicts; other objects are as they were.

    Not by pytree, which makes new objects of others, too: a module would fill a cache that nobody reads.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _mapped(function, each) for key, each in value.items()}
    return type(value)(_mapped(function, each) for each in value) if type(value) in (tuple, list) else value


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

    def __init__(self, models: Iterable[tuple[str, nn.Module]], call: BadCall, device: torch.device) -> None:
        self._call, self._device, self._room = call, device, _MOST
        self.is_whole = False
        self._inside: dict[int, str] = {}  # while the call runs: the names of the modules in this one, by identity
        self._facts: dict[str, Any] = {"call": call.number, "module": call.module, "in_backward": call.in_backward}
        self._left_out: dict[str, str] = {}  # by name, what it is
        self._tensors: dict[str, torch.Tensor] = {}
        super().__init__(models)

    def begin(self, call: BadCall, module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module | None, None]:
        is_this = call == self._call._replace(in_backward=False) and not self.is_whole
        if is_this:
            self._inside = {id(part): canonical_name(name) for name, part in module.named_modules()}
            kind = type(module)
            kind = kind.__bases__[-1] if "FSDPModule" in [each.__name__ for each in kind.__bases__] else kind
            context, random = CallContext.now(self._device).to_json()
            self._tensors |= random
            self._facts |= {
                "class": kind.__name__,
                "context": context,
                "args": [self._encoded(each, f"input.{place}") for place, each in enumerate(args)],
                "kwargs": {name: self._encoded(each, f"input.{name}") for name, each in kwargs.items()},
                "training": [self._inside[id(part)] for part in module.modules() if part.training],
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
            }
            for name, tensor in itertools.chain(module.named_buffers(), module.named_parameters()):
                if self._is_there(tensor):
                    self._take(f"state.{canonical_name(name)}", tensor)
        if (prefix := self._inside.get(id(module))) is not None:
            for name, tensor in weights_of(module).items():
                self._take(f"state.{prefix}{'.' if prefix else ''}{name}", tensor)
        return module if is_this else None, None

    @staticmethod
    def _is_there(tensor: torch.Tensor) -> bool:
        """Whether it is no shard, and has memory: ZeRO-3 and FSDP take that from weights that nobody uses now."""
        return exotic(tensor.detach()) is None and tensor.nbytes <= tensor.untyped_storage().nbytes() > 0

    def end(self, begun: nn.Module | None, output: Any) -> None:
        if begun is None:
            return
        self._inside, self.is_whole = {}, True
        for name in (f"state.{canonical_name(name)}" for name, _ in begun.named_parameters()):
            if name not in self._tensors:
                self._left_out.setdefault(name, "no module that was called has it")
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
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: self._encoded(each, f"{name}.{key}") for key, each in value.items()}}
        if type(value) in (list, tuple, torch.Size):
            kind = "list" if type(value) is list else "tuple"
            return {kind: [self._encoded(each, f"{name}.{i}") for i, each in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        self._left_out[name] = f"a {type(value).__name__}"
        return None

    @torch.no_grad()
    def _take(self, name: str, tensor: torch.Tensor) -> bool:
        if name in self._tensors and self._tensors[name].shape == tensor.shape:
            return True
        why = exotic(tensor.detach()) or ("too large" if tensor.nbytes > self._room else "")
        why = why or (str(tensor.dtype) if tensor.dtype in (torch.complex128, torch.complex32) else "")
        if why:
            self._left_out[name] = f"{why}, {format_bytes(tensor.nbytes)}"
            return False
        self._room -= tensor.nbytes
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if tensor.requires_grad:
            self._facts.setdefault("needs_gradient", []).append(name)
        if isinstance(tensor, nn.Parameter):
            self._facts.setdefault("parameters", []).append(name)
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
        name = functools.partial(capture_folder, folder, about["step"], about["rank"])
        part = name().with_name(f".{name().name}.part")
        try:
            from safetensors.torch import save_file

            number = next(each for each in itertools.count(1) if not name(each).exists())
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            save_file(self._tensors, part / "tensors.safetensors")
            facts = about | self._facts | {"left_out": [f"{each}: {why}" for each, why in self._left_out.items()]}
            (part / "capture.json").write_text(json.dumps(facts), encoding="utf-8")
            part.rename(name(number))
        except Exception as error:  # safetensors has errors of its own
            shutil.rmtree(part, ignore_errors=True)
            warnings.warn(f"{name()} cannot be written: {error}; training goes on", stacklevel=2)
            return 0
        return number


def capture_folder(folder: pathlib.Path, step: int, rank: int, number: int = 1) -> pathlib.Path:
    """
    >>> capture_folder(pathlib.Path("captures"), 37, 1), capture_folder(pathlib.Path("captures"), 37, 1, 2).name
    (PosixPath('captures/step-37.rank-1'), 'step-37.rank-1.2')
    """
    return folder / f"step-{step}.rank-{rank}{f'.{number}' if number > 1 else ''}"
