"""Small models of the architectures that people train, for tests of what ``disthooks explain`` predicts.

    module, inputs = zoo.build("llama")          # on the device and under the modes that are active
    module(**inputs)                             # or module(*inputs): a dict or a tuple

``ZOO`` has the models that a test runs for real: one step takes less than a second on one core and saves 1 to 50 MiB.
``FULL`` has models of full size, which are built only under fake tensors. ``DATA_DEPENDENT`` names those of which fake
tensors cannot know everything, with the reason. ``AUTOCAST`` names those whose step runs under autocast.
"""

# [Note: inputs of the zoo]
# Real tokens are random numbers, so that routing and padding are as in training. No model reads one of them on the
# host, except those of `DATA_DEPENDENT`. A mask is given only where a model needs one, because transformers looks at
# the values of a mask to leave it out if it masks nothing.

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.models import Bottleneck
from tests.support import nets

Inputs = tuple[Any, ...] | dict[str, Any]
Built = tuple[nn.Module, Inputs]
#: Makes a model in training mode, and its example inputs.
Builder = Callable[..., Built]

ZOO: dict[str, Builder] = {}
FULL: dict[str, Builder] = {}
#: Models whose memory depends on the values of tensors, and what it depends on.
DATA_DEPENDENT: dict[str, str] = {}
#: Models whose forward and loss run under ``torch.autocast("cpu", torch.bfloat16)``.
AUTOCAST: set[str] = set()


def build(name: str, **sizes: int) -> Built:
    """The model ``name`` of ``ZOO`` or ``FULL``, from seed 0, in training mode, and its inputs.

    ``sizes`` are ``batch`` and ``seq`` (tokens, frames, or pixels of a side), where the default shall not hold.
    """
    torch.manual_seed(0)
    module, inputs = {**ZOO, **FULL}[name](**sizes)
    return module.train(), inputs


def context(name: str) -> contextlib.AbstractContextManager[Any]:
    """The context of the forward of ``name``: autocast to bfloat16 on the CPU if it is in ``AUTOCAST``."""
    return torch.autocast("cpu", torch.bfloat16) if name in AUTOCAST else contextlib.nullcontext()


def entry(function: Builder) -> Builder:
    """Add ``function`` to ``ZOO`` under its own name."""
    ZOO[function.__name__] = function
    return function


def full(function: Builder) -> Builder:
    """Add ``function`` to ``FULL`` under its own name."""
    FULL[function.__name__] = function
    return function


def tokens(vocabulary: int, batch: int, seq: int) -> torch.Tensor:
    """Random tokens of shape (batch, seq)."""
    return torch.randint(0, vocabulary, (batch, seq))


def hf(model: str, config: str, **sizes: Any) -> Any:
    """A model of transformers with random weights, by the names of its class and of its configuration's."""
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)(**sizes))


# -- language models of transformers

DECODER = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "use_cache": False,
}


def labelled(vocabulary: int, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Tokens that are their own labels."""
    ids = tokens(vocabulary, batch, seq)
    return {"input_ids": ids, "labels": ids}


@entry
def llama(batch: int = 2, seq: int = 128) -> Built:
    return hf("LlamaForCausalLM", "LlamaConfig", **DECODER), labelled(512, batch, seq)


@entry
def llama_masked(batch: int = 2, seq: int = 128) -> Built:
    """The same with a mask that masks nothing, as a tokenizer gives it: transformers reads it and leaves it out."""
    module, inputs = llama(batch, seq)
    return module, inputs | {"attention_mask": torch.ones(batch, seq, dtype=torch.int64)}


@entry
def qwen3(batch: int = 2, seq: int = 128) -> Built:
    return hf("Qwen3ForCausalLM", "Qwen3Config", **DECODER, head_dim=32), labelled(512, batch, seq)


@entry
def gemma2(batch: int = 2, seq: int = 128) -> Built:
    """Soft caps on logits and attention, and a sliding window in every second layer."""
    sizes = DECODER | {"head_dim": 32, "sliding_window": 64, "attn_implementation": "eager"}
    return hf("Gemma2ForCausalLM", "Gemma2Config", **sizes), labelled(512, batch, seq)


@entry
def mixtral(batch: int = 2, seq: int = 128) -> Built:
    """A mixture of experts by transformers' default, ``grouped_mm``: what is saved does not depend on the routing."""
    sizes = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf("MixtralForCausalLM", "MixtralConfig", **sizes), labelled(512, batch, seq)


@entry
def mixtral_loop(batch: int = 2, seq: int = 128) -> Built:
    """The same with a loop over the experts that have tokens: each gets as many rows as the router gives it."""
    sizes = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return hf("MixtralForCausalLM", "MixtralConfig", **sizes), labelled(512, batch, seq)


DATA_DEPENDENT["mixtral_loop"] = "the loop runs over the experts that got tokens, each with the tokens that it got"


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


@entry
def gpt2(batch: int = 2, seq: int = 128) -> Built:
    """The head is tied to the embedding; three kinds of dropout."""
    sizes = {"vocab_size": 512, "n_positions": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "use_cache": False}
    return hf("GPT2LMHeadModel", "GPT2Config", **sizes, **_SPECIAL), labelled(512, batch, seq)


@entry
def opt(batch: int = 2, seq: int = 128) -> Built:
    sizes = {"vocab_size": 512, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 512, "word_embed_proj_dim": 128, "use_cache": False}
    return hf("OPTForCausalLM", "OPTConfig", **sizes), labelled(512, batch, seq)


@entry
def bloom(batch: int = 2, seq: int = 128) -> Built:
    """Positions by ALiBi, and a GELU that is an autograd Function of its own."""
    sizes = {"vocab_size": 512, "hidden_size": 128, "n_layer": 2, "n_head": 4, "use_cache": False}
    return hf("BloomForCausalLM", "BloomConfig", **sizes), labelled(512, batch, seq)


@entry
def mamba(batch: int = 2, seq: int = 64) -> Built:
    """A selective state space by torch's operators alone: a loop over the tokens."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "use_cache": False}
    return hf("MambaForCausalLM", "MambaConfig", **sizes), labelled(512, batch, seq)


ENCODER = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@entry
def bert(batch: int = 2, seq: int = 128) -> Built:
    return hf("BertForMaskedLM", "BertConfig", **ENCODER), labelled(512, batch, seq)


@entry
def bert_padded(batch: int = 2, seq: int = 128) -> Built:
    """The same, with rows of two lengths and a mask."""
    module, inputs = bert(batch, seq)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[0, seq // 2 :] = 0
    return module, inputs | {"attention_mask": mask}


@entry
def deberta(batch: int = 2, seq: int = 64) -> Built:
    """Attention to contents and to relative positions."""
    sizes = ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32}
    ids = tokens(512, batch, seq)
    module = hf("DebertaV2ForSequenceClassification", "DebertaV2Config", **sizes, max_relative_positions=64)
    return module, {"input_ids": ids, "labels": torch.zeros(batch, dtype=torch.int64)}


@entry
def t5(batch: int = 2, seq: int = 96) -> Built:
    sizes = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    module = hf("T5ForConditionalGeneration", "T5Config", **sizes, use_cache=False, decoder_start_token_id=0)
    return module, {"input_ids": tokens(512, batch, seq), "labels": tokens(512, batch, seq // 2)}


# -- images and sound, of transformers

IMAGE = {"image_size": 64, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}


@entry
def vit(batch: int = 4, seq: int = 64) -> Built:
    sizes = IMAGE | {"image_size": seq, "intermediate_size": 256, "num_labels": 10}
    images, classes = torch.randn(batch, 3, seq, seq), torch.randint(0, 10, (batch,))
    return hf("ViTForImageClassification", "ViTConfig", **sizes), {"pixel_values": images, "labels": classes}


@entry
def swin(batch: int = 2, seq: int = 64) -> Built:
    """Attention in windows, each second layer's shifted and masked."""
    sizes = {"image_size": seq, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    module = hf("SwinForImageClassification", "SwinConfig", **sizes, window_size=8, num_labels=10)
    images, classes = torch.randn(batch, 3, seq, seq), torch.randint(0, 10, (batch,))
    return module, {"pixel_values": images, "labels": classes}


@entry
def clip(batch: int = 4, seq: int = 32) -> Built:
    """An image tower and a text tower; the loss compares every image with every text."""
    text = ENCODER | {"bos_token_id": 1, "eos_token_id": 511, "max_position_embeddings": 64}
    sizes = {"text_config": text, "vision_config": IMAGE | {"intermediate_size": 256}, "projection_dim": 64}
    ids = tokens(511, batch, seq)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 64, 64), "return_loss": True}
    return hf("CLIPModel", "CLIPConfig", **sizes), inputs


@entry
def whisper(batch: int = 2, seq: int = 32) -> Built:
    """Spectrograms of 200 frames to tokens."""
    sizes = {"vocab_size": 512, "d_model": 96, "num_mel_bins": 40, "max_source_positions": 100, "use_cache": False}
    sizes |= {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _WHISPER.items()}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    module = hf("WhisperForConditionalGeneration", "WhisperConfig", **sizes)
    return module, {"input_features": torch.randn(batch, 40, 200), "labels": tokens(512, batch, seq)}


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 192}


@entry
def wav2vec2(batch: int = 2, seq: int = 6400) -> Built:
    """``seq`` samples of sound. Its random masks in time and layer drop, which are drawn by the host, are off."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    sizes |= {"conv_dim": [32] * 4, "conv_kernel": [10, 3, 3, 2], "conv_stride": [5, 2, 2, 2], "mask_time_prob": 0.0}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "num_labels": 10}
    module = hf("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **sizes, classifier_proj_size=32)
    return module, {"input_values": torch.randn(batch, seq), "labels": torch.randint(0, 10, (batch,))}


# -- written here

_RESNET152, _RESNET18 = (3, 8, 36, 3), (2, 2, 2, 2)


@entry
def resnet18(batch: int = 4, seq: int = 64) -> Built:
    """Of a quarter of its width; ``seq`` is the side of the image in pixels."""
    return nets.residual_network(nets.BasicBlock, _RESNET18, 16, 10), (torch.randn(batch, 3, seq, seq),)


@entry
def resnet152(batch: int = 2, seq: int = 64) -> Built:
    """All of its 50 blocks, of a quarter of their width."""
    return nets.residual_network(Bottleneck, _RESNET152, 16, 10), (torch.randn(batch, 3, seq, seq),)


@entry
def unet(batch: int = 2, seq: int = 64) -> Built:
    return nets.UNet(), (torch.randn(batch, 3, seq, seq),)


@entry
def convnext(batch: int = 2, seq: int = 32) -> Built:
    """``seq`` is the side of the image in pixels."""
    stem = nn.Conv2d(3, 64, 2, stride=2)
    return nn.Sequential(stem, *[nets.ConvNeXtBlock(64) for _ in range(3)]), (torch.randn(batch, 3, seq, seq),)


@entry
def dit(batch: int = 4, seq: int = 16) -> Built:
    """``seq`` is the side of the latent image."""
    inputs = torch.randn(batch, 4, seq, seq), torch.randint(0, 1000, (batch,)), torch.randn(batch, 16, 48)
    return nets.DiT(), inputs


@entry
def diffusion_unet(batch: int = 2, seq: int = 16) -> Built:
    """``seq`` is the side of the latent image."""
    inputs = torch.randn(batch, 4, seq, seq), torch.randint(0, 1000, (batch,)), torch.randn(batch, 16, 48)
    return nets.DiffusionUNet(), inputs


@entry
def vae(batch: int = 4, seq: int = 64) -> Built:
    return nets.VAE(), (torch.rand(batch, 3, seq, seq),)


@entry
def lstm(batch: int = 4, seq: int = 64) -> Built:
    return nets.LanguageModel(), (tokens(500, batch, seq),)


@entry
def gru(batch: int = 8, seq: int = 48) -> Built:
    return nets.Tagger(), (torch.randn(batch, seq, 48),)


@entry
def mlp(batch: int = 512, seq: int = 256) -> Built:
    """``seq`` is the number of features of a row."""
    parts = [part for _ in range(3) for part in (nn.Linear(seq, seq), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*parts, nn.Linear(seq, 10)), (torch.randn(batch, seq),)


@entry
def translator(batch: int = 4, seq: int = 64) -> Built:
    return nets.Translator(), (tokens(300, batch, seq), tokens(300, batch, seq // 2))


@entry
def graph(batch: int = 256, seq: int = 2048) -> Built:
    """``batch`` nodes and ``seq`` edges."""
    return nets.GraphNetwork(), (torch.randn(batch, 64), torch.randint(0, batch, (2, seq)))


# -- the same models, trained in other ways


@entry
def llama_lora(batch: int = 2, seq: int = 128) -> Built:
    """LoRA by peft: the weights are frozen, and two small matrices beside each projection are trained."""
    module, inputs = llama(batch, seq)
    peft = importlib.import_module("peft")
    lora = peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(module, lora), inputs


def _checkpointed(make: Builder, reentrant: bool, **sizes: int) -> Built:
    module, inputs = make(**sizes)
    chosen: Any = module
    chosen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return module, inputs


@entry
def llama_checkpointed(batch: int = 2, seq: int = 128) -> Built:
    """transformers' gradient checkpointing, not reentrant."""
    return _checkpointed(llama, False, batch=batch, seq=seq)


@entry
def gpt2_checkpointed_reentrant(batch: int = 2, seq: int = 128) -> Built:
    """transformers' gradient checkpointing, reentrant, with dropout, whose random numbers are drawn again."""
    return _checkpointed(gpt2, True, batch=batch, seq=seq)


@entry
def stack_checkpointed(batch: int = 4, seq: int = 128) -> Built:
    return nets.CheckpointedStack(reentrant=False), (torch.randn(batch, seq, 96),)


@entry
def stack_checkpointed_reentrant(batch: int = 4, seq: int = 128) -> Built:
    return nets.CheckpointedStack(reentrant=True), (torch.randn(batch, seq, 96),)


def _under_autocast(make: Builder) -> None:
    """Add ``make`` once more, for a step under autocast."""
    name = f"{make.__name__}_autocast"
    ZOO[name] = make
    AUTOCAST.add(name)


for _make in (llama, gpt2, bert, vit, resnet18, dit, lstm, llama_lora, llama_checkpointed, stack_checkpointed):
    _under_autocast(_make)


def _has_bfloat16_lstm() -> bool:
    """Whether this CPU runs an LSTM under autocast: oneDNN has no bfloat16 one for some CPUs, and torch then raises."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(64, 64)(torch.zeros(4, 64, 64))
    except RuntimeError:
        return False
    return True


def names() -> list[Any]:
    """The names of ``ZOO`` for ``parametrize``; a model that torch itself cannot run on this CPU is skipped."""
    cannot = set() if _has_bfloat16_lstm() else {"lstm_autocast"}
    why = "torch has no LSTM in bfloat16 on this CPU"
    return [pytest.param(name, marks=pytest.mark.skipif(name in cannot, reason=why)) for name in ZOO]


# -- of full size, for fake tensors


@full
def resnet152_full(batch: int = 256, seq: int = 224) -> Built:
    return nets.residual_network(Bottleneck, _RESNET152, 64, 1000), (torch.randn(batch, 3, seq, seq),)


@full
def gpt2_xl(batch: int = 4, seq: int = 1024) -> Built:
    sizes = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False}
    return hf("GPT2LMHeadModel", "GPT2Config", **sizes), labelled(50257, batch, seq)


_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False}


def _llama3(batch: int, seq: int, **sizes: int) -> Built:
    return hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA3, **sizes, rope_theta=5e5), labelled(128256, batch, seq)


@full
def llama3_8b(batch: int = 1, seq: int = 4096) -> Built:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _llama3(batch, seq, **sizes)


@full
def llama3_70b(batch: int = 1, seq: int = 4096) -> Built:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return _llama3(batch, seq, **sizes)


#: The models whose largest batch ``--fits`` has to find; each grows by its ``batch``.
FITS: tuple[str, ...] = ("llama", "gpt2", "bert", "t5", "vit", "resnet18", "unet", "dit", "lstm", "mlp")

#: Models for a test that has time for a few only, one of each way to save. They need torch alone.
FEW: tuple[str, ...] = ("resnet18", "lstm", "dit", "stack_checkpointed_reentrant", "resnet18_autocast")
