"""Photographs made worse, by the definitions of CIFAR-10-C."""

import io
import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d, pad

from uqlab.core.checks import ArrayLike, as_tensor, one_of
from uqlab.core.extras import extra

Images = Float[Tensor, "samples channels height width"]
Change = Callable[[Tensor, float, torch.Generator], Tensor]


def _gaussian_noise(x, deviation, generator):
    return x + deviation * torch.randn(x.shape, generator=generator)


def _shot_noise(x, photons, generator):
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x, share, generator):
    """Make a share of all numbers black or white, each with the same probability."""
    drawn = torch.rand(x.shape, generator=generator)
    return torch.where(drawn < share, (drawn < share / 2).to(x), x)


def _gaussian_blur(x, deviation, generator):
    reach = math.ceil(4 * deviation)
    steps = torch.arange(-reach, reach + 1)
    kernel = torch.exp(-((steps / deviation) ** 2) / 2)
    kernel = (kernel / kernel.sum()).repeat(x.shape[1], 1, 1, 1).to(x)
    x = pad(x, [reach] * 4, mode="replicate")
    x = conv2d(x, kernel, groups=x.shape[1])
    return conv2d(x, kernel.transpose(2, 3), groups=x.shape[1])


def _brightness(x, more, generator):
    """Raise the value of hue, saturation and value, which is the largest channel."""
    value = x.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, x * raised / value, raised)


def _contrast(x, share, generator):
    mean = x.mean((2, 3), keepdim=True)
    return mean + share * (x - mean)


def _by_picture(x, change):
    """Return what a change of 8-bit pictures makes of each."""
    with extra("notebooks"):
        from PIL import Image
    rows = (255 * x).round().byte().permute(0, 2, 3, 1).numpy()
    made = [np.asarray(change(Image, Image.fromarray(row))) for row in rows]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).to(x) / 255


def _pixelate(x, share, generator):
    def change(Image, picture):
        few = [int(share * side) for side in picture.size]
        box = Image.Resampling.BOX
        return picture.resize(few, box).resize(picture.size, box)

    return _by_picture(x, change)


def _jpeg(x, quality, generator):
    def change(Image, picture):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        return Image.open(file)

    return _by_picture(x, change)


# What each does, with the parameter of severity 1 to 5.
CORRUPTIONS: dict[str, tuple[Change, tuple[float, ...]]] = {
    "gaussian_noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "brightness": (_brightness, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (_contrast, (0.75, 0.50, 0.40, 0.30, 0.15)),
    "pixelate": (_pixelate, (0.95, 0.90, 0.85, 0.75, 0.65)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}


def corrupted(images: ArrayLike, kind: str, severity: int, seed: int = 0) -> Images:
    """Return colour images with one of eight corruptions of CIFAR-10-C.

    Parameters
    ----------
    images
        [samples, 3, height, width], in [0, 1]. The severities are made for 32 x 32
        pixels.
    kind
        One of CORRUPTIONS: noise of a sensor ("gaussian_noise", "shot_noise",
        "impulse_noise"), "gaussian_blur", light ("brightness", "contrast"), and what
        files do ("pixelate", "jpeg").
    severity
        1 to 5.
    seed
        Of the noise.

    Returns
    -------
    Tensor
        As `images`, in [0, 1].

    Raises
    ------
    ValueError
        For another kind or severity.

    References
    ----------
    Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common
    Corruptions and Perturbations, ICLR 2019.

    Examples
    --------
    >>> grey = torch.full((1, 3, 2, 2), 0.5)
    >>> corrupted(grey, "brightness", 2).unique()
    tensor([0.6000])
    """
    one_of("kind", kind, CORRUPTIONS)
    one_of("severity", severity, (1, 2, 3, 4, 5))
    change, strengths = CORRUPTIONS[kind]
    generator = torch.Generator().manual_seed(seed)
    images = as_tensor("images", images, "samples channels height width")
    made = change(images.cpu(), strengths[severity - 1], generator)
    return made.clamp(0, 1).to(images)
