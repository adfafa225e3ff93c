"""Twenty faults of one line each, over all packages: whether the tests catch each of them.

``python -m tools.mutations`` copies the source tree, makes one fault after the other in the copy, and runs the tests
that are named beside it up to the first failure. It prints a line for each fault; its exit code is the number of faults
that no test caught. ``python -m tools.mutations 3 17`` tries these two. Each change of the tests has to leave it at 0.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A fault: in ``file`` the text ``right``, which stands there once, becomes ``wrong``; ``tests`` shall catch it."""

    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = (
    # saved tensors: identity of contents, views, mutation
    Mutation("saved/contents.py", "if packed.saved_at == saved_at:", "if True:", "tests/laws -k 01_exact"),
    Mutation("saved/packed.py", "if self.tensor._version != self.version:", "if False:", "tests/laws -k 05_mutation"),
    Mutation(
        "saved/hooks.py",
        "alias = tensor if is_itself else tensor.detach()",
        "alias = tensor",
        "tests/laws -k '06_nothing_left or 01_exact'",
    ),
    # stores
    Mutation(
        "saved/stores/group_file.py", "group.extent.offset + first - group.base", "group.extent.offset", "tests/laws"
    ),
    Mutation(
        "saved/stores/extents.py",
        "self.free[at : at + 1] = [(begin + room, end)] if begin + room < end else []",
        "pass",
        "tests/unit/saved tests/laws",
    ),
    Mutation(
        "saved/stores/base.py",
        "if self._limit is not None and used + count > self._limit:",
        "if False:",
        "tests/laws -k 10_bounded",
    ),
    Mutation(
        "saved/stores/copies.py",
        "self._back.wait_event(filled)",
        "pass",
        "tests/device",
    ),
    # codecs and recomputation
    Mutation("saved/codecs/quantize.py", "it.values.round_()", "it.values.floor_()", "tests/unit/saved/test_codecs.py"),
    Mutation("saved/recompute/verify.py", "_ENOUGH, _SAMPLE = 256, 4096", "_ENOUGH, _SAMPLE = 0, 4096", "tests/laws"),
    # gradients
    Mutation("grads/step.py", "grad.copy_(copy * scale)", "grad.copy_(copy)", "tests/engines tests/laws"),
    Mutation(
        "grads/plan.py",
        "if bound.rule.measures() and rewritten & set(bound.indices):",
        "if False:",
        "tests/unit/grads tests/laws",
    ),
    Mutation(
        "grads/rules/clip.py",
        "factor = (limit / (norm + 1e-6)).clamp(max=1.0)",
        "factor = limit / (norm + 1e-6)",
        "tests/unit/grads tests/laws",
    ),
    Mutation(
        "grads/collectives.py",
        "return torch.where(values.isnan(), _NAN, keys)",
        "return keys",
        "tests/unit/grads tests/laws",
    ),
    Mutation("grads/stats/nonfinite.py", "_LEADS = 0.1", "_LEADS = 1e9", "tests/engines/test_norm_peak.py"),
    # engines
    Mutation(
        "engines/fsdp1.py",
        "is_owner=owner == self.ranks[self.position],",
        "is_owner=True,",
        "tests/engines",
    ),
    # watching, configuration, launching, predictions, integrations
    Mutation(
        "report/watch/finite.py",
        "return outputs.isnan() | (outputs.isneginf() & inputs.isfinite())",
        "return outputs.isnan()",
        "tests/unit/report",
    ),
    Mutation(
        "config/source.py", "line: int = node.start_mark.line", "line: int = node.end_mark.line", "tests/unit/config"
    ),
    Mutation(
        "run/worker.py",
        "if path and not os.path.exists(path):",
        "if not path:",
        "tests/end_to_end/test_worker.py",
    ),
    Mutation("predict/hardware/allocator.py", "MIN_BLOCK = 512", "MIN_BLOCK = 256", "tests/unit/predict"),
    Mutation(
        "integrations/_shared.py",
        'gradients.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))',
        "pass",
        "tests/integrations",
    ),
)


def caught(mutation: Mutation, copy: pathlib.Path) -> str:
    """The test that fails with the fault, or "" if all pass."""
    file = copy / "disthooks" / mutation.file
    text = file.read_text()
    assert text.count(mutation.right) == 1, f"{mutation.file} has {mutation.right!r} {text.count(mutation.right)} times"
    file.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        command = f"{sys.executable} -B -m pytest -q -x --no-header -p no:cacheprovider --tier all {mutation.tests}"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
        done = subprocess.run(command, shell=True, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        file.write_text(text)
    if not done.returncode:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"


def main() -> int:
    chosen = [int(word) for word in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "mutated"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "*.pyc", "__pycache__"))
        for number in chosen:
            mutation, begin = MUTATIONS[number - 1], time.monotonic()
            by = caught(mutation, copy)
            missed += not by
            print(f"{number:2} {mutation.file}: {by or 'NOT CAUGHT'} ({time.monotonic() - begin:.0f} s)", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
