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

# The floor of a package or of a file: a file imports only from lower floors and from its own package.
FLOORS = {
    "_version": 0, "errors": 0, "memory": 0, "_torch": 0, "_streams": 0, "_tensors": 0, "_match": 0, "_handles": 0,
    "_fork_safe": 0, "_hashing": 0, "saved": 1, "engines": 1, "grads": 2, "watch": 3, "config": 4, "integrations": 5,
    "launcher": 6, "run": 7, "cli": 7, "_front": 8, "__main__": 8,
}  # fmt: skip
DISTRIBUTED = ("engines", "grads.collectives", "launcher", "cli")


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


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__init__.py"], ids=_name)
def test_a_file_imports_only_from_lower_floors(file: pathlib.Path) -> None:
    mine = _name(file).split(".")[0]
    for imported, _ in _imports(file):
        if imported.startswith("disthooks."):
            theirs = imported.removeprefix("disthooks.").split(".")[0].replace("__version__", "_version")
            allowed = theirs == mine or FLOORS[theirs] < FLOORS[mine] or FLOORS[mine] == 0 == FLOORS[theirs]
            assert allowed, f"{_name(file)} imports {imported}"


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
