"""Epistemic uncertainty of one pretrained classifier, from gradients by its weights.

Let g_c be the gradient of log p_c(x) by the weights of a layer, frozen or not. A score
is a weighted sum of the norms ||g_c|| over classes and layers: it is high where the
weights would have to change much to change the prediction.

The equations of REGrad (Wang and Ji, CVPR 2024, arXiv 2404.10124) were not available to
us, only descriptions: an expected gradient norm normalised by a square root, layer
weights that grow exponentially with depth, and gradients averaged over perturbed
inputs. Readings A, B and C of the first are ours: call results "REGrad-style".

A model in training mode is switched to evaluation mode for the computation; afterwards
it is as before: same modes, no gradients, no hooks.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    InputsLike,
    as_one,
    as_tensor,
    at_least,
    finite,
    one_network,
    one_of,
    representable,
    within,
)
from uqlab.core.devices import ACTIVATIONS, elements_of_temporary, without_cudnn
from uqlab.core.modules import evaluating, like_parameters
from uqlab.gradients.per_sample import SampleGradients

Scores = Float[Tensor, " samples"]
ClassWeight = Literal["p", "sqrt_p", "uniform", "predicted"]
Reduction = Literal["A", "B", "C"]
Layers = str | Sequence[str]

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {  # from log p [samples, classes]
    "p": torch.exp,
    "sqrt_p": lambda log_p: (log_p / 2).exp(),
    "uniform": lambda log_p: torch.full_like(log_p, 1 / log_p.shape[1]),
    "predicted": lambda log_p: torch.zeros_like(log_p).scatter_(
        1, log_p.argmax(1, keepdim=True), 1.0
    ),
}


def exgrad(
    model: nn.Module,
    inputs: InputsLike,
    *,
    norm: Literal[1, 2] = 1,
    layers: Layers = "last",
) -> Scores:
    """Return ExGrad, the mean gradient norm sum_c p_c ||g_c||: higher = more uncertain.

    The paper takes the last layer and the 1-norm. Over several layers this is the mean
    of the layers' norms. Parameters and errors are those of `gradient_norms`.

    References
    ----------
    Igoe et al. 2022, arXiv 2205.10439.
    """
    norms, _, log_p = gradient_norms(model, inputs, norm=norm, layers=layers)
    return reduce_norms(norms, log_p, class_weight="p", depth=0.0)


def regrad(
    model: nn.Module,
    inputs: InputsLike,
    *,
    class_weight: ClassWeight = "sqrt_p",
    norm: Literal[1, 2] = 2,
    depth: float = 3.0,
    perturbations: int = 10,
    sigma: float = 0.02,
    seed: int = 0,
    reduction: Reduction = "A",
    layers: Layers = "all",
    batch_size: int | None = None,
) -> Scores:
    """Return a REGrad-style score: higher = more uncertain.

    Parameters
    ----------
    model, inputs, norm, perturbations, sigma, seed, layers, batch_size
        As in `gradient_norms`.
    class_weight, depth, reduction
        As in `reduce_norms`.

    References
    ----------
    Wang and Ji 2024, arXiv 2404.10124, read as the module's docstring says.
    """
    norms, _, log_p = gradient_norms(
        model,
        inputs,
        norm=norm,
        layers=layers,
        perturbations=perturbations,
        sigma=sigma,
        seed=seed,
        batch_size=batch_size,
    )
    return reduce_norms(
        norms, log_p, class_weight=class_weight, reduction=reduction, depth=depth
    )


def gradnorm(model: nn.Module, inputs: InputsLike) -> Scores:
    """Return GradNorm, minus ||h||_1 sum_c |p_c - 1/C|: higher = more uncertain.

    The score of Huang et al. is the 1-norm of the gradient of KL(uniform || p) by the
    last layer's weights, without bias; h are this layer's inputs. Large norms mean
    confidence, hence the sign.

    Raises
    ------
    TypeError, ValueError
        As `gradient_norms`; ValueError unless the logits come from an nn.Linear on
        [samples, features].

    References
    ----------
    Huang et al. 2021, arXiv 2110.00218.
    """

    def score(gradients, x):
        h, log_p = gradients.head_inputs(x)
        return (-h.abs().sum(1) * (log_p.exp() - 1 / log_p.shape[1]).abs().sum(1),)

    (scores,), _ = _by_batch(score, model, inputs, "last", 1)
    return scores


def gradient_norms(
    model: nn.Module,
    inputs: InputsLike,
    *,
    norm: Literal[1, 2] = 2,
    layers: Layers = "all",
    perturbations: int = 0,
    sigma: float = 0.02,
    seed: int = 0,
    batch_size: int | None = None,
) -> tuple[
    Float[Tensor, "layers samples classes"], list[str], Float[Tensor, "samples classes"]
]:
    """Return norms of the gradients of log p_c by layer, the layers' names, and log p.

    Parameters
    ----------
    model
        Any classifier that returns logits [samples, C], or an output that has them as
        `.logits`.
    inputs
        One tensor [samples, ...].
    norm
        The 1-norm or the 2-norm.
    layers
        "all", "last", a regular expression searched in the layers' names, or a list of
        names. A layer is a module with parameters of its own, in the order in which the
        forward pass reaches it.
    perturbations
        How many inputs x + eps_i, eps_i ~ N(0, sigma^2), there are. Their gradients and
        the gradient at x are averaged before the norm is taken; p_c is the probability
        at x. All samples share the draws, so that a score depends only on its input and
        the seed.
    sigma
        Deviation of the perturbations, in units of the inputs.
    batch_size
        Inputs a pass; None for as many as keep the activations small.

    Raises
    ------
    TypeError
        Unless the model is one network, and its inputs and outputs are tensors.
    ValueError
        For unknown layers; for inputs or logits that are empty or not finite; for
        outputs that are not [samples, C] with C >= 2; for a model without parameters,
        with an output detached from them, or that mixes the samples of a batch; for
        perturbed integer inputs.

    Example
    -------
    The gradient of log p_0 by one weight, 2, and one bias, at p = (1/2, 1/2) and x = 2:

    >>> head = nn.Linear(1, 2)
    >>> _ = nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    >>> gradient_norms(head, [[2.0]])[0]  # (sqrt(1/2) * sqrt(2 ** 2 + 1 ** 2))
    tensor([[[1.5811, 1.5811]]])
    """
    one_of("norm", norm, (1, 2))
    copies = 1 + at_least("perturbations", perturbations, 0)
    within("sigma", sigma, "[0, inf)")

    def measure(gradients, x):
        perturbed = x.unsqueeze(1)
        if copies > 1 and sigma:
            perturbed = perturbed + _noise(x[0], perturbations, sigma, seed)
        return gradients.norms(perturbed)

    (norms, log_p), names = _by_batch(
        measure, model, inputs, layers, norm, copies, batch_size
    )
    return norms.movedim(0, 1), names, log_p


def reduce_norms(
    norms: ArrayLike,
    log_p: ArrayLike,
    *,
    class_weight: ClassWeight = "sqrt_p",
    reduction: Reduction = "A",
    depth: float = 3.0,
) -> Scores:
    """Return the score of `regrad` from what `gradient_norms` returns.

    With n_c = sum_l w_l ||g_c^(l)||, the score is, by reduction, "A": sum_c w_c n_c;
    "B": sqrt(sum_c p_c n_c^2), for one layer and norm 2 the root of the trace of the
    Fisher information; "C": sum_c p_c sqrt(n_c). "A" with class weight "p" and depth 0
    is `exgrad`.

    Parameters
    ----------
    norms
        [layers, samples, classes].
    log_p
        [samples, classes].
    class_weight
        w_c of "A": "p", "sqrt_p" = sqrt(p_c), "uniform" = 1/C, "predicted" = 1 for the
        top class. A score whose weights ignore the probabilities ("uniform") ranks
        inversely: confident predictions are high.
    depth
        w_l = exp(depth l/(L-1)) / sum over the L layers from input (l = 0) to output; 0
        weighs them equally.
    """
    one_of("reduction", reduction, ("A", "B", "C"))
    within("depth", depth, "(-inf, inf)")
    if reduction != "A" and class_weight != "sqrt_p":
        raise ValueError(
            "readings B and C weigh classes by p: leave class_weight out, "
            f"got {class_weight!r}"
        )
    norms, log_p, weights = _weighed(norms, log_p, class_weight)
    position = torch.linspace(0, 1, len(norms), dtype=norms.dtype, device=norms.device)
    n = torch.tensordot((depth * position).softmax(0), norms, 1)  # [samples, classes]
    if reduction == "A":
        return (weights * n).sum(1)
    p = log_p.exp()
    return (p * n.square()).sum(1).sqrt() if reduction == "B" else (p * n.sqrt()).sum(1)


def layer_shares(
    norms: ArrayLike, log_p: ArrayLike, *, class_weight: ClassWeight = "sqrt_p"
) -> Float[Tensor, "layers samples"]:
    """Return the share of each layer in sum_l sum_c w_c ||g_c^(l)||, layers unweighted.

    It is 0 for a sample without gradients. Parameters as in `reduce_norms`.
    """
    norms, _, weights = _weighed(norms, log_p, class_weight)
    sums = (norms * weights).sum(2)
    return sums / sums.sum(0).clamp(min=torch.finfo(sums.dtype).tiny)


def _weighed(
    norms: ArrayLike, log_p: ArrayLike, class_weight: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and log p as tensors, and the weights of the classes."""
    one_of("class_weight", class_weight, WEIGHTS)
    norms = as_tensor("norms", norms, "layers samples classes")
    log_p = as_tensor("log_p", log_p, "samples classes")
    if norms.shape[1:] != log_p.shape:
        raise ValueError(
            "norms [layers, samples, classes] and log_p [samples, classes] must be of "
            f"the same samples and classes, got {list(norms.shape)} and "
            f"{list(log_p.shape)}"
        )
    finite("norms", norms)
    finite("log_p", log_p)
    return norms, log_p, WEIGHTS[class_weight](log_p)


def _by_batch(
    compute: Callable[[SampleGradients, Tensor], Sequence[Tensor]],
    model: nn.Module,
    inputs: InputsLike,
    layers: Layers,
    norm: int,
    copies: int = 1,
    batch_size: int | None = None,
) -> tuple[list[Tensor], list[str]]:
    """Return what is computed for batches of the inputs, joined, and the layers."""
    one_network(model, "uqlab.gradients")
    if isinstance(model, nn.DataParallel):  # torch.func cannot run it
        model = model.module
    x = as_one(inputs)
    device = x.device
    x = like_parameters(model, x)
    with evaluating(model), without_cudnn(model):
        other = x[-1:] if len(x) > 1 else torch.zeros_like(x)
        gradients = SampleGradients(model, torch.cat([other, x[:1]]), layers, norm)
        room = elements_of_temporary(x.device, ACTIVATIONS)
        fitting = max(1, room // (gradients.footprint * copies))
        batches = x.split(fitting if batch_size is None else batch_size)
        results = [compute(gradients, batch) for batch in batches]
    joined = [torch.cat(tensors).to(device) for tensors in zip(*results, strict=True)]
    representable("inputs or perturbations", joined[0])
    return joined, gradients.names


def _noise(x: Tensor, perturbations: int, sigma: float, seed: int) -> Tensor:
    """Return what is added to an input, [1 + perturbations, ...]: first nothing."""
    if not x.is_floating_point():
        raise ValueError(
            f"{x.dtype} inputs cannot be perturbed: set perturbations=0, "
            "or embed them first"
        )
    generator = torch.Generator().manual_seed(seed)
    shape = (perturbations, *x.shape)
    drawn = torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device)
    return torch.cat([torch.zeros_like(x[None]), sigma * drawn])
