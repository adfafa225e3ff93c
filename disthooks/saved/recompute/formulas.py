"""What each node of the graph computed, for those that are cheap to compute again.

To add one: a function of a :class:`Reader` under ``@formula(name of the node)``, which gives a :class:`Call`. It may
raise ``Unknown`` wherever the graph does not tell all there is to know. Only elementwise functions, and norms by
statistics that are saved or that belong to one row: a sum that threads or blocks share may be other bits the next
time. All that selects a kernel besides the tensors goes into ``key``. Where several ways may give the bits of the
original, list them in ``runs``: the one that is proven is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from disthooks.saved.packed import InPlace
from disthooks.saved.recompute.graph import Reader, Saved, Source, Unknown

Run = Callable[..., torch.Tensor]
_aten: Any = torch.ops.aten


class Norm(NamedTuple):
    """What the graph does not tell of a norm, by the module that has its weight."""

    eps: float | None
    bias: torch.Tensor | None


class Call(NamedTuple):
    """How a value was computed.

    Attributes:
        name: for reports.
        args: of what.
        runs: ways to do it, the likeliest first; each takes the tensors of ``args``.
        key: all other arguments.
        cost: operators that read or write all elements; a view costs nothing.
    """

    name: str
    args: Sequence[Source | None]
    runs: tuple[Run, ...]
    key: tuple[Any, ...] = ()
    cost: int = 1


Finder = Callable[[Saved | None], Norm]
Formula = Callable[[Reader, Finder], Call]
FORMULAS: dict[str, Formula] = {}


def formula(*names: str) -> Callable[[Formula], Formula]:
    """The decorated function says what nodes of these ``names`` computed.

    It is given the node, and what finds the :class:`Norm` of a weight that the node saved.
    """

    def add(function: Formula) -> Formula:
        FORMULAS.update(dict.fromkeys(names, function))
        return function

    return add


# -- elementwise, of one tensor

_UNARY: dict[str, tuple[str, Run, tuple[str, ...]]] = {  # the name, the function, its other arguments
    "ReluBackward0": ("relu", torch.relu, ()),
    "GeluBackward0": ("gelu", lambda x, approximate: F.gelu(x, approximate=approximate), ("approximate",)),
    "SiluBackward0": ("silu", F.silu, ()),
    "SigmoidBackward0": ("sigmoid", torch.sigmoid, ()),
    "TanhBackward0": ("tanh", torch.tanh, ()),
    "MishBackward0": ("mish", F.mish, ()),
    "HardswishBackward0": ("hardswish", F.hardswish, ()),
    "HardsigmoidBackward0": ("hardsigmoid", F.hardsigmoid, ()),
    "HardtanhBackward0": ("hardtanh", F.hardtanh, ("min_val", "max_val")),
    "LeakyReluBackward0": ("leaky_relu", F.leaky_relu, ("negative_slope",)),
    "EluBackward0": ("elu", lambda x, *args: _aten.elu(x, *args), ("alpha", "scale", "input_scale")),
    "SoftplusBackward0": ("softplus", F.softplus, ("beta", "threshold")),
    "NegBackward0": ("neg", torch.neg, ()),
    "PowBackward0": ("pow", torch.pow, ("exponent",)),
    "ExpBackward0": ("exp", torch.exp, ()),
    "SinBackward0": ("sin", torch.sin, ()),
    "CosBackward0": ("cos", torch.cos, ()),
}


def _unary(name: str, function: Run, arguments: tuple[str, ...]) -> Formula:
    def read(node: Reader, find: Finder) -> Call:
        found = tuple(node.number(each) for each in arguments)
        return Call(name, [node.operand(0, "self")], (lambda x: function(x, *found),), found)

    return read


for _node, _about in _UNARY.items():
    FORMULAS[_node] = _unary(*_about)

# -- elementwise, of two


@formula("AddBackward0")
def add(node: Reader, find: Finder) -> Call:
    """A residual; of a constant that is added the graph knows nothing."""
    alpha = node.number("alpha")
    return Call("add", [node.input(0), node.input(1)], (lambda x, y: torch.add(x, y, alpha=alpha),), (alpha,))


@formula("SubBackward0")
def subtract(node: Reader, find: Finder) -> Call:
    """The same with a minus."""
    alpha = node.number("alpha")
    return Call("sub", [node.input(0), node.input(1)], (lambda x, y: torch.sub(x, y, alpha=alpha),), (alpha,))


@formula("MulBackward0")
def mul(node: Reader, find: Finder) -> Call:
    """A gate, a scale, a dropout's mask: a constant is saved, and so known."""
    return Call("mul", [node.operand(0, "self"), node.operand(1, "other")], (torch.mul,))


@formula("DivBackward0")
def div(node: Reader, find: Finder) -> Call:
    """A quotient, where the divisor is saved."""
    return Call("div", [node.operand(0, "self"), node.operand(1, "other")], (torch.div,))


@formula("NativeDropoutBackward0")
def dropout(node: Reader, find: Finder) -> Call:
    """By the mask, which is saved: bool, a byte for each element.

    Whether ``native_dropout`` was given ``train=False`` the graph does not tell. Then nothing is masked and nothing is
    scaled; a mask at random has a gap, but for one time in exp(64).
    """
    p = node.number("p")
    if math.prod(node.shape) * p < 64:
        raise Unknown
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    rounded = 0.0 if p == 1 else float(torch.tensor(1.0 - p, dtype=torch.float32, device="cpu").reciprocal())
    runs = [lambda x, mask: x * (mask.to(x.dtype) * scale)]  # as on a CPU
    if node.device.type != "cpu":
        runs.insert(0, lambda x, mask: _aten.native_dropout_backward(x, mask, rounded))  # forward's product, too
    return Call("dropout", [node.input(0), node.saved("result1")], tuple(map(_unless_off, runs)), (p,), 2)


def _unless_off(run: Run) -> Run:
    return lambda x, mask: torch.where(mask.all(), x, run(x, mask))


# -- norms


def _folded(x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """By the saved statistics: in eval mode, with all of the scale in the weight, a CPU multiplies the same numbers.

    No reduction is run again: its bits would depend on the number of threads.
    """
    weight = invstd if weight is None else invstd * weight
    bias = None if bias is None else bias.to(mean.dtype)
    out: torch.Tensor = torch.native_batch_norm(x, weight, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return out


@formula("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def batch_norm(node: Reader, find: Finder) -> Call:
    """From its input and the statistics that it saved; in eval mode by running it again."""
    weight = node.saved("weight", copied=True)
    if node.is_given(2):
        bias: Source | None = node.input(2)
    else:
        bias = None if weight is None else _constant(find(weight).bias)
    x = node.operand(0, "input")
    eps, training = _eps_and_mode(node)
    if not training:
        mean, var = node.saved("running_mean", copied=True), node.saved("running_var", copied=True)
        return Call(
            "batch_norm",
            [x, weight, bias, mean, var],
            (
                lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, False, 0.0, eps)[0],
                lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, False, 0.0, eps, True),
            ),
            (eps, training),
        )
    mean, invstd = _statistics(node)
    runs: tuple[Run, ...] = (_folded,)
    if node.device.type != "cpu":  # the kernel that the native one uses; then cuDNN's own, which is deterministic
        runs = (
            lambda x, w, b, m, s: torch.batch_norm_elemt(x, w, b, m, s, eps),
            _folded,
            lambda x, w, b, m, s: torch.batch_norm(x, w, b, None, None, True, 0.0, eps, True),
        )
    return Call("batch_norm", [x, weight, bias, mean, invstd], runs, (eps, training, node.device.type))


def _eps_and_mode(node: Reader) -> tuple[float, bool]:
    try:
        return node.number("eps"), node.number("training")
    except Unknown:
        return node.number("epsilon"), node.number("training")  # cuDNN's and MIOpen's name


def _statistics(node: Reader) -> tuple[Saved | None, Saved | None]:
    mean, invstd = node.saved("result1"), node.saved("result2")
    if mean is None or invstd is None:
        raise Unknown
    return mean, invstd


@formula("NativeLayerNormBackward0")
def layer_norm(node: Reader, find: Finder) -> Call:
    """Run again, a row is one thread's. The graph has no eps: one that was guessed might give the same bits for the
    first batch, and others later. So it is that of the module that has the weight.
    """
    weight, bias = node.saved("weight", copied=True), node.saved("bias", copied=True)
    shape, eps = list(node.number("normalized_shape")), find(weight).eps
    if eps is None:
        raise Unknown
    return Call(
        "layer_norm",
        [node.operand(0, "input"), weight, bias],
        (lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0],),
        (tuple(shape), eps),
    )


@formula("FusedRmsNormBackward0")
def rms_norm(node: Reader, find: Finder) -> Call:
    """As layer norm; an eps of None is the smallest of the dtype."""
    weight = node.saved("weight", copied=True)
    shape, eps = list(node.number("normalized_shape")), find(weight).eps
    return Call(
        "rms_norm",
        [node.operand(0, "input"), weight],
        (lambda x, w: _aten._fused_rms_norm(x, shape, w, eps)[0],),
        (tuple(shape), eps),
    )


@formula("NativeGroupNormBackward0")
def group_norm(node: Reader, find: Finder) -> Call:
    """Run again; the graph has all but the bias where that is frozen."""
    weight = node.saved("weight", copied=True)
    bias = node.input(2) if node.is_given(2) else None if weight is None else _constant(find(weight).bias)
    numbers = tuple(node.number(name) for name in ("N", "C", "HxW", "group", "eps"))
    return Call(
        "group_norm",
        [node.operand(0, "input"), weight, bias],
        (lambda x, w, b: torch.native_group_norm(_dense(x), w, b, *numbers)[0],),
        numbers,
    )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """As ``group_norm`` has it: on a CPU other kernels take channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x if x.is_cpu and last is not None and x.is_contiguous(memory_format=last) else x.contiguous()


def _constant(tensor: torch.Tensor | None) -> Saved | None:
    return None if tensor is None else Saved(InPlace(tensor, ""), copied=True)


# -- casts and copies


@formula("ToCopyBackward0")
def cast(node: Reader, find: Finder) -> Call:
    """To another dtype, on the same device: autocast's copy of an activation."""
    source = node.input(0)
    if node.device_of(source) != node.device:
        raise Unknown
    dtype = node.dtype
    return Call("cast", [source], (lambda x: x.to(dtype),), (dtype,))


@formula("CloneBackward0")
def clone(node: Reader, find: Finder) -> Call:
    """``contiguous()``, mostly, or ``clone()``: which of them the layout of what comes of it has to tell."""
    return Call("clone", [node.input(0)], (lambda x: x.contiguous(), torch.clone))


# -- views; each of its own value, so the base may be any


@formula("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1")
@formula("SqueezeBackward2", "UnsqueezeBackward0")
def view(node: Reader, find: Finder) -> Call:
    """Another shape for the same elements, in the same order."""
    shape = node.shape
    return Call("view", [node.input(0)], (lambda x: x.reshape(shape),), (shape,), 0)


@formula("ExpandBackward0")
def expand(node: Reader, find: Finder) -> Call:
    """Repeated without a copy."""
    shape = node.shape
    return Call("expand", [node.input(0)], (lambda x: x.expand(shape),), (shape,), 0)


@formula("TransposeBackward0")
def transpose(node: Reader, find: Finder) -> Call:
    """Two dimensions exchanged."""
    dims = _signed(node.number("dim0")), _signed(node.number("dim1"))
    return Call("transpose", [node.input(0)], (lambda x: x.transpose(*dims),), dims, 0)


@formula("TBackward0")
def t(node: Reader, find: Finder) -> Call:
    """A matrix transposed."""
    return Call("t", [node.input(0)], (lambda x: x.t(),), (), 0)


@formula("PermuteBackward0")
def permute(node: Reader, find: Finder) -> Call:
    """Dimensions in another order."""
    dims = tuple(_signed(dim) for dim in node.number("dims"))
    return Call("permute", [node.input(0)], (lambda x: x.permute(dims),), dims, 0)


@formula("AliasBackward0")
def alias(node: Reader, find: Finder) -> Call:
    """The same."""
    return Call("alias", [node.input(0)], (lambda x: x,), (), 0)


def _signed(number: int) -> int:
    """An argument as it was given: nodes hold a negative one as an unsigned number of 64 bits."""
    return number - (1 << 64) if number > math.ldexp(1, 63) else number
