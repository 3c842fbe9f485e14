"""Laplace: Gaussians around trained weights, of a LoRA network or of CLIP's towers."""

import copy
import functools
import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

from uqlab.core.checks import (
    InputsLike,
    as_inputs,
    as_tensor,
    one_of,
    positive,
)
from uqlab.core.modules import (
    batches,
    call,
    classifier_of,
    evaluating,
    frozen,
    given_for_logits,
    hooked,
    logits_of,
    trainable,
    unwrapped,
)
from uqlab.ensembles.base import (
    LOADERS,
    PLAIN_ATTENTION,
    Ensemble,
    Members,
    Own,
    member_generators,
    member_range,
)
from uqlab.ensembles.implicit import plain, put
from uqlab.ensembles.lora import LowRank

VARIANCES = torch.logspace(-6, 6, 121, dtype=torch.float64)  # tried for the prior
WHOLE = 2000  # classes, of which a curvature is kept whole


class Curvature(NamedTuple):
    """The generalised Gauss-Newton matrix of the summed loss by one weight [out, in].

    It is outputs (x) inputs: `outputs` [out, out] sums over inputs, places and classes
    the outer products of what reaches the output, or is [out], the diagonal of that;
    `inputs` [in, in] is the mean over inputs and places of those of what enters.
    """

    outputs: Tensor
    inputs: Tensor

    def spectrum(self) -> tuple[Tensor, Any, Tensor]:
        """Return the eigenvalues [out, in] and both's vectors; a diagonal has None."""
        small, v = torch.linalg.eigh(self.inputs)
        large, u = self.outputs, None
        if large.ndim == 2:
            large, u = torch.linalg.eigh(large)
        return torch.outer(large.clamp(min=0), small.clamp(min=0)), u, v

    def draw(self, prior_precision: float, generator: torch.Generator) -> Tensor:
        """Draw a weight [out, in].

        It is Normal(0, (outputs (x) inputs + prior_precision I)^-1).
        """
        return self.draws(prior_precision, [generator])[0]

    def draws(self, prior_precision, generators) -> Tensor:
        """Draw weights [generators, out, in]: `draw` with each of the generators."""
        eigenvalues, u, v = self.spectrum()
        deviation = (eigenvalues + prior_precision).rsqrt()
        like = deviation.cpu()
        noise = [torch.empty_like(like).normal_(generator=g) for g in generators]
        drawn = torch.stack(noise).to(v) * deviation
        return (drawn if u is None else u @ drawn) @ v.mT


class _LinearisedEnsemble(Ensemble):
    """Members f(x) + J (w_m - w): one network, linear in what members add to it.

    `center` is that network, an ensemble of one; J is the Jacobian of its logits by
    what its member holds.
    """

    center: Ensemble

    def one_pass(self, call, row, tensors):
        """Return the logits of one member."""
        mean = {key: t[0] for key, t in self.center.rows().items()}
        step = {key: row[key] - t for key, t in mean.items()}
        with PLAIN_ATTENTION:  # which has a forward derivative
            return torch.add(*jvp(lambda held: call(held, tensors), (mean,), (step,)))

    def member(self, index):
        """Return one member as a module; its weights alone are no network."""
        index = range(self.members)[index]
        return _Member(self.shard(slice(index, index + 1)))


class _Member(nn.Module):
    """The first member of an ensemble: inputs [batch, ...] -> logits [batch, ...]."""

    def __init__(self, ensemble: Ensemble):
        super().__init__()
        self.ensemble = ensemble

    def forward(self, *args, **named):
        """Return the member's logits."""
        return self.ensemble(*args, **named)[0]


def laplace_lora(
    trained: Ensemble,
    inputs: InputsLike,
    members: Members,
    *,
    linearised: bool = True,
    prior_variance: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
) -> Ensemble:
    """Draw members around one trained LoRA network, A and B by a Kronecker posterior.

    Parameters
    ----------
    trained : Ensemble
        `lora(backbone, 1, ...)` after training; its classifier stays as it is.
    inputs : tensor, array or tensors by name
        Those that it was trained on, [samples, ...]; a generalised Gauss-Newton matrix
        needs no labels. Its logits are those of classes; one alone is of a sigmoid.
    members : int or range
        As in `lora`. Member m depends on (seed, m) and `trained` alone.
    linearised : bool
        Whether the network is linear in A and B around the trained ones, as in Yang et
        al.: samples of logits. False takes samples of weights, which the network sees
        as they are; for a wide posterior its accuracy falls.
    prior_variance : float
        Of each number in A and B; Muhlematter et al. 2024 (appendix W) take 0.001.
    batch_size : int
        Inputs in a pass.

    Returns
    -------
    Ensemble

    Raises
    ------
    TypeError
        Unless `trained` is a LoRA-Ensemble.
    ValueError
        For more than one member of it, a prior variance that is not positive, and
        inputs that are not finite.

    Notes
    -----
    The precision of A, and that of B, is G (x) S + I / prior_variance, with the
    curvature G of the layer's outputs and the second moment S of its inputs, for a
    convolution those of its patches. Yang et al. approximate the larger factor by a low
    rank; here both are whole.

    References
    ----------
    Yang et al., "Bayesian low-rank adaptation for large language models", 2024.
    """
    recipe = getattr(trained, "recipe", {})
    if recipe.get("method") != "lora" or trained.members != 1:
        raise ValueError(
            "laplace_lora takes one trained network that `lora` made, "
            f"lora(backbone, 1), got {type(trained).__name__} {recipe}"
        )
    positive("prior_variance", prior_variance)
    ids = member_range(members)
    pairs = curvatures(trained, inputs, batch_size)
    ensemble = _copies(trained, ids, linearised)
    for number, (name, pair) in enumerate(pairs.items()):
        generators = member_generators(seed, ids, "laplace", number)
        low: Any = ensemble.seen[name].kind
        for p, curvature in zip((low.lora_A, low.lora_B), pair, strict=True):
            p.data += curvature.draws(1 / prior_variance, generators).to(p)
    return ensemble.eval()


def _copies(trained, ids, linearised):
    """Return an ensemble whose members all start as the one that was trained."""
    center = copy.deepcopy(trained).requires_grad_(False)
    pairs = zip(trained.network.modules(), center.network.modules(), strict=True)
    made = copy.deepcopy(trained, {id(theirs): module for theirs, module in pairs})
    made.member_ids = ids
    for part in made.parts:
        for t in part.stacked().values():
            t.data = t.data.expand(len(ids), *t.shape[1:]).clone()
    if linearised:
        made.__class__ = _LinearisedEnsemble
        made.center = center
        made.recipe = {"method": "laplace_lora", "lora": trained.recipe}
    return made


def curvatures(
    trained: Any, inputs: InputsLike, batch_size: int = 64
) -> dict[str, tuple[Curvature, Curvature]]:
    """Return the curvatures of A and of B, in float64, by the name of the weight.

    What enters B is A of what enters the layer, and slopes go back to A through B.
    """
    network = trained.member(0).requires_grad_()
    low = {n: p.kind for n, p in trained.seen.items() if isinstance(p.kind, LowRank)}
    layers = {n: network.get_submodule(n.rpartition(".")[0]) for n in low}
    look = functools.partial(_seen_and_back, network, layers)
    pairs = {}
    for name, whole in _sums(network, inputs, batch_size, look).items():
        kind = low[name]
        down, up = (kind.scale * t.data[0].double() for t in (kind.lora_A, kind.lora_B))
        of_a = Curvature(up.mT @ whole.outputs @ up, whole.inputs)
        pairs[name] = of_a, Curvature(whole.outputs, down @ whole.inputs @ down.mT)
    return pairs


def _sums(network, inputs, batch_size, look):
    """Return the curvatures of layers by name, in float64.

    `look` returns, for a batch, the name of each, what enters it, by row or place, and
    the batch's curvature by its outputs.
    """
    found = {}
    with evaluating(network):
        for _, batch in batches(network, as_inputs(inputs), batch_size):
            for name, entered, outputs in look(batch):
                seen = entered.flatten(0, -2).double()
                total = found.setdefault(name, [0, 0, 0])
                for i, more in enumerate((outputs, seen.mT @ seen, len(seen))):
                    total[i] += more
    return {name: Curvature(g, s / rows) for name, (g, s, rows) in found.items()}


@torch.enable_grad()
def _seen_and_back(network, layers, x):
    """Yield what enters each layer, by place, and the curvature by its outputs."""
    calls = {}

    def note(layer, args, y):
        if type(layer) in (nn.Linear, nn.Conv2d) and getattr(layer, "groups", 1) == 1:
            calls[layer] = args[0].detach(), y
            return y.clone()  # which the network may change in place

    with hooked(layer.register_forward_hook(note) for layer in layers.values()):
        logits = as_tensor("logits", logits_of(call(network, x)), "batch classes")
    if hidden := [name for name, layer in layers.items() if layer not in calls]:
        raise ValueError(
            "laplace_lora must see what enters and leaves a layer, which only linear "
            f"layers and plain convolutions show when they are called, not {hidden[0]}:"
            " make the LoRA network with another target"
        )
    outputs = [calls[layer][1] for layer in layers.values()]
    slopes = [
        torch.autograd.grad(logits, outputs, root, retain_graph=True)
        for root in _roots(logits.detach())
    ]
    for (name, layer), *of_classes in zip(layers.items(), *slopes, strict=True):
        seen, back = _rows(layer, calls[layer][0], of_classes)
        back = back.flatten(0, -2).double()
        yield name, seen, back.mT @ back


@torch.no_grad()
def projection_curvature(
    h: Tensor, weight: Tensor, others: Tensor, scale: float | Tensor
) -> Curvature:
    """Return the curvature of the last matrix of one of CLIP's towers.

    Parameters
    ----------
    h : [samples, width]
        What the matrix is given.
    weight : [features, width]
        The matrix.
    others : [classes, features]
        The other tower's unit vectors, which count as fixed.
    scale : float
        The logits are scale * u . others^T with the unit vector u of h weight^T, the
        loss that of samples against all of `others`.

    References
    ----------
    Baumann et al., "Post-hoc probabilistic vision-language models" (BayesVLM), 2024.
    """
    z = h @ weight.T
    u, length = F.normalize(z), z.norm(dim=1)[:, None, None]
    p = (scale * u @ others.T).softmax(1)[..., None]
    along = (u @ others.T)[..., None] * u[:, None]
    slopes = scale * (others - along) / length  # d logits / d z
    roots = (slopes - (p * slopes).sum(1, keepdim=True)) * p.sqrt()
    roots = roots.flatten(0, 1).double()
    return Curvature(roots.T @ roots, h.T.double() @ h.double() / len(h))


def _rows(layer, x, back):
    """Return what each row, or place, is made from, and its slopes [classes, ...]."""
    back = torch.stack(back)
    if isinstance(layer, nn.Linear):
        return x, back
    mode = layer.padding_mode.replace("zeros", "constant")
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)
    return patches.mT, back.movedim(2, -1)  # the channels last


def _roots(logits):
    """Return columns s_c [c, samples, outputs], whose s_c s_c^T sum to the curvature.

    Of a softmax it is diag(p) - p p^T, of a single sigmoid p (1 - p).
    """
    if logits.shape[-1] == 1:
        p = logits.sigmoid()
        return (p * (1 - p)).sqrt()[None]
    p = logits.softmax(-1)
    return (torch.eye(p.shape[-1]).to(p)[:, None] - p) * p.T.sqrt()[..., None]


def _own_classifiers(network, members, classifier):
    """Give each member a copy of a network's classifier; all else is frozen."""
    ids, network = member_range(members), plain(network)
    if not classifier:
        raise ValueError(
            f"{type(network).__name__} has no layer before its classifier to share"
        )
    # A separate module, also where its weight is tied to another's.
    put(network, classifier, frozen(network.get_submodule(classifier)))
    sees = {}
    for name, p in network.get_submodule(classifier).named_parameters():
        sees[f"{classifier}.{name}"] = [Own(p.detach().clone()) for _ in ids]
    ensemble = Ensemble(network, ids, sees)
    ensemble.shares_most = True
    return ensemble.with_recipe({"method": "laplace", "classifier": classifier})


def _linearised(backbone, members, lora):
    settings = {name: value for name, value in lora.items() if name != "method"}
    return _copies(LOADERS["lora"](backbone, 1, **settings), members, linearised=True)


LOADERS |= {"laplace_lora": _linearised, "laplace": _own_classifiers}


def laplace(
    network: nn.Module,
    inputs: InputsLike,
    members: Members,
    *,
    prior_variance: float | None = None,
    outputs: Literal["gaussian"] | None = None,
    noise_variance: float | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> Ensemble:
    """Draw members around a trained network, the classifier by a Kronecker posterior.

    This is the last-layer Laplace approximation.

    Parameters
    ----------
    network : nn.Module
        Any trained network whose logits are a linear layer's output, the classifier's.
    inputs : tensor, array or tensors by name
        Those that it was trained on, [samples, ...]; a generalised Gauss-Newton matrix
        needs no labels.
    members : int or range
        As in `lora`. Member m depends on (seed, m) and `network` alone.
    prior_variance : float, optional
        Of each number in the classifier. None for the one with the largest marginal
        likelihood among `VARIANCES`.
    outputs : str, optional
        "gaussian" where the network's outputs are means. None for logits: one alone is
        of a sigmoid, several are of a softmax.
    noise_variance : float, optional
        Of "gaussian" targets around the means, in their unit squared.
    batch_size : int
        Inputs in a pass.

    Returns
    -------
    Ensemble

    Raises
    ------
    ValueError
        For variances that are not positive, a noise variance that is missing or not
        wanted, inputs that are not finite, a network that is nothing but a classifier,
        and one whose logits are no layer's output.

    Warns
    -----
    UserWarning
        For more than 2,000 classes, of whose G only the diagonal is kept.

    Notes
    -----
    Weight and bias W have the precision G (x) S + I / prior_variance, with the
    curvature G of the logits and the second moment S of the features and a one; of
    tokens those that the logits are made of. For "gaussian" outputs this is exact: that
    of Bayesian linear regression on the features.

    References
    ----------
    MacKay, "A practical Bayesian framework for backpropagation networks", 1992.
    Daxberger et al., "Laplace redux", 2021.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> laplace(network, torch.rand(20, 4), 5)(torch.rand(7, 4)).shape
    torch.Size([5, 7, 3])
    """
    _check_outputs(outputs, noise_variance)
    x = as_inputs(inputs)
    network = unwrapped(network)
    name = classifier_of(network, x)
    ensemble = _own_classifiers(network, members, name)
    # The weight, and perhaps a bias
    own = sorted(trainable(ensemble), key=Tensor.dim, reverse=True)
    parts = [p.data if p.ndim == 3 else p.data[..., None] for p in own]
    mean = torch.cat([p[0] for p in parts], 1).double()
    found = classifier_curvature(network, name, x, batch_size, noise_variance)
    if prior_variance is None:
        prior_variance = _likeliest(mean, found)
    positive("prior_variance", prior_variance)
    generators = member_generators(seed, ensemble.member_ids, "laplace")
    drawn = mean + found.draws(1 / prior_variance, generators)
    for p, w in zip(parts, drawn.split([p.shape[-1] for p in parts], -1), strict=True):
        p.copy_(w)
    return ensemble.eval()


def _check_outputs(outputs, noise_variance):
    """Raise ValueError unless Gaussian outputs alone have a noise variance."""
    one_of("outputs", outputs, (None, "gaussian"))
    if outputs:
        positive("noise_variance", noise_variance or 0)
    elif noise_variance is not None:
        raise ValueError('noise_variance goes with outputs="gaussian" alone')


def classifier_curvature(network, classifier, inputs, batch_size, noise_variance):
    """Return the curvature of a classifier's weight and bias, side by side."""
    layer = network.get_submodule(classifier)
    if layer.out_features > WHOLE and noise_variance is None:
        said = f"more than {WHOLE:,} classes: the output factor of laplace is diagonal"
        warnings.warn(said, stacklevel=3)

    @torch.no_grad()
    def look(batch):
        z = logits_of(call(network, batch)).double()
        h = given_for_logits(network, {classifier: layer}, batch)[classifier]
        if layer.bias is not None:
            h = F.pad(h, (0, 1), value=1.0)
        return [(classifier, h, _by_logits(z, noise_variance))]

    return _sums(network, inputs, batch_size, look)[classifier]


def _by_logits(z, noise_variance):
    """Return the curvature by logits, or its diagonal, summed over the samples."""
    if noise_variance is not None:
        return torch.full_like(z, 1 / noise_variance).sum(0)
    p = z.sigmoid() if z.shape[1] == 1 else z.softmax(-1)
    if 1 < z.shape[1] <= WHOLE:
        return p.sum(0).diag() - p.mT @ p
    return (p * (1 - p)).sum(0)


def _likeliest(mean, found):
    """Return the prior variance v among VARIANCES with the largest evidence.

    It is -(|mean|^2 / v + log det(I + v H)) / 2 by a Laplace approximation, up to a
    constant, for a curvature H.
    """
    eigenvalues, *_ = found.spectrum()
    widths = torch.stack([(v * eigenvalues).log1p().sum() for v in VARIANCES])
    evidence = -(mean.square().sum() / VARIANCES.to(mean) + widths) / 2
    return float(VARIANCES[evidence.argmax()])
