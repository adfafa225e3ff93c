"""``on_gradient()``: one function on the gradients of some parameters, without rules, statistics or collectives."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from disthooks._handles import Attachment, UncopiedHook, first_names, weak_method
from disthooks._match import Pattern, as_patterns, match
from disthooks.engines.base import Engine, Shard
from disthooks.engines.detect import detect_engine
from disthooks.engines.optimizer_step import optimizers_stepping
from disthooks.errors import AttachError, UsageError
from disthooks.grads.step import refuse_scaled

Function = Callable[[torch.Tensor], torch.Tensor | None]


class OnGradient(Attachment):
    """What :func:`on_gradient` attached.

    Attributes:
        names: of the parameters that the function is for.
    """

    def __init__(self, engine: Engine, indices: Sequence[int], function: Function, at: str) -> None:
        super().__init__()
        self._engine, self._function = engine, function
        self._at = at
        self._shards = {i: engine.shards[i] for i in indices}
        self._calls: collections.Counter[str] = collections.Counter()
        self.names = tuple(shard.name for shard in self._shards.values())

    def __repr__(self) -> str:
        return f"<OnGradient of {len(self.names)} parameters ({first_names(self.names)}), at={self._at!r}>"

    def report(self) -> dict[str, int]:
        """How many times the function was called for each parameter, on this rank."""
        return {name: self._calls[name] for name in self.names}

    def attach(self) -> None:
        """Put the hooks on, and one on the model's forward that notices when an engine has replaced the parameters."""
        if self._at == "local":
            # The parameters of a plain module keep this object, even when only a part of the module was given here and
            # is gone. An engine holds parameters where the collector cannot look: there the model keeps it, see below.
            hook = self._local if self._engine.trains_alone else weak_method(self._local)
            for handle in self._engine.on_local(list(self._shards), hook):
                self.on_remove(handle.remove)
        else:
            handle = self._engine.before_any_step(weak_method(self._before_step))
            self.on_remove(handle.remove)
            weakref.finalize(self, handle.remove).atexit = False
        self.on_remove(self._engine.model.register_forward_pre_hook(UncopiedHook(self._check)).remove)

    def _check(self, module: nn.Module, args: Any) -> None:
        # A replica of DataParallel has copies in place of parameters.
        if not torch.compiler.is_compiling() and not getattr(module, "_is_replica", False):
            self._engine.check()

    def _local(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        return self._call(self._shards[index], grad)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = {id(parameter) for parameter in self._engine.optimizer_parameters(optimizer)}
        if held.isdisjoint(id(shard.parameter) for shard in self._shards.values()):
            return
        refuse_scaled(optimizer)
        for outer in optimizers_stepping():
            if outer is not optimizer:
                # The outer step has called the function for its parameters already.
                held -= {id(parameter) for group in outer.param_groups for parameter in group["params"]}
        for shard in self._shards.values():
            grad = shard.optimizer_gradient() if id(shard.parameter) in held else None
            if grad is not None:
                result = self._call(shard, grad)
                if result is not None and result is not grad:
                    _write(shard.parameter, grad, result)

    def _call(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        """Call the function with the gradient in the user's units. See [Note: whose units] in step.py."""
        scale = self._engine.gradient_scale()
        if scale is None:
            return self._apply(shard, grad)
        seen = grad.to(torch.promote_types(grad.dtype, torch.float32)) / scale
        version = seen._version
        result = self._apply(shard, seen)
        if result is None and seen._version == version:
            return None
        return ((seen if result is None else result) * scale).to(grad.dtype)

    def _apply(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        self._calls[shard.name] += 1
        version = grad._version
        result = self._function(grad)
        if self._at == "local" and grad._version != version:
            raise UsageError(
                f"the function for the local gradient of {shard.name!r} changed it in place, and autograd may use the "
                "same tensor for other parameters: return a new one (grad.clamp(...) for grad.clamp_(...))"
            )
        if result is not None:
            _check_result(result, grad, f"{shard.name!r} on rank {self._engine.ranks[self._engine.position]}")
        return result


def on_gradient(
    model: nn.Module,
    pattern: Pattern | Iterable[Pattern],
    fn: Function,
    at: Literal["final", "local"] = "final",
) -> OnGradient:
    """Call ``fn(grad)`` on the gradients of matching parameters; what it returns takes their place.

    At ``"final"`` it is called just before any optimizer that holds the parameter steps, with the gradient as the
    engine has it: under ``fully_shard`` a DTensor, on which torch's own functions mean the whole gradient; under
    ``FullyShardedDataParallel`` and DeepSpeed's ZeRO 1 to 3 the part that this rank has, of one dimension, on ranks
    that have any. At
    ``"local"`` it is called in every backward, with this rank's own whole gradient of that micro-batch, before it
    is accumulated or reduced; there it must not communicate.

    Args:
        model: what the engine returned; for ``fully_shard`` the model itself. Attach after the engine took it.
        pattern: one or several of: a glob over the parameter's name (``*`` crosses dots), a type, a predicate of
            name and parameter.
        fn: given a gradient, returns one of the same shape and dtype, or None to leave it as it is.
        at: "final" or "local".

    Returns:
        A handle with ``remove()``, and ``report()``: how often each gradient was seen.

    Raises:
        UsageError: when an argument can never work; from backward or ``step()``, when ``fn`` returns something of
            another shape or dtype.
        MatchError: when a pattern matches no parameter.
        AttachError: when no matching parameter needs a gradient, or on an engine that is not supported; from the
            model's forward, when an engine has replaced the parameters since.

    >>> model = nn.Linear(2, 1)
    >>> with on_gradient(model, "bias", torch.zeros_like, at="local") as hook:
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.bias.grad, hook.report()
    (tensor([0.]), {'bias': 1})
    """
    if at not in ("final", "local"):
        raise UsageError(f"at={at!r}: a gradient can be seen 'final' (what the optimizer uses) or 'local'")
    if not callable(fn):
        raise UsageError(f"fn={fn!r} cannot be called")
    engine = detect_engine(model)
    attached = OnGradient(engine, _chosen(engine, pattern, at), fn, at)
    attached.attach()
    return attached


def _chosen(engine: Engine, pattern: Pattern | Iterable[Pattern], at: str) -> list[int]:
    named = [(shard.name, shard.as_full_parameter()) for shard in engine.shards]
    names = {name for name, _ in match(named, as_patterns(pattern), "parameter")}
    indices = [i for i, (name, _) in enumerate(named) if name in names]
    if not any(named[i][1].requires_grad for i in indices):
        shown = ", ".join(sorted(names)[:5]) or "none"
        raise AttachError(f"no matching parameter needs a gradient ({shown}): set requires_grad before attaching")
    if at == "final" and not any(engine.is_updated(i) for i in indices):
        raise AttachError(
            f"the optimizer of {engine.label} updates no matching parameter: give it those, or at='local'"
        )
    return indices


def _check_result(result: object, grad: torch.Tensor, where: str) -> None:
    wanted = f"a tensor of shape {tuple(grad.shape)} and {grad.dtype}, or None"
    if not isinstance(result, torch.Tensor):
        raise UsageError(f"the function for the gradient of {where} must return {wanted}, got {result!r}")
    if result.shape != grad.shape or result.dtype != grad.dtype:
        raise UsageError(
            f"the function for the gradient of {where} must return {wanted}, got shape {tuple(result.shape)} and "
            f"{result.dtype}"
        )
    if hasattr(grad, "placements") != hasattr(result, "placements"):
        raise UsageError(
            f"the function for the gradient of {where} was given a {type(grad).__name__} and returned a "
            f"{type(result).__name__}; return one like it: torch's own functions do"
        )


def _write(parameter: nn.Parameter, grad: torch.Tensor, result: torch.Tensor) -> None:
    """Write into the gradient that is there: it may be a view of DDP's bucket, and a DTensor keeps its placements."""
    if grad.layout is torch.strided and result.layout is torch.strided:
        grad.copy_(result)
    else:
        parameter.grad = result
