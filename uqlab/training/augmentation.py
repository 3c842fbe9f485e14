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
    members, batch, _, height, width = x.shape
    if len(generators) != members:
        raise ValueError(f"{members} members need as many generators")
    places = 2 * padding + 1
    size = (2, batch)
    corners = [torch.randint(places, size, generator=g) for g in generators]
    down, right = torch.stack(corners, dim=1).to(x.device)  # [members, batch] each
    draws = [torch.rand(batch, generator=g) for g in generators]
    mirrored = torch.stack(draws).to(x.device) < 0.5 * flip
    # All crops of all images, as a view: [members, batch, channels, down, right, ...].
    crops = F.pad(x, (padding,) * 4).unfold(3, height, 1).unfold(4, width, 1)
    m = torch.arange(members, device=x.device)[:, None]
    b = torch.arange(batch, device=x.device)
    crops = crops[m, b, :, down, right]
    return torch.where(mirrored.view(members, batch, 1, 1, 1), crops.flip(-1), crops)
