"""What in a model keeps hooks from working, or makes them cost more than they should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from disthooks._match import canonical, inside
from disthooks.engines.base import is_a

_GONE = "what is saved there is computed again anyway; take {whole!r} itself, or a module around it"


def conflicts(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[dict[str, str], list[str]]:
    """Why some of ``modules`` would save nothing; and warnings about them."""
    regions, compiled = list(_checkpointed(model)), list(_compiled(model))
    lost: dict[str, str] = {}
    warned: list[str] = []
    for name, module in modules.items():
        for whole, region, what in regions:
            if _is_inside(module, region):
                lost[name] = f"it is inside {whole!r}, {what}: {_GONE.format(whole=whole)}"
        for whole, part in compiled:
            if _is_inside(module, part):
                warned.append(
                    f"{name!r} is inside {whole!r}, which is compiled: its graph breaks there; compile the "
                    "modules that have the hooks, each by itself"
                )
    return lost, warned + _unsure(model, modules)


def _is_inside(module: nn.Module, outer: nn.Module) -> bool:
    return module is not outer and any(part is module for part in outer.modules())


def _checkpointed(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules whose inside is computed again in backward, and by what."""
    for name, module in inside(model).named_modules():
        if is_a(module, "CheckpointWrapper"):
            yield canonical(name), module, "a CheckpointWrapper of torch"
        elif is_a(module, "GradientCheckpointingLayer") and _is_on(module):
            yield canonical(name), module, "which transformers' gradient_checkpointing computes again"


def _is_on(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def _unsure(model: nn.Module, modules: Mapping[str, nn.Module]) -> list[str]:
    """Models that checkpoint their layers in a forward of their own: which, only running them tells."""
    found = []
    for name, module in inside(model).named_modules():
        known = any(is_a(part, "GradientCheckpointingLayer") for part in module.modules())
        taken = [each for each, part in modules.items() if _is_inside(part, module)]
        if _is_on(module) and not known and taken:
            found.append(
                f"gradient_checkpointing is on in {canonical(name) or 'the model'!r}: if it checkpoints {taken[0]!r}, "
                "the hooks there save nothing; give example inputs, and a run will tell"
            )
    return found


def _compiled(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in inside(model).named_modules():
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            yield canonical(name) or "the model", module
