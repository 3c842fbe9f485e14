"""The networks of the notebooks."""

import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from uqlab.models.pretrained import plain_logits

EMBEDDED = Path(__file__).parent / "assets" / "letters-vit.safetensors"


def mlp(
    in_features: int,
    widths: Sequence[int] = (64, 32),
    classes: int = 10,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Flatten, ReLU layers of the given widths, each followed by dropout, and a linear layer (Kirsch 2024, D.1)."""
    sizes = [in_features, *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def small_cnn(
    classes: int = 10, channels: int = 1, width: int = 32, patch: int = 1
) -> nn.Sequential:
    """Three convolutions, an average over the map and a linear layer, for small images.

    The first has the stride `patch`, so that a position of the map stands for patch x patch pixels.
    """
    sizes, layers = [channels, width, 2 * width, 2 * width], []
    for before, after, step in zip(sizes, sizes[1:], (patch, 1, 1), strict=False):
        reach = max(1, step - 1)
        layers += [
            nn.Conv2d(before, after, 2 * reach + 1, step, reach, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)
    )


class Standardize(nn.Module):
    """(x - mean) / std of each channel. Put it before a network, and inputs stay in [0, 1] everywhere else."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer(
            "mean", torch.tensor(mean)[:, None, None], persistent=False
        )
        self.register_buffer("std", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class LogMel(nn.Module):
    """Spectrograms as an audio spectrogram transformer takes them (Gong et al. 2021), `length` frames long.

    [batch, 1, mels, frames] in [0, 1], low tones below -> [batch, length, mels], standardised as for AudioSet; what is
    missing in the end is filled as `ASTFeatureExtractor` of transformers does. scale: the logarithms that 0 and 1 mean.
    """

    def __init__(self, length: int, scale: tuple[float, float]):
        super().__init__()
        self.length, self.scale = length, scale

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.scale
        x = (
            x[:, 0].flip(1).mT[:, : self.length] * (high - low) + low
        )  # [batch, frames, mels]
        return (F.pad(x, (0, 0, 0, self.length - x.shape[1])) + 4.2677393) / (
            2 * 4.5689974
        )


def wide_resnet(
    depth: int = 28, width: int = 1, classes: int = 10, channels: int = 3
) -> nn.Sequential:
    """Wide-ResNet, depth 6 n + 4, without dropout for [batch, channels, 32, 32] (Zagoruyko & Komodakis 2016)."""
    if depth < 10 or (depth - 4) % 6 or width < 1:
        raise ValueError(
            f"a Wide-ResNet has depth 6 n + 4 (10, 16, ...) and width >= 1, got {depth} and {width}"
        )
    sizes = [16, 16 * width, 32 * width, 64 * width]
    blocks = []
    for before, after in itertools.pairwise(sizes):
        blocks.append(_WideBlock(before, after, 2 if blocks else 1))
        blocks += [_WideBlock(after, after, 1) for _ in range((depth - 4) // 6 - 1)]
    return _he_initialised(
        nn.Conv2d(channels, sizes[0], 3, padding=1, bias=False),
        *blocks,
        nn.BatchNorm2d(sizes[3]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(sizes[3], classes),
    )


def _he_initialised(*layers: Any) -> nn.Sequential:
    network = nn.Sequential(*layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


class _WideBlock(nn.Module):
    """BatchNorm, ReLU and convolution, twice; the result is added to the input, projected if shapes differ."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = (
            nn.Conv2d(before, after, 1, stride, bias=False)
            if before != after or stride != 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(ready))))
        return y + (x if self.shortcut is None else self.shortcut(ready))


def cifar_resnet(depth: int = 20, classes: int = 10) -> nn.Sequential:
    """ResNet, depth 6 n + 2, for [batch, 3, 32, 32], 16-32-64 channels, no weights in shortcuts (He et al. 2016, 4.2).

    Its modules have the names of github.com/akamaster/pytorch_resnet_cifar10, so that the weights trained there fit.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(
            f"a CIFAR ResNet has depth 6 n + 2 (8, 14, 20, 32, 44, 56, 110, ...), got {depth}"
        )
    n = (depth - 2) // 6

    def group(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            *(_Block(before if i == 0 else after, after) for i in range(n))
        )

    return _he_initialised(
        OrderedDict(
            conv1=nn.Conv2d(3, 16, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(16),
            relu=nn.ReLU(),
            layer1=group(16, 16),
            layer2=group(16, 32),
            layer3=group(32, 64),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            linear=nn.Linear(64, classes),
        )
    )


class _Block(nn.Module):
    """Two convolutions, added to the input; where the channels double, the map is halved (option A)."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.stride = after // before
        self.conv1, self.bn1 = (
            nn.Conv2d(before, after, 3, self.stride, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.conv2, self.bn2 = (
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if (
            new := y.shape[1] - x.shape[1]
        ):  # every other pixel, and channels of zeros on both sides
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride],
                (0, 0, 0, 0, new // 2, new - new // 2),
            )
        return F.relu(y + x)


def vit(
    image_size: int, patch_size: int, *, width: int = 64, layers: int = 4, heads: int = 4, channels: int = 1,
    classes: int = 10,
) -> nn.Module:  # fmt: skip
    """A vision transformer without dropout for [batch, channels, image_size, image_size] (Dosovitskiy et al., 2021).

    It is ViTForImageClassification of transformers with an inner width of 4 `width`, and returns the logits alone.
    """
    smallest = min(image_size, patch_size, width, layers, heads, channels, classes)
    if smallest < 1 or image_size % patch_size or width % heads:
        raise ValueError(
            "sizes must be at least 1, patch_size must divide image_size and heads must divide width, got "
            f"{image_size=}, {patch_size=}, {width=}, {layers=}, {heads=}, {channels=}, {classes=}"
        )
    from transformers import ViTConfig, ViTForImageClassification  # takes a second

    config = ViTConfig(
        image_size=image_size, patch_size=patch_size, num_channels=channels, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        num_labels=classes,  # type: ignore[call-arg]
    )  # fmt: skip
    return plain_logits(ViTForImageClassification(config))


def embedded(classes: int = 10) -> nn.Module:
    """A small pretrained `vit` for grey images [batch, 1, 28, 28] in [0, 1], with no download.

    Patches of 7 x 7, width 128, 4 blocks of 8 heads. It has seen letters, handwritten (EMNIST) and printed (notMNIST,
    `glyphs`); never MNIST, Fashion-MNIST or KMNIST, nor any digit. `tools/make_backbone.py` made it, and its
    `provenance` says how. The classifier of the letters A to Z is kept for classes=26; else a new one is drawn from
    torch's global seed.
    """
    network = vit(28, 7, width=128, layers=4, heads=8, classes=classes)
    with safe_open(EMBEDDED, "pt") as file:
        state = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        network.provenance = json.loads(file.metadata()["provenance"])
    if classes != len(state["classifier.bias"]):
        state |= {
            name: w
            for name, w in network.state_dict().items()
            if name.startswith("classifier.")
        }
    network.load_state_dict(state)
    network.name = "uqlab.models.embedded"  # type: ignore[assignment]
    return network.eval()
