"""``features`` keeps the outputs of chosen modules by name; ``choose_modules`` finds the modules for every watcher."""

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

from disthooks._handles import Attachment, UncopiedHook
from disthooks._locks import new_lock
from disthooks._match import Pattern, as_patterns, match_modules, unwrap_engine
from disthooks._torch import in_backward
from disthooks.errors import AttachError, MatchError, MutationError, NotSeenError, UsageError


def display_name(name: str) -> str:
    """A module's name in a message; the model itself has none."""
    return name or "(model)"


def choose_modules(
    model: nn.Module, patterns: Iterable[Pattern], depth: int | None = None, left_out: list[str] | None = None
) -> dict[str, nn.Module]:
    """The modules that ``patterns`` choose, by canonical name, in the model's order; AttachError if they call no hooks.

    A wrapper and the module in it have one canonical name: the module is chosen. See [Note: modules without hooks].
    """
    # named_modules gives a wrapper before the module in it, so the dict keeps the inner one under their common name.
    chosen = dict(match_modules(model, as_patterns(patterns)))
    if depth is not None:
        chosen = {name: module for name, module in chosen.items() if (name.count(".") + 1 if name else 0) <= depth}
        if not chosen:
            raise MatchError(f"every module that matches is deeper than depth={depth}; raise depth or leave it out")
    reasons: dict[int, str] = {}
    for module in unwrap_engine(model).modules():
        if isinstance(module, torch.jit.ScriptModule):
            reasons[id(module)] = "scripted code calls no Python hooks; watch the module from before torch.jit"
        elif "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            why = (
                "code compiled before calls no new hooks; watch and call the module from before "
                "torch.compile (model._orig_mod), or watch a module around it"
            )
            reasons |= {id(part): why for part in module.modules()}
    without = [name for name, module in chosen.items() if id(module) in reasons]
    if without and (left_out is None or len(without) == len(chosen)):
        module = chosen[without[0]]
        raise AttachError(f"{display_name(without[0])!r} ({type(module).__name__}): {reasons[id(module)]}")
    if left_out is not None:
        left_out += without
    return {name: module for name, module in chosen.items() if id(module) not in reasons}


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and all other containers that torch's pytree knows."""
    if isinstance(value, torch.Tensor):  # the usual case, ten times as fast without pytree
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def version_of(tensor: torch.Tensor) -> int | None:
    """The number of in-place changes of ``tensor``; None if torch does not count them (``inference_mode``)."""
    return None if tensor.is_inference() else tensor._version


__all__ = ["Seen", "features"]


class _Run(NamedTuple):
    """One call that returned: its output, and the tensors in it with their versions at that time, or an error."""

    output: Any
    versions: tuple[tuple[torch.Tensor, int | None], ...]
    error: str


class Seen(Attachment, Mapping[str, Any]):
    """What :func:`features` returns: a mapping from canonical module names to the output of the module's last call.

    The mapping has the watched modules that have run, in the model's order. The outputs stay readable after the
    ``with`` block or ``remove()``.
    """

    def __init__(self, names: tuple[str, ...], keep: int | None) -> None:
        super().__init__()
        self.names = names
        self._keep = keep
        self._lock = new_lock()
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
        """The outputs that are kept for ``name``, oldest first; replicas follow each other in the order of devices.

        Raises:
            NotSeenError: when the module has not run, or torch could not keep its output.
            MutationError: when one of them was changed in place afterwards.
        """
        runs = self._of(name)
        with self._lock:
            kept = [run for device in sorted(runs, key=_order) for run in runs[device]]
        return tuple(_read(name, run) for run in kept)

    def count(self, name: str) -> int:
        """The number of calls of ``name`` that returned, also those whose outputs are no longer kept.

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

    def _remember(self, name: str, detach: bool, copy: bool, module: nn.Module, args: object, output: Any) -> None:
        if in_backward():  # a checkpoint computes again what was seen
            return

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.detach() if detach else tensor
            return kept.clone() if copy else kept

        single, error = isinstance(output, torch.Tensor), ""
        try:
            kept = alias(output) if single else pytree.tree_map_only(torch.Tensor, alias, output)
            versions = tuple((tensor, version_of(tensor)) for tensor in tensors_of(kept))
        except Exception as raised:  # a user's subclass of tensors may raise anything
            kept, versions, error = None, (), f"{type(raised).__name__}: {raised}"
        replica: torch.device | None = None
        if getattr(module, "_is_replica", False):
            replica = versions[0][0].device if versions else torch.device("cpu")
        with self._lock:
            fresh: collections.deque[_Run] = collections.deque(maxlen=self._keep)
            self._runs[name].setdefault(replica, fresh).append(_Run(kept, versions, error))
            self._counts[name] += 1


def features(
    model: nn.Module, *patterns: Pattern, detach: bool = True, copy: bool = False, keep: int | None = 1
) -> Seen:
    """Keep what the matching modules return, under their names, without changing it or waiting for a device.

    Tensors are kept as aliases, which cost no memory beyond what they keep alive. If an output is changed in place
    later (``nn.ReLU(inplace=True)``, ``out += x``), its alias no longer shows what the module returned, and reading it
    raises. ``copy=True`` keeps a copy instead, made on the device.

    ``seen[name]`` is the output of the module's last call; ``seen.calls(name)`` has the last ``keep`` calls, and
    ``seen.count(name)`` is the number of all calls. In ``nn.DataParallel`` each replica keeps its own part of the
    batch: ``seen.calls(name)`` has one part for each device, and ``seen[name]`` raises. Under DDP and FSDP an output is
    for this rank's part of the batch. The second forward of a checkpoint, in backward, does not count as a call.

    Args:
        model: the model; names are those inside it when it is wrapped by DDP or DataParallel.
        patterns: globs over module names (``*`` crosses dots; ``""`` is the model itself), module classes or
            predicates of name and module.
        detach: whether to keep tensors without their graph, so that they do not keep alive what they were computed
            from. Tensors are found in tuples, lists, dicts, named tuples and types known to torch's pytree; any other
            object is kept as it is.
        copy: whether to keep copies instead of aliases.
        keep: how many calls of each module to keep; None for all of them.

    Returns:
        A mapping that is also an attachment: the end of a ``with`` block or ``remove()`` takes the hooks off.

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
        hook = UncopiedHook(functools.partial(seen._remember, name, detach, copy))
        seen.on_remove(module.register_forward_hook(hook).remove)
    return seen


def _order(device: torch.device | None) -> tuple[str, int]:
    return ("", 0) if device is None else (device.type, device.index or 0)


def _read(name: str, run: _Run) -> Any:
    if run.error:
        raise NotSeenError(f"the output of {display_name(name)!r} could not be kept ({run.error})")
    if any(version is not None and tensor._version != version for tensor, version in run.versions):
        raise MutationError(
            f"the output of {display_name(name)!r} was changed in place after it was seen, by a later layer such as "
            "ReLU(inplace=True) or by an operator such as +=; pass copy=True to features() to keep what it was"
        )
    return run.output
