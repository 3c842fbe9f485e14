"""The networks of the notebooks."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(in_features: int, widths: Sequence[int] = (64, 32), classes: int = 10, dropout: float = 0.1) -> nn.Sequential:
    """Flatten, ReLU layers of the given widths, each followed by dropout, and a linear layer (Kirsch 2024, D.1)."""
    sizes = [in_features, *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


class Standardize(nn.Module):
    """(x - mean) / std per channel: put before a network, it lets inputs stay in [0, 1] everywhere else."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


def wide_resnet(depth: int = 28, width: int = 1, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Wide-ResNet-depth-width without dropout for [batch, channels, 32, 32] (Zagoruyko & Komodakis, 2016).

    Raises ValueError unless depth is 6 n + 4 with n >= 1 and width at least 1.
    """
    if depth < 10 or (depth - 4) % 6 or width < 1:
        raise ValueError(
            f"a Wide-ResNet has depth 6 n + 4 (10, 16, 22, 28, ...) and width >= 1, got {depth} and {width}"
        )
    sizes = [16, 16 * width, 32 * width, 64 * width]
    blocks = []
    for group in range(3):
        for n in range((depth - 4) // 6):
            stride = 2 if group > 0 and n == 0 else 1
            blocks.append(_WideBlock(sizes[group] if n == 0 else sizes[group + 1], sizes[group + 1], stride))
    network = nn.Sequential(
        nn.Conv2d(channels, sizes[0], 3, padding=1, bias=False),
        *blocks,
        nn.BatchNorm2d(sizes[3]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(sizes[3], classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


class _WideBlock(nn.Module):
    """BatchNorm, ReLU and convolution twice, added to the (projected) input."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(ready))))
        return y + (x if self.shortcut is None else self.shortcut(ready))
