"""Features of single heads, and how well they separate ID from OOD inputs."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    as_inputs,
    as_tensor,
    count,
    finite,
    representable,
)
from uqlab.core.modules import batches, call, evaluating, hooked
from uqlab.models import attentions


@torch.no_grad()
def head_features(
    model: nn.Module, inputs: Any, *, batch_size: int = 128
) -> list[Tensor]:
    """Compute each head's output for the class token, which is the first (Hydra, B.2).

    Parameters
    ----------
    model : nn.Module
        A network that `shape` accepts. It runs in evaluation mode.
    inputs
        A tensor [samples, ...], or tensors by name.
    batch_size : int
        Samples in one pass.

    Returns
    -------
    list of Tensor
        Features [samples, heads, size] of each layer, before the output projection, in
        the model's precision, on the CPU. A text tower has no class token, so its
        layers are left out.

    Raises
    ------
    ValueError
        If the network has no class token: its attention looks at windows, or only at
        earlier tokens (GPT-2), so that the first token sees no other. If its output
        projection is no layer that is called, as in nn.MultiheadAttention.
    """
    inputs = as_inputs(inputs)
    layers = [layer for layer in attentions(model) if layer.tower != "text"]
    kind = type(model).__name__
    if any(getattr(part, "is_causal", False) for part in model.modules()):
        raise ValueError(f"{kind} has no class token: its first token sees no other")
    first = {model.get_submodule(layer.output.module): [] for layer in layers}

    def note(projection, args):
        first[projection].append(args[0][:, 0].cpu())

    with evaluating(model), hooked(p.register_forward_pre_hook(note) for p in first):
        for _, batch in batches(model, inputs, batch_size):
            call(model, batch)
    features = []
    for layer, parts in zip(layers, first.values(), strict=True):
        if sum(map(len, parts)) != count(inputs):
            raise ValueError(
                f"{kind} attends to windows, which have no class token, or its output "
                "projection is not called, as in nn.MultiheadAttention"
            )
        joined = torch.cat(parts)  # [samples, heads * size]
        representable("features", joined)
        features.append(joined.unflatten(-1, (layer.heads, layer.size)))
    return features


class Separation(NamedTuple):
    """The distance between the means of ID and OOD features, for each head."""

    euclidean: Float[Tensor, " heads"]
    mahalanobis: Float[Tensor, " heads"]


def separation(id_features: ArrayLike, ood_features: ArrayLike) -> Separation:
    """Measure how far each head separates inputs in and out of distribution.

    The result is the distance between the means of their features (Hydra, B.2). The
    Mahalanobis distance uses the covariance of the ID features (denominator samples -
    1). Its pseudo-inverse ignores directions without variance.

    Parameters
    ----------
    id_features, ood_features
        Features [samples, heads, size] of one layer, such as those of `head_features`.

    Returns
    -------
    Separation
        Two distances [heads], float64.

    Raises
    ------
    ValueError
        If the two have different heads or head sizes, if there are fewer than 2 ID
        inputs or no OOD input, or if a feature is not finite.

    Examples
    --------
    >>> known = torch.tensor([[[0.0]], [[2.0]]])
    >>> separation(known, known + 3).euclidean
    tensor([3.], dtype=torch.float64)
    """
    axes = "samples heads size"
    a = as_tensor("id_features", id_features, axes).double()
    b = as_tensor("ood_features", ood_features, axes).double()
    if a.shape[1:] != b.shape[1:]:
        given = f"{list(a.shape)} and {list(b.shape)}"
        raise ValueError(
            "`id_features` and `ood_features` must have the same heads, got " + given
        )
    if len(a) < 2 or not len(b):
        raise ValueError(
            f"give at least 2 ID inputs and 1 OOD input, got {len(a)} and {len(b)}"
        )
    finite("id_features", a)
    finite("ood_features", b)
    centred = a - a.mean(0)
    covariance = torch.einsum("nhi,nhj->hij", centred, centred) / (len(a) - 1)
    difference = (a.mean(0) - b.mean(0)).unsqueeze(1)  # [heads, 1, size]
    inverse = torch.linalg.pinv(covariance, hermitian=True)
    squared = (difference @ inverse @ difference.mT).flatten().clamp(min=0)
    return Separation(difference.norm(dim=(1, 2)), squared.sqrt())
