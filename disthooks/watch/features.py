"""``features``: what chosen modules returned, by name; and how the modules that are watched are chosen."""

# [Note: modules without hooks]
# torch calls forward hooks in Python, from `Module.__call__`. Scripted code never calls them, and compiled code calls
# those that were there when it was compiled. A watcher of such a module would see nothing and report that nothing
# happened, so it is refused.

from __future__ import annotations

import collections
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._fork_safe import Order, shared_lock
from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import Pattern, as_patterns, match_modules, unwrap_engine
from disthooks._torch import in_backward
from disthooks.errors import AttachError, MatchError, MutationError, NotSeenError, UsageError


def display_name(name: str) -> str:
    """A module's name in a message; the model itself has none."""
    return name or "(model)"


def choose_modules(model: nn.Module, patterns: Iterable[Pattern], depth: int | None = None) -> dict[str, nn.Module]:
    """The modules that ``patterns`` choose, by canonical name, in the model's order.

    A wrapper and the module in it have one canonical name: the module is chosen. See [Note: modules without hooks].

    Raises:
        MatchError: when a pattern matches no module, or none that is at most ``depth`` deep.
        AttachError: when a module that matches runs without Python hooks.
    """
    root = unwrap_engine(model)
    # Of a wrapper and the module in it, named_modules gives the inner one last.
    chosen = dict(match_modules(model, as_patterns(patterns)))
    if depth is not None:
        chosen = {name: module for name, module in chosen.items() if _depth(name) <= depth}
        if not chosen:
            raise MatchError(f"every module that matches is deeper than depth={depth}; raise depth or leave it out")
    dead = {id(part): why for part, why in _without_hooks(root)}
    for name, module in chosen.items():
        if id(module) in dead:
            raise AttachError(f"{display_name(name)!r} ({type(module).__name__}): {dead[id(module)]}")
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
    if isinstance(value, torch.Tensor):  # the usual case, ten times as fast without pytree
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def version_of(tensor: torch.Tensor) -> int | None:
    """The count of in-place changes; None for a tensor without one, which was made under ``inference_mode``."""
    return None if tensor.is_inference() else tensor._version


__all__ = ["Seen", "features"]


class _Run(NamedTuple):
    output: Any
    versions: tuple[tuple[torch.Tensor, int | None], ...]


class Seen(Attachment, Mapping[str, Any]):
    """Canonical module name to the output of its last call; what :func:`features` returns.

    As a mapping it has the watched modules that have run, in the model's order. What was seen stays readable
    after the ``with`` block or ``remove()``.
    """

    def __init__(self, names: tuple[str, ...], keep: int | None) -> None:
        super().__init__()
        self.names = names
        self._keep = keep
        self._lock = shared_lock(Order.WATCH)
        # The inner key is the device of a DataParallel replica, and None for a module that is not one.
        self._runs: dict[str, dict[torch.device | None, collections.deque[_Run]]] = {name: {} for name in names}
        self._counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Seen:
        return self

    def __getitem__(self, name: str) -> Any:
        runs = self._of(name)
        replicas = [str(device) for device in sorted(runs, key=_order) if device is not None]
        if replicas:
            raise UsageError(
                f"{display_name(name)!r} ran in DataParallel replicas ({', '.join(replicas)}), each with its part of "
                f"the batch: seen.calls({name!r}) has them all, in the order of the devices"
            )
        return _read(name, runs[None][-1])

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if self._runs[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return bool(self._runs.get(name)) if isinstance(name, str) else False

    def calls(self, name: str) -> tuple[Any, ...]:
        """The outputs that are kept for ``name``, oldest first; those of replicas by device.

        Raises:
            NotSeenError: when the module has not run.
            MutationError: when one of them was changed in place afterwards.
        """
        runs = self._of(name)
        with self._lock:
            kept = [run for device in sorted(runs, key=_order) for run in runs[device]]
        return tuple(_read(name, run) for run in kept)

    def count(self, name: str) -> int:
        """How many calls of ``name`` returned, kept or not.

        Raises:
            NotSeenError: when no such module is watched.
        """
        self._known(name)
        return self._counts[name]

    def _known(self, name: str) -> None:
        if name not in self._runs:
            near = difflib.get_close_matches(name, self.names, n=5) or self.names[:8]
            raise NotSeenError(f"{name!r} is not watched; watched are: {', '.join(map(display_name, near))}")

    def _of(self, name: str) -> dict[torch.device | None, collections.deque[_Run]]:
        self._known(name)
        if not self._runs[name]:
            raise NotSeenError(
                f"{display_name(name)!r} is watched but did not run: its forward was not called (or not through "
                "module(...)), it raised, or torch.compile ran it without Python"
            )
        return self._runs[name]

    def _add(self, name: str, replica: torch.device | None, run: _Run) -> None:
        with self._lock:
            fresh: collections.deque[_Run] = collections.deque(maxlen=self._keep)
            self._runs[name].setdefault(replica, fresh).append(run)
            self._counts[name] += 1


def features(
    model: nn.Module, *patterns: Pattern, detach: bool = True, copy: bool = False, keep: int | None = 1
) -> Seen:
    """Keep what the matching modules return, under their names, without changing it or waiting for a device.

    Tensors are kept as aliases, which cost no memory beyond what they keep alive. An alias that is changed in
    place later (``nn.ReLU(inplace=True)``, ``out += x``) no longer shows what the module returned, so reading it
    raises; ``copy=True`` keeps a copy, made on the device.

    A module that is called several times shows its last call; ``seen.calls(name)`` has the last ``keep`` calls and
    ``seen.count(name)`` their number. In ``nn.DataParallel`` each replica keeps its own part of the batch:
    ``seen.calls(name)`` has one part for each device, and ``seen[name]`` raises. Under DDP and FSDP it is this
    rank's part of the batch. What a checkpoint computes again in backward is no further call.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        patterns: globs over module names (``*`` crosses dots; ``""`` is the model itself), module classes or
            predicates of name and module.
        detach: without the graph, so that keeping the output does not keep what it was computed from.
            Tensors are found in tuples, lists, dicts, named tuples and types known to torch's pytree; any other
            object is kept as it is.
        copy: keep copies.
        keep: how many calls of each module to keep; None for all of them.

    Returns:
        A mapping that is also an attachment: the hooks leave at the end of a ``with`` block or by ``remove()``.

    Raises:
        UsageError: without patterns, or when ``keep`` is not positive.
        MatchError: when a pattern matches no module; the message lists near names.
        AttachError: when a matching module is compiled or scripted, so that it calls no hooks.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with features(net, "1", nn.Linear) as seen:
    ...     y = net(torch.ones(5, 3))
    >>> seen["1"].shape, list(seen), seen.count("2")
    (torch.Size([5, 8]), ['0', '1', '2'], 1)
    """
    if not patterns:
        raise UsageError('features: name at least one module, such as "layer4"; "*" is every one')
    if keep is not None and keep < 1:
        raise UsageError(f"features: keep={keep} keeps nothing; give 1 or more, or None for all calls")
    chosen = choose_modules(model, patterns)
    seen = Seen(tuple(chosen), keep)
    for name, module in chosen.items():
        hook = UncopiedHook(functools.partial(_see, seen, name, detach, copy))
        seen.on_remove(module.register_forward_hook(hook).remove)
    return seen


def _see(seen: Seen, name: str, detach: bool, copy: bool, module: nn.Module, args: object, output: Any) -> None:
    if in_backward():  # a checkpoint computes again what was seen
        return

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach() if detach else tensor
        return kept.clone() if copy else kept

    single = isinstance(output, torch.Tensor)
    kept = alias(output) if single else pytree.tree_map_only(torch.Tensor, alias, output)
    versions = tuple((tensor, version_of(tensor)) for tensor in tensors_of(kept))
    seen._add(name, _replica(module, versions), _Run(kept, versions))


def _replica(module: nn.Module, versions: tuple[tuple[torch.Tensor, int | None], ...]) -> torch.device | None:
    if not getattr(module, "_is_replica", False):
        return None
    return versions[0][0].device if versions else torch.device("cpu")


def _order(device: torch.device | None) -> tuple[str, int]:
    return ("", 0) if device is None else (device.type, device.index or 0)


def _read(name: str, run: _Run) -> Any:
    if any(version is not None and tensor._version != version for tensor, version in run.versions):
        raise MutationError(
            f"the output of {display_name(name)!r} was changed in place after it was seen, by a later layer such as "
            "ReLU(inplace=True) or by an operator such as +=; pass copy=True to features() to keep what it was"
        )
    return run.output
