"""Which modules are watched, and hooks that do not follow them into copies and pickles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._match import Pattern, inside, listed, match_modules
from disthooks.errors import AttachError, MatchError


def shown(name: str) -> str:
    """``name`` as people read it: the model itself has none."""
    return name or "(model)"


def choose(model: nn.Module, patterns: Iterable[Pattern], depth: int | None = None) -> dict[str, nn.Module]:
    """Canonical name to module, in the model's order; a wrapper gives way to what it wraps.

    Raises:
        MatchError: when a pattern matches no module, or none that is at most ``depth`` deep.
        AttachError: when a module that matches runs without Python hooks.
    """
    root = inside(model)
    # A wrapper and the module in it have one name; named_modules gives the inner one last.
    chosen = dict(match_modules(model, listed(patterns)))
    if depth is not None:
        chosen = {name: module for name, module in chosen.items() if _depth(name) <= depth}
        if not chosen:
            raise MatchError(f"every module that matches is deeper than depth={depth}; raise depth or leave it out")
    dead = {id(part): why for part, why in _without_hooks(root)}
    for name, module in chosen.items():
        if id(module) in dead:
            raise AttachError(f"{shown(name)!r} ({type(module).__name__}): {dead[id(module)]}")
    return chosen


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _without_hooks(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield module, "scripted code calls no Python hooks; watch the module from before torch.jit"
        elif "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            for part in module.modules():
                yield (
                    part,
                    "code compiled before calls no new hooks; watch and call the module from before "
                    "torch.compile (model._orig_mod), or watch a module around it",
                )


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and whatever else is registered with torch's pytree."""
    if isinstance(value, torch.Tensor):  # most often, and ten times as fast
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def version_of(tensor: torch.Tensor) -> int | None:
    """The count of in-place changes, or None for a tensor that keeps none (made under inference_mode)."""
    return None if tensor.is_inference() else tensor._version
