"""Formulas: how to compute the output of a graph node again, for operators that are cheap.

To add a formula, write a function of a :class:`NodeReader` under ``@formula(name of the node)`` that returns a
:class:`Call`, and a line in ``tests/unit/saved/test_formulas.py``. The function raises ``NotComputable`` if the graph
does not have everything that it needs. This file has functions of an element or of a row, and norms whose statistics
are saved: a sum that threads or blocks share may have other bits the next time. Matrix products are such sums. A user
has to ask for them, and their libraries give the same bits for the same call. ``key`` has everything that selects a
kernel, besides the tensors. If several variants may give the bits of the original, list them in ``runs``: the variant
that is proven is used. See [Note: how recompute is proven] in ``verify.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from disthooks.saved.packed import InPlace
from disthooks.saved.recompute.graph import NodeReader, NotComputable, Saved, Source, metadata_of

Run = Callable[..., torch.Tensor]
_aten: Any = torch.ops.aten


class NormArguments(NamedTuple):
    """The arguments of a norm that the graph does not have, read from the module that has its weight."""

    eps: float | None
    bias: torch.Tensor | None


class Call(NamedTuple):
    """The call of an operator that computes a value.

    Attributes:
        name: the operator's name, for reports.
        args: the sources of the operator's tensors; None for a tensor that it does not get.
        runs: functions of the tensors in ``args``, one for each variant, the likeliest first.
        key: all other arguments.
        cost: how many operators read or write all elements; a view costs nothing.
        is_product: whether it is a matrix product of the last two of ``args``. A weight among them is not copied.
    """

    name: str
    args: Sequence[Source | None]
    runs: tuple[Run, ...]
    key: tuple[Any, ...] = ()
    cost: int = 1
    is_product: bool = False


Finder = Callable[[Saved | None], NormArguments]
Formula = Callable[[NodeReader, Finder], Call]
FORMULAS: dict[str, Formula] = {}


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Decorator: the function is the formula of the nodes with these ``names``.

    The function gets the reader of the node, and a function that gives the :class:`NormArguments` of a weight that
    the node saved.
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
    def read(node: NodeReader, find: Finder) -> Call:
        found = tuple(node.number(each) for each in arguments)
        return Call(name, [node.operand(0, "self")], (lambda x: function(x, *found),), found)

    return read


for _node, _about in _UNARY.items():
    FORMULAS[_node] = _unary(*_about)

# -- elementwise, of two


@formula("AddBackward0")
def add(node: NodeReader, find: Finder) -> Call:
    """A residual. The sum is not computable if one of the terms is a constant, because the graph does not have it."""
    alpha = node.number("alpha")
    return Call("add", [node.input(0), node.input(1)], (lambda x, y: torch.add(x, y, alpha=alpha),), (alpha,))


@formula("SubBackward0")
def subtract(node: NodeReader, find: Finder) -> Call:
    """A difference. It is not computable if one of the terms is a constant."""
    alpha = node.number("alpha")
    return Call("sub", [node.input(0), node.input(1)], (lambda x, y: torch.sub(x, y, alpha=alpha),), (alpha,))


@formula("MulBackward0")
def mul(node: NodeReader, find: Finder) -> Call:
    """A gate, a scale or a dropout's mask. A constant factor is saved by the node, so the graph has it."""
    return Call("mul", [node.operand(0, "self"), node.operand(1, "other")], (torch.mul,))


@formula("DivBackward0")
def div(node: NodeReader, find: Finder) -> Call:
    """A quotient, if the node saved the divisor."""
    return Call("div", [node.operand(0, "self"), node.operand(1, "other")], (torch.div,))


@formula("NativeDropoutBackward0")
def dropout(node: NodeReader, find: Finder) -> Call:
    """A product with the mask, which the node saved: bool, one byte for each element (decision 88).

    The graph does not say whether ``native_dropout`` got ``train=False``. With ``train=False`` the mask is all True,
    and the output is the input. So each variant returns its input if the mask is all True. A random mask of a tensor
    that is computed here is all True with a probability below exp(-64).
    """
    p = node.number("p")
    if math.prod(node.shape) * p < 64:  # the probability that a random mask is all True may be higher than exp(-64)
        raise NotComputable
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    rounded = 0.0 if p == 1 else float(torch.tensor(1.0 - p, dtype=torch.float32, device="cpu").reciprocal())
    # The CPU's operator multiplies in this way. On a device, backward's operator has the product of forward's kernel.
    runs: list[Run] = [lambda x, mask: torch.where(mask.all(), x, x * (mask.to(x.dtype) * scale))]
    if node.device.type != "cpu":
        product = _aten.native_dropout_backward
        runs.insert(0, lambda x, mask: torch.where(mask.all(), x, product(x, mask, rounded)))
    return Call("dropout", [node.input(0), node.saved("result1")], tuple(runs), (p,), 2)


# -- norms


def _folded(x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """Batch norm from its saved statistics, in eval mode, with the whole scale in the weight (decision 80).

    On a CPU this multiplies the same numbers as training mode. No reduction runs again, because its bits would depend
    on the number of threads.
    """
    weight = invstd if weight is None else invstd * weight
    bias = None if bias is None else bias.to(mean.dtype)
    out: torch.Tensor = torch.native_batch_norm(x, weight, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return out


@formula("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def batch_norm(node: NodeReader, find: Finder) -> Call:
    """In training mode the input and the saved statistics give the output; in eval mode the operator runs again."""
    weight = node.saved("weight", must_copy=True)
    bias, x = _bias(node, weight, find), node.operand(0, "input")
    training = node.number("training")
    try:
        eps = node.number("eps")
    except NotComputable:
        eps = node.number("epsilon")  # the name that cuDNN and MIOpen use
    if not training:
        mean, var = node.saved("running_mean", must_copy=True), node.saved("running_var", must_copy=True)
        return Call(
            "batch_norm",
            [x, weight, bias, mean, var],
            (
                lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, False, 0.0, eps)[0],
                lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, False, 0.0, eps, True),
            ),
            (eps, training),
        )
    mean, invstd = node.saved("result1"), node.saved("result2")
    if mean is None or invstd is None:
        raise NotComputable
    runs: tuple[Run, ...] = (_folded,)
    if node.device.type != "cpu":
        # The first variant is the kernel of the native operator, the last one cuDNN's own, which is deterministic.
        runs = (
            lambda x, w, b, m, s: torch.batch_norm_elemt(x, w, b, m, s, eps),
            _folded,
            lambda x, w, b, m, s: torch.batch_norm(x, w, b, None, None, True, 0.0, eps, True),
        )
    return Call("batch_norm", [x, weight, bias, mean, invstd], runs, (eps, training, node.device.type))


def _bias(node: NodeReader, weight: Saved | None, find: Finder) -> Source | None:
    """The bias of a norm: an input of the operator, or a constant of the module if it is frozen."""
    if node.has_gradient(2):
        return node.input(2)
    bias = None if weight is None else find(weight).bias
    return None if bias is None else Saved(InPlace(bias, ""), must_copy=True)


@formula("NativeLayerNormBackward0")
def layer_norm(node: NodeReader, find: Finder) -> Call:
    """The operator runs again: one thread computes a whole row, so the bits do not depend on the number of threads.

    The graph does not have eps. A guessed eps might give the same bits for the first batch and others later, so eps is
    read from the module that has the weight.
    """
    weight, bias = node.saved("weight", must_copy=True), node.saved("bias", must_copy=True)
    shape, eps = list(node.number("normalized_shape")), find(weight).eps
    if eps is None:
        raise NotComputable
    return Call(
        "layer_norm",
        [node.operand(0, "input"), weight, bias],
        (lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)[0],),
        (tuple(shape), eps),
    )


@formula("FusedRmsNormBackward0")
def rms_norm(node: NodeReader, find: Finder) -> Call:
    """The operator runs again, as for layer norm. An eps of None means the smallest step of the dtype."""
    weight = node.saved("weight", must_copy=True)
    shape, eps = list(node.number("normalized_shape")), find(weight).eps
    return Call(
        "rms_norm",
        [node.operand(0, "input"), weight],
        (lambda x, w: _aten._fused_rms_norm(x, shape, w, eps)[0],),
        (tuple(shape), eps),
    )


@formula("NativeGroupNormBackward0")
def group_norm(node: NodeReader, find: Finder) -> Call:
    """The operator runs again. A frozen bias, and from torch 2.14 on eps, are not in the graph: the module has them."""
    weight = node.saved("weight", must_copy=True)
    bias = _bias(node, weight, find)
    try:
        eps = node.number("eps")
    except NotComputable:
        eps = find(weight).eps
    if eps is None:
        raise NotComputable
    numbers = (*(node.number(name) for name in ("N", "C", "HxW", "group")), eps)

    def run(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        # `group_norm` makes its input contiguous before it calls this operator. On a CPU it leaves an input in
        # channels-last format as it is, and the operator has other kernels for that.
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if not (x.is_cpu and last is not None and x.is_contiguous(memory_format=last)):
            x = x.contiguous()
        return torch.native_group_norm(x, weight, bias, *numbers)[0]

    return Call("group_norm", [node.operand(0, "input"), weight, bias], (run,), numbers)


# -- matrix products, for ``Recompute(products=...)``; the same call with the same shapes


@formula("MmBackward0", "BmmBackward0")
def mm(node: NodeReader, find: Finder) -> Call:
    """``F.linear`` without a bias, ``x @ y``."""
    run = {"MmBackward0": torch.mm, "BmmBackward0": torch.bmm}[node.name]
    return Call(run.__name__, [node.operand(0, "self"), node.operand(1, "mat2")], (run,), is_product=True)


@formula("AddmmBackward0", "BaddbmmBackward0")
def addmm(node: NodeReader, find: Finder) -> Call:
    """``F.linear`` with a bias. It is not computable if the bias is frozen, because the graph does not have it."""
    alpha, beta = node.number("alpha"), node.number("beta")
    is_batch = node.name == "BaddbmmBackward0"
    factors = ("batch1", "batch2") if is_batch else ("mat1", "mat2")
    run: Run = torch.baddbmm if is_batch else torch.addmm
    return Call(
        "baddbmm" if is_batch else "addmm",
        [node.input(0), node.operand(1, factors[0]), node.operand(2, factors[1])],
        (lambda bias, x, y: run(bias, x, y, beta=beta, alpha=alpha),),
        (alpha, beta),
        is_product=True,
    )


# -- casts and copies


@formula("ToCopyBackward0")
def cast(node: NodeReader, find: Finder) -> Call:
    """A cast to another dtype on the same device, as autocast does to an activation."""
    source = node.input(0)
    if metadata_of(source).device != node.device:
        raise NotComputable
    dtype = node.dtype
    return Call("cast", [source], (lambda x: x.to(dtype),), (dtype,))


@formula("CloneBackward0")
def clone(node: NodeReader, find: Finder) -> Call:
    """``contiguous()`` or ``clone()``: the layout of the original says which of the two variants it was."""
    return Call("clone", [node.input(0)], (lambda x: x.contiguous(), torch.clone))


# -- views; a view is computed from the value of which it was made, which may be a view itself


@formula("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1")
@formula("SqueezeBackward2", "UnsqueezeBackward0")
def view(node: NodeReader, find: Finder) -> Call:
    shape = node.shape
    return Call("view", [node.input(0)], (lambda x: x.reshape(shape),), (shape,), 0)


@formula("ExpandBackward0")
def expand(node: NodeReader, find: Finder) -> Call:
    """Dimensions of one element, repeated without a copy."""
    shape = node.shape
    return Call("expand", [node.input(0)], (lambda x: x.expand(shape),), (shape,), 0)


@formula("TransposeBackward0")
def transpose(node: NodeReader, find: Finder) -> Call:
    """Two dimensions exchanged."""
    dims = _signed(node.number("dim0")), _signed(node.number("dim1"))
    return Call("transpose", [node.input(0)], (lambda x: x.transpose(*dims),), dims, 0)


@formula("TBackward0")
def t(node: NodeReader, find: Finder) -> Call:
    return Call("t", [node.input(0)], (lambda x: x.t(),), (), 0)


@formula("PermuteBackward0")
def permute(node: NodeReader, find: Finder) -> Call:
    dims = tuple(_signed(dim) for dim in node.number("dims"))
    return Call("permute", [node.input(0)], (lambda x: x.permute(dims),), dims, 0)


@formula("AliasBackward0")
def alias(node: NodeReader, find: Finder) -> Call:
    """The same elements in the same shape."""
    return Call("alias", [node.input(0)], (lambda x: x,), (), 0)


def _signed(number: int) -> int:
    """The argument as the operator got it. A node holds a negative number as an unsigned number of 64 bits."""
    return number - (1 << 64) if number > math.ldexp(1, 63) else number
