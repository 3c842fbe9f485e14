"""Epistemic uncertainty of one pretrained classifier, from the gradients of its log-probabilities by its weights.

With g_c the gradient of log p_c(x) by the weights of a layer and ||g_c|| its norm, a score is a sum over classes and
layers of such norms: high where the model would have to move far to believe something else. Everything starts from
`gradient_norms`, [layers, samples, classes]; the scores are reductions of it. Gradients are by all weights, frozen or
not, and no sample's gradient is formed where its norm has a closed form (`_ghost`).

The equations of REGrad (Wang and Ji, CVPR 2024, arXiv 2404.10124) were not available to us, only descriptions: an
expected gradient norm normalised by a square root, layer weights that grow exponentially with depth, gradients averaged
over perturbed inputs. Readings A, B and C of the first are ours: call results "REGrad-style".

Models are evaluated: one in training mode with dropout or batch normalisation is switched for the computation and back,
with a UserWarning. The model is left as it was: no gradients, no hooks.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from uqlab.gradients.per_sample import SampleGradients

Inputs = Shaped[Tensor, "samples ..."]
Scores = Float[Tensor, " samples"]
ClassWeight = Literal["p", "sqrt_p", "uniform", "predicted"]
Reduction = Literal["A", "B", "C"]

# Floats that one pass keeps as activations: 16 MiB of float32 on a CPU, where more does not pay.
_ACTIVATIONS = {"cpu": 2**22, "cuda": 2**27}


def exgrad(
    model: nn.Module,
    inputs: Inputs,
    *,
    norm: Literal[1, 2] = 1,
    layers: str | Sequence[str] = "last",
    depth: float = 0.0,
    perturbations: int = 0,
    sigma: float = 0.02,
    seed: int = 0,
    classes: int | None = None,
    return_error: bool = False,
    batch_size: int | None = None,
) -> Scores | tuple[Scores, Scores]:
    """ExGrad, the expected gradient norm sum_c p_c ||g_c||: [samples], higher = more uncertain.

    The paper takes the last layer and the 1-norm; over several layers this is the mean of their norms (depth = 0). The
    other arguments are those of `regrad`, which raises the same errors. Igoe et al. 2022, arXiv 2205.10439.
    """
    settings = {"perturbations": perturbations, "sigma": sigma, "seed": seed, "batch_size": batch_size}
    return _score(model, inputs, layers, norm, ("p", "A", depth), classes, return_error, **settings)


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
    layers: str | Sequence[str] = "all",
    classes: int | None = None,
    return_error: bool = False,
    batch_size: int | None = None,
) -> Scores | tuple[Scores, Scores]:
    """REGrad-style score, A: sum_c w_c n_c with n_c = sum_l w_l ||g_c^(l)||: [samples], higher = more uncertain.

    Args:
        model: any classifier, inputs -> logits [samples, C] or an output that has them as `.logits`.
        inputs: [samples, ...]; one batch is moved to the model's device and dtype at a time.
        class_weight: w_c of reading A: "p", "sqrt_p" = sqrt(p_c), "uniform" = 1/C, "predicted" = 1 for the top class.
            Without probabilities in it ("uniform") a score ranks inversely: it is high for confident predictions.
        norm: 1 or 2.
        depth: w_l = exp(depth l/(L-1)) / sum over the L layers from input (l = 0) to output; 0 weighs them equally.
            A layer is a module with parameters of its own, in the order in which the forward pass reaches it.
        perturbations: number N of inputs x + eps_i, eps_i ~ N(0, sigma^2), whose gradients are averaged with that at x
            before the norm is taken; p_c is that at x. All samples share the N draws, so that a score depends on its
            input and the seed alone. 0, or sigma = 0, is the plain score.
        sigma: standard deviation, in units of the inputs.
        reduction: "A"; "B" = sqrt(sum_c p_c n_c^2), for one layer and norm 2 the root of the Fisher information's
            trace; "C" = sum_c p_c sqrt(n_c).
        layers: "all", "last", a regular expression searched in the layers' names, or a list of names.
        classes: None for the sum over all classes; an integer samples so many of them per input, with replacement and
            probability proportional to their weight. A and C are then unbiased; B is the root of an unbiased sum.
        return_error: return (scores, standard errors); 0 without sampling, B's by the delta method.
        batch_size: inputs per pass, None for as many as keep the activations small.

    Raises:
        ValueError: for unknown switches and layers, empty or not finite inputs or logits, outputs that are not
            [samples, C] with C >= 2, a model without parameters or with an output detached from them, a model that
            mixes the samples of a batch, perturbed integer inputs.
        TypeError: if model is no module, inputs or outputs are no tensors.

    Wang and Ji 2024, arXiv 2404.10124, read as the module's docstring says.
    """
    settings = {"perturbations": perturbations, "sigma": sigma, "seed": seed, "batch_size": batch_size}
    return _score(model, inputs, layers, norm, (class_weight, reduction, depth), classes, return_error, **settings)


def gradnorm(model: nn.Module, inputs: Inputs, *, batch_size: int | None = None) -> Scores:
    """GradNorm, minus ||h||_1 sum_c |p_c - 1/C|: [samples], higher = more uncertain.

    Huang et al.'s score is the 1-norm of the gradient of KL(uniform || p) by the last layer's weights (without bias),
    with h its inputs. Large norms mean confidence, hence the sign. Raises the errors of `regrad`, and ValueError unless
    the logits come from an nn.Linear on [samples, features]. Huang et al. 2021, arXiv 2110.00218.
    """
    parts = []
    with _prepared(model, inputs, "last", 1, batch_size=batch_size) as (gradients, batches):
        if gradients.head is None:
            raise ValueError(
                "gradnorm needs logits that come straight from an nn.Linear on [samples, features]; the last layer, "
                f"{gradients.names[-1]!r}, is not; exgrad takes any"
            )
        for x, _ in batches:
            h, log_p = gradients.head_inputs(x[:, 0])
            parts.append(h.abs().sum(1) * (log_p.exp() - 1 / log_p.shape[1]).abs().sum(1))
    return torch.cat(parts).neg().to(inputs.device)


def gradient_norms(
    model: nn.Module,
    inputs: Inputs,
    *,
    norm: Literal[1, 2] = 2,
    layers: str | Sequence[str] = "all",
    perturbations: int = 0,
    sigma: float = 0.02,
    seed: int = 0,
    classes: Int[Tensor, "samples drawn"] | None = None,
    batch_size: int | None = None,
) -> tuple[Float[Tensor, "layers samples drawn"], list[str], Float[Tensor, "samples classes"]]:
    """Norms of the gradients of log p_c by each layer: (norms [layers, samples, C], layer names, log p [samples, C]).

    With `classes` [samples, drawn], the norms of those classes of each sample alone. The other arguments and the errors
    are those of `regrad`; `reduce_norms` makes scores of the result, `layer_shares` says where the gradient lives.
    """
    norms, log_ps = [], []
    settings = {"perturbations": perturbations, "sigma": sigma, "seed": seed, "batch_size": batch_size}
    with _prepared(model, inputs, layers, norm, **settings) as (gradients, batches):
        if classes is not None and (classes.ndim != 2 or len(classes) != len(inputs) or classes.is_floating_point()):
            raise ValueError(f"classes must be integers [samples, drawn], got {classes.dtype} {list(classes.shape)}")
        for x, at in batches:
            pick = None if classes is None else lambda log_p, at=at: classes[at].to(log_p.device)
            part, log_p, _ = gradients.norms(x, pick)
            norms.append(part)
            log_ps.append(log_p)
    return torch.cat(norms, 1).to(inputs.device), gradients.names, torch.cat(log_ps).to(inputs.device)


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
    return _reduce(norms, log_p, None, class_weight, reduction, depth)[0]


def layer_shares(
    norms: Float[Tensor, "layers samples classes"],
    log_p: Float[Tensor, "samples classes"],
    *,
    class_weight: ClassWeight = "sqrt_p",
) -> Float[Tensor, "layers samples"]:
    """Share of each layer in sum_l sum_c w_c ||g_c^(l)||, layers unweighted; 0 for a sample without gradients."""
    _check_switches(class_weight, "A", 0.0)
    parts = (norms * _class_weights(log_p, class_weight)).sum(2)
    return parts / parts.sum(0).clamp(min=torch.finfo(parts.dtype).tiny)


def _score(
    model: nn.Module,
    inputs: Tensor,
    layers: str | Sequence[str],
    norm: int,
    switches: tuple[Any, Any, float],
    classes: int | None,
    return_error: bool,
    **settings: Any,
) -> Scores | tuple[Scores, Scores]:
    _check_switches(*switches)
    if classes is not None and (not isinstance(classes, int) or classes < 2):
        raise ValueError(f"classes must be None (all) or a sample of at least 2 per input, got {classes!r}")
    parts = []
    with _prepared(model, inputs, layers, norm, **settings) as (gradients, batches):
        uniform = torch.empty(0)
        if classes is not None:  # drawn for all samples at once, so that batches make no difference
            uniform = torch.rand(len(inputs), classes, generator=torch.Generator().manual_seed(settings["seed"]))
        for x, at in batches:
            pick = None if classes is None else lambda log_p, u=uniform[at]: _draw(_weights(log_p, *switches[:2]), u)
            norms, log_p, targets = gradients.norms(x, pick)
            parts.append(torch.stack(_reduce(norms, log_p, None if pick is None else targets, *switches)))
    scores, errors = torch.cat(parts, 1).to(inputs.device)
    return (scores, errors) if return_error else scores


def _reduce(
    norms: Tensor, log_p: Tensor, drawn: Tensor | None, class_weight: str, reduction: str, depth: float
) -> tuple[Tensor, Tensor]:
    """(score, standard error), each [samples], from norms of all classes, or of classes drawn by their weights."""
    position = torch.linspace(0, 1, len(norms), dtype=norms.dtype, device=norms.device)
    n = torch.tensordot((depth * position).softmax(0), norms, 1)  # [samples, classes]
    n = {"A": n, "B": n.square(), "C": n.sqrt()}[reduction]
    weights = _weights(log_p, class_weight, reduction)
    if drawn is None:
        score = (weights * n).sum(1)
        error = torch.zeros_like(score)
    else:
        mass = weights.sum(1)
        score, error = mass * n.mean(1), mass * n.std(1) / math.sqrt(n.shape[1])
    if reduction == "B":
        score = score.sqrt()
        error = error / (2 * score).clamp(min=torch.finfo(score.dtype).tiny)
    return score, error


def _weights(log_p: Tensor, class_weight: str, reduction: str) -> Tensor:
    return _class_weights(log_p, class_weight if reduction == "A" else "p")


def _class_weights(log_p: Tensor, class_weight: str) -> Tensor:
    match class_weight:
        case "p":
            return log_p.exp()
        case "sqrt_p":
            return (log_p / 2).exp()
        case "uniform":
            return torch.full_like(log_p, 1 / log_p.shape[1])
        case _:
            return torch.zeros_like(log_p).scatter_(1, log_p.argmax(1, keepdim=True), 1.0)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Classes [samples, drawn] with probability proportional to weights [samples, C], by inversion."""
    steps = weights.double().cumsum(1)
    drawn = torch.searchsorted(steps, uniform.to(steps) * steps[:, -1:], right=True)
    return drawn.clamp(max=weights.shape[1] - 1)


@contextlib.contextmanager
def _prepared(
    model: nn.Module,
    inputs: Tensor,
    layers: str | Sequence[str],
    norm: int,
    *,
    perturbations: int = 0,
    sigma: float = 0.0,
    seed: int = 0,
    batch_size: int | None = None,
) -> Iterator[tuple[SampleGradients, Iterator[tuple[Tensor, slice]]]]:
    """The model in evaluation mode, taken apart, and its inputs in batches [n, 1 + perturbations, ...]."""
    _check_inputs(model, inputs, norm, perturbations, sigma, batch_size)
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters, so there are no gradients to measure")
    dtype = parameter.dtype if inputs.is_floating_point() else inputs.dtype
    copies = perturbations + 1 if sigma > 0 else 1
    noise = torch.empty(0)
    if copies > 1:
        noise = torch.randn(
            perturbations, *inputs.shape[1:], generator=torch.Generator().manual_seed(seed), dtype=dtype
        )
        noise = torch.cat([torch.zeros_like(noise[:1]), noise.mul_(sigma)]).to(parameter.device)

    def batches(step: int) -> Iterator[tuple[Tensor, slice]]:
        for start in range(0, len(inputs), step):
            at = slice(start, start + step)
            x = inputs[at].to(parameter.device, dtype).unsqueeze(1)
            yield (x + noise if copies > 1 else x), at

    with _evaluating(model):
        other = inputs[-1:] if len(inputs) > 1 else torch.zeros_like(inputs)
        gradients = SampleGradients(model, torch.cat([other, inputs[:1]]).to(parameter.device, dtype), layers, norm)
        budget = _ACTIVATIONS.get(parameter.device.type, _ACTIVATIONS["cuda"])
        yield gradients, batches(batch_size or max(1, budget // (gradients.footprint * copies)))


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time being, with a warning where training mode would have made a difference."""
    modes = {module: module.training for module in model.modules()}

    def differs(module: nn.Module) -> bool:
        name = type(module).__name__
        rate = getattr(
            module, "p" if "Dropout" in name else "dropout", 0
        )  # attention and recurrent layers have .dropout
        return "BatchNorm" in name or (isinstance(rate, int | float) and rate > 0)

    if different := sorted({type(module).__name__ for module, mode in modes.items() if mode and differs(module)}):
        warnings.warn(
            f"the model is in training mode and has {', '.join(different)}: gradients are taken in evaluation mode; "
            "call model.eval() to say so",
            UserWarning,
            stacklevel=6,
        )
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _check_inputs(
    model: nn.Module, inputs: Tensor, norm: int, perturbations: int, sigma: float, batch_size: int | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs must be a tensor, got {type(inputs).__name__}; use torch.as_tensor(inputs)")
    if inputs.ndim == 0 or inputs.numel() == 0:
        raise ValueError(f"inputs must be [samples, ...] and not empty, got {list(inputs.shape)}")
    if inputs.is_floating_point() and not inputs.isfinite().all():
        raise ValueError("inputs must be finite, got NaN or infinite values")
    if norm not in (1, 2):
        raise ValueError(f"norm must be 1 or 2, got {norm!r}")
    if perturbations < 0 or not 0 <= sigma < math.inf:
        raise ValueError(f"perturbations and sigma must not be negative, got {perturbations} and {sigma}")
    if perturbations and sigma and not inputs.is_floating_point():
        raise ValueError(f"{inputs.dtype} inputs cannot be perturbed: set perturbations=0, or embed them first")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 or None, got {batch_size}")


def _check_switches(class_weight: str, reduction: str, depth: float) -> None:
    if class_weight not in ("p", "sqrt_p", "uniform", "predicted"):
        raise ValueError(f"class_weight must be 'p', 'sqrt_p', 'uniform' or 'predicted', got {class_weight!r}")
    if reduction not in ("A", "B", "C"):
        raise ValueError(f"reduction must be 'A', 'B' or 'C', got {reduction!r}")
    if reduction != "A" and class_weight != "sqrt_p":
        raise ValueError(f"readings B and C weigh classes by p: leave class_weight out, got {class_weight!r}")
    if not math.isfinite(depth):
        raise ValueError(f"depth must be finite, got {depth}")
