"""Make the picture of README: the page of ``dh.explain`` for Llama 3.1 8B, in light and in dark. It needs Chromium.

    python docs/picture.py                     # docs/img/explain-light.png and explain-dark.png
    python docs/picture.py --layers 2 --out /tmp

The tables between the verdict and the curve are left out.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import tempfile

import torch
from torch import nn

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import disthooks as dh  # noqa: E402
from tests.support.browser import Browser, find_browser  # noqa: E402

WIDTH, HEIGHT = 1120, 900
#: The tables between them.
LEFT_OUT = "#plans, #modules"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    build = functools.wraps(llama_3_1_8b)(functools.partial(llama_3_1_8b, args.layers))
    plan = [("model.layers.*", dh.OnCpu())]
    said = dh.explain(build, device="h100", optimizer="adamw", dtype=torch.bfloat16, engine="fsdp2", world=8, plan=plan)
    with tempfile.TemporaryDirectory() as folder, Browser(find_browser()) as browser:
        page = pathlib.Path(folder, "page.html")
        page.write_text(said.to_html())
        browser.resize(WIDTH, HEIGHT)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.open(page)
            browser.run(f"document.querySelectorAll({LEFT_OUT!r}).forEach((section) => section.remove())")
            browser.screenshot(args.out / f"explain-{scheme}.png")
    print(str(said).partition("\n")[0])


if __name__ == "__main__":
    main()
