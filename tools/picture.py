"""Make the pictures of README: the pages of ``dh.explain`` and ``disthooks report``, in light and in dark, in Chromium.

    python tools/picture.py                     # docs/img/explain-light.png, explain-narrow-dark.png, ...
    python tools/picture.py --layers 2 --out /tmp

The page of ``dh.explain`` is of Llama 3.1 8B; the tables between the verdict and the curve are left out. That of
``disthooks report`` is of a small GPT on two ranks, in whose training a bit flips in backward (benchmarks/faults.py);
two of its charts are left out. ``rerun`` is the page of docs/guides/diverged.md, with its first charts alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import disthooks as dh  # noqa: E402
from disthooks.report.document import document  # noqa: E402
from disthooks.report.log import read  # noqa: E402
from disthooks.report.page.page import page  # noqa: E402
from tests.support.browser import Browser, find_browser  # noqa: E402

#: The pictures, and the size of the browser's window for each; what is narrow is for phones.
SIZES = {"explain": (1120, 900), "explain-narrow": (390, 680), "report": (1120, 900), "rerun": (1120, 620)}
#: What is not in the pictures.
LEFT_OUT = {
    "explain": "#plans, #modules",
    "report": "#norms .chart:nth-of-type(n + 3), #norms .lead",
    "rerun": "#norms .chart:nth-of-type(n + 3), #norms .lead",
}
NARROW = ", .tiles, .chips, #head .legend, .lead"  # nor in those for phones, which have the width for one thing


def llama_3_1_8b(layers: int = 32) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The architecture of Llama 3.1 8B, and one sequence of 8,192 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    tokens = torch.zeros(1, 8192, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def report_of_a_fault(folder: pathlib.Path) -> str:
    """The page of a training in which one bit flips."""
    faults = ["--faults", "1", "--clean", "0", "--kinds", "backward", "--seed", "7", "--folder", str(folder)]
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *faults]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    (log,) = folder.glob("*.jsonl")
    return page("report", document(read(log).runs[-1], "small GPT"))


def report_of_a_second_run(folder: pathlib.Path) -> str:
    """The page of the training of docs/guides/diverged.md, in which a step is run again, and captured."""
    code = (ROOT / "docs" / "guides" / "diverged.md").read_text().partition("```python\n")[2].partition("```")[0]
    (folder / "train.py").write_text(code)
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return page("report", document(read(folder / "runs" / "gradients.jsonl").runs[-1], "runs/gradients.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    build = functools.wraps(llama_3_1_8b)(functools.partial(llama_3_1_8b, args.layers))
    plan = [("model.layers.*", dh.OnCpu())]
    said = dh.explain(build, device="h100", optimizer="adamw", dtype=torch.bfloat16, engine="fsdp2", world=8, plan=plan)
    with tempfile.TemporaryDirectory() as folder, Browser(find_browser()) as browser:
        pages = {"explain": said.to_html(), "report": report_of_a_fault(pathlib.Path(folder))}
        pages["rerun"] = report_of_a_second_run(pathlib.Path(folder))
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        for picture, scheme in itertools.product(SIZES, ("light", "dark")):
            if (picture, scheme) == ("rerun", "dark"):
                continue  # the documentation shows it in light alone
            name, _, is_narrow = picture.partition("-")
            browser.resize(*SIZES[picture])
            file = pathlib.Path(folder, f"{name}.html")
            file.write_text(pages[name], encoding="utf-8")
            browser.prefer(scheme)
            browser.open(file)
            left_out = LEFT_OUT[name] + NARROW * bool(is_narrow)
            browser.run(f"document.querySelectorAll({left_out!r}).forEach((each) => each.remove())")
            if name in ("report", "rerun"):
                browser.wait_for(lambda: browser.run("!!document.querySelector('#heat canvas')"))
            browser.screenshot(args.out / f"{picture}-{scheme}.png")
    print(str(said).partition("\n")[0])


if __name__ == "__main__":
    main()
