"""Says whether hooks may open, at every call and when a module is attached. See [Note: hooks step back]."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import nn

from disthooks import _streams, _torch
from disthooks._torch import (
    being_traced,
    exporting,
    hooks_allowed,
    in_backward,
    in_transform,
    recorded_by_jit,
    top_hooks,
    uncompiled,
)

BREAK = (
    "saved-tensor hooks of disthooks act between compiled graphs, so the graph breaks here; for whole graphs compile "
    "the modules that have the hooks, each by itself: module.compile(fullgraph=True)"
)


_UNCAPTURED = (
    "remove() the hooks first, or attach to modules that are not captured; torch.compile(mode='reduce-overhead') makes "
    "graphs that hooks can be around"
)


@uncompiled()
def refuse_capture(module_name: str) -> None:
    """Raise AttachError while a CUDA graph is captured. Called when hooks open, and when they act on a GPU's tensor.

    A graph is replayed without Python, so no hook would run then. Without the error the user would have a model whose
    memory nobody offloads (decision 76).
    """
    if _torch.capturing():
        place = f"the saved-tensor hooks of {module_name!r}" if module_name else "a saving(...) block"
        _streams.refuse_capture(place, _UNCAPTURED)


_BROKEN = (
    "torch.compile breaks its graph at each module that disthooks is attached to, because hooks act between compiled "
    "graphs. The compiler fuses other operators then, so gradients are not bit for bit those of the model compiled "
    "whole: they are those of the model whose attached modules are compiled each by itself, "
    "module.compile(fullgraph=True), which is the same with hooks and without, and has no breaks. This is said once"
)
_said: set[str] = set()


@uncompiled()
def _say_broken() -> None:
    """Tell the user once that graphs break. The compiler calls this while it traces, as a constant."""
    if _BROKEN not in _said:
        _said.add(_BROKEN)
        warnings.warn(_BROKEN, stacklevel=2)


_say_broken.__dict__["_dynamo_marked_constant"] = True  # torch.compiler.assume_constant_result, without its imports


@uncompiled()
def nothing_to_hook() -> bool:
    """Whether the compiler traces a call that saves nothing or that is exported. False when plain Python runs."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    if exporting() or not torch.is_grad_enabled():
        return True
    _say_broken()
    return False


@uncompiled(BREAK)
def reason_not_to_hook() -> str | None:
    """Why hooks must not open now, or None if they may; asked at every call."""
    if not torch.is_grad_enabled():
        return "no_grad"
    if exporting():
        return "exporting"
    if recorded_by_jit():
        return "torch.jit.trace"
    if being_traced():
        return "tracing"  # sizes may be tensors then, and the trace would have a restored tensor as a constant
    if not hooks_allowed() or in_transform():
        return "hooks disabled"  # some transforms of torch.func forbid hooks; in the others tensors have no memory
    top = top_hooks(True)
    if top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint":
        return "checkpoint"  # a non-reentrant one: our hooks would take the tensors from its own hooks
    # A reentrant checkpoint computes tensors again inside a backward and uses them at once (decision 20).
    return "backward" if in_backward() else None


def reason_never_called(module: nn.Module) -> str | None:
    """Why hooks around the calls of ``module`` itself could never act, or None if they can."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # its class has no forward to look at; `module_class.refusal` has the reason for such a module
    kind = type(module)
    called = kind.__call__ is not nn.Module.__call__ or "forward" in module.__dict__  # as modules of torch.compile have
    if kind.forward is nn.Module.forward and not called:
        return "it is a container without a forward, which nobody calls; take the modules inside it"
    if inspect.iscoroutinefunction(kind.forward) or inspect.isasyncgenfunction(kind.forward):
        return "its forward is asynchronous, and other code may run in between; take the modules that it awaits"
    return None
