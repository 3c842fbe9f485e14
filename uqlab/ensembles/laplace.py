"""Laplace: Gaussians around trained weights, of a LoRA network or of CLIP's towers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from uqlab.core.checks import (
    ArrayLike,
    InputsLike,
    as_inputs,
    as_tensor,
    one_of,
    positive,
    representable,
)
from uqlab.core.modules import Inputs, batches, call, evaluating, hooked, logits_of
from uqlab.ensembles.base import Ensemble, Members, member_generators, member_range
from uqlab.ensembles.lora import LowRank

Outputs = Literal["classes", "binary", "multilabel", "gaussian"] | None


class Curvature(NamedTuple):
    """The generalised Gauss-Newton matrix of the summed loss by one weight [out, in].

    It is outputs (x) inputs: `outputs` [out, out] sums over inputs, places and classes
    the outer products of what reaches the output, or is [out], the diagonal of that;
    `inputs` [in, in] is the mean over inputs and places of those of what enters.
    """

    outputs: Tensor
    inputs: Tensor

    def spectrum(self) -> tuple[Tensor, Any, Any]:
        """Return the eigenvalues [out, in] and both's vectors; a diagonal has None."""
        (large, u), (small, v) = (
            torch.linalg.eigh(m) if m.ndim == 2 else (m, None) for m in self
        )
        return torch.outer(large.clamp(min=0), small.clamp(min=0)), u, v

    def draw(self, prior_precision: float, generator: torch.Generator) -> Tensor:
        """Draw a weight [out, in]: `draws` with one generator."""
        return self.draws(prior_precision, [generator])[0]

    def draws(
        self, prior_precision: float, generators: Sequence[torch.Generator]
    ) -> Tensor:
        """Draw weights [generators, out, in] around zero.

        They are Normal(0, (outputs (x) inputs + prior_precision I)^-1).
        """
        eigenvalues, u, v = self.spectrum()
        deviation = (eigenvalues + prior_precision).rsqrt()
        like = deviation.cpu()
        noise = [torch.empty_like(like).normal_(generator=g) for g in generators]
        drawn = torch.stack(noise).to(v) * deviation
        return (drawn if u is None else u @ drawn) @ v.mT


class LinearisedEnsemble(Ensemble):
    """Members f(x) + J (w_m - w): one network, linear in what members add to it.

    `center` is that network, an ensemble of one; J is the Jacobian of its logits by
    what its member holds.
    """

    center: Ensemble

    def one_pass(self, call, row, tensors):
        """Return the logits of one member."""
        mean = {key: t[0] for key, t in self.center.rows().items()}
        step = {key: row[key] - t for key, t in mean.items()}
        with sdpa_kernel(SDPBackend.MATH):  # which has a forward derivative
            return torch.add(*jvp(lambda held: call(held, tensors), (mean,), (step,)))

    def member(self, index):
        """Return one member as a module; its weights alone are no network."""
        self._check_index(index)
        return First(self.shard(slice(index, index + 1)))


class First(nn.Module):
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
    outputs: Outputs = None,
    noise_variance: float | None = None,
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
        needs no labels.
    members : int, str or range
        As in `lora`. Member m depends on (seed, m) and `trained` alone.
    linearised : bool
        Whether the network is linear in A and B around the trained ones, as in Yang et
        al.: samples of logits. False takes samples of weights, which the network sees
        as they are; for a wide posterior its accuracy falls.
    prior_variance : float
        Of each number in A and B; Muhlematter et al. 2024 (appendix W) take 0.001.
    outputs, noise_variance
        As in `laplace`.
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
    recipe, count = (getattr(trained, name, None) for name in ("recipe", "members"))
    if (recipe or {}).get("method") != "lora" or count != 1:
        raise ValueError(
            "laplace_lora takes one trained network that `lora` made, "
            f"lora(backbone, 1), got {type(trained).__name__} of {count} members"
        )
    positive("prior_variance", prior_variance)
    ids = member_range(members)
    pairs = curvatures(trained, inputs, batch_size, outputs, noise_variance)
    ensemble = copies(trained, ids, linearised)
    for number, (name, pair) in enumerate(pairs.items()):
        generators = member_generators(seed, ids, "laplace", number)
        low: Any = ensemble.seen[name].kind
        for p, curvature in zip((low.lora_A, low.lora_B), pair, strict=True):
            p.data += curvature.draws(1 / prior_variance, generators).to(p)
    return ensemble.eval()


def copies(trained: Any, ids: range, linearised: bool) -> Any:
    """Return an ensemble whose members all start as the one that was trained."""
    center = copy.deepcopy(trained).requires_grad_(False)
    sees: dict[str, list[nn.Module]] = {}
    for name, part in trained.seen.items():
        one = copy.deepcopy(part.kind)
        for key, t in part.stacked().items():
            one.get_parameter(key).data = t.detach()[0].clone()
        sees[name] = [one for _ in ids]
    kind = LinearisedEnsemble if linearised else Ensemble
    made: Any = kind(center.network, ids, sees)
    made.borrowed = trained.borrowed
    if not linearised:
        return made.with_recipe(trained.recipe)
    made.center = center
    return made.with_recipe({"method": "laplace_lora", "lora": trained.recipe})


def curvatures(
    trained: Any, inputs: InputsLike, batch_size: int = 64, *likelihood: Any
) -> dict[str, tuple[Curvature, Curvature]]:
    """Return the curvatures of A and of B, in float64, by the name of the weight.

    `likelihood` is the outputs and the noise variance of `laplace`.

    What enters B is A of what enters the layer, and slopes go back to A through B.
    """
    network = trained.member(0).requires_grad_()
    low = {n: p.kind for n, p in trained.seen.items() if isinstance(p.kind, LowRank)}
    layers = {n: network.get_submodule(n.rpartition(".")[0]) for n in low}
    whole = sums(
        network,
        inputs,
        batch_size,
        lambda x: _seen_and_back(network, layers, x, likelihood),
    )
    pairs = {}
    for name, (outputs, inner) in whole.items():
        kind = low[name]
        down, up = (kind.scale * t.data[0].double() for t in (kind.lora_A, kind.lora_B))
        of_a = Curvature(up.mT @ outputs @ up, inner)
        pairs[name] = of_a, Curvature(outputs, down @ inner @ down.mT)
    return pairs


def sums(
    network: nn.Module, inputs: Any, batch_size: int, look: Callable[[Inputs], Any]
) -> dict[str, Curvature]:
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
def _seen_and_back(network, layers, x, likelihood):
    """Yield what enters each layer, by place, and the curvature by its outputs."""
    calls = {}

    def note(layer, args, y):
        if type(layer) in (nn.Linear, nn.Conv2d) and getattr(layer, "groups", 1) == 1:
            calls[layer] = args[0].detach(), y

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
        for root in square_root(logits, *likelihood)
    ]
    for (name, layer), *of_classes in zip(layers.items(), *slopes, strict=True):
        seen, back = _rows(layer, calls[layer][0], torch.stack(of_classes))
        back = back.flatten(0, -2).double()
        yield name, seen, back.mT @ back


@torch.no_grad()
def projection_curvature(
    h: ArrayLike, weight: ArrayLike, others: ArrayLike, scale: float | Tensor
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
    h = as_tensor("h", h, "samples width")
    weight = as_tensor("weight", weight, "features width")
    others = as_tensor("others", others, "classes features")
    z = h @ weight.T
    u, length = F.normalize(z), z.norm(dim=1)[:, None, None]
    p = (scale * u @ others.T).softmax(1)[..., None]
    along = (u @ others.T)[..., None] * u[:, None]
    slopes = scale * (others - along) / length  # d logits / d z
    roots = (slopes - (p * slopes).sum(1, keepdim=True)) * p.sqrt()
    roots = roots.flatten(0, 1).double()
    representable("curvatures", roots)
    return Curvature(roots.T @ roots, h.T.double() @ h.double() / len(h))


def _rows(layer: Any, x: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each row, or place, is made from, and its slopes [classes, ...]."""
    if isinstance(layer, nn.Linear):
        return x, back
    mode = layer.padding_mode.replace("zeros", "constant")
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)
    return patches.mT, back.movedim(2, -1)  # the channels last


def square_root(logits: Tensor, *likelihood: Any) -> Tensor:
    """Return columns s_c [c, samples, outputs], whose s_c s_c^T sum to the curvature.

    That of a softmax is diag(p) - p p^T.
    """
    each, p = each_curvature(logits.detach(), *likelihood)
    if p is None:
        return each.sqrt().diag_embed().movedim(1, 0)
    return (torch.eye(p.shape[-1]).to(p)[:, None] - p) * p.T.sqrt()[..., None]


def each_curvature(
    logits: Tensor, outputs: Outputs = None, noise_variance: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Return the loss's curvature by each logit, and the probabilities of a softmax.

    Both are [samples, outputs]. What is no softmax has None, and no curvature by two
    logits.
    """
    one_of("outputs", outputs, (None, "classes", "binary", "multilabel", "gaussian"))
    if outputs == "gaussian":
        positive("noise_variance", noise_variance)
        return torch.full_like(logits, 1 / noise_variance), None
    if noise_variance is not None:
        raise ValueError('noise_variance goes with outputs="gaussian" alone')
    softmax = logits.shape[-1] > 1 and outputs in (None, "classes")
    p = logits.softmax(-1) if softmax else logits.sigmoid()
    return p * (1 - p), p if softmax else None
