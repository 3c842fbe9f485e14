"""What each head gives the class token, and how far it separates inputs in and out of distribution."""

import operator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import at_least, count_samples, finite
from uqlab.core.modules import Inputs, call, evaluating, hooked
from uqlab.heads.attention import attentions, linear, take


@torch.no_grad()
def head_features(
    model: nn.Module, inputs: Inputs, layer: int = -1, *, batch_size: int = 128
) -> Float[Tensor, "samples heads size"]:
    """What each head of a layer gives the first token, the class token, before the output projection (Hydra, B.2).

    In evaluation mode and in the model's precision, on the CPU. A negative layer counts from the last. Raises
    ValueError for a layer that does not exist, has no heads left, or belongs to a text tower.
    """
    found = attentions(model)
    if not -len(found) <= operator.index(layer) < len(found):
        raise ValueError(f"layer must be {-len(found)} to {len(found) - 1}, got {layer}")
    attention = found[layer]
    if attention.tower == "text":
        raise ValueError(f"layer {layer} is one of the text tower, which has no class token")
    if not attention.heads:
        raise ValueError(f"layer {layer} has no heads left")
    at_least("batch_size", batch_size)
    features: list[Tensor] = []

    def keep(_: nn.Module, args: tuple) -> None:
        features.append(args[0][:, 0].unflatten(-1, (attention.heads, attention.size)).cpu())

    starts = range(0, count_samples(inputs), batch_size)
    with evaluating(model), hooked([linear(model, attention.output).register_forward_pre_hook(keep)]):
        for low in starts:
            call(model, take(model, inputs, slice(low, low + batch_size)))
    return torch.cat(features)


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
