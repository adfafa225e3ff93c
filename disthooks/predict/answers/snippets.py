"""The lines of an advice that one can paste: Python and YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def checkpoint_code(names: Sequence[str]) -> str:
    """Lines of Python that do what :func:`checkpointed` does to ``model``.

    >>> print(checkpoint_code(["layers.0", "layers.1"]))
    import functools
    from torch.utils.checkpoint import checkpoint
    for name in [f"layers.{i}" for i in range(2)]:
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    """
    return (
        "import functools\n"
        "from torch.utils.checkpoint import checkpoint\n"
        f"for name in {_listed(names)}:\n"
        "    block = model.get_submodule(name)\n"
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    )


def fsdp_code(units: Sequence[str]) -> str:
    """Lines of Python that shard the modules with these names, and the rest of ``model``.

    >>> print(fsdp_code(["", "layers.0", "layers.1"]))
    from torch.distributed.fsdp import fully_shard
    for name in [f"layers.{i}" for i in range(2)]:
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    """
    names = [each for each in units if each]
    inner = f"for name in {_listed(names)}:\n    fully_shard(model.get_submodule(name))\n" if names else ""
    return f"from torch.distributed.fsdp import fully_shard\n{inner}fully_shard(model)"


def _listed(names: Sequence[str]) -> str:
    """An expression that gives ``names``, short if they are numbered."""
    dotted = names[0].rpartition(".")[0] + "." if "." in names[0] else ""
    is_numbered = list(names) == [f"{dotted}{i}" for i in range(len(names))]
    return f'[f"{dotted}{{i}}" for i in range({len(names)})]' if is_numbered else repr(list(names))


def as_yaml(document: Mapping[str, Any]) -> str:
    """A configuration as lines of YAML, with one entry of ``save`` after the other.

    >>> print(as_yaml({"save": [{"modules": "layers.*", "store": {"kind": "OnCpu", "limit": "10 GiB"}}]}))
    save:
      - modules: "layers.*"
        store: {kind: OnCpu, limit: 10 GiB}
    """
    lines = ["save:"]
    for entry in document["save"]:
        for number, (key, value) in enumerate(entry.items()):
            lines.append(f"  {'-' if number == 0 else ' '} {key}: {_flow(value)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(each) for each in value) + "]"
    is_plain = isinstance(value, str) and value.replace(" ", "").replace("/", "").isalnum()
    return str(value) if is_plain or not isinstance(value, str) else json.dumps(value)
