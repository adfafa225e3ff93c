"""ResNet-152 with 256 images on an A100: what it saves, and what remains if all of it goes to the host. No GPU needed.

torch's tutorial on saved-tensor hooks measured 48 GB on such a GPU, and 5 GB with everything on the CPU.
"""

from __future__ import annotations

import torch
from torch import nn

import disthooks as dh


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, and a way around them."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.downsample = nn.ReLU(inplace=True), nn.Identity()
        if stride != 1 or inner != 4 * width:
            around = nn.Conv2d(inner, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(around, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += self.downsample(x)
        return self.relu(out)


def resnet152() -> tuple[nn.Module, torch.Tensor]:
    """The model and a batch. Under ``dh.explain`` neither takes any memory."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    parts, inner = [stem, nn.MaxPool2d(3, 2, padding=1)], 64
    for stage, depth in enumerate((3, 8, 36, 3)):
        width = 64 << stage
        for number in range(depth):
            parts.append(Bottleneck(inner, width, 2 if stage and not number else 1))
            inner = 4 * width
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000)
    return nn.Sequential(*parts, *head), torch.randn(256, 3, 224, 224)


said = dh.explain(resnet152, plan=dh.OnCpu(), optimizer="sgd", device="a100")
without, planned = said.memory, said.planned
assert planned is not None
saved, peak, least = said.saved_bytes / 1e9, without.peak_bytes / 1e9, planned.peak_bytes / 1e9
low, high = (nbytes / 1e9 for nbytes in planned.peak_range)
where = f"in the {planned.peak.phase} of {planned.peak.module}"
print(f"Autograd saves {saved:.1f} GB for the backward, and the step needs {peak:.1f} GB.")
print("The tutorial measured 48 GB. The workspaces of cuDNN and CUDA's own memory are not in the prediction.")
print("With this plan all saved tensors go to the host:  dh.save_activations(model, '', dh.OnCpu())")
print(f"Then the step needs {least:.1f} GB ({low:.1f} to {high:.1f} GB, by what the allocator can use), {where}.")
print(f"The tutorial measured 5 GB. The host has to hold {planned.host / 1e9:.1f} GB.")
gpu = said.situation.hardware
assert gpu is not None
link, forward = gpu.offload_seconds(said.saved_bytes), said.seconds["forward"]
print(f"Is it worth it? To the host and back takes {link:.1f} s; to compute the forward again takes {forward:.1f} s.")
assert 0.93 * 48 < saved < peak < 48
assert low <= least <= high < 6
assert 0.99 * saved < planned.host / 1e9 < 1.01 * saved
