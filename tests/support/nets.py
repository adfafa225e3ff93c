"""Networks of the zoo that are written here: convolutions, recurrences, diffusion, graphs, checkpointed stacks.

Each is a small copy of an architecture that people train, and saves tensors in the way of that architecture.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Block, Bottleneck, convolution


class BasicBlock(nn.Module):
    """The block of ResNet-18: two 3 x 3 convolutions, and the input added."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inner, width, 3, stride), convolution(width, width, 3)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity() if inner == width and stride == 1 else convolution(inner, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(self.relu(self.first(x)))
        out += self.shortcut(x)
        return self.relu(out)


def residual_network(
    block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], width: int, classes: int
) -> nn.Sequential:
    """A ResNet for images of three channels; depths (2, 2, 2, 2) and (3, 8, 36, 3) make ResNet-18 and ResNet-152."""
    parts: list[nn.Module] = [convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inner, expansion = width, 4 if block is Bottleneck else 1
    for stage, depth in enumerate(depths):
        for number in range(depth):
            parts.append(block(inner, width << stage, 2 if stage and not number else 1))
            inner = expansion * (width << stage)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


class UNet(nn.Module):
    """Segmentation: the outputs of each level are joined to those of the same level on the way back."""

    def __init__(self, width: int = 16, levels: int = 3, classes: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.first = self._double(3, width)
        self.down = nn.ModuleList(self._double(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.joined = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inner: int, outer: int) -> nn.Sequential:
        parts = (convolution(inner, outer, 3), nn.ReLU(inplace=True), convolution(outer, outer, 3))
        return nn.Sequential(*parts, nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat((levels.pop(), up(x)), dim=1))
        return self.head(x)


def time_embedding(steps: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of ``steps``, which has shape (batch,); the result has shape (batch, width)."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 2, device=steps.device) / (width // 2))
    angles = steps[:, None].float() * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class CrossAttention(nn.Module):
    """Attention from ``x`` to ``context``, both of shape (batch, length, channels)."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(context, 2 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), *self.kv(context).chunk(2, dim=-1))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted, scaled and gated by the time and the class (adaLN-zero)."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.attention = CrossAttention(width, width, heads)
        self.cross = CrossAttention(width, context, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, dim=-1)
        y = self.norms[0](x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y)
        x = x + self.cross(self.norms[1](x), context)
        return x + gate2 * self.mlp(self.norms[2](x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer over patches of a latent image, with a text to attend to."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4, context: int = 48, patch: int = 2) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(4, width, patch, stride=patch)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiTBlock(width, context, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4 * patch * patch)

    def forward(self, x: torch.Tensor, steps: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        rows, columns = (size // self.patch for size in x.shape[2:])
        y = self.patches(x).flatten(2).transpose(1, 2)
        time = self.time(time_embedding(steps, self.width))
        for block in self.blocks:
            y = block(y, time, text)
        y = self.head(self.norm(y)).unflatten(1, (rows, columns)).unflatten(-1, (4, self.patch, self.patch))
        return y.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


class ResidualTimeBlock(nn.Module):
    """A block of a diffusion U-Net: group norms, convolutions, the time added between them, attention to a text."""

    def __init__(self, inner: int, outer: int, time: int, context: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()
        self.norm, self.cross = nn.LayerNorm(outer), CrossAttention(outer, context, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.dropout(F.silu(self.norm2(y)), 0.1, self.training)) + self.shortcut(x)
        flat = y.flatten(2).transpose(1, 2)
        return y + self.cross(self.norm(flat), text).transpose(1, 2).unflatten(2, tuple(y.shape[2:]))


class DiffusionUNet(nn.Module):
    """Noise of a latent image, from its step and a text: the U-Net of latent diffusion, with two levels."""

    def __init__(self, width: int = 32, context: int = 48) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down1 = ResidualTimeBlock(width, width, time, context)
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2 = ResidualTimeBlock(width, 2 * width, time, context)
        self.middle = ResidualTimeBlock(2 * width, 2 * width, time, context)
        self.up2 = ResidualTimeBlock(4 * width, width, time, context)
        self.up1 = ResidualTimeBlock(2 * width, width, time, context)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, steps: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time(time_embedding(steps, self.width))
        high = self.down1(self.first(x), time, text)
        low = self.down2(self.shrink(high), time, text)
        y = self.up2(torch.cat((self.middle(low, time, text), low), dim=1), time, text)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        y = self.up1(torch.cat((y, high), dim=1), time, text)
        return self.last(F.silu(self.norm(y)))


class LanguageModel(nn.Module):
    """An LSTM over tokens, with dropout between its layers, and the loss of the next token."""

    def __init__(self, vocabulary: int = 500, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(F.dropout(self.lstm(self.embed(tokens))[0], 0.1, self.training))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Tagger(nn.Module):
    """A GRU that reads in both directions, and a class for each position."""

    def __init__(self, width: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0]).log_softmax(dim=-1)


class Translator(nn.Module):
    """``nn.Transformer`` with embeddings that encoder, decoder and head share."""

    def __init__(self, vocabulary: int = 300, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        y = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.linear(y, self.embed.weight)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7 x 7 convolution, a norm over channels, an MLP, and a learned scale of each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.mlp(y)).permute(0, 3, 1, 2)


class GraphNetwork(nn.Module):
    """Messages along edges, summed at each node by ``index_add``, in three rounds."""

    def __init__(self, width: int = 64, rounds: int = 3) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """``nodes`` has shape (count, width); ``edges`` has shape (2, edges), from row 0 to row 1."""
        start, end = edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat((nodes[start], nodes[end]), dim=-1))
            nodes = update(torch.zeros_like(nodes).index_add(0, end, sent), nodes)
        return self.head(nodes).mean()


class VAE(nn.Module):
    """A variational autoencoder of images with convolutions; its output is its loss."""

    def __init__(self, width: int = 16, latent: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
        )
        self.moments = nn.Conv2d(2 * width, 2 * latent, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(latent, 2 * width, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.moments(self.encoder(x)).chunk(2, dim=1)
        again = self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.binary_cross_entropy(again, x) + 1e-3 * divergence


class CheckpointedStack(nn.Module):
    """Transformer blocks, each of which ``torch.utils.checkpoint`` runs again in backward."""

    def __init__(self, reentrant: bool, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x
