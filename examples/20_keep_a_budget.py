"""A fine-tuning on two processes that dies under a limit of its memory, and finishes under it with ``dh.fit``."""

import contextlib
import pathlib
import re
import resource
import tempfile

import torch
from _two import on_two_processes

import disthooks as dh

MIB = 1 << 20


@contextlib.contextmanager
def at_most(nbytes: int):
    """Let this process allocate ``nbytes`` more than it has now, as a container or a batch system would."""
    data = int(re.search(r"VmData:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def losses(budget: int | None, folder: str) -> list[float]:
    """Four steps of a GPT-2 of six layers on a page of text; ``budget`` is for the resident memory of the process."""
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    sizes = {"vocab_size": 256, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    if budget:
        dh.fit(model, budget, dh.OnDisk(folder, in_flight="16 MiB"))
    text = torch.frombuffer(bytearray(pathlib.Path(__file__).read_bytes()), dtype=torch.uint8).long()
    found = []
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(4):
        begins = torch.randint(len(text) - 256, (8,), generator=generator)
        tokens = torch.stack([text[begin : begin + 256] for begin in begins.tolist()])
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train(folder: str) -> None:
    dh.memory.release_promptly()
    free = losses(None, folder)  # the first time it also imports its libraries
    dh.memory.reset_peak_resident()
    before = dh.memory.resident()
    assert losses(None, folder) == free
    needs = dh.memory.peak_resident() - before
    room = needs * 6 // 10

    with at_most(room):
        try:
            losses(None, folder)
            died = ""
        except RuntimeError as error:
            died = str(error)
        fitted = losses(dh.memory.resident() + room * 9 // 10, folder)

    assert "can't allocate memory" in died, died
    assert fitted == free  # the same bits
    print(f"training needs {needs // MIB} MiB; in {room // MIB} MiB it died, and trains with fit: {fitted[-1]:.4f}")


if __name__ == "__main__" and on_two_processes(__file__):
    with tempfile.TemporaryDirectory() as own:
        train(own)
