"""``SaveWith``, a wrapper of a module: hooks open inside the forward of each replica, in the thread that runs it."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from disthooks._torch import metadata_being_loaded, top_hooks, uncompiled
from disthooks.errors import UsageError
from disthooks.saved.hooks import HookSite, tensors_in
from disthooks.saved.pipeline import OpenPipeline, Pipeline, Stage, pipeline
from disthooks.saved.recompute.verify import proofs_of
from disthooks.saved.report import SavedReport
from disthooks.saved.when_to_hook import nothing_to_hook, reason_never_called

# torch's own activation wrappers use this name. Its distributed checkpoints and FSDP strip it from names (decision 7).
_INNER = "_checkpoint_wrapped_module"
_OWN = frozenset(nn.Module().__dict__) | {_INNER, "_site", "_added"}  # attributes of the wrapper, not of what is inside

# [Note: what cannot reach through a wrapper]
# A wrapper has no parameters itself: code that puts another tensor in the place of a parameter looks for it in the
# dictionaries of the module that it is given, and finds nothing. So pruning, weight_norm, spectral_norm, parametrize
# and torch.func.functional_call are applied to the module before it is wrapped, or to `wrapper.unwrapped`. `register_*`
# says so, because pruning calls it first. The others are errors of torch, before it has changed anything.
# `save_activations` has none of these limits.


class SaveWith(nn.Module):
    """Run ``module``, and put the tensors that autograd saves in its forward through ``stages``.

    Names are those of the plain model: ``state_dict`` keys, ``named_parameters`` and ``named_modules`` do not show the
    wrapper, a checkpoint of a wrapped model loads into a plain one and the reverse, and attributes of ``module`` can be
    read from the wrapper. A call under ``no_grad``, in a ``torch.func`` transform, while exporting, or inside a
    checkpointed region runs without hooks and is counted in ``report().passed``. So is a call of another method than
    ``forward``, whose tensors stay where they are.

    Args:
        module: the module to wrap.
        stages: a store; before it :class:`~disthooks.Recompute` and codecs, in this order.
        at_least: tensors of fewer bytes stay where they are: an int or text such as ``"1 MiB"``, 0 for all to go. None
            for 64 KiB with ``OnDisk`` and ``OnCpu``, 4 KiB with other stores.
        selective_checkpoints: whether the tensors that a selective checkpoint keeps for backward go to the store, too.

    Raises:
        UsageError: when ``module`` is no module, or ``stages`` are none of these.

    >>> from disthooks import OnDisk
    >>> net = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), SaveWith(nn.Linear(512, 4), OnDisk("/tmp")))
    >>> net(torch.ones(64, 8)).sum().backward()
    >>> net[2].report().moved == 64 * 512 * 4
    True
    >>> sorted(net.state_dict())
    ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    def __init__(
        self,
        module: nn.Module,
        *stages: Stage | Pipeline,
        at_least: int | str | None = None,
        selective_checkpoints: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UsageError(f"{type(self).__name__} wraps a torch.nn.Module, got {module!r}")
        if why := reason_never_called(module):
            raise UsageError(f"{type(self).__name__}({type(module).__name__}): {why}")
        checked = pipeline(*stages, at_least=at_least, selective_checkpoints=selective_checkpoints)
        opened = OpenPipeline(checked, None if checked.recompute is None else proofs_of(module))
        self._site = HookSite(opened, type(module).__name__)
        self.add_module(_INNER, module)
        self.register_state_dict_post_hook(_strip_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_insert_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_strip_messages)  # type: ignore[no-untyped-call]

    @property
    def unwrapped(self) -> nn.Module:
        """The module inside."""
        inner = self._modules[_INNER]
        assert inner is not None
        return inner

    def unwrap(self) -> nn.Module:
        """The module without this wrapper and those inside it; see :func:`unwrap`."""
        return unwrap(self)

    def report(self) -> SavedReport:
        """Bytes stored, shared, kept and held by this wrapper and its replicas, on this rank."""
        return self._site.pipeline.report()

    @uncompiled(callees=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with the hooks on in this thread."""
        inner = self.unwrapped
        if nothing_to_hook():
            return inner(*args, **kwargs)
        return self._site.call(inner, inner, *args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This wrapper, and then the module inside under the same name."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.unwrapped.named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        return str(self._site.pipeline.stages)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "parametrizations":  # torch would take them out of the class of the wrapper
                raise
            inner = super().__getattr__(_INNER)
            found = getattr(inner, name)
            is_method = type(found) is types.MethodType and found.__self__ is inner
            return self._counted(found) if is_method and not torch.compiler.is_compiling() else found

    def _counted(self, method: types.MethodType) -> types.MethodType:
        """The same method, whose calls the report counts if they save tensors: hooks open around ``forward`` alone."""

        @functools.wraps(method)
        def call(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if top_hooks(True) is None and any(tensor.grad_fn is not None for tensor in tensors_in(result)):
                self._site.pipeline.counters.count_pass("a method other than forward", self._site.name)
            return result

        return types.MethodType(call, self.unwrapped)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set ``name`` on the module inside, from which it is read, unless torch or this class keeps it on the wrapper.

        A parameter that stayed on the wrapper would never be trained (decision 25).
        """
        inner = self.__dict__.get("_modules", {}).get(_INNER)
        if inner is None or name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
            if name == "training" and inner is not None:
                inner.training = value
            return
        setattr(inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or _INNER not in self._modules:
            super().__delattr__(name)
        else:
            delattr(self.unwrapped, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the module inside."""
        super().add_module(name, module) if name == _INNER else self.unwrapped.add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse; see [Note: what cannot reach through a wrapper]."""
        self._refuse("register_parameter", name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Refuse; see [Note: what cannot reach through a wrapper]."""
        self._refuse("register_buffer", name)

    def _refuse(self, function: str, name: str) -> NoReturn:
        raise UsageError(
            f"{function}({name!r}) on a disthooks wrapper, and nothing was changed: call it, or what called it "
            "(pruning), on the module before it is wrapped, or on `wrapper.unwrapped`, the module inside"
        )

    def __getitem__(self, index: Any) -> Any:
        return self.unwrapped[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.unwrapped)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.unwrapped)  # without this a module without a length would have no truth value


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unwrap(model: nn.Module) -> nn.Module:
    """Take every disthooks wrapper out of ``model``, which is changed in place.

    Args:
        model: a model with wrappers in it, or a wrapper.

    Returns:
        ``model``, or the module inside when ``model`` is a wrapper itself.

    Raises:
        UsageError: when ``model`` is no module; when a wrapper has hooks of its own, as after
            ``fully_shard(wrapper)``: they would be lost.

    >>> from disthooks import OnCpu
    >>> net = nn.Sequential(nn.Linear(8, 4), SaveWith(SaveWith(nn.Linear(4, 2), OnCpu()), OnCpu()))
    >>> [type(layer).__name__ for layer in unwrap(net)]
    ['Linear', 'Linear']
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SaveWith) and any(getattr(module, hooks) for hooks in _HOOKS):
            raise UsageError(
                f"{name or 'the model'!r} cannot be unwrapped: {type(module).__name__} has hooks of its own, an "
                "engine's perhaps, that would be lost. Unwrap before the engine takes the model; its state_dict is "
                "that of the plain model in any case"
            )
    # Nothing was changed until here, so a model that cannot be unwrapped is as it was.
    for module in list(model.modules()):
        if not isinstance(module, SaveWith):
            module._modules.update({name: _innermost(child) for name, child in module._modules.items()})
    inner = _innermost(model)
    assert inner is not None
    return inner


def _innermost(module: nn.Module | None) -> nn.Module | None:
    while isinstance(module, SaveWith):
        module = module.unwrapped
    return module


def _strip_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Give the entries of the module inside, and their versions, the names that they have in the plain model."""
    inner = f"{prefix}{_INNER}"
    for names in (state, getattr(state, "_metadata", {})):
        for key in [key for key in names if key == inner or key.startswith(inner + ".")]:
            names[(prefix + key[len(inner) + 1 :]).rstrip(".")] = names.pop(key)


def _insert_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the entries the names that the wrapped model expects, so that a checkpoint of the plain model loads.

    Their versions are renamed, too: without them a module would treat a new checkpoint as an old one (decision 14).
    """
    own = {f"{prefix}{name}" for name in module._parameters}  # FSDP1 puts its flat parameter on the module that it gets
    # torch's set_model_state_dict does not find FSDP1 in a wrapper: it adds the model's own tensors, by FSDP1's names.
    added = f"{prefix}_fsdp_wrapped_module.", f"{prefix}_flat_param"
    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for key in [key for key, value in state.items() if key.startswith(added) and id(value) in tensors]:
        if key not in own:
            del state[key]
    for key in [key for key in state if key.startswith(prefix) and key not in own]:
        state[f"{prefix}{_INNER}.{key[len(prefix) :]}"] = state.pop(key)
    versions = metadata_being_loaded()
    where = prefix.removesuffix(".")
    inside = {
        f"{prefix}{_INNER}{key[len(where) :] if where else '.' + key}".rstrip("."): version
        for key, version in versions.items()
        if key == where or key.startswith(prefix)
    }
    versions.update(inside)
    module.__dict__["_added"] = list(inside)  # `_strip_messages` takes them out again: the checkpoint is the user's


def _strip_messages(module: nn.Module, incompatible: Any) -> None:
    """Report missing and unexpected keys under the names of the plain model, and restore the checkpoint's versions."""
    versions = metadata_being_loaded()
    for key in module.__dict__.pop("_added", ()):
        versions.pop(key, None)
    for keys in incompatible:
        keys[:] = [key.replace(f"{_INNER}.", "") for key in keys]
