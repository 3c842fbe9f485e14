"""Small networks of the notebooks: perceptrons, ResNets, transformers."""

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

from uqlab.core.checks import at_least
from uqlab.core.extras import extra
from uqlab.core.modules import layers_of
from uqlab.models.checkpoints import plain_logits

EMBEDDED = Path(__file__).parent / "assets" / "letters-vit.safetensors"
AUDIOSET = 4.2677393, 2 * 4.5689974  # less the mean, and twice the deviation


def mlp(
    in_features: int,
    widths: Sequence[int] = (64, 32),
    classes: int = 10,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Return a perceptron that flattens its input (Kirsch 2024, D.1).

    Each layer is linear, ReLU and dropout; the last one is linear.

    Parameters
    ----------
    in_features
        Size of a flattened input.
    widths
        Sizes of the hidden layers.
    classes
        Number of logits.
    dropout
        Probability that a unit is dropped in training.

    Examples
    --------
    >>> sum(p.numel() for p in mlp(784).parameters())
    52650
    """
    sizes = [in_features, *widths]
    layers = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def small_cnn(
    classes: int = 10, channels: int = 1, width: int = 32, patch: int = 1
) -> nn.Sequential:
    """Return three convolutions, an average over the map and a linear layer.

    The network is for small images. A position of the map stands for patch x patch
    pixels.

    Parameters
    ----------
    classes
        Number of logits.
    channels
        Channels of the images.
    width
        Channels of the first map; the others have twice as many.
    patch
        Stride of the first convolution, in pixels.
    """
    layers = []
    sizes = [(channels, width, patch), (width, 2 * width, 1), (2 * width, 2 * width, 1)]
    for before, after, step in sizes:
        reach = max(1, step - 1)
        layers += [
            nn.Conv2d(before, after, 2 * reach + 1, step, reach, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, *_pooled(2 * width, classes))


def _pooled(width: int, classes: int) -> list[nn.Module]:
    """Return the end of a convolutional network: an average and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]


class Standardize(nn.Module):
    """Standardise each channel: (x - mean) / std.

    Put it before a network, and inputs stay in [0, 1] everywhere else.

    Parameters
    ----------
    mean, std
        A number for each channel.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        if len(mean) != len(std) or not min(std) > 0:
            raise ValueError(
                "mean and std must have a number for each channel, std above 0, got "
                f"{list(mean)} and {list(std)}"
            )
        for name, values in (("mean", mean), ("std", std)):
            values = torch.tensor(values)[:, None, None]
            self.register_buffer(name, values, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(
                "images must be [samples, channels, height, width], got "
                f"{list(x.shape)}: put Standardize before what flattens them"
            )
        return (x - self.mean) / self.std


class LogMel(nn.Module):
    """Spectrograms as an audio spectrogram transformer takes them (Gong et al. 2021).

    [batch, 1, mels, frames] in [0, 1], low tones below, become [batch, length, mels],
    standardised as for AudioSet; what is missing in the end is filled as
    `ASTFeatureExtractor` of transformers does.

    Parameters
    ----------
    length
        Number of frames.
    scale
        Logarithms of the energies that 0 and 1 stand for.
    """

    def __init__(self, length: int, scale: tuple[float, float]):
        super().__init__()
        self.length = length
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.scale
        shift, spread = AUDIOSET
        x = x[:, 0].flip(1).mT[:, : self.length]  # [batch, frames, mels]
        x = x * (high - low) + low
        return (F.pad(x, (0, 0, 0, self.length - x.shape[1])) + shift) / spread


def wide_resnet(
    depth: int = 28, width: int = 1, classes: int = 10, channels: int = 3
) -> nn.Sequential:
    """Return a Wide-ResNet without dropout (Zagoruyko & Komodakis 2016).

    It takes [batch, channels, 32, 32].

    Parameters
    ----------
    depth
        Number of layers, 6 n + 4.
    width
        Factor of the 16, 32 and 64 channels.
    classes
        Number of logits.
    channels
        Channels of the images.

    Raises
    ------
    ValueError
        If `depth` is not 6 n + 4.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(
            f"a Wide-ResNet has depth 6 n + 4 (10, 16, 22, 28, ...), got {depth}"
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
        *_pooled(sizes[3], classes),
    )


def _he_initialised(*layers: Any) -> nn.Sequential:
    """Return the layers with convolutions drawn as He et al. 2015 do."""
    network = nn.Sequential(*layers)
    for layer in layers_of(network, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return network


class _WideBlock(nn.Module):
    """BatchNorm, ReLU and convolution, twice, added to the input.

    The input is projected where shapes differ.
    """

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.norm2 = nn.BatchNorm2d(after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = None
        if before != after or stride != 1:
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norm1(x))
        y = self.conv2(F.relu(self.norm2(self.conv1(ready))))
        return y + (x if self.shortcut is None else self.shortcut(ready))


def cifar_resnet(depth: int = 20, classes: int = 10) -> nn.Sequential:
    """Return the ResNet for [batch, 3, 32, 32] of He et al. 2016, 4.2.

    It has 16, 32 and 64 channels and no weights in shortcuts. Its modules have the
    names of github.com/akamaster/pytorch_resnet_cifar10, so that the weights trained
    there fit.

    Parameters
    ----------
    depth
        Number of layers, 6 n + 2.
    classes
        Number of logits.

    Raises
    ------
    ValueError
        If `depth` is not 6 n + 2.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(
            "a CIFAR ResNet has depth 6 n + 2 (8, 14, 20, 32, 44, 56, 110, ...), "
            f"got {depth}"
        )
    layers = {
        "conv1": nn.Conv2d(3, 16, 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(16),
        "relu": nn.ReLU(),
    }
    for number, (before, after) in enumerate([(16, 16), (16, 32), (32, 64)], start=1):
        blocks = [_Block(before, after)]
        blocks += [_Block(after, after) for _ in range((depth - 2) // 6 - 1)]
        layers[f"layer{number}"] = nn.Sequential(*blocks)
    layers |= zip(("pool", "flatten", "linear"), _pooled(64, classes), strict=True)
    return _he_initialised(OrderedDict(layers))


class _Block(nn.Module):
    """Two convolutions, added to the input.

    Where the channels double, the map is halved (option A).
    """

    def __init__(self, before: int, after: int):
        super().__init__()
        self.stride = after // before
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            # Every other pixel, and channels of zeros on both sides
            missing = y.shape[1] - x.shape[1]
            sides = missing // 2, missing - missing // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *sides))
        return F.relu(y + x)


def vit(
    image_size: int,
    patch_size: int,
    *,
    width: int = 64,
    layers: int = 4,
    heads: int = 4,
    channels: int = 1,
    classes: int = 10,
) -> nn.Module:
    """Return a vision transformer without dropout (Dosovitskiy et al. 2021).

    It is ViTForImageClassification of transformers with an inner width of 4 `width`,
    takes [batch, channels, image_size, image_size] and returns the logits alone.

    Parameters
    ----------
    image_size, patch_size
        Side of the images and of a patch, in pixels.
    width
        Size of a token; a multiple of `heads`.
    layers, heads
        Number of blocks, and of heads in each.
    channels
        Channels of the images.
    classes
        Number of logits.

    Raises
    ------
    ValueError
        If `patch_size` does not divide `image_size`, or `heads` `width`.
    """
    if image_size % patch_size or width % heads:
        raise ValueError(
            "patch_size must divide image_size and heads must divide width, got "
            f"{image_size=}, {patch_size=}, {width=}, {heads=}"
        )
    with extra("models"):  # takes a second
        from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        num_channels=channels,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=classes,  # type: ignore[call-arg]
    )
    return plain_logits(ViTForImageClassification(config))


def embedded(classes: int = 10) -> nn.Module:
    """Return a small pretrained `vit` for grey images, with no download.

    It takes [batch, 1, 28, 28] in [0, 1] and has patches of 7 x 7, width 128 and 4
    blocks of 8 heads. It has seen letters, handwritten (EMNIST) and printed (notMNIST,
    `glyphs`); never MNIST, Fashion-MNIST or KMNIST, nor any digit.
    `tools/make_backbone.py` made it, and its `provenance` says how.

    Parameters
    ----------
    classes
        Number of logits. The classifier of the letters A to Z is kept for 26; else a
        new one is drawn from torch's global seed.
    """
    at_least("classes", classes)
    network = vit(28, 7, width=128, layers=4, heads=8, classes=classes)
    with safe_open(EMBEDDED, "pt") as file:
        state = {name: file.get_tensor(name).float() for name in file.keys()}
        network.provenance = json.loads(file.metadata()["provenance"])
    if classes != len(state["classifier.bias"]):
        for name in ("classifier.weight", "classifier.bias"):
            state[name] = network.state_dict()[name]
    network.load_state_dict(state)
    network.name = "uqlab.models.embedded"  # type: ignore[assignment]
    source = {"made_by": "embedded", "classes": classes}
    network.source = source  # type: ignore[assignment]
    return network.eval()
