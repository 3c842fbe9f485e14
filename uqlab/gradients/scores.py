"""Epistemic uncertainty of one classifier, from the gradients by its weights.

Let g_c be the gradient of log p_c(x) by the parameters of a layer, frozen or not. A
score is a weighted sum of the norms ||g_c|| over classes and layers.

We know REGrad (Wang and Ji, CVPR 2024, arXiv 2404.10124) from descriptions, not from
its equations. They describe an expected gradient norm normalised by a square root,
layer weights that grow exponentially with depth, and gradients averaged over perturbed
inputs. The reductions A, B and C are our readings of the first. Call results
"REGrad-style".

The model is evaluated in evaluation mode. Afterwards it has its modes, gradients and
hooks as before.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    Inputs,
    InputsLike,
    as_inputs,
    as_tensor,
    at_least,
    count,
    finite,
    first_tensor,
    one_network,
    one_of,
    representable,
    within,
)
from uqlab.core.devices import without_cudnn
from uqlab.core.modules import (
    batches,
    call,
    classifier_of,
    evaluating,
    given_for_logits,
    logits_of,
    map_tensors,
    take,
)
from uqlab.gradients.per_sample import SampleGradients

Scores = Float[Tensor, " samples"]
ClassWeight = Literal["p", "sqrt_p", "uniform", "predicted"]
Reduction = Literal["A", "B", "C"]
Layers = str | Sequence[str]

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {  # of log p [samples, classes]
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
    """Return ExGrad, the expected gradient norm sum_c p_c ||g_c||, [samples].

    Higher is more uncertain. The defaults are those of the paper: the 1-norm in the
    last layer. With several layers, the score is the mean over layers. For parameters
    and errors see `gradient_norms`.

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
    """Return a REGrad-style score [samples]; higher is more uncertain.

    Parameters
    ----------
    model, inputs, norm, perturbations, sigma, seed, layers, batch_size
        See `gradient_norms`.
    class_weight, depth, reduction
        See `reduce_norms`.

    References
    ----------
    Wang and Ji 2024, arXiv 2404.10124; for our reading see the module's docstring.
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


@torch.no_grad()
def gradnorm(model: nn.Module, inputs: InputsLike) -> Scores:
    """Return GradNorm, -||h||_1 sum_c |p_c - 1/C|, [samples].

    Higher is more uncertain. Huang et al. take the 1-norm of the gradient of
    KL(uniform || p) by the weight of the last linear layer, whose inputs are h. A large
    norm means confidence, hence the minus sign.

    Parameters
    ----------
    model
        A classifier whose logits are the output of an nn.Linear.
    inputs
        A tensor [samples, ...], or tensors by name.

    Raises
    ------
    TypeError
        If `model` is not one network.
    ValueError
        If the logits are not the output of a linear layer. If inputs or logits are
        empty or not finite.

    References
    ----------
    Huang et al. 2021, arXiv 2110.00218.
    """
    results = []
    with _ready(model, inputs) as (network, x):
        name = classifier_of(network, x)
        head = {name: network.get_submodule(name)}
        for _, batch in batches(network, x, 64):
            h = given_for_logits(network, head, batch)[name]
            logits = head[name](h)
            finite("the model's logits", logits)
            rest = logits - logits_of(call(network, batch))
            if rest.abs().max() > 1e-2 * logits.abs().max():  # as of linearised members
                raise ValueError(f"the logits are not the output of the layer {name!r}")
            p = logits.softmax(1)
            results.append(-h.abs().sum(1) * (p - 1 / p.shape[1]).abs().sum(1))
    return _joined(results, x)


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
    """Return the gradient norms of log p_c in each layer, the layers' names, and log p.

    Parameters
    ----------
    model
        A classifier that returns logits [samples, C], or an output with `.logits`.
    inputs
        A tensor [samples, ...], or tensors by name.
    norm
        The order of the norm, 1 or 2.
    layers
        "all", "last", a regular expression searched in the layers' names, or a list of
        names. A layer is a module that has parameters of its own. Layers are in the
        order in which the forward pass calls them.
    perturbations
        Number of perturbed inputs x + eps_i, eps_i ~ N(0, sigma^2), for each sample.
        Their gradients and the gradient at x are averaged, then the norm is taken; p_c
        is the probability at x. All samples share the draws, so a score depends only on
        its input and the seed. Integer tensors beside floating ones stay as they are.
    sigma
        Standard deviation of the perturbations, in units of the inputs.
    seed
        Seed of the perturbations.
    batch_size
        Samples in a pass. By default, as many as a few hundred MiB hold on a CPU.

    Returns
    -------
    tuple
        Norms [layers, samples, C], names of the layers, and log p [samples, C] in nats.

    Raises
    ------
    TypeError
        If `model` is not one network, or does not return logits.
    ValueError
        If a layer is unknown. If inputs or logits are empty or not finite, or logits
        are not [samples, C] with C >= 2. If the model has no parameters, detaches its
        output from them, or mixes the samples of a batch. If integer inputs are to be
        perturbed.

    Example
    -------
    The gradient of log p_0 by one weight and one bias, at p = (1/2, 1/2) and x = 2:

    >>> head = nn.Linear(1, 2)
    >>> _ = nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    >>> gradient_norms(head, [[2.0]])[0]  # (sqrt(1/2) * sqrt(2 ** 2 + 1 ** 2))
    tensor([[[1.5811, 1.5811]]])
    """
    one_of("norm", norm, (1, 2))
    at_least("perturbations", perturbations, 0)
    within("sigma", sigma, "[0, inf)")
    results = []
    with _ready(model, inputs) as (network, x):
        ends = take(network, x, slice(None, None, max(1, count(x) - 1)))

        def copies(some):
            return _copies(some, perturbations if sigma else 0, sigma, seed)

        gradients = SampleGradients(network, copies(ends), layers, norm)
        for _, batch in batches(network, x, batch_size or gradients.batch_size):
            results.append(gradients.norms(copies(batch)))
    norms, log_p = (_joined(parts, x) for parts in zip(*results, strict=True))
    return norms.movedim(0, 1), gradients.names, log_p


def reduce_norms(
    norms: ArrayLike,
    log_p: ArrayLike,
    *,
    class_weight: ClassWeight = "sqrt_p",
    reduction: Reduction = "A",
    depth: float = 3.0,
) -> Scores:
    """Return the score of `regrad`, [samples], from the output of `gradient_norms`.

    Parameters
    ----------
    norms
        Gradient norms [layers, samples, classes].
    log_p
        Log-probabilities [samples, classes], in nats.
    class_weight
        The weights w_c of reduction "A": "p", "sqrt_p" for sqrt(p_c), "uniform" for
        1/C, or "predicted" for 1 at the top class and 0 elsewhere. Weights that ignore
        the probabilities ("uniform") rank inversely: confident predictions score high.
    reduction
        With n_c = sum_l w_l ||g_c^(l)||, "A" is sum_c w_c n_c, "B" is
        sqrt(sum_c p_c n_c^2), and "C" is sum_c p_c sqrt(n_c). "A" with class weight "p"
        and depth 0 is `exgrad`. "B" for one layer and the 2-norm is the square root of
        the trace of the Fisher information.
    depth
        Layer weights w_l are proportional to exp(depth l/(L-1)), from the input (l = 0)
        to the output, and sum to 1. At 0 all layers weigh the same.

    Raises
    ------
    TypeError
        If `norms` or `log_p` are not floating numbers.
    ValueError
        If shapes do not match, numbers are not finite, or a choice is unknown. If
        `class_weight` is given for reduction "B" or "C".
    """
    one_of("reduction", reduction, ("A", "B", "C"))
    within("depth", depth, "(-inf, inf)")
    if reduction != "A" and class_weight != "sqrt_p":
        raise ValueError(
            "reductions B and C weigh classes by p: leave out `class_weight`, "
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
    """Return each layer's share of sum_l sum_c w_c ||g_c^(l)||, [layers, samples].

    The shares of a sample sum to 1, or are 0 if all its gradients are 0. For parameters
    see `reduce_norms`.
    """
    norms, _, weights = _weighed(norms, log_p, class_weight)
    sums = (norms * weights).sum(2)
    return sums / sums.sum(0).clamp(min=torch.finfo(sums.dtype).tiny)


def _weighed(
    norms: ArrayLike, log_p: ArrayLike, class_weight: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked norms and log p, and class weights [samples, classes]."""
    one_of("class_weight", class_weight, WEIGHTS)
    norms = as_tensor("norms", norms, "layers samples classes")
    log_p = as_tensor("log_p", log_p, "samples classes")
    if norms.shape[1:] != log_p.shape:
        raise ValueError(
            "`norms` [layers, samples, classes] and `log_p` [samples, classes] must "
            "have the same samples and classes, got "
            f"{list(norms.shape)} and {list(log_p.shape)}"
        )
    finite("norms", norms)
    finite("log_p", log_p)
    return norms, log_p, WEIGHTS[class_weight](log_p)


@contextlib.contextmanager
def _ready(model: nn.Module, inputs: InputsLike) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a checked network in evaluation mode, and its checked inputs."""
    one_network(model, "uqlab.gradients")
    if isinstance(model, nn.DataParallel):  # torch.func cannot run it
        model = model.module
    x = as_inputs(inputs)
    with evaluating(model), without_cudnn(model):
        yield model, x


def _joined(results: Sequence[Tensor], x: Inputs) -> Tensor:
    """Return the results of all batches on the device of the inputs."""
    joined = torch.cat([*results]).to(first_tensor(x).device)
    representable("inputs or perturbations", joined)
    return joined


def _copies(x: Inputs, perturbations: int, sigma: float, seed: int) -> Any:
    """Return inputs [n, copies, ...]: each sample itself, then its perturbations."""
    tensors = [x] if isinstance(x, Tensor) else x.values()
    if perturbations and not any(t.is_floating_point() for t in tensors):
        raise ValueError(
            f"{first_tensor(x).dtype} inputs cannot be perturbed; set "
            "`perturbations=0`, or give embedded inputs"
        )
    generator = torch.Generator().manual_seed(seed)

    def copied(t):
        copies = t.unsqueeze(1).repeat_interleave(1 + perturbations, 1)
        if perturbations and t.is_floating_point():
            shape = (perturbations, *t.shape[1:])
            noise = torch.randn(shape, generator=generator, dtype=t.dtype)
            copies[:, 1:] += sigma * noise.to(t.device)
        return copies

    return map_tensors(copied, x)
