"""Photographs made worse, by the definitions of CIFAR-10-C."""

import io
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.ndimage import gaussian_filter
from torch import Tensor

from uqlab.core.checks import ArrayLike, as_tensor, one_of
from uqlab.core.extras import extra

CORRUPTIONS = {  # the parameter of severity 1 to 5
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "shot_noise": (500.0, 250.0, 100.0, 75.0, 50.0),  # photons
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share, half of it black
    "gaussian_blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation, pixels
    "brightness": (0.05, 0.10, 0.15, 0.20, 0.30),  # added to the value of HSV
    "contrast": (0.75, 0.50, 0.40, 0.30, 0.15),  # share that remains
    "pixelate": (0.95, 0.90, 0.85, 0.75, 0.65),  # share of the pixels of a side
    "jpeg": (80.0, 65.0, 58.0, 50.0, 40.0),  # quality
}


def corrupted(
    images: ArrayLike, kind: str, severity: int, seed: int = 0
) -> Float[Tensor, "samples channels height width"]:
    """Corrupt colour images in one of eight ways of CIFAR-10-C.

    Parameters
    ----------
    images
        [samples, 3, height, width], in [0, 1]. The severities are made for 32 x 32
        pixels.
    kind
        A name in CORRUPTIONS.
    severity
        1 to 5.
    seed
        Of the noise.

    Returns
    -------
    Tensor
        As `images`, in [0, 1].

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
    images = as_tensor("images", images, "samples channels height width")
    level = CORRUPTIONS[kind][severity - 1]
    change = _noisy if kind.endswith("noise") else _changed
    changed = change(images.cpu(), kind, level, torch.Generator().manual_seed(seed))
    return changed.clamp(0, 1).to(images)


def _noisy(x: Tensor, kind: str, level: float, generator: torch.Generator) -> Tensor:
    if kind == "gaussian_noise":
        return x + level * torch.randn(x.shape, generator=generator)
    if kind == "shot_noise":
        return torch.poisson(x * level, generator=generator) / level
    drawn = torch.rand(x.shape, generator=generator)
    return torch.where(drawn < level, (drawn < level / 2).to(x), x)


def _changed(x: Tensor, kind: str, level: float, _: Any) -> Tensor:
    if kind == "gaussian_blur":
        sigma = (0, 0, level, level)
        return torch.from_numpy(gaussian_filter(x.numpy(), sigma, mode="nearest"))
    if kind == "brightness":
        value = x.amax(1, keepdim=True)
        raised = (value + level).clamp(max=1)
        return torch.where(value > 0, x * raised / value, raised)
    if kind == "contrast":
        mean = x.mean((2, 3), keepdim=True)
        return mean + level * (x - mean)
    pictures = (255 * x).round().byte().permute(0, 2, 3, 1).numpy()
    made = [np.asarray(_picture(each, kind, level)) for each in pictures]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).to(x) / 255


def _picture(pixels: np.ndarray, kind: str, level: float) -> Any:
    """Return one picture of 8 bits with fewer pixels, or as a JPEG file keeps it."""
    with extra("notebooks"):
        from PIL import Image
    picture = Image.fromarray(pixels)
    if kind == "pixelate":
        box = Image.Resampling.BOX
        small = picture.resize([int(level * side) for side in picture.size], box)
        return small.resize(picture.size, box)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=int(level))
    return Image.open(file)
