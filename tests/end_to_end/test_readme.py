"""Every Python, YAML, JSON and shell block of README.md and docs/ runs as it stands, each by itself.

A block that cannot run here says so in its first line, ``# not run in CI: WHY``; all of those are listed below. What is
printed is in blocks of the language ``text``.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from typing import NamedTuple

import pytest

import disthooks as dh
from tests.support import ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
#: tests/end_to_end/test_course.py runs the pages of the course.
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in DOCS if path.parent.name not in ("course", "upstream"))]
#: Pages whose blocks run one after another, below.
TOGETHER = ("README.md", "docs/guides/one-rank.md", "docs/guides/diverged.md")
MARK = "# not run in CI: "
#: The blocks that do not run, by page and reason. Make the block run rather than add to these.
NOT_RUN = [
    *[("docs/gpu.md", "it needs a GPU")] * 4,
    ("docs/saved-tensors/layer-inputs.md", '"model" is yours; examples/19_layer_inputs.py is run'),
    ("docs/integrations/ray.md", "it starts a Ray cluster (examples/13_ray.py is run)"),
]


class Block(NamedTuple):
    """One fenced block.

    Attributes:
        page: the file.
        line: of its first line.
        language: what stands behind the fence.
        text: what is in it.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def why_not(self) -> str:
        """Why it is not run; empty when it is."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(MARK) if first.startswith(MARK) else ""


def _blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(.*)\n((?:(?!```).*\n)*)```$", text, re.MULTILINE)
    return [Block(page, text[: it.start()].count("\n") + 2, it[1], it[2]) for it in found]


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _run(page: str, *languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.page == page and block.language in languages and not block.why_not]


def _id(block: Block) -> str:
    return f"{block.page}:{block.line}"


# -- what there is


def test_every_block_has_a_language() -> None:
    assert sum((ROOT / page).read_text().count("```") for page in PAGES) == 2 * len(BLOCKS), "a fence is not closed"
    known = ("python", "yaml", "json", "sh", "text", "{toctree}", "{include} ../CHANGELOG.md")
    assert [_id(block) for block in BLOCKS if block.language not in known] == []


def test_output_is_no_command() -> None:
    """Nothing escapes by being called text."""
    command = re.compile(
        r"^(\$ |make |pip |python |torchrun |accelerate |deepspeed |disthooks [a-z]|import |from .* import )"
    )
    assert [_id(block) for block in BLOCKS if block.language == "text" and command.match(block.text)] == []


def test_few_blocks_do_not_run() -> None:
    assert sorted((block.page, block.why_not) for block in BLOCKS if block.why_not) == sorted(NOT_RUN)


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "_TABLE" not in (ROOT / "README.md").read_text()


# -- the folder

TRAIN = """
import os
import torch
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), num_layers=2)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    x = torch.randn(8, 32, 64)
    # a bad sample
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
BAD_SAMPLE = 'x[3] *= float("nan") if step == 37 and os.environ["RANK"] == "1" else 1'
BUILD = """
import torch
from torch import nn

def build():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), num_layers=2)
    return model, torch.randn(8, 32, 64)


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))


def tokens():
    return [{"input_ids": row, "labels": row} for row in torch.randint(100, (32, 64))]


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(98))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def texts():
    from datasets import Dataset

    return Dataset.from_dict({"text": [" ".join(f"w{(i + j) % 98}" for j in range(64)) for i in range(32)]})


def module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, _ = build()

        def training_step(self, x, index):
            return self.model(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Module()


def batches():
    return torch.utils.data.DataLoader(torch.randn(32, 32, 64), batch_size=8)
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """What the pages take for granted: README's hooks file, a script, a model, a file for each launcher."""
    (hooks,) = _run("README.md", "yaml")
    # The models of the other pages have their layers in other places.
    text = hooks.text.replace('"layers.*"', '"*layers.?"')
    (tmp_path / "hooks.yaml").write_text(text)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "package.py").write_text(BUILD)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    (ds,) = _run("docs/integrations/deepspeed.md", "json")
    (tmp_path / "ds.json").write_text(ds.text)
    (budget,) = _run("docs/integrations/index.md", "yaml")
    (tmp_path / "budget.yaml").write_text(budget.text)
    (tmp_path / "scratch" / "0").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "gradients.jsonl").write_text('{"step": 0, "grad_norm": 1.0}\n')
    return tmp_path


def _environment(folder: pathlib.Path) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hidden = ("DISTHOOKS_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    more |= {"DS_ACCELERATOR": "cpu", "HF_HOME": str(folder / "home"), "USER": os.environ.get("USER", "somebody")}
    more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PET_MASTER_PORT": port}
    more |= {"ROOT": str(ROOT), "PYTHON": sys.executable}
    return {key: value for key, value in os.environ.items() if key not in hidden} | more


def _ran(folder: pathlib.Path, *command: str, given: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """What a command printed that must end well: a line for the shell, or the words of another program."""
    call = [*command] if len(command) > 1 else ["bash", "-c", COMMANDS + command[0]]
    env = _environment(folder) | more
    done = subprocess.run(call, cwd=folder, env=env, input=given, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


# -- the blocks

RUNNER = """
import json, sys, torch
if "deepspeed" in sys.argv[1] or "integrations/index" in sys.argv[1]:
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
for page, line, text in json.load(sys.stdin):
    print("--", page, line, flush=True)
    exec(compile("\\n" * (line - 1) + text, page, "exec"), {"__name__": "__main__"})
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


PYTHON = [page for page in PAGES if page not in ("README.md", "docs/guides/diverged.md") and _run(page, "python")]


@pytest.mark.dist
@pytest.mark.full_tier(page=tuple(page for page in PYTHON[1:] if page != "docs/integrations/index.md"))
@pytest.mark.parametrize("page", PYTHON)
def test_the_python_runs(page: str, folder: pathlib.Path) -> None:
    """Each block with no name but its own; as the only rank of a job, as torchrun would start it."""
    given = json.dumps([(block.page, block.line, block.text) for block in _run(page, "python")])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = _ran(folder, sys.executable, "-W", "ignore", "-c", RUNNER, page, given=given, **rank)
    if page == "docs/integrations/index.md":
        said = [line for line in done.stdout.splitlines() if line.startswith("budget 3.0 GiB")]
        assert len(said) == 6, done.stdout
        assert all(line.endswith("all 4 steps within") for line in said)


@pytest.mark.parametrize("block", [block for page in PAGES for block in _run(page, "yaml", "json")], ids=_id)
def test_the_configuration_is_read(block: Block, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/scratch, where the pages have a disk, is a folder here."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("USER", "somebody")
    text = block.text.replace("/scratch", str(folder / "scratch"))
    if block.language == "json":
        plan = dh.config.from_config(json.loads(text)["disthooks"])
    else:
        (folder / "block.yaml").write_text(text)
        plan = dh.config.from_config(folder / "block.yaml")
    assert plan.saves or plan.watches
    if block.page == "README.md":
        assert plan.saves[0][0] == ("layers.*",)


# Commands are those of this Python; make says what it would do; a launcher's port is a free one.
COMMANDS = r"""
set -e
make() { command make -n -C "$ROOT" "$@" > /dev/null; }
python() { command "$PYTHON" "$@"; }
torchrun() { python -m torch.distributed.run "$@"; }
accelerate() { python -m accelerate.commands.accelerate_cli "$@"; }
deepspeed() { python -m deepspeed.launcher.runner --master_port "$MASTER_PORT" "$@"; }
disthooks() {
    if [ "$1 $2" = "launch deepspeed" ]; then shift 2; set -- launch deepspeed --master_port "$MASTER_PORT" "$@"; fi
    python -m disthooks "$@"
}
"""
SHELL = [
    (block, line)
    for page in PAGES
    if page not in TOGETHER
    for block in _run(page, "sh")
    for line in block.text.splitlines()
]
#: The first of each program; tests/end_to_end/test_run.py has each launcher.
FIRST = tuple({line.split()[0]: line for _, line in reversed(SHELL)}.values())


@pytest.mark.dist
@pytest.mark.full_tier(line=tuple(line for _, line in SHELL if line not in FIRST))
@pytest.mark.parametrize(("block", "line"), SHELL, ids=[f"{_id(block)}: {line[:40]}" for block, line in SHELL])
def test_the_shell_runs(block: Block, line: str, folder: pathlib.Path) -> None:
    if "deepspeed" in line:
        pytest.importorskip("deepspeed")
    done = _ran(folder, line)
    if "hooks.yaml" in line and "train.py" in line:
        assert re.search(r"disthooks: .*saved and moved|moved", done.stdout + done.stderr), "hooks were not attached"


@pytest.mark.dist
@pytest.mark.full_tier
def test_the_script_for_accelerate_starts_on_two_ranks(folder: pathlib.Path) -> None:
    page = "docs/integrations/accelerate.md"
    (folder / "train.py").write_text(_run(page, "python")[0].text)
    (said,) = (block.text for block in BLOCKS if block.page == page and block.language == "text")
    first, _ = _run(page, "sh")[0].text.splitlines()
    done = _ran(folder, first)
    assert done.stderr.count(said) == 1, "on one rank"
    lines = [json.loads(line) for line in (folder / "runs" / "gradients.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == list(range(10)), "after the line that the folder has"
    assert {"loss", "grad_norm", "clip_ratio", "saved/moved"} <= lines[-1].keys()


# -- what README shows is what comes

#: What differs between two runs: times, speeds, and what the disk had written already.
_VARIES = re.compile(r"-?\d\.\d{3,4}\b|[0-9.]+ (µs|ms|s|GB/s|MB/s)\b|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[0-9.]+%")


def _told(text: str) -> list[str]:
    return [_VARIES.sub("#", line).strip() for line in text.splitlines() if line.strip()]


def _section(block: Block) -> str:
    """The last heading of README before the block; before the first one only ``make`` is shown."""
    above = "".join((ROOT / "README.md").read_text().splitlines(keepends=True)[: block.line])
    return ["", *re.findall(r"^## (.*)", above, re.MULTILINE)][-1]


#: README's headings below which there is a program with what it prints; one has both Python and a command.
SECTIONS = [_section(block) for block in BLOCKS if block.page == "README.md" and block.language == "text"]
OFTEN = "The run diverged"


@pytest.mark.dist
@pytest.mark.full_tier(section=tuple(section for section in SECTIONS if section != OFTEN))
@pytest.mark.parametrize("section", SECTIONS)
def test_readme_shows_what_comes(section: str, folder: pathlib.Path) -> None:
    """Its blocks run one after another in one folder, as somebody would copy them; each output is the one below it."""
    (folder / "train.py").write_text(TRAIN.replace("range(2)", "range(60)").replace("# a bad sample", BAD_SAMPLE))
    (folder / "runs" / "gradients.jsonl").unlink()
    shown = 0
    blocks = [block for block in BLOCKS if block.page == "README.md" and _section(block) == section]
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.language == "yaml":
            (folder / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
        if block.why_not or block.language not in ("python", "sh"):
            continue
        python = [sys.executable, "-W", "ignore", "-c", block.text]
        done = _ran(folder, *(python if block.language == "python" else [block.text]))
        if following is None or following.language != "text":
            continue
        came = _told(done.stdout) + _told(done.stderr)
        missing = [line for line in _told(following.text) if line not in came]
        assert not missing, f"README.md:{following.line}: {missing} did not come, but:\n{done.stdout}{done.stderr}"
        shown += 1
    assert shown == 1


# -- what the guide for one wrong rank shows names the fault

WRONG_RANK = """
import time, torch
from torch import nn

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), num_layers=2)
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rank = torch.distributed.get_rank()
generator = torch.Generator().manual_seed(rank)
for step in range(320):
    if rank == 1:
        FAULT
    (ddp(torch.randn(4, 8, 32, generator=generator)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""
WEIGHT = """if step == 203:
            with torch.no_grad():
                model.layers[1].linear1.weight[3, 5] = 50.0"""


@pytest.mark.dist
def test_the_guide_for_one_wrong_rank_names_it(folder: pathlib.Path) -> None:
    """Its file, its two commands, as they stand."""
    page = "docs/guides/one-rank.md"
    (folder / "hooks.yaml").write_text(_run(page, "yaml")[0].text)
    (folder / "train.py").write_text(WRONG_RANK.replace("FAULT", WEIGHT))
    (folder / "runs" / "gradients.jsonl").unlink()
    for block in _run(page, "sh"):
        done = _ran(folder, block.text)
    says = "Steps 201 to 210 on rank 1: the output of layers.1.linear1 jumped to .* after step 299 showed that "
    assert re.search(says, done.stdout), done.stdout


def test_the_guide_for_a_run_that_diverged_shows_what_comes(folder: pathlib.Path) -> None:
    """From the first sentence to the operator."""
    page = "docs/guides/diverged.md"
    (folder / "runs" / "gradients.jsonl").unlink()
    (folder / "train.py").write_text(_run(page, "python")[0].text)
    _ran(folder, sys.executable, "train.py")
    for block, shown in zip(_run(page, "sh"), _run(page, "text"), strict=True):
        came = _told(_ran(folder, block.text).stdout)
        assert [line for line in _told(shown.text) if line not in came] == [], came
