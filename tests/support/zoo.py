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
import functools
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


def tokens(vocabulary: int, batch: int, seq: int) -> torch.Tensor:
    """Random tokens of shape (batch, seq)."""
    return torch.randint(0, vocabulary, (batch, seq))


def images(batch: int, seq: int) -> torch.Tensor:
    return torch.randn(batch, 3, seq, seq)


def classes(batch: int) -> torch.Tensor:
    return torch.randint(0, 10, (batch,))


def latents(batch: int, seq: int) -> tuple[torch.Tensor, ...]:
    """Latent images of a side of ``seq``, their steps, and a text."""
    return torch.randn(batch, 4, seq, seq), torch.randint(0, 1000, (batch,)), torch.randn(batch, 16, 48)


def hf(model: str, config: str, **sizes: Any) -> Any:
    """A model of transformers with random weights, by the names of its class and of its configuration's."""
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)(**sizes))


def labelled(vocabulary: int, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Tokens that are their own labels."""
    ids = tokens(vocabulary, batch, seq)
    return {"input_ids": ids, "labels": ids}


# -- models of transformers

ENCODER = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 512}
DECODER = ENCODER | {"num_key_value_heads": 2, "use_cache": False}
EXPERTS = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL = {"vocab_size": 512, "hidden_size": 128, "use_cache": False}
GPT2 = {"vocab_size": 512, "n_positions": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "use_cache": False}
OPT = {"ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
MAMBA = {"vocab_size": 512, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "use_cache": False}
CAPPED = {"head_dim": 32, "sliding_window": 64, "attn_implementation": "eager"}
#: Models of language: their class and that of their configuration without its end, their sizes.
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 32}),
    # Soft caps on logits and attention, and a sliding window in every second layer.
    "gemma2": ("Gemma2ForCausalLM", DECODER | CAPPED),
    # A mixture of experts by transformers' default, `grouped_mm`: what is saved does not depend on the routing. And
    # with a loop over the experts that have tokens: each gets as many rows as the router gives it.
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "mixtral_loop": ("MixtralForCausalLM", EXPERTS | {"experts_implementation": "eager"}),
    # The head is tied to the embedding; three kinds of dropout.
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"bos_token_id": 1, "eos_token_id": 2}),
    "opt": ("OPTForCausalLM", SMALL | OPT | {"word_embed_proj_dim": 128}),
    # Positions by ALiBi, and a GELU that is an autograd Function of its own.
    "bloom": ("BloomForCausalLM", SMALL | {"n_layer": 2, "n_head": 4}),
    # A selective state space by torch's operators alone: a loop over the tokens.
    "mamba": ("MambaForCausalLM", MAMBA),
    "bert": ("BertForMaskedLM", ENCODER),
}
#: Models whose memory depends on the values of tensors, and what it depends on.
DATA_DEPENDENT = {"mixtral_loop": "the loop runs over the experts that got tokens, each with the tokens that it got"}


def language(name: str, batch: int = 2, seq: int = 0) -> Built:
    """A model of ``LANGUAGE``."""
    kind, sizes = LANGUAGE[name]
    seq = seq or (64 if name == "mamba" else 128)
    return hf(kind, f"{kind.partition('For')[0].partition('LM')[0]}Config", **sizes), labelled(512, batch, seq)


def llama_masked(batch: int = 2, seq: int = 128) -> Built:
    """With a mask that masks nothing, as a tokenizer gives it: transformers reads it and leaves it out."""
    module, inputs = language("llama", batch, seq)
    return module, {**inputs, "attention_mask": torch.ones(batch, seq, dtype=torch.int64)}


def bert_padded(batch: int = 2, seq: int = 128) -> Built:
    """With rows of two lengths and a mask."""
    module, inputs = language("bert", batch, seq)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[0, seq // 2 :] = 0
    return module, {**inputs, "attention_mask": mask}


def deberta(batch: int = 2, seq: int = 64) -> Built:
    """Attention to contents and to relative positions."""
    sizes = ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32}
    module = hf("DebertaV2ForSequenceClassification", "DebertaV2Config", **sizes, max_relative_positions=64)
    return module, {"input_ids": tokens(512, batch, seq), "labels": torch.zeros(batch, dtype=torch.int64)}


def t5(batch: int = 2, seq: int = 96) -> Built:
    sizes = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
    module = hf("T5ForConditionalGeneration", "T5Config", **sizes, use_cache=False, decoder_start_token_id=0)
    return module, {"input_ids": tokens(512, batch, seq), "labels": tokens(512, batch, seq // 2)}


IMAGE = {"image_size": 64, "patch_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}


def vit(batch: int = 4, seq: int = 64) -> Built:
    sizes = IMAGE | {"image_size": seq, "intermediate_size": 256, "num_labels": 10}
    module = hf("ViTForImageClassification", "ViTConfig", **sizes)
    return module, {"pixel_values": images(batch, seq), "labels": classes(batch)}


def swin(batch: int = 2, seq: int = 64) -> Built:
    """Attention in windows, each second layer's shifted and masked."""
    sizes = {"image_size": seq, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    module = hf("SwinForImageClassification", "SwinConfig", **sizes, window_size=8, num_labels=10)
    return module, {"pixel_values": images(batch, seq), "labels": classes(batch)}


def clip(batch: int = 4, seq: int = 32) -> Built:
    """An image tower and a text tower; the loss compares every image with every text."""
    text = ENCODER | {"bos_token_id": 1, "eos_token_id": 511, "max_position_embeddings": 64}
    sizes = {"text_config": text, "vision_config": IMAGE | {"intermediate_size": 256}, "projection_dim": 64}
    inputs = {"input_ids": tokens(511, batch, seq), "pixel_values": images(batch, 64), "return_loss": True}
    return hf("CLIPModel", "CLIPConfig", **sizes), inputs


def whisper(batch: int = 2, seq: int = 32) -> Built:
    """Spectrograms of 200 frames to tokens."""
    each = {"layers": 2, "attention_heads": 4, "ffn_dim": 192}
    sizes = {"vocab_size": 512, "d_model": 96, "num_mel_bins": 40, "max_source_positions": 100, "use_cache": False}
    sizes |= {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in each.items()}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    module = hf("WhisperForConditionalGeneration", "WhisperConfig", **sizes)
    return module, {"input_features": torch.randn(batch, 40, 200), "labels": tokens(512, batch, seq)}


def wav2vec2(batch: int = 2, seq: int = 6400) -> Built:
    """``seq`` samples of sound. Its random masks in time and layer drop, which are drawn by the host, are off."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
    sizes |= {"conv_dim": [32] * 4, "conv_kernel": [10, 3, 3, 2], "conv_stride": [5, 2, 2, 2], "mask_time_prob": 0.0}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "num_labels": 10}
    module = hf("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **sizes, classifier_proj_size=32)
    return module, {"input_values": torch.randn(batch, seq), "labels": classes(batch)}


# -- written here

_RESNET152, _RESNET18 = (3, 8, 36, 3), (2, 2, 2, 2)


def convnext(batch: int = 2, seq: int = 32) -> Built:
    blocks = [nets.ConvNeXtBlock(64) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 64, 2, stride=2), *blocks), (images(batch, seq),)


def mlp(batch: int = 512, seq: int = 256) -> Built:
    """``seq`` is the number of features of a row."""
    parts = [part for _ in range(3) for part in (nn.Linear(seq, seq), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*parts, nn.Linear(seq, 10)), (torch.randn(batch, seq),)


def graph(batch: int = 256, seq: int = 2048) -> Built:
    """``batch`` nodes and ``seq`` edges."""
    return nets.GraphNetwork(), (torch.randn(batch, 64), torch.randint(0, batch, (2, seq)))


def _stack(reentrant: bool, batch: int = 4, seq: int = 128) -> Built:
    return nets.CheckpointedStack(reentrant=reentrant), (torch.randn(batch, seq, 96),)


# -- the same models, trained in other ways


def llama_lora(batch: int = 2, seq: int = 128) -> Built:
    """LoRA by peft: the weights are frozen, and two small matrices beside each projection are trained."""
    module, inputs = language("llama", batch, seq)
    peft = importlib.import_module("peft")
    lora = peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(module, lora), inputs


def _checkpointed(name: str, reentrant: bool, batch: int = 2, seq: int = 128) -> Built:
    """transformers' gradient checkpointing. Reentrant: gpt2, whose dropout draws its random numbers again."""
    module, inputs = language(name, batch, seq)
    chosen: Any = module
    chosen.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return module, inputs


#: One step of each takes less than a second on one core. ``seq`` of images is their side in pixels.
ZOO: dict[str, Builder] = {
    **{name: functools.partial(language, name) for name in LANGUAGE},
    **{each.__name__: each for each in (llama_masked, bert_padded, deberta, t5, vit, swin, clip, whisper, wav2vec2)},
    # Of a quarter of their width.
    "resnet18": lambda batch=4, seq=64: (
        nets.residual_network(nets.BasicBlock, _RESNET18, 16, 10),
        (images(batch, seq),),
    ),
    "resnet152": lambda batch=2, seq=64: (nets.residual_network(Bottleneck, _RESNET152, 16, 10), (images(batch, seq),)),
    "unet": lambda batch=2, seq=64: (nets.UNet(), (images(batch, seq),)),
    "convnext": convnext,
    "dit": lambda batch=4, seq=16: (nets.DiT(), latents(batch, seq)),
    "diffusion_unet": lambda batch=2, seq=16: (nets.DiffusionUNet(), latents(batch, seq)),
    "vae": lambda batch=4, seq=64: (nets.VAE(), (torch.rand(batch, 3, seq, seq),)),
    "lstm": lambda batch=4, seq=64: (nets.LanguageModel(), (tokens(500, batch, seq),)),
    "gru": lambda batch=8, seq=48: (nets.Tagger(), (torch.randn(batch, seq, 48),)),
    "mlp": mlp,
    "translator": lambda batch=4, seq=64: (nets.Translator(), (tokens(300, batch, seq), tokens(300, batch, seq // 2))),
    "graph": graph,
    "llama_lora": llama_lora,
    "llama_checkpointed": functools.partial(_checkpointed, "llama", False),
    "gpt2_checkpointed_reentrant": functools.partial(_checkpointed, "gpt2", True),
    "stack_checkpointed": functools.partial(_stack, False),
    "stack_checkpointed_reentrant": functools.partial(_stack, True),
}
_ALSO = ("llama", "gpt2", "bert", "vit", "resnet18", "dit", "lstm", "llama_lora", "llama_checkpointed")
#: Models whose forward and loss run under ``torch.autocast("cpu", torch.bfloat16)``.
AUTOCAST = {f"{name}_autocast" for name in (*_ALSO, "stack_checkpointed")}
ZOO |= {f"{name}_autocast": ZOO[name] for name in (*_ALSO, "stack_checkpointed")}


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

_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "use_cache": False}


def _llama3(width: int, inner: int, layers: int, heads: int, batch: int = 1, seq: int = 4096) -> Built:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    module = hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA3, **sizes, num_attention_heads=heads, rope_theta=5e5)
    return module, labelled(128256, batch, seq)


def resnet152_full(batch: int = 256, seq: int = 224) -> Built:
    return nets.residual_network(Bottleneck, _RESNET152, 64, 1000), (images(batch, seq),)


def gpt2_xl(batch: int = 4, seq: int = 1024) -> Built:
    sizes = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False}
    return hf("GPT2LMHeadModel", "GPT2Config", **sizes), labelled(50257, batch, seq)


FULL: dict[str, Builder] = {
    "resnet152_full": resnet152_full,
    "gpt2_xl": gpt2_xl,
    "llama3_8b": functools.partial(_llama3, 4096, 14336, 32, 32),
    "llama3_70b": functools.partial(_llama3, 8192, 28672, 80, 64),
}

#: The models whose largest batch ``--fits`` has to find; each grows by its ``batch``.
FITS: tuple[str, ...] = ("llama", "gpt2", "bert", "t5", "vit", "resnet18", "unet", "dit", "lstm", "mlp")

#: Models for a test that has time for a few only, one of each way to save. They need torch alone.
FEW: tuple[str, ...] = ("resnet18", "lstm", "dit", "stack_checkpointed_reentrant", "resnet18_autocast")
