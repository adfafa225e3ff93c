"""TRL's SFTTrainer with PEFT's LoRA on two processes: adapters are clipped apart, the frozen weights rest."""

import tempfile

import torch
from _two import on_two_processes

CONFIG = {
    "save": [{"modules": "*.layers.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {
        "rules": [{"kind": "only", "pattern": "*.lora_B.*", "rule": {"kind": "ClipNorm", "max_norm": 0.05}}],
        "stats": [{"kind": "Norm"}],
        "groups": {"down": "*.lora_A.*", "up": "*.lora_B.*"},
    },
}


def tokenizer() -> object:
    """Words, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(98))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def train(folder: str) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from disthooks.integrations.transformers import DisthooksCallback

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    texts = [" ".join(f"w{(i + j) % 98}" for j in range(64)) for i in range(32)]
    options = {"max_steps": 4, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    hooks = DisthooksCallback(CONFIG)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=100, num_key_value_heads=2, **sizes)),
        args=SFTConfig(folder, use_cpu=True, bf16=False, ddp_backend="gloo", log_level="error", **options),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"text": texts}),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        callbacks=[hooks],
    )
    trainer.train()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    for entry in logged:  # the Trainer's norm is after our rule: of "up" at most 0.05 is left
        down, up = entry["gradients/grad_norm/group/down"], entry["gradients/grad_norm/group/up"]
        assert abs(entry["grad_norm"] - (down**2 + min(up, 0.05) ** 2) ** 0.5) < 1e-5
    assert hooks.saved is not None
    assert hooks.saved.moved > 0
    if trainer.is_world_process_zero():
        print(f"{hooks.saved.moved / 2**20:.1f} MiB on disk; the last norm of lora_B was {up:.3f} before its clipping")
    trainer.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


if __name__ == "__main__" and on_two_processes(__file__):
    with tempfile.TemporaryDirectory() as own:
        train(own)
