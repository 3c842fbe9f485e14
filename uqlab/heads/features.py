"""What each head gives the class token, and how far it separates inputs in and out of distribution."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import count_samples, finite, representable
from uqlab.core.modules import Inputs, call, evaluating, hooked, sharing_copy
from uqlab.heads.attention import take
from uqlab.heads.cutting import opened
from uqlab.models import Attention, attentions


@torch.no_grad()
def head_features(
    model: nn.Module, inputs: Inputs, *, batch_size: int = 128
) -> list[Tensor]:
    """Compute what each head gives the first token, the class token (Hydra, B.2).

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts; it is used in evaluation mode.
    inputs
        A tensor [samples, ...], or tensors by name.
    batch_size : int
        Samples in one pass.

    Returns
    -------
    list of Tensor
        For each layer [samples, heads, size], before the output projection, in the
        model's precision, on the CPU. Layers of a text tower are left out: they have no
        class token.

    Raises
    ------
    ValueError
        If the attention looks at windows, which have no class token.
    """
    network = opened(sharing_copy(model))
    found = [each for each in attentions(network) if each.tower != "text"]
    features: list[list[Tensor]] = [[] for _ in found]
    count = count_samples(inputs)

    def keep(attention: Attention, into: list[Tensor]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple) -> None:
            first = args[0][:, 0]  # [batch, heads * size]
            into.append(first.unflatten(-1, (attention.heads, attention.size)).cpu())

        return hook

    handles = []
    for attention, into in zip(found, features, strict=True):
        projection = network.get_submodule(attention.output.module)
        handles.append(projection.register_forward_pre_hook(keep(attention, into)))
    with evaluating(network), hooked(handles):
        for low in range(0, count, batch_size):
            call(network, take(network, inputs, slice(low, low + batch_size)))
    joined = [torch.cat(parts) for parts in features]
    for each in joined:
        if len(each) != count:
            kind = type(model).__name__
            raise ValueError(f"{kind} attends to windows, which have no class token")
        representable("features", each)
    return joined


class Separation(NamedTuple):
    """The distance between the means of the ID and the OOD features, for each head."""

    euclidean: Float[Tensor, " heads"]
    mahalanobis: Float[Tensor, " heads"]


def separation(
    id_features: Float[Tensor, "id heads size"],
    ood_features: Float[Tensor, "ood heads size"],
) -> Separation:
    """How far each head separates ID from OOD inputs: the distance between their means (Hydra, B.2). Float64.

    The Mahalanobis distance uses the covariance of the ID features (denominator id - 1). Its pseudo-inverse ignores
    directions in which the ID features do not vary. Raises ValueError for features of different heads or not finite.
    """
    a, b = id_features.double(), ood_features.double()
    if a.ndim != 3 or b.ndim != 3 or a.shape[1:] != b.shape[1:]:
        given = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(
            f"features must be [samples, heads, size] of the same heads, got {given}"
        )
    if len(a) < 2 or not len(b):
        raise ValueError(
            f"needs at least 2 ID inputs and 1 OOD input, got {len(a)} and {len(b)}"
        )
    finite("id_features", a)
    finite("ood_features", b)
    covariance = torch.stack(
        [torch.atleast_2d(own.mT.cov()) for own in a.unbind(1)]
    )  # [heads, size, size]
    difference = (a.mean(0) - b.mean(0)).unsqueeze(1)  # [heads, 1, size]
    squared = difference @ torch.linalg.pinv(covariance, hermitian=True) @ difference.mT
    return Separation(
        difference.norm(dim=(1, 2)), squared.flatten().clamp(min=0).sqrt()
    )
