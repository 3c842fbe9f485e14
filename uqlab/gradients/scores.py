"""Epistemic uncertainty of one classifier, from the gradients by its weights.

Let g_c be the gradient of log p_c(x) by the parameters of a layer, frozen or not. A
score is a weighted sum of the norms ||g_c|| over classes and layers.

We know REGrad (Wang and Ji, CVPR 2024, arXiv 2404.10124) from descriptions, not from
its equations. They describe an expected gradient norm normalised by a square root,
layer weights that grow exponentially with depth, and gradients averaged over perturbed
inputs. The reductions A, B and C are our readings of the first. Call results
"REGrad-style".

A linear layer's gradient for one sample is a sum of outer products, errors times
inputs, over tokens and perturbed copies. Its norm follows from these factors ("ghost
norms": Goodfellow 2015, arXiv 1510.01799; for sums, Li et al. 2022, arXiv 2110.05679).
Other layers need the gradients themselves. Norms ||g||_q are computed as powers
||g||_q^q, which add up over weights and biases.

The model is evaluated in evaluation mode. Afterwards it has its modes, gradients and
hooks as before.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

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
from uqlab.core.modules import (
    batches,
    called_with,
    classifier_of,
    evaluating,
    given_for_logits,
    hooked,
    layers_of,
    like_parameters,
    logits_of,
    map_tensors,
    rows_of,
    unwrapped,
)

Tensors = dict[str, Tensor]
ELEMENTS = 2**25  # activations and gradients in one pass: more is no faster on a CPU


class _SampleGradients:
    """The layers of a classifier, and their gradient norms for each sample.

    A layer is a module that has parameters itself; those off the path to the logits do
    not count. The closed form needs layers that are linear and called once. If it does
    not agree with autograd, as where a weight is also used outside its layer,
    gradients are computed by `vmap`. Recurrent layers need a loop, and so does code
    that depends on the values of the inputs; the loop is of plain autograd.

    Parameters
    ----------
    model
        A classifier in evaluation mode.
    rows
        Some samples [samples, copies, ...], for the comparison.
    layers
        "all" or "last".
    q
        The norm, 1 or 2.
    """

    def __init__(self, model: nn.Module, rows: Inputs, layers: str, q: int):
        self.model = model
        self.q = q
        names, self.classes, activations = _traced(model, _flat(rows))
        self.names = names[-1:] if layers == "last" else names
        self.layers: list[Any] = [model.get_submodule(name) for name in self.names]
        self.parameters = {
            name: p.detach()
            for name, p in model.named_parameters()
            if _layer_of(name) in self.names and p.is_floating_point()
        }
        self.way = self._choose(rows)
        held = activations + sum(p.numel() for p in self.parameters.values())
        self.batch_size = ELEMENTS // held or 1

    @torch.no_grad()
    def norms(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Return norms [n, layers, C] of the gradients of log p_c, and log p [n, C].

        The gradients are averaged over the copies of a sample, x [n, copies, ...]. The
        first copy is the sample itself, and log p belongs to it.
        """
        classes = range(self.classes)
        try:
            powers, logits = self.way(x, classes)
        except LookupError:  # a layer got other rows, as in a mixture of experts
            powers, logits = self._looped(x, classes)
        finite("the model's logits", logits)
        return powers.pow(1 / self.q), logits[:, 0].log_softmax(1)

    @torch.no_grad()
    def _choose(self, rows: Inputs) -> Callable[..., Any]:
        """Return the fastest way that gives the same as the loop."""
        classes = [0, 1]  # of these, one has a large gradient
        expected, _ = self._looped(rows, classes)
        slack = 8 * torch.finfo(expected.dtype).eps ** 0.5
        small = slack * float(expected.max()) / 100
        for way in (self._closed, self._mapped):
            # Each library has errors of its own for what vmap cannot run.
            with contextlib.suppress(Exception):
                if torch.allclose(way(rows, classes)[0], expected, slack, small):
                    return way
        return self._looped

    @torch.enable_grad()
    def _closed(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers [n, layers, classes] and logits [n, copies, C]."""
        n, copies = first_tensor(x).shape[:2]
        logits, grams, probes = self._probed(_flat(x), n)
        p = logits.detach().softmax(1)
        powers = []
        for c in classes:
            seed = _cotangent(p, c) / copies
            errors = torch.autograd.grad(logits, probes, seed, retain_graph=True)
            pairs = zip(grams, errors, strict=True)
            sums = [(gram * _gram(d, n, self.q)).sum((1, 2)) for gram, d in pairs]
            powers.append(torch.stack(sums, 1).clamp(min=0))
        return torch.stack(powers, 2), logits.detach().unflatten(0, (n, copies))

    def _probed(self, x: Inputs, n: int) -> tuple[Tensor, Any, Any]:
        """Return logits, and the Gram matrix of the inputs and a probe of each layer.

        A probe of zeros is added to the layer's output: the gradient by the probe is
        the error there. Raises LookupError unless each layer is linear and called once,
        with the rows of x.
        """
        calls = {}

        def probed(layer, args, y):
            if type(layer) is not nn.Linear or layer in calls or len(y) != count(x):
                raise LookupError
            gram = _gram(args[0].detach(), n, self.q) + (layer.bias is not None)
            calls[layer] = gram, torch.zeros_like(y, requires_grad=True)
            return y + calls[layer][1]

        register = nn.Module.register_forward_hook
        with hooked(register(layer, probed, prepend=True) for layer in self.layers):
            logits = _logits(self.model, {}, x)
        grams, probes = zip(*(calls[layer] for layer in self.layers), strict=True)
        return logits, grams, probes

    def _mapped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, for all samples at once."""
        # torch maps attention in this form only, and warns of all that it loops over.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            return vmap(lambda row: self._sample(row, classes))(x)

    def _looped(self, x: Inputs, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return powers and logits as `_closed`, one sample after the other."""
        each = (rows_of(x, i) for i in range(count(x)))
        rows = [self._sample(row, classes, _pullback) for row in each]
        powers, logits = zip(*rows, strict=True)
        return torch.stack(powers), torch.stack(logits)

    def _sample(
        self, row: Inputs, classes: Sequence[int], of: Callable[..., Any] = vjp
    ) -> tuple[Tensor, Tensor]:
        """Return powers [layers, classes] and logits [copies, C] of one sample."""
        logits, pull = of(lambda p: _logits(self.model, p, row), self.parameters)
        p = logits.detach().softmax(1)
        powers = []
        for c in classes:
            (gradients,) = pull(_cotangent(p, c) / len(p))
            sums: dict[str, Any] = dict.fromkeys(self.names, 0)
            for key, gradient in gradients.items():
                power = torch.linalg.vector_norm(gradient, self.q) ** self.q
                sums[_layer_of(key)] += power
            powers.append(torch.stack([*sums.values()]))
        return torch.stack(powers, 1), logits.detach()


@torch.enable_grad()
def _pullback(run: Callable[[Tensors], Tensor], parameters: Tensors) -> Any:
    """Return what `torch.func.vjp` does, by autograd, which runs any network."""
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    logits = run(leaves)

    def pull(seed):
        slopes = torch.autograd.grad(
            logits, [*leaves.values()], seed, retain_graph=True, materialize_grads=True
        )
        return [dict(zip(leaves, slopes, strict=True))]

    return logits.detach(), pull


@torch.enable_grad()
def _traced(model: nn.Module, x: Inputs) -> tuple[list[str], int, int]:
    """Return the layers on the path to the logits, the classes, and the activations.

    The layers are in the order of their calls. The activations are the number of
    elements that all modules get.
    """
    order, sizes = [], []

    def note(module, args):
        order.append(module)
        sizes.extend(t.numel() for t in args if isinstance(t, Tensor))

    leaves = {
        name: p.detach().requires_grad_()
        for name, p in model.named_parameters()
        if p.is_floating_point()
    }
    with hooked(part.register_forward_pre_hook(note) for part in model.modules()):
        logits = _logits(model, leaves, x)
    if not logits.requires_grad:
        raise ValueError(
            "the model's logits have no gradient path to its parameters; give a "
            "model with parameters that does not detach its output"
        )
    tensors = [*leaves.values()]
    slopes = torch.autograd.grad(logits.sum(), tensors, allow_unused=True)
    pairs = zip(leaves, slopes, strict=True)
    found = [_layer_of(name) for name, slope in pairs if slope is not None]

    def first_call(name):  # or that of the closest module around it
        module = model.get_submodule(name)
        called = module in order
        return order.index(module) if called else first_call(_layer_of(name))

    return sorted(dict.fromkeys(found), key=first_call), logits.shape[1], sum(sizes)


def _logits(model: nn.Module, parameters: Tensors, x: Inputs) -> Tensor:
    """Return the logits [rows, C] for other values of some parameters."""
    args = (x,) if isinstance(x, Tensor) else x
    logits = logits_of(called_with(model, parameters, args))
    if logits.ndim != 2 or len(logits) != count(x) or logits.shape[1] < 2:
        raise ValueError(
            f"the model must return logits [{count(x)}, C] with C >= 2, got "
            f"{list(logits.shape)}; of an ensemble, give one member: ensemble.member(m)"
        )
    return logits


def _cotangent(p: Tensor, c: int) -> Tensor:
    """Return the gradient e_c - p of log p_c by the logits, [rows, classes].

    1 - p_c is the sum of the other entries, which keeps its digits if p_c is near 1.
    """
    of_class = torch.arange(p.shape[1], device=p.device) == c
    others = p.masked_fill(of_class, 0)
    return torch.where(of_class, others.sum(1, keepdim=True), -others)


def _gram(t: Tensor, n: int, q: int) -> Tensor:
    """Return the inner products of a sample's rows, [n, rows, rows].

    For inputs a and errors d, ||sum_s d_s a_s^T||^2 = sum_st (a_s . a_t) (d_s . d_t).
    For q = 1 a sample must have one row, whose 1-norm is returned.
    """
    t = t.reshape(n, -1, t.shape[-1])
    if t.shape[1] == 1:
        return t.abs().pow(q).sum(2, keepdim=True)
    if q == 1:
        raise LookupError
    return t @ t.mT


def _flat(x: Inputs) -> Any:
    """Return inputs [n, copies, ...] as [n * copies, ...]."""
    return map_tensors(lambda t: t.flatten(0, 1), x)


def _layer_of(name: str) -> str:
    """Return the name of the module that holds a parameter or a module."""
    return name.rpartition(".")[0]


Scores = Float[Tensor, " samples"]
ClassWeight = Literal["p", "sqrt_p", "uniform", "predicted"]
Layers = Literal["all", "last"]

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {  # of log p [samples, classes]
    "p": torch.exp,
    "sqrt_p": lambda log_p: (log_p / 2).exp(),
    "uniform": lambda log_p: torch.full_like(log_p, 1 / log_p.shape[1]),
    "predicted": lambda log_p: F.one_hot(log_p.argmax(1), log_p.shape[1]).to(log_p),
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
) -> Scores:
    """Return a REGrad-style score [samples]; higher is more uncertain.

    Parameters
    ----------
    model, inputs, norm, perturbations, sigma, seed
        See `gradient_norms`.
    class_weight, depth
        See `reduce_norms`.

    References
    ----------
    Wang and Ji 2024, arXiv 2404.10124; for our reading see the module's docstring.
    """
    norms, _, log_p = gradient_norms(
        model, inputs, norm=norm, perturbations=perturbations, sigma=sigma, seed=seed
    )
    return reduce_norms(norms, log_p, class_weight=class_weight, depth=depth)


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
            logits = _logits(network, {}, batch)
            finite("the model's logits", logits)
            rest = head[name](h) - logits
            if rest.abs().max() > 1e-2 * logits.abs().max():  # of linearised members
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
        "all", or "last" for the last one alone. A layer is a module that holds
        parameters itself. Layers are in the order in which the forward pass calls them.
    perturbations
        Number of perturbed inputs x + eps_i, eps_i ~ N(0, sigma^2), for each sample.
        Their gradients and the gradient at x are averaged, then the norm is taken; p_c
        is the probability at x. All samples share the draws, so a score depends only on
        its input and the seed. Integer tensors beside floating ones stay as they are.
    sigma
        Standard deviation of the perturbations, in units of the inputs.
    seed
        Seed of the perturbations.

    Returns
    -------
    tuple
        Norms [layers, samples, C], names of the layers, and log p [samples, C] in nats.

    Raises
    ------
    TypeError
        If `model` is not one network, or does not return logits.
    ValueError
        If inputs or logits are empty or not finite, or logits are not [samples, C] with
        C >= 2. If the model has no parameters or detaches its output from them. If
        integer inputs are to be perturbed.

    Example
    -------
    The gradient of log p_0 by one weight and one bias, at p = (1/2, 1/2) and x = 2:

    >>> head = nn.Linear(1, 2)
    >>> _ = nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    >>> gradient_norms(head, [[2.0]])[0]  # (sqrt(1/2) * sqrt(2 ** 2 + 1 ** 2))
    tensor([[[1.5811, 1.5811]]])
    """
    one_of("norm", norm, (1, 2))
    one_of("layers", layers, ("all", "last"))
    at_least("perturbations", perturbations, 0)
    within("sigma", sigma, "[0, inf)")
    results, noise = [], (perturbations, sigma, seed)
    with _ready(model, inputs) as (network, x):
        some = _copies(like_parameters(network, x, slice(2)), *noise)
        gradients = _SampleGradients(network, some, layers, norm)
        for _, batch in batches(network, x, gradients.batch_size):
            results.append(gradients.norms(_copies(batch, *noise)))
    norms, log_p = (_joined(parts, x) for parts in zip(*results, strict=True))
    return norms.movedim(0, 1), gradients.names, log_p


def reduce_norms(
    norms: ArrayLike,
    log_p: ArrayLike,
    *,
    class_weight: ClassWeight | None = None,
    reduction: Literal["A", "B", "C"] = "A",
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
        The weights w_c: "p", "sqrt_p" for sqrt(p_c), "uniform" for 1/C, or "predicted"
        for 1 at the top class and 0 elsewhere. By default "sqrt_p" in reduction "A",
        else "p". Weights that ignore the probabilities ("uniform") rank inversely:
        confident predictions score high.
    reduction
        With n_c = sum_l w_l ||g_c^(l)||, "A" is sum_c w_c n_c, "B" is
        sqrt(sum_c w_c n_c^2), and "C" is sum_c w_c sqrt(n_c). "A" with class weight "p"
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
        If shapes do not match, numbers are not finite, or a choice is unknown.
    """
    powers = {"A": 1.0, "B": 2.0, "C": 0.5}
    one_of("reduction", reduction, powers)
    class_weight = class_weight or ("sqrt_p" if reduction == "A" else "p")
    one_of("class_weight", class_weight, WEIGHTS)
    within("depth", depth, "(-inf, inf)")
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
    position = torch.linspace(0, 1, len(norms), dtype=norms.dtype, device=norms.device)
    n = torch.tensordot((depth * position).softmax(0), norms, 1)  # [samples, classes]
    score = (WEIGHTS[class_weight](log_p) * n.pow(powers[reduction])).sum(1)
    return score.sqrt() if reduction == "B" else score


def layer_shares(
    norms: Float[Tensor, "layers samples classes"],
    log_p: Float[Tensor, "samples classes"],
    *,
    class_weight: ClassWeight = "sqrt_p",
) -> Float[Tensor, "layers samples"]:
    """Return each layer's share of sum_l sum_c w_c ||g_c^(l)||, [layers, samples].

    The shares of a sample sum to 1, or are 0 if all its gradients are 0. For parameters
    see `reduce_norms`.
    """
    layers = [reduce_norms(n[None], log_p, class_weight=class_weight) for n in norms]
    sums = torch.stack(layers)
    return sums / sums.sum(0).clamp(min=torch.finfo(sums.dtype).tiny)


@contextlib.contextmanager
def _ready(model: nn.Module, inputs: InputsLike) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a checked network in evaluation mode, and its checked inputs."""
    one_network(model, "uqlab.gradients")
    model, x = unwrapped(model), as_inputs(inputs)  # torch.func cannot run wrappers
    cudnn = contextlib.nullcontext()
    if layers_of(model, nn.RNNBase):  # cuDNN has no gradients in evaluation mode
        cudnn = torch.backends.cudnn.flags(enabled=False)
    with evaluating(model), cudnn:
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
            "integer inputs cannot be perturbed; set `perturbations=0`, or give "
            "embedded inputs"
        )
    generator = torch.Generator().manual_seed(seed)

    def copied(t):
        copies = t.unsqueeze(1).repeat_interleave(1 + perturbations, 1)
        if t.is_floating_point():
            shape = (perturbations, *t.shape[1:])
            noise = torch.randn(shape, generator=generator, dtype=t.dtype)
            copies[:, 1:] += sigma * noise.to(t.device)
        return copies

    return map_tensors(copied, x)
