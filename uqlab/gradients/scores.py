"""Epistemic uncertainty of one pretrained classifier, from the gradients of its log-probabilities by its weights.

Let g_c be the gradient of log p_c(x) by the weights of a layer, frozen or not. A score is a weighted sum of the norms
||g_c|| over classes and layers: it is high where the weights would have to change much to change the prediction.
Where a norm has a closed form (`closed_forms`), the gradient of a sample is never computed.

The equations of REGrad (Wang and Ji, CVPR 2024, arXiv 2404.10124) were not available to us, only descriptions: an
expected gradient norm normalised by a square root, layer weights that grow exponentially with depth, and gradients
averaged over perturbed inputs. Readings A, B and C of the first are ours: call results "REGrad-style".

A model in training mode that has dropout or batch normalisation is switched to evaluation mode for the computation,
with a UserWarning. Afterwards it is as before: same modes, no gradients, no hooks.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from uqlab.core.checks import count_samples, finite, one_network, representable
from uqlab.core.devices import ACTIVATIONS, elements_of_temporary
from uqlab.core.modules import evaluating
from uqlab.gradients.per_sample import SampleGradients

Inputs = Shaped[Tensor, "samples ..."]
Scores = Float[Tensor, " samples"]
ClassWeight = Literal["p", "sqrt_p", "uniform", "predicted"]
Reduction = Literal["A", "B", "C"]
Layers = str | Sequence[str]


def exgrad(
    model: nn.Module,
    inputs: Inputs,
    *,
    norm: Literal[1, 2] = 1,
    layers: Layers = "last",
) -> Scores:
    """ExGrad, the expected gradient norm sum_c p_c ||g_c||: higher = more uncertain.

    The paper takes the last layer and the 1-norm. Over several layers this is the mean of the layers' norms. The
    arguments and the errors are those of `regrad`. Igoe et al. 2022, arXiv 2205.10439.
    """
    return regrad(
        model,
        inputs,
        class_weight="p",
        norm=norm,
        depth=0.0,
        perturbations=0,
        layers=layers,
    )


def regrad(
    model: nn.Module,
    inputs: Inputs,
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
    """REGrad-style score, A: sum_c w_c n_c with n_c = sum_l w_l ||g_c^(l)||: higher = more uncertain.

    model: any classifier that returns logits [samples, C], or an output that has them as `.logits`.
    class_weight: w_c of reading A: "p", "sqrt_p" = sqrt(p_c), "uniform" = 1/C, "predicted" = 1 for the top class.
        A score whose weights ignore the probabilities ("uniform") ranks inversely: confident predictions are high.
    depth: w_l = exp(depth l/(L-1)) / sum over the L layers from input (l = 0) to output; 0 weighs them equally.
        A layer is a module with parameters of its own, in the order in which the forward pass reaches it.
    perturbations: number of inputs x + eps_i, eps_i ~ N(0, sigma^2), with sigma in units of the inputs. Their gradients
        and the gradient at x are averaged before the norm is taken; p_c is the probability at x. All samples share the
        draws, so that a score depends only on its input and the seed.
    reduction: "A"; "B" = sqrt(sum_c p_c n_c^2), for one layer and norm 2 the root of the Fisher information's
        trace; "C" = sum_c p_c sqrt(n_c).
    layers: "all", "last", a regular expression searched in the layers' names, or a list of names.
    batch_size: inputs per pass; None for as many as keep the activations small.

    Raises ValueError for unknown switches and layers; for inputs or logits that are empty or not finite; for outputs
    that are not [samples, C] with C >= 2; for a model without parameters, with an output detached from them, or that
    mixes the samples of a batch; for perturbed integer inputs. Raises TypeError unless the model is one network, and
    its inputs and outputs are tensors. Wang and Ji 2024, arXiv 2404.10124, read as the module's docstring says.
    """
    _check_switches(class_weight, reduction, depth)

    def score(gradients: SampleGradients, x: Tensor) -> Tensor:
        return reduce_norms(
            *gradients.norms(x),
            class_weight=class_weight,
            reduction=reduction,
            depth=depth,
        )

    parts = _by_batch(
        score, model, inputs, layers, norm, batch_size, perturbations, sigma, seed
    )
    return torch.cat(parts).to(inputs.device)


def gradnorm(model: nn.Module, inputs: Inputs) -> Scores:
    """GradNorm, minus ||h||_1 sum_c |p_c - 1/C|: higher = more uncertain.

    The score of Huang et al. is the 1-norm of the gradient of KL(uniform || p) by the last layer's weights, without
    bias; h are this layer's inputs. Large norms mean confidence, hence the sign. Raises the errors of `regrad`, and
    ValueError unless the logits come from an nn.Linear on [samples, features]. Huang et al. 2021, arXiv 2110.00218.
    """

    def score(gradients: SampleGradients, x: Tensor) -> Tensor:
        h, log_p = gradients.head_inputs(x[:, 0])
        return -h.abs().sum(1) * (log_p.exp() - 1 / log_p.shape[1]).abs().sum(1)

    return torch.cat(_by_batch(score, model, inputs, "last", 1)).to(inputs.device)


def gradient_norms(
    model: nn.Module,
    inputs: Inputs,
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
    """Norms of the gradients of log p_c by each layer, the layers' names, and log p.

    The arguments and the errors are those of `regrad`. `reduce_norms` turns the result into scores, `layer_shares` into
    the share of each layer.
    """

    def measure(
        gradients: SampleGradients, x: Tensor
    ) -> tuple[Tensor, Tensor, list[str]]:
        return *gradients.norms(x), gradients.names

    parts = _by_batch(
        measure, model, inputs, layers, norm, batch_size, perturbations, sigma, seed
    )
    norms, log_p, names = zip(*parts, strict=True)
    return (
        torch.cat(norms, 1).to(inputs.device),
        names[0],
        torch.cat(log_p).to(inputs.device),
    )


def reduce_norms(
    norms: Float[Tensor, "layers samples classes"],
    log_p: Float[Tensor, "samples classes"],
    *,
    class_weight: ClassWeight = "sqrt_p",
    reduction: Reduction = "A",
    depth: float = 3.0,
) -> Scores:
    """The score of `regrad` from what `gradient_norms` returns; class_weight "p" and depth 0 give `exgrad`."""
    _check_switches(class_weight, reduction, depth)
    position = torch.linspace(0, 1, len(norms), dtype=norms.dtype, device=norms.device)
    n = torch.tensordot((depth * position).softmax(0), norms, 1)  # [samples, classes]
    if reduction == "A":
        return (_WEIGHTS[class_weight](log_p) * n).sum(1)
    p = log_p.exp()
    return (p * n.square()).sum(1).sqrt() if reduction == "B" else (p * n.sqrt()).sum(1)


def layer_shares(
    norms: Float[Tensor, "layers samples classes"],
    log_p: Float[Tensor, "samples classes"],
    *,
    class_weight: ClassWeight = "sqrt_p",
) -> Float[Tensor, "layers samples"]:
    """The share of each layer in sum_l sum_c w_c ||g_c^(l)||, layers unweighted; 0 for a sample without gradients."""
    _check_shapes(norms, log_p)
    parts = (norms * _WEIGHTS[class_weight](log_p)).sum(2)
    return parts / parts.sum(0).clamp(min=torch.finfo(parts.dtype).tiny)


_WEIGHTS: dict[
    str, Callable[[Tensor], Tensor]
] = {  # of the classes, from log p [samples, classes]
    "p": torch.exp,
    "sqrt_p": lambda log_p: (log_p / 2).exp(),
    "uniform": lambda log_p: torch.full_like(log_p, 1 / log_p.shape[1]),
    "predicted": lambda log_p: torch.zeros_like(log_p).scatter_(
        1, log_p.argmax(1, keepdim=True), 1.0
    ),
}


def _check_shapes(norms: Tensor, log_p: Tensor) -> None:
    if norms.shape[1:] != log_p.shape:
        raise ValueError(
            "norms [layers, samples, classes] and log_p [samples, classes] must be of the same samples and classes, "
            f"got {list(norms.shape)} and {list(log_p.shape)}"
        )
    finite("norms", norms)
    finite("log_p", log_p)


def _check_switches(class_weight: str, reduction: str, depth: float) -> None:
    if reduction != "A" and class_weight != "sqrt_p":
        raise ValueError(
            f"readings B and C weigh classes by p: leave class_weight out, got {class_weight!r}"
        )


def _by_batch(
    compute: Callable[[SampleGradients, Tensor], Any],
    model: nn.Module,
    inputs: Tensor,
    layers: Layers,
    norm: int,
    batch_size: int | None = None,
    perturbations: int = 0,
    sigma: float = 0.0,
    seed: int = 0,
) -> list[Any]:
    """`compute` for every batch [n, 1 + perturbations, ...], with the model in evaluation mode."""
    one_network(model, "uqlab.gradients")
    count_samples(inputs)
    if perturbations and sigma and not inputs.is_floating_point():
        raise ValueError(
            f"{inputs.dtype} inputs cannot be perturbed: set perturbations=0, or embed them first"
        )
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError(
            "the model has no parameters, so there are no gradients to measure"
        )
    like = {
        "device": parameter.device,
        "dtype": parameter.dtype if inputs.is_floating_point() else inputs.dtype,
    }
    noise = torch.zeros(1, *[1] * (inputs.ndim - 1), **like)  # [1 + perturbations, ...]
    if perturbations and sigma:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(
            perturbations, *inputs.shape[1:], generator=generator, dtype=like["dtype"]
        )
        noise = torch.cat([torch.zeros_like(drawn[:1]), drawn.mul_(sigma)]).to(
            parameter.device
        )
    _warn_of_training(model)
    with evaluating(model):
        other = inputs[-1:] if len(inputs) > 1 else torch.zeros_like(inputs)
        gradients = SampleGradients(
            model, torch.cat([other, inputs[:1]]).to(**like), layers, norm
        )
        fitting = max(
            1,
            elements_of_temporary(parameter.device, ACTIVATIONS)
            // (gradients.footprint * len(noise)),
        )
        parts = inputs.split(batch_size or fitting)
        results = [
            compute(gradients, part.to(**like).unsqueeze(1) + noise) for part in parts
        ]
    for each in results:
        representable(
            "inputs or perturbations", each if isinstance(each, Tensor) else each[0]
        )
    return results


def _warn_of_training(model: nn.Module) -> None:
    """Warn of modules in training mode that would give something else than in evaluation mode."""
    different = set()
    for part in model.modules():
        name = type(part).__name__
        rate = getattr(
            part, "p" if "Dropout" in name else "dropout", 0
        )  # attention and recurrent layers: .dropout
        if part.training and (
            "BatchNorm" in name or (isinstance(rate, int | float) and rate > 0)
        ):
            different.add(name)
    if different:
        warnings.warn(
            f"the model is in training mode and has {', '.join(sorted(different))}: gradients are taken in evaluation "
            "mode; call model.eval() to avoid this warning",
            UserWarning,
            stacklevel=5,
        )
