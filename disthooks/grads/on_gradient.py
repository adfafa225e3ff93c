"""``on_gradient()`` calls one function on the gradients of some parameters.

It needs no optimizer, and makes no collective: rules, statistics and the log belong to ``gradients()``.
"""

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
    """The attachment that :func:`on_gradient` returns.

    Attributes:
        names: the names of the parameters whose gradients the function is called on.
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
        """For the name of each parameter, how many times the function was called for it on this rank."""
        return {name: self._calls[name] for name in self.names}

    def attach(self) -> None:
        """Put the hooks on, and one more on the model's forward.

        The hook on forward raises :class:`~disthooks.errors.AttachError` if an engine has replaced the parameters.
        """
        if self._at == "local":
            # The parameters of a plain module keep this object alive, even if only a submodule was given here and the
            # user dropped it. An engine holds parameters where the garbage collector cannot look, so a reference from
            # them would never be freed. There the model keeps this object, by the hook on its forward below.
            hook = self._local if self._engine.trains_alone else weak_method(self._local)
            for handle in self._engine.on_local(list(self._shards), hook):
                self.on_remove(handle.remove)
        else:
            # The hook is on every optimizer of the process, so it must not keep this object alive. It goes away with
            # this object.
            handle = self._engine.before_any_step(weak_method(self._before_step))
            self.on_remove(handle.remove)
            weakref.finalize(self, handle.remove).atexit = False
        self.on_remove(self._engine.model.register_forward_pre_hook(UncopiedHook(self._check)).remove)

    def _check(self, module: nn.Module, args: Any) -> None:
        # A replica of DataParallel has copies in place of parameters, so they differ there although nothing is wrong.
        if not torch.compiler.is_compiling() and not getattr(module, "_is_replica", False):
            self._engine.check()

    def _local(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        return self._call(self._shards[index], grad)

    @torch.no_grad()
    def _before_step(self, optimizer: Any) -> None:
        held = {id(parameter) for parameter in self._engine.optimizer_parameters(optimizer)}
        if held.isdisjoint(id(shard.parameter) for shard in self._shards.values()):
            return
        refuse_scaled(optimizer)
        # An optimizer may step others inside its own step. Each gradient is changed once, in the outermost step.
        for outer in optimizers_stepping():
            if outer is not optimizer:
                # The hook of the outer step has called the function for these parameters already.
                held -= {id(parameter) for group in outer.param_groups for parameter in group["params"]}
        for shard in self._shards.values():
            grad = shard.optimizer_gradient() if id(shard.parameter) in held else None
            if grad is not None:
                result = self._call(shard, grad)
                if result is None or result is grad:
                    continue
                if grad.layout is torch.strided and result.layout is torch.strided:
                    # In place, because the gradient may be a view of DDP's bucket. A DTensor keeps its placements.
                    grad.copy_(result)
                else:
                    shard.parameter.grad = result  # a sparse gradient cannot be written in place

    def _call(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        """Call the function with the gradient in the user's units, without the engine's loss scale.

        See [Note: whose units] in step.py.
        """
        scale = self._engine.gradient_scale()
        if scale is None:
            return self._apply(shard, grad)
        unscaled = grad.to(torch.promote_types(grad.dtype, torch.float32)) / scale
        version = unscaled._version
        result = self._apply(shard, unscaled)
        if result is None and unscaled._version == version:
            return None  # neither a result nor a change in place: the gradient keeps its bits
        return ((unscaled if result is None else result) * scale).to(grad.dtype)

    def _apply(self, shard: Shard, grad: torch.Tensor) -> torch.Tensor | None:
        self._calls[shard.name] += 1
        version = grad._version  # torch counts it up at each change in place
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
    """Call ``fn(grad)`` on the gradients of matching parameters; the tensor that it returns replaces the gradient.

    At ``"final"`` the function is called just before a step of any optimizer that holds the parameter. It gets the
    gradient as the engine has it. Under ``fully_shard`` this is a DTensor, and torch's own functions on it compute with
    the whole gradient. Under ``FullyShardedDataParallel`` and DeepSpeed's ZeRO 1 to 3 it is the part that this rank
    has, with one dimension; on a rank without a part the function is not called.

    At ``"local"`` the function is called in every backward, with this rank's own whole gradient of that micro-batch,
    before the gradient is accumulated or reduced. There the function must not communicate with other ranks, and must
    not change the gradient in place.

    Args:
        model: the model that the engine returned; for ``fully_shard`` the model itself. Attach after the engine has
            wrapped it.
        pattern: one or several of: a glob over the parameter's name (``*`` crosses dots), a type, a predicate of
            name and parameter.
        fn: a function that takes a gradient and returns one of the same shape and dtype, or None to leave the gradient
            as it is.
        at: "final" for the gradient that the optimizer uses, or "local" for this rank's own.

    Returns:
        A handle with ``remove()`` and ``report()``, which tells how many times the function was called for each
        parameter. It is a context manager too.

    Raises:
        UsageError: when an argument can never work; from backward or ``step()``, when ``fn`` returns something else
            than None or a tensor of the same shape and dtype; from backward, when ``fn`` changes a local gradient in
            place.
        MatchError: when a pattern matches no parameter.
        AttachError: when no matching parameter needs a gradient, or on an engine that is not supported; from the
            model's forward, when an engine has replaced the parameters after the attachment.

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
    """The indices of the engine's shards that match, checked."""
    named = [(shard.name, shard.as_full_parameter()) for shard in engine.shards]
    # A frozen parameter may match: it may get a gradient later. One at least needs a gradient now.
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
