"""Law 18, optional means optional.

"`import disthooks` needs torch alone. An integration is imported only inside its own file, and only if its framework
is already in `sys.modules` or asked for by name."

This file shows it in processes in which no other package can be imported, and by the imports that the library's files
have.
"""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import disthooks as dh

ROOT = pathlib.Path(dh.__file__).parent

#: Every package that disthooks can use and need not have.
OPTIONAL = (
    *(
        "accelerate",
        "deepspeed",
        "lightning",
        "lz4",
        "mlflow",
        "peft",
        "pydantic",
        "pytorch_lightning",
        "ray",
    ),
    *("rich", "tensorboard", "transformers", "typer", "wandb", "yaml", "zstandard"),
)
#: A process in which none of them can be imported.
ALONE = f"""
import importlib.abc, importlib.util, sys, tempfile, torch

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Refuse())
spec_of = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in {OPTIONAL!r} else spec_of(name, *rest)
before = set(sys.modules)
"""
STEP = """
import disthooks as dh
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
store = dh.Tiered(dh.OnCpu("8 KiB"), dh.OnDisk(tempfile.gettempdir()))
stats = [dh.stats.Norm(), dh.stats.Histogram()]
saving = dh.save_activations(model, "?", store, at_least=0)
with saving, dh.features(model, "1") as seen, dh.trace(model, print=None):
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(), dh.ClipNorm(1.0)], stats=stats) as watch:
        model(torch.randn(32, 64)).square().sum().backward()
        optimizer.step()
assert saving.report().moved > 0 and seen["1"].shape == (32, 64) and watch.latest["grad_norm"] > 0
late = ("disthooks.integrations.", "disthooks.run.cli")
print(sorted(name for name in set(sys.modules) - before if name.startswith(late)))
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)


def test_the_compiler_is_not_imported() -> None:
    code = "import sys, disthooks; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_step_with_everything_on_needs_torch_alone() -> None:
    """Saved tensors, rules, statistics, features, a trace; no integration and no command is imported."""
    done = _run(ALONE + STEP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]"]


#: What is asked for, and the package that it needs.
NEEDS = {
    "dh.config.from_config({'save': []})": "disthooks[config]",
    "dh.integrations.accelerate": "accelerate",
    "dh.integrations.lightning": "lightning",
    "dh.integrations.transformers": "accelerate",  # it looks for accelerate first
    "dh.sinks.TensorBoard('.').open()": "tensorboard",
    "dh.sinks.WandB().open()": "wandb",
    "dh.sinks.MLflow().open()": "mlflow",
}
ASK = """
import disthooks as dh
for asked in {needs!r}:
    try:
        eval(asked)
    except (ImportError, dh.errors.DisthooksError) as error:
        print(asked, error, sep=" -> ")
"""


def test_what_is_asked_for_and_missing_is_named_with_its_remedy() -> None:
    done = _run(ALONE + ASK.format(needs=list(NEEDS)))
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" -> ", 1) for line in done.stdout.splitlines() if " -> " in line)
    assert said.keys() == NEEDS.keys()
    for asked, package in NEEDS.items():
        assert package in said[asked].lower()
        assert "pip install" in said[asked]


#: Which of the library's packages may import which package that is not torch, each inside a function or behind its own
#: part of the library: the configuration, the command line, one codec's kernels.
MAY = {
    "pydantic": ("config", "report/record.py"),
    "pydantic_core": ("report/record.py",),
    "yaml": ("config", "run"),
    "typer": ("run",),
    "rich": ("run",),
    "pytest": ("testing.py",),
    "safetensors": ("grads/capture.py", "report/replay.py"),
}


def test_a_package_is_imported_only_where_it_belongs() -> None:
    wrong = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for package in {name.split(".")[0] for name in names} - {"torch", "disthooks", *sys.stdlib_module_names}:
                if not str(file.relative_to(ROOT)).startswith(MAY.get(package, ())):
                    wrong.append(f"{file.relative_to(ROOT)} imports {package}")
    assert wrong == []
