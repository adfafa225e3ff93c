"""The lines of Python of an advice, for pasting."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from torch import nn

_NAMES = """\
# hidden is what the last linear layer gets, labels are the next tokens
head = model.get_submodule("{head}")
"""
_TORCH = """\
loss = torch.nn.functional.linear_cross_entropy(
    hidden.flatten(0, -2), head.weight, labels.flatten(),
    linear_bias=head.bias, options=torch.nn.LinearCrossEntropyOptions(),
)"""
_LIGER = """\
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
loss = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden.flatten(0, -2), labels.flatten(), head.bias)"""
# For an older torch: backward computes the logits of each part again.
_PARTS = """\
from torch.utils.checkpoint import checkpoint
def loss_of_part(hidden, labels):
    return torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")
parts = zip(hidden.flatten(0, -2).chunk(8), labels.flatten().chunk(8))
loss = sum(checkpoint(loss_of_part, *each, use_reentrant=False) for each in parts) / labels.numel()"""


def checkpoint_code(names: Sequence[str]) -> str:
    """Lines of Python that do what ``checkpointed`` does to ``model``."""
    return (
        "import functools\n"
        "from torch.utils.checkpoint import checkpoint\n"
        f"for name in {_listed(names)}:\n"
        "    block = model.get_submodule(name)\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    )


def loss_code(head: str) -> str:
    """Lines of Python that compute the mean loss of tokens in chunks; ``head`` is the name of the last linear layer."""
    has_torchs, has_ligers = hasattr(nn, "LinearCrossEntropyOptions"), importlib.util.find_spec("liger_kernel")
    return _NAMES.format(head=head) + (_TORCH if has_torchs else _LIGER if has_ligers else _PARTS)


def fsdp_code(units: Sequence[str]) -> str:
    """Lines of Python that shard the modules with these names, and the rest of ``model``."""
    names = [each for each in units if each]
    inner = f"for name in {_listed(names)}:\n    fully_shard(model.get_submodule(name))\n" if names else ""
    return f"from torch.distributed.fsdp import fully_shard\n{inner}fully_shard(model)"


def _listed(names: Sequence[str]) -> str:
    """An expression that gives ``names``, short if they are numbered."""
    dotted = names[0].rpartition(".")[0] + "." if "." in names[0] else ""
    is_numbered = list(names) == [f"{dotted}{i}" for i in range(len(names))]
    return f'[f"{dotted}{{i}}" for i in range({len(names)})]' if is_numbered else repr(list(names))
