"""The house has floors, and a file imports only from lower ones; ``import disthooks`` needs torch alone."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

from tests.support import ROOT as REPOSITORY

ROOT = REPOSITORY / "disthooks"
FILES = sorted(ROOT.rglob("*.py"))

# (floor, step inside the floor): a file may import from a lower floor, or from its own part at a lower step.
PARTS: dict[str, tuple[int, str, int]] = {
    "_version": (0, "", 0),
    "_front": (7, "", 0),  # all public names; __init__ imports it when the first is asked for
    "__main__": (7, "", 0),
    "errors": (0, "", 0),
    "_torch": (0, "", 0),
    "_device": (0, "", 0),
    "_events": (0, "", 1),
    "_forks": (0, "", 1),
    "_locks": (0, "", 0),
    "_tensors": (0, "", 1),
    "_described": (0, "", 0),
    "_match": (0, "", 1),
    "_handles": (0, "", 1),
    "memory": (0, "", 2),
    "saved.codecs": (1, "saved", 0),
    "saved.codecs.blocks": (1, "saved", 0),
    "saved.codecs.fused": (1, "saved", 0),
    "saved.codecs.kernels": (1, "saved", 0),
    "saved.codecs.noise": (1, "saved", 0),
    "saved.codecs.base": (1, "saved", 0),
    "saved.codecs.cast": (1, "saved", 0),
    "saved.codecs.compact": (1, "saved", 0),
    "saved.codecs.compress": (1, "saved", 0),
    "saved.codecs.quantize": (1, "saved", 0),
    "saved.stores.base": (1, "saved", 0),
    "saved.stores.buffers": (1, "saved", 0),
    "saved.stores.prefetch": (1, "saved", 0),
    "saved.stores.traffic": (1, "saved", 0),
    "saved.stores.transfer": (1, "saved", 1),
    "saved.stores.pinned": (1, "saved", 1),
    "saved.stores.lane": (1, "saved", 1),
    "saved.stores.parcel": (1, "saved", 1),
    "saved.stores.courier": (1, "saved", 1),
    "saved.stores.arena": (1, "saved", 1),
    "saved.stores.gpu_direct": (1, "saved", 2),
    "saved.stores.staging": (1, "saved", 2),
    "saved.stores.ticket": (1, "saved", 3),
    "saved.stores.carrier": (1, "saved", 4),
    "saved.stores.crew": (1, "saved", 0),
    "saved.stores.ahead": (1, "saved", 4),
    "saved.stores.mover": (1, "saved", 5),
    "saved.stores.cpu": (1, "saved", 2),
    "saved.stores.disk": (1, "saved", 6),
    "saved.stores.turns": (1, "saved", 1),
    "saved.stores.device": (1, "saved", 1),
    "saved.stores.tiers": (1, "saved", 2),
    "saved.entry": (1, "saved", 0),
    "saved.region": (1, "saved", 0),
    "saved.index": (1, "saved", 1),
    "saved.report": (1, "saved", 1),
    "saved.ledger": (1, "saved", 2),
    "saved.kept": (1, "saved", 1),
    "saved.weights": (1, "saved", 1),
    "saved.called": (1, "saved", 3),
    "saved.packed": (1, "saved", 3),
    "saved.contents": (1, "saved", 3),
    "saved.recast": (1, "saved", 3),
    "saved.sharded": (1, "saved", 3),
    "saved.recompute": (1, "saved", 0),
    "saved.recompute.stage": (1, "saved", 1),
    "saved.recompute.places": (1, "saved", 1),
    "saved.recompute.reader": (1, "saved", 4),
    "saved.recompute.formulas": (1, "saved", 5),
    "saved.recompute.program": (1, "saved", 5),
    "saved.recompute.planner": (1, "saved", 6),
    "saved.recompute.again": (1, "saved", 7),
    "saved.recompute.value": (1, "saved", 8),
    "saved.pipeline": (1, "saved", 2),
    "saved.frame": (1, "saved", 9),
    "saved.site": (1, "saved", 10),
    "saved.classes": (1, "saved", 11),
    "saved.saving": (1, "saved", 11),
    "saved.wrap": (1, "saved", 11),
    "saved.inplace": (1, "saved", 12),
    "engines.shard": (1, "engines", 0),
    "engines.skip": (1, "engines", 0),
    "engines.steps": (1, "engines", 1),
    "engines.clipping": (1, "engines", 0),
    "engines.base": (1, "engines", 1),
    "watch": (1, "watch", 0),
    "grads.order": (2, "grads", 0),
    "grads.measures": (2, "grads", 1),
    "grads.collect": (2, "grads", 2),
    "grads.step_counts": (2, "grads", 2),
    "grads.rules": (2, "grads", 2),
    "grads.stats": (2, "grads", 2),
    "grads.sinks.base": (2, "grads", 0),
    "grads.sinks.records": (2, "grads", 0),
    "grads.sinks.runs": (2, "grads", 0),
    "grads.sinks.plain": (2, "grads", 1),
    "grads.sinks.tensorboard": (2, "grads", 1),
    "grads.sinks.wandb": (2, "grads", 1),
    "grads.sinks.mlflow": (2, "grads", 1),
    "grads.sinks.trackers": (2, "grads", 1),
    "grads.sinks": (2, "grads", 2),
    "grads.held": (2, "grads", 2),
    "grads.plan": (2, "grads", 3),
    "grads.looking": (2, "grads", 3),
    "grads.record": (2, "grads", 4),
    "grads.alarm": (2, "grads", 5),
    "grads.nonfinite": (2, "grads", 5),
    "grads.rounds": (2, "grads", 6),
    "grads.attached": (2, "grads", 7),
    "grads.attach": (2, "grads", 8),
    "watch.blame": (3, "config", 0),  # it asks other ranks as grads do; a configuration attaches it
    "config.source": (3, "config", 0),
    "config.find": (3, "config", 0),
    "config.values": (3, "config", 0),
    "config.schema": (3, "config", 0),
    "config.attached": (3, "config", 0),
    "config.ranks": (3, "config", 0),
    "config.watchers": (3, "config", 0),
    "config.kinds": (3, "config", 1),
    "config.paths": (3, "config", 1),
    "config.budget": (3, "config", 1),
    "config.conflicts": (3, "config", 1),
    "config.recipe": (3, "config", 2),
    "config.dump": (3, "config", 2),
    "config.plan": (3, "config", 3),
    "config.read": (3, "config", 4),
    "config.jsonschema": (3, "config", 4),
    "config.front": (3, "config", 5),
    "config": (3, "config", 6),
    "integrations._shared": (4, "integrations", 0),
    "integrations.accelerate": (4, "integrations", 1),
    "integrations.lightning": (4, "integrations", 0),
    "integrations.transformers": (4, "integrations", 2),
    "run": (5, "run", 0),
    "launching": (5, "run", 1),
    "cli": (6, "", 0),
}
DISTRIBUTED = ("engines", "grads.collect", "grads.gather", "grads.step_counts", "saved.budget", "launching", "cli")


def _name(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").removesuffix("__init__")


def _imports(file: pathlib.Path) -> list[tuple[str, bool]]:
    """Names of modules imported, and whether for the type checker alone."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            known = [name for name in names if (ROOT.parent / (name.replace(".", "/") + ".py")).exists()]
            found += [(name, id(node) in typing_only) for name in (known or [node.module])]
    return found


def _place(name: str) -> tuple[int, str, int]:
    part = name.split(".")[0]
    while name:  # of a package all files have its place, unless they have their own
        if name in PARTS:
            return PARTS[name]
        name = name.rpartition(".")[0]
    floor = {"saved": 1, "engines": 1, "watch": 1, "grads": 2}.get(part)
    assert floor is not None, f"{name} has no floor: add it to PARTS"
    return floor, part, 2


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__init__.py"], ids=_name)
def test_a_file_imports_only_from_lower_floors(file: pathlib.Path) -> None:
    mine = _place(_name(file))
    for imported, typing_only in _imports(file):
        if typing_only or not imported.startswith("disthooks."):
            continue
        name = imported.removeprefix("disthooks.")
        if name in ("saved", "engines", "grads", "watch", "saved.stores", "__version__"):
            continue  # the package itself, which holds names only
        theirs = _place(name)
        allowed = theirs[0] < mine[0] or (theirs[:2] == mine[:2] and theirs[2] <= mine[2])
        assert allowed, f"{_name(file)} (floor {mine[0]}) imports {name} (floor {theirs[0]})"


def test_distributed_is_imported_where_it_belongs() -> None:
    for file in FILES:
        uses = [n for n, _ in _imports(file) if n.startswith("torch.distributed")]
        assert not uses or _name(file).startswith(DISTRIBUTED), f"{_name(file)} imports {uses}"


def test_saved_and_grads_do_not_know_each_other() -> None:
    for file in FILES:
        part = _name(file).split(".")[0]
        for other in {"saved": ("grads", "engines"), "grads": ("saved",), "engines": ("saved", "grads")}.get(part, ()):
            assert not any(n.startswith(f"disthooks.{other}") for n, _ in _imports(file)), _name(file)


def test_files_are_short() -> None:
    long = {_name(f): n for f in FILES if (n := len(f.read_text().splitlines())) > 600}
    assert long == {}


ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Refuse())
import torch, tempfile
before = set(sys.modules)
import disthooks as dh
x = torch.ones(256, 256, requires_grad=True)
with dh.saving(dh.OnDisk(tempfile.gettempdir())) as saved:
    y = x.exp().sum()
y.backward()
assert saved.report().moved > 0
new = {{m.split(".")[0] for m in set(sys.modules) - before}}
print(sorted(n for n in new if n not in sys.stdlib_module_names))
print(sorted(m for m in set(sys.modules) - before if m.startswith(("torch.distributed.fsdp", "deepspeed"))))
"""


def test_import_needs_torch_alone() -> None:
    forbidden = ["numpy", "pydantic", "yaml", "rich", "typer", "deepspeed", "accelerate", "transformers", "lightning"]
    forbidden += ["zstandard", "lz4", "tensorboard", "wandb", "mlflow"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE.format(forbidden=forbidden)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names, engines = done.stdout.splitlines()
    assert names == "['disthooks']"
    assert engines == "[]"
