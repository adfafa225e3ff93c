"""The house has floors and no circles, and what saves tensors loads no engine.

The floors are contracts of import-linter, in pyproject.toml; here is what it cannot say.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import ROOT

sys.path.append(str(ROOT / "tools"))
from package import Package

PACKAGE = Package(ROOT / "disthooks")
# Modules beside the packages that stand above them: the names for users, and what third parties test with.
ABOVE = {"disthooks", "disthooks.__main__", "disthooks.testing"}
DISTRIBUTED = tuple(f"disthooks.{name}" for name in ("engines.", "grads.collectives", "run.", "predict."))


def lint(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """What ``make lint`` says about the imports of ``folder/disthooks``, by the contracts of this repository."""
    script = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run(
        [sys.executable, "-c", script, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_library_does_not_grow() -> None:
    """A new feature takes away what it makes superfluous (decisions 214 and 227)."""
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.folder.rglob("*.py")) <= 51_217


def test_imports_keep_the_contracts() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("saved/report.py", "from disthooks.engines import base"),
        ("engines/ddp.py", "def f():\n    from disthooks.saved import report"),
        ("grads/plan.py", "if TYPE_CHECKING:\n    from disthooks.config import plan"),
        ("_tensors.py", "from disthooks.saved import report"),  # grads would know saved, through _tensors
        ("report/watch/trace.py", "import transformers"),
        ("saved/report.py", "import yaml"),
    ],
)
def test_a_wrong_import_breaks_a_contract(file: str, line: str, tmp_path: pathlib.Path) -> None:
    for path in PACKAGE.folder.rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    with (tmp_path / "disthooks" / file).open("a") as changed:
        changed.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_every_package_has_a_floor() -> None:
    packages = {name.split(".")[1] for name in PACKAGE.by_name if name.count(".") > 1}
    packages |= {path.parent.name for path in PACKAGE.folder.glob("*/__init__.py")}
    contracts = (ROOT / "pyproject.toml").read_text()
    floors = contracts.partition("layers = [")[2].partition("]")[0].replace("|", '", "')
    assert packages == {floor.strip(' "') for floor in floors.replace("\n", "").split(",")} - {"", "__main__"}


def test_modules_beside_the_packages_import_none_of_them() -> None:
    beside = [file for file in PACKAGE.files if file.path.parent == PACKAGE.folder and file.name not in ABOVE]
    for file in beside:
        wrong = {each.target for each in PACKAGE.imports(file) if each.target.count(".") > 1} & PACKAGE.by_name.keys()
        assert not wrong, f"{file.name} imports {wrong}"


def test_no_module_imports_itself_through_others() -> None:
    """TYPE_CHECKING and imports inside functions count."""
    assert PACKAGE.circles() == []


def test_imports_are_absolute() -> None:
    for file in PACKAGE.files:
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in file.nodes), file.name


def test_distributed_is_imported_where_it_belongs() -> None:
    for file in PACKAGE.files:
        names = [f"{each.target}.{each.name}" for each in PACKAGE.imports(file)]
        uses = [name for name in names if name.startswith("torch.distributed")]
        assert not uses or file.name.startswith(DISTRIBUTED), f"{file.name} imports {uses}"


def test_files_are_short() -> None:
    """Comments do not count, so that nobody leaves out a reason to keep a file short."""
    lines = {
        file.name: sum(not line.lstrip().startswith("#") for line in file.text.splitlines()) for file in PACKAGE.files
    }
    assert {name: count for name, count in lines.items() if count > 620} == {}


SAVED = """
import sys, tempfile, torch, disthooks as dh
x = torch.ones(256, 256, requires_grad=True)
with dh.saving(dh.OnDisk(tempfile.gettempdir())) as saved:
    y = x.exp().sum()
y.backward()
assert saved.report().moved > 0
print([name for name in sys.modules if name.startswith(("torch.distributed.fsdp", "deepspeed"))])
"""


def test_saved_tensors_load_no_engine() -> None:
    """That no other package is needed is law 18."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SAVED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
