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
    _, batch, _, height, width = x.shape
    size = (2, batch, 1)
    corners = [torch.randint(2 * padding + 1, size, generator=g) for g in generators]
    down, right = torch.stack(corners, 1).to(x.device)  # [members, batch, 1] each
    draws = [torch.rand(batch, 1, generator=g) for g in generators]
    mirrored = torch.stack(draws).to(x.device) < 0.5 * flip
    rows = down + torch.arange(height, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    columns = torch.where(mirrored, columns.flip(-1), columns)
    cropped = F.pad(x, (padding,) * 4).take_along_dim(rows[:, :, None, :, None], 3)
    return cropped.take_along_dim(columns[:, :, None, None], 4)
