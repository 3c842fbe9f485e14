"""What each head gives the class token, and how far it separates inputs in and out of distribution."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import count_samples, finite, representable
from uqlab.core.modules import Inputs, call, evaluating, hooked
from uqlab.heads.attention import Attention, attentions, linear, take


@torch.no_grad()
def head_features(model: nn.Module, inputs: Inputs, *, batch_size: int = 128) -> list[Tensor]:
    """What the heads give the first token, the class token, before the output projection (Hydra, B.2).

    For each layer [samples, heads, size], all of one pass, in evaluation mode and in the model's precision, on the CPU.
    Layers of a text tower are left out: they have no class token.
    """
    found = [attention for attention in attentions(model) if attention.tower != "text"]
    features: list[list[Tensor]] = [[] for _ in found]

    def keep(attention: Attention, into: list[Tensor]) -> Callable[[nn.Module, tuple], None]:
        return lambda _, args: into.append(args[0][:, 0].unflatten(-1, (attention.heads, attention.size)).cpu())

    hooks = (
        linear(model, attention.output).register_forward_pre_hook(keep(attention, into))
        for attention, into in zip(found, features, strict=True)
    )
    starts = range(0, count_samples(inputs), batch_size)
    with evaluating(model), hooked(hooks):
        for low in starts:
            call(model, take(model, inputs, slice(low, low + batch_size)))
    found = [torch.cat(parts) for parts in features]
    for each in found:
        representable("features", each)
    return found


class Separation(NamedTuple):
    """The distance between the means of the ID and the OOD features, for each head."""

    euclidean: Float[Tensor, " heads"]
    mahalanobis: Float[Tensor, " heads"]


def separation(
    id_features: Float[Tensor, "id heads size"], ood_features: Float[Tensor, "ood heads size"]
) -> Separation:
    """How far each head separates ID from OOD inputs: the distance between their means (Hydra, B.2). Float64.

    The Mahalanobis distance uses the covariance of the ID features (denominator id - 1). Its pseudo-inverse ignores
    directions in which the ID features do not vary. Raises ValueError for features of different heads or not finite.
    """
    a, b = id_features.double(), ood_features.double()
    if a.ndim != 3 or b.ndim != 3 or a.shape[1:] != b.shape[1:]:
        given = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(f"features must be [samples, heads, size] of the same heads, got {given}")
    if len(a) < 2 or not len(b):
        raise ValueError(f"needs at least 2 ID inputs and 1 OOD input, got {len(a)} and {len(b)}")
    finite("id_features", a)
    finite("ood_features", b)
    covariance = torch.stack([torch.atleast_2d(own.mT.cov()) for own in a.unbind(1)])  # [heads, size, size]
    difference = (a.mean(0) - b.mean(0)).unsqueeze(1)  # [heads, 1, size]
    squared = difference @ torch.linalg.pinv(covariance, hermitian=True) @ difference.mT
    return Separation(difference.norm(dim=(1, 2)), squared.flatten().clamp(min=0).sqrt())
