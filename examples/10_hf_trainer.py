"""Transformers' Trainer on two processes: one callback; its own gradient norm is the one that disthooks measures."""

import tempfile

import torch
from _two import on_two_processes

CONFIG = {
    "save": [{"modules": "model.layers.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {"stats": [{"kind": "Norm"}, {"kind": "MaxAbs"}]},
}


class Rows(torch.utils.data.Dataset):
    """Each row counts up from another number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = (i + torch.arange(64)) % 100
        return {"input_ids": row, "labels": row}


def train(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from disthooks.integrations.transformers import DisthooksCallback

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, **sizes))
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=8,
        logging_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        gradient_checkpointing=True,  # what moves then are the checkpoints' inputs
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        save_steps=4,
    )
    hooks = DisthooksCallback(CONFIG)  # without an argument: DISTHOOKS_CONFIG, ./disthooks.yaml or ./hooks.yaml
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[hooks])
    trainer.train()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    for entry in logged:
        assert abs(entry["grad_norm"] - entry["gradients/grad_norm"]) <= 1e-6 * entry["grad_norm"]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert hooks.saved is not None
    assert hooks.saved.moved > 0
    if trainer.is_world_process_zero():
        print(f"{hooks.saved.moved / 2**20:.1f} MiB of saved tensors on disk; loss {logged[-1]['loss']:.2f}")
    trainer.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


if __name__ == "__main__" and on_two_processes(__file__):
    with tempfile.TemporaryDirectory() as own:
        train(own)
