"""The lines of Python of an advice, for pasting."""

from __future__ import annotations

from collections.abc import Sequence


def checkpoint_code(names: Sequence[str]) -> str:
    """Lines of Python that do what ``checkpointed`` does to ``model``."""
    return (
        "import functools\n"
        "from torch.utils.checkpoint import checkpoint\n"
        f"for name in {_listed(names)}:\n"
        "    block = model.get_submodule(name)\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    )


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
