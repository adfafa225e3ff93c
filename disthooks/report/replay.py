"""``replay``: makes a captured call of a module again, and names the operator that made it bad."""

# [Note: which operator is named]
# The first operator with a result that is not finite is often the wrong one: a mask fills scores with -inf on purpose,
# and softmax makes finite numbers of it. So values are ordered, finite before infinite before NaN, with Python numbers
# among the arguments, and an operator has made something if its result is worse than all that it was given. From what
# the call returned that is bad, the bad tensors are followed back, by the storage that each operator read and wrote.
# Of the operators on that way that made something, the first one is named.
# In backward, the operator runs for a node of autograd; the line of code is that of the forward which made the node.

from __future__ import annotations

import contextlib
import json
import linecache
import pathlib
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from disthooks._match import unwrap_engine
from disthooks._tensors import floats_of
from disthooks._torch import current_node, node_name
from disthooks.errors import UsageError
from disthooks.grads.call_context import CallContext
from disthooks.grads.capture import badness

_TORCH = str(pathlib.Path(torch.__file__).parent)
_NOT_USERS = (_TORCH, str(pathlib.Path(__file__).parents[1]), "<")
_RANK = (0, 1, 1, 2)  # of a badness: -inf is no better than inf here


class Operator(NamedTuple):
    """An operator whose result is worse than all that it was given.

    Attributes:
        name: such as ``aten.div.Tensor``.
        node: the node of autograd in whose backward it ran; "" in forward.
        line: the line of the module's code, "file:number: text"; in backward that of the forward.
        given: its arguments, in words.
        made: its results, in words.
    """

    name: str
    node: str
    line: str
    given: tuple[str, ...]
    made: tuple[str, ...]


class Replay(NamedTuple):
    """What :func:`replay` found.

    Attributes:
        where: the step, the rank, the module and the call.
        is_reproduced: whether the result is not finite here, too.
        operator: the operator that made it; None if it is not reproduced, or the inputs or weights were bad before.
        bad_before: which inputs and weights were not finite already.
        finite_in: whether the result is finite in ``float32`` and in ``float64``; None if it does not run there.
        left_out: what the capture does not have.
    """

    where: str
    is_reproduced: bool
    operator: Operator | None
    bad_before: tuple[str, ...]
    finite_in: Mapping[str, bool | None]
    left_out: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.is_reproduced:
            return "it is not reproduced here: what the call gives is finite"
        if self.operator is None:
            known = f"{' and '.join(self.bad_before)} were not finite before the call" if self.bad_before else ""
            return known or "no operator that Python can see made it: look for a kernel of its own in this module"
        wide = [dtype for dtype, is_finite in self.finite_in.items() if is_finite]
        if not wide and self.finite_in["float64"] is None:
            return "it does not run in float64, so the formula or the precision may be the cause"
        if not wide:
            return "it is not finite in float64 either: the formula is the cause, not the precision"
        return f"it is finite in {' and '.join(wide)}: the precision is the cause, not the formula"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the operators with a result that is not finite. See [Note: which operator is named]."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Of each: the earlier ones that wrote what it read and is bad, and itself if it made something.
        self._seen: list[tuple[list[int], Operator | None]] = []
        self._writers: dict[int, int] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten.empty", "aten.new_empty", "aten.resize_")):
            return func(*args, **(kwargs or {}))  # its memory may have held anything
        is_copy = str(func).startswith("aten.copy_")  # it does not read what it writes to
        leaves = tree_leaves((args[1:] if is_copy else args, kwargs or {}))
        leaves = [each for each in leaves if isinstance(each, (torch.Tensor, float))]
        given = [each if isinstance(each, torch.Tensor) else torch.tensor(each, dtype=torch.float64) for each in leaves]
        given = floats_of(given)
        before = _rank(given)
        said = tuple(map(_described, leaves)) if func._schema.is_mutable else ()  # before it changes them
        result = func(*args, **(kwargs or {}))
        made = floats_of(result)
        if after := _rank(made):
            operator = None
            if after > before:
                said = said or tuple(map(_described, leaves))
                operator = Operator(str(func), *_place(), said, tuple(map(_described, made)))
            written = (self._writers.get(_storage(each)) for each in given if _rank([each]))
            self._seen.append(([each for each in written if each is not None], operator))
            self._writers |= dict.fromkeys(map(_storage, made), len(self._seen) - 1)
        return result

    def maker_of(self, results: Iterable[torch.Tensor]) -> Operator | None:
        """The first operator that made what is bad in ``results``."""
        ways = [self._writers[_storage(each)] for each in results if _storage(each) in self._writers and _rank([each])]
        on_way: set[int] = set()
        while ways:
            if (place := ways.pop()) not in on_way:
                on_way.add(place)
                ways += self._seen[place][0]
        return next((made for place in sorted(on_way) if (made := self._seen[place][1]) is not None), None)


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that are asked for a floating-point dtype make another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {"dtype": self._dtype} if getattr((kwargs or {}).get("dtype"), "is_floating_point", False) else {}
        return func(*args, **((kwargs or {}) | wide))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _rank(tensors: Sequence[torch.Tensor]) -> int:
    return _RANK[badness(tensors)]


def _described(value: Any) -> str:
    """A tensor in words: its dtype, its shape, the range of its finite elements, and how many are not finite."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.numel() == 0 or value.dtype is torch.bool or value.is_complex():
        return text
    plain = value.detach().float() if value.dtype.itemsize == 1 else value.detach()
    finite = plain[plain.isfinite()]
    ranged = f", {finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    words = {"NaN": plain.isnan(), "inf": plain.isposinf(), "-inf": plain.isneginf()}
    counts = [f"{int(where.sum())} of {plain.numel()} {word}" for word, where in words.items() if bool(where.any())]
    return text + ranged + "".join(f", {count}" for count in counts)


def _place() -> tuple[str, str]:
    """The node of autograd that runs, "" in forward, and the line of the user's code."""
    node, frames = current_node(), []
    if node is None:
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()]
    else:  # anomaly mode keeps the stack of the forward as text, an entry a frame
        found = (re.match(r'\s*File "(.*)", line (\d+)', entry) for entry in node.metadata.get("traceback_", ()))
        frames = [(each[1], int(each[2])) for each in found if each is not None]
    # The frames below the last one of this file called the replay.
    below = max((place for place, (file, _) in enumerate(frames[:-3]) if file == __file__), default=0)
    own = next((each for each in reversed(frames[below:]) if not each[0].startswith(_NOT_USERS)), None)
    name = "" if node is None else node_name(node)
    if own is None:
        return name, ""
    file, here = pathlib.Path(own[0]), pathlib.Path.cwd()
    where = file.relative_to(here) if file.is_relative_to(here) else file
    return name, f"{where}:{own[1]}: {linecache.getline(*own).strip()}"


class _Capture(NamedTuple):
    """A folder of grads/capture.py."""

    facts: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: pathlib.Path) -> _Capture:
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            raise UsageError("replay reads with the package safetensors: pip install 'disthooks[capture]'") from None
        try:
            facts = json.loads((folder / "capture.json").read_text(encoding="utf-8"))
            return cls(facts, load_file(folder / "tensors.safetensors"))
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{folder} is no capture of rerun(capture=...): {error}") from error

    def put_into(self, module: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
        """Give the module the weights and buffers of the capture, and its mode of training."""
        module.to(device, dtype)  # what the capture does not have
        training, parameters = set(self.facts["training"]), self.facts.get("parameters", ())
        for name, part in module.named_modules():
            part.training = name in training
        for name in self.tensors:
            place, _, key = name.removeprefix("state.").rpartition(".")
            if not name.startswith("state."):
                continue
            try:
                owner, tensor = module.get_submodule(place), self.tensor(name, dtype, device)
                if name in parameters:
                    getattr(owner, key)
            except AttributeError as error:
                raise UsageError(f"the model that was built is another: {error}") from error
            is_parameter = key in owner._parameters
            setattr(owner, key, nn.Parameter(tensor.detach(), tensor.requires_grad) if is_parameter else tensor)

    def tensor(self, name: str, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
        found = self.tensors[name]
        found = found.to(device, dtype if found.is_floating_point() else None, copy=True)
        return found.requires_grad_(name in self.facts.get("needs_gradient", ()))

    def argument(self, value: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
        """What ``CallTaker`` has encoded."""
        if not isinstance(value, dict):
            return value
        ((kind, inside),) = value.items()
        if kind == "tensor":
            return self.tensor(inside, dtype, device)
        if kind == "dtype":
            return dtype or getattr(torch, inside)
        if kind == "dict":
            return {name: self.argument(each, dtype, device) for name, each in inside.items()}
        made = [self.argument(each, dtype, device) for each in inside]
        return made if kind == "list" else tuple(made)


def _results(
    module: nn.Module, capture: _Capture, dtype: torch.dtype | None, device: torch.device, mode: TorchDispatchMode
) -> list[torch.Tensor]:
    """What the captured call gives under ``mode``: its outputs, or in backward the gradients that it makes."""
    facts = capture.facts
    capture.put_into(module, dtype, device)
    args = [capture.argument(each, dtype, device) for each in facts["args"]]
    kwargs = {name: capture.argument(each, dtype, device) for name, each in facts["kwargs"].items()}
    leaves = [each for each in (*tree_leaves((args, kwargs)), *module.parameters()) if _needs_gradient(each)]
    copied = tree_map(lambda each: each.clone() if _needs_gradient(each) else each, (args, kwargs))
    context = CallContext.from_json(facts["context"], capture.tensors, device)
    context = context if dtype is None else context._replace(autocast=[])
    found: list[torch.Tensor] = []
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype or default)
    try:
        with context.entered(), torch.autograd.set_detect_anomaly(facts["in_backward"], check_nan=False), mode:
            outputs = floats_of(module(*copied[0], **copied[1]))
            if not facts["in_backward"]:
                return outputs
            places = [place for place in range(len(outputs)) if f"gradient.{place}" in capture.tensors]
            given = [capture.tensor(f"gradient.{place}", dtype, device) for place in places]
            for leaf in leaves:  # `.grad` is a copy that the mode does not see
                leaf.register_hook(found.append)
            torch.autograd.backward([outputs[place] for place in places], given)
    finally:
        torch.set_default_dtype(default)
    return found


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def replay(folder: str | pathlib.Path, build: Callable[[], Any], device: str = "cpu") -> Replay:
    """Make a captured call again, and find the operator that made it bad.

    Args:
        folder: such as ``run/capture/step-37.rank-1``, from ``rerun(capture="run/capture")``.
        build: makes the model, or the model and more in a tuple; the module with the name in the capture gets its
            weights.
        device: where to run it.

    Raises:
        UsageError: when the folder is no capture, or the model is another.
    """
    capture, where = _Capture.read(pathlib.Path(folder)), torch.device(device)
    facts = capture.facts
    made = build()
    model = unwrap_engine(made[0] if isinstance(made, tuple) else made)
    try:
        module = model.get_submodule(facts["module"])
    except AttributeError as error:
        raise UsageError(f"the model that was built has no module {facts['module']!r}: {error}") from error
    if facts["in_backward"] and not any(name.startswith("gradient.") for name in capture.tensors):
        raise UsageError(f"{folder} has no gradient of the output: {', '.join(facts['left_out'])}")
    watch = _Watch()
    try:
        results = _results(module, capture, None, where, watch)
    except Exception as error:
        if not facts["left_out"] or isinstance(error, UsageError):
            raise
        left_out = ", ".join(facts["left_out"])
        raise UsageError(f"the call does not run without what the capture has not ({left_out}): {error}") from error
    is_bad = _rank(results) > 0
    names = [name for name in capture.tensors if name.partition(".")[0] in ("state", "input", "gradient")]
    bad = tuple(name for name in names if badness(floats_of(capture.tensors[name])) > 1)
    finite_in: dict[str, bool | None] = {}
    for dtype in (torch.float32, torch.float64) if is_bad else ():
        name = str(dtype).removeprefix("torch.")
        finite_in[name] = None
        with contextlib.suppress(Exception):  # a kernel may have no such dtype
            finite_in[name] = _rank(_results(module, capture, dtype, where, _Widened(dtype))) == 0
    part = f"{facts['module'] or 'the model'} ({facts['class']}), call {facts['call']}"
    said = f"step {facts['step']}, rank {facts['rank']}: {part}{', in backward' if facts['in_backward'] else ''}"
    return Replay(said, is_bad, watch.maker_of(results), bad, finite_in, tuple(facts["left_out"]))
