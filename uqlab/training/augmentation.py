"""Augmentation: what changes the inputs of every batch at random."""

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_flip(
    x: Tensor, generators: list[torch.Generator], padding: int = 4, flip: bool = True
) -> Tensor:
    """Return random crops of the zero-padded images; every second is mirrored.

    Parameters
    ----------
    x
        Images [members, batch, channels, height, width].
    generators
        One a member.
    padding
        Pixels on each side.
    flip
        Whether images are mirrored, each with probability one half.
    """
    if x.ndim != 5 or len(generators) != len(x) or padding < 0:
        raise ValueError(
            "crop_flip takes x [members, batch, channels, height, width], a generator "
            "for each member and a padding of 0 or more, got "
            f"{list(x.shape)}, {len(generators)} generators and {padding}"
        )
    members, batch, _, height, width = x.shape
    size = (2, batch)
    corners = torch.stack(
        [torch.randint(2 * padding + 1, size, generator=g) for g in generators]
    ).to(x.device)
    mirrored = torch.stack(
        [torch.rand(batch, generator=g) < 0.5 * flip for g in generators]
    ).to(x.device)
    # All crops of all images, as a view: [members, batch, channels, down, right, ...].
    crops = F.pad(x, (padding,) * 4).unfold(3, height, 1).unfold(4, width, 1)
    m = torch.arange(members, device=x.device)[:, None]
    b = torch.arange(batch, device=x.device)
    crops = crops[m, b, :, corners[:, 0], corners[:, 1]]
    return torch.where(mirrored[:, :, None, None, None], crops.flip(-1), crops)
