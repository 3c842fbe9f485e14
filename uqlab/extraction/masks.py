"""Sub-models hidden in one trained network: masks on its weights, and tiles of its last feature map (Kirsch 2024).

Nothing of the network is trained again: the members share its frozen weights.
"""

import copy
import functools
import itertools
import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.ensembles import (
    ELEMENTWISE,
    Ensemble,
    FoldedEnsemble,
    MaskedLinear,
    member_seed,
    plain_linear,
    replace_layers,
    with_layers,
)
from uqlab.extraction.fit import make_mask_step, sequence
from uqlab.extraction.tiles import tiles
from uqlab.training import Workers

__all__ = ["MaskEnsemble", "MaskHistory", "Masks", "fit_masks", "mask_diversity", "masks", "tiles"]


class Masks(NamedTuple):
    """The masks of one linear layer, in [0, 1]; None where nothing is masked."""

    rows: Float[Tensor, "members out"] | None
    columns: Float[Tensor, "members in"] | None


@dataclass(frozen=True)
class MaskHistory:
    """What `fit_masks` did: cross-entropy [steps, members] and mask diversity [steps], nats; steps; seconds."""

    loss: Tensor
    diversity: Tensor
    steps: int
    seconds: float


class MaskEnsemble(FoldedEnsemble):
    """Members that keep rows and columns of one network's linear layers; soft masks until `harden` is called."""

    def train(self, mode: bool = True) -> "MaskEnsemble":
        """The frozen network stays as it is at prediction: no dropout, no batch statistics."""
        super().train(mode)
        self.network.eval()
        return self

    def layers(self) -> dict[str, MaskedLinear]:
        """The masked layers by name."""
        return {name: part for name, part in self.network.named_modules() if isinstance(part, MaskedLinear)}

    def masks(self) -> dict[str, Masks]:
        """The masks of every layer, by its name in the network."""
        with torch.no_grad():
            return {name: Masks(*layer.masks()) for name, layer in self.layers().items()}

    def harden(self, threshold: float = 0.5) -> "MaskEnsemble":
        """Masks become 1 where they exceed `threshold` and 0 elsewhere; `soften` undoes it. Returns the ensemble."""
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), as masks are, got {threshold}")
        return self._set_threshold(threshold)

    def soften(self) -> "MaskEnsemble":
        """Masks are the sigmoids of their logits again. Returns the ensemble."""
        return self._set_threshold(None)

    def _set_threshold(self, threshold: float | None) -> "MaskEnsemble":
        for layer in self.layers().values():
            layer.threshold = threshold
        return self

    def member(self, index: int) -> nn.Module:
        """Member `index` as a plain network.

        With hard masks a dense small one, where the masked layers are the linear layers of an `nn.Sequential` with
        elementwise modules between them: units that are not used are gone, units that are used but masked to a constant
        have become part of the next bias. Elsewhere a network of the original shape with masked weights.
        """
        self._check_index(index)
        hard = all(layer.threshold is not None for layer in self.layers().values())
        parts = sequence(self.network)
        return _small_member(parts, index) if hard and parts is not None else super().member(index)

    def shard(self, rows: slice) -> "MaskEnsemble":
        return MaskEnsemble(with_layers(self.network, lambda layer: layer.shard(rows)), self.member_ids[rows])


def masks(model: nn.Module, members: int = 10, *, inputs: bool = True, std: float = 0.5, seed: int = 0) -> MaskEnsemble:
    """An ensemble of sub-models of one network: row and column masks on every `nn.Linear`, all weights frozen.

    model: the trained network; it is copied, and the copy is used in evaluation mode. Its last linear layer gives the
        classes, whose rows are never masked.
    members: number of sub-models.
    inputs: whether the columns of the first linear layer, its input features, are masked too. If not, the product with
        the first layer is computed once for all members.
    std: standard deviation of the mask logits at the start (Normal around 0); member m's depend on (seed, m) alone.

    The masks are to be trained with `fit_masks`. Raises TypeError for what is no single network, ValueError for a model
    without linear layers and for members < 1 or std <= 0. Kirsch 2024, section D.4.
    """
    if not isinstance(model, nn.Module) or isinstance(model, Ensemble):
        hint = "; choose one of its networks: ensemble.member(0)" if isinstance(model, Ensemble) else ""
        raise TypeError(f"masks takes one torch module, got {type(model).__name__}{hint}")
    if members < 1 or not 0 < std < math.inf:
        raise ValueError(f"members must be at least 1 and std positive, got {members} and {std}")
    network = nn.Sequential(copy.deepcopy(model)) if isinstance(model, nn.Linear) else copy.deepcopy(model)
    names = [name for name, part in network.named_modules() if type(part) is nn.Linear]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layer to mask; masks need one, tiles take convolutional networks"
        )
    for part in [*network.parameters()]:
        part.requires_grad_(False)
    generators = [torch.Generator().manual_seed(member_seed(seed, m, "masks")) for m in range(members)]

    def logits(wanted: bool, features: int, like: Tensor) -> Tensor | None:
        if not wanted:
            return None
        return torch.stack([torch.randn(features, generator=g) * std for g in generators]).to(like)

    def make(name: str, layer: nn.Linear) -> MaskedLinear:
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        rows = logits(name != names[-1], weight.shape[0], weight)
        columns = logits(inputs or name != names[0], weight.shape[1], weight)
        return MaskedLinear(weight, bias, rows, columns, members=members)

    replace_layers(network, "|".join(f"^{name}$".replace(".", r"\.") for name in names), make)
    return MaskEnsemble(network, range(members)).eval()


def mask_diversity(ensemble: Ensemble) -> Float[Tensor, ""]:
    """I[mask; member] per mask element, mean over all elements of all layers, nats, in [0, log 2].

    H(mean over members of p) - mean over members of H(p), with H the entropy of a coin that shows 1 with probability p,
    the mask. Hard masks count as p in {0, 1}. Kirsch 2024, section D.4; mean instead of sum is our choice, which keeps
    the weight of the term independent of the width.
    """
    ensemble = _checked(ensemble)
    found = [mask for layer in ensemble.masks().values() for mask in layer if mask is not None]
    p = torch.cat(found, 1)  # [members, elements]
    return (_coin(p.mean(0)) - _coin(p).mean(0)).mean().clamp(min=0)


def fit_masks(
    ensemble: Ensemble,
    inputs: Shaped[Tensor, "samples ..."],
    labels: Int[Tensor, " samples"],
    *,
    diversity: float = 2.0,
    steps: int = 600,
    lr: float = 0.05,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> MaskHistory:
    """Train the masks of `masks(...)`: mean cross-entropy of the members - diversity * `mask_diversity`, by Adam.

    All members see the same batch [batch, ...], drawn from inputs [samples, ...] in an order of `seed`. Networks of
    linear layers and ReLU take a step whose forward and backward pass are written out; others autograd's. The ensemble
    is left with soft masks.

    Raises TypeError for another kind of ensemble; ValueError for labels that are missing, of one class only or out of
    range, for inputs that are empty or not finite and for settings out of range; FloatingPointError if a loss is not
    finite. Kirsch 2024, section D.4 (weight 2.0); optimiser and steps are our choice.
    """
    started = time.perf_counter()
    ensemble = _checked(ensemble)
    if steps < 1 or batch_size < 1 or not lr > 0 or not 0 <= diversity < math.inf:
        given = f"{steps}, {batch_size}, {lr}, {diversity}"
        raise ValueError(f"steps and batch_size must be at least 1, lr positive and diversity >= 0, got {given}")
    ensemble.soften().eval()
    layers = list(ensemble.layers().values())
    like = layers[0].weight
    x, y = _check_data(ensemble, inputs, labels)
    x, y = x.to(like.device, like.dtype if x.is_floating_point() else None), y.to(like.device, torch.int64)

    # All logits lie in one tensor, of which the layers' parameters are views: one sigmoid, one update.
    parameters = [p for layer in layers for p in layer.own_parameters()]
    logits = torch.cat([p.detach() for p in parameters], 1)  # [members, elements]
    for p, part in zip(parameters, logits.split([p.shape[1] for p in parameters], 1), strict=True):
        p.data = part
    optimizer = torch.optim.Adam([logits], lr, fused=True)
    gradient = logits.grad = torch.zeros_like(logits)
    losses, diversities = (torch.zeros(steps, *size, device=like.device) for size in ((ensemble.members,), ()))
    work = batch_size * ensemble.members * sum(layer.weight.numel() for layer in layers)

    workers = Workers(ensemble, work, functools.partial(make_mask_step, flat=x.ndim == 2))
    with workers, tqdm(total=steps, desc="fit masks", disable=not progress, leave=False) as bar:
        for step, rows in enumerate(itertools.islice(_batches(len(x), batch_size, seed, like.device), steps)):
            bx, by = x[rows], y[rows]

            def gradients(members: slice, _, mask_step, step=step, bx=bx, by=by) -> None:
                losses[step, members], gradient[members] = mask_step(bx, by)

            workers.run(gradients)
            p = logits.sigmoid()
            mean = p.mean(0)
            diversities[step] = (_coin(mean) - _coin(p).mean(0)).mean()
            # d (H(mean p) - mean H(p)) / dp = (logit(p) - logit(mean p)) / members, and logit(p) is what we train
            slope = (logits - mean.logit(1e-7)).mul_(p).mul_(1 - p)
            gradient.div_(ensemble.members).sub_(slope, alpha=diversity / logits.numel())
            optimizer.step()
            bar.update()
    for p in parameters:
        p.data = p.data.clone()
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        raise FloatingPointError(f"the loss is not finite from step {int(bad[0, 0])} on; lower lr")
    return MaskHistory(losses.cpu(), diversities.cpu(), steps, time.perf_counter() - started)


def _checked(ensemble: Ensemble) -> MaskEnsemble:
    if not isinstance(ensemble, MaskEnsemble):
        raise TypeError(f"needs the ensemble that extraction.masks(model) returns, got {type(ensemble).__name__}")
    return ensemble


def _check_data(ensemble: MaskEnsemble, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        kinds = f"{type(inputs).__name__} and {type(labels).__name__}"
        raise TypeError(f"inputs and labels must be tensors, got {kinds}; masks cannot be trained without labels")
    if inputs.ndim < 2 or len(inputs) == 0 or labels.shape != inputs.shape[:1]:
        given = f"{list(inputs.shape)} and {list(labels.shape)}"
        raise ValueError(f"inputs must be [samples, ...], at least one, and labels [samples], got {given}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if inputs.is_floating_point() and not inputs.isfinite().all():
        raise ValueError("inputs hold NaN or infinite values; clean them first")
    low, high = int(labels.min()), int(labels.max())
    parameter = next(ensemble.parameters())
    with torch.no_grad():
        first = inputs[:1].to(parameter.device, parameter.dtype if inputs.is_floating_point() else None)
        classes = ensemble(first).shape[-1]
    if low < 0 or high >= classes:
        missing = "; -1 stands for a missing label, without which masks cannot be trained" if low < 0 else ""
        raise ValueError(f"labels must be 0 to {classes - 1}, one for each output, got {low} to {high}{missing}")
    if low == high:
        raise ValueError(f"all labels are {low}: with one class any mask will do; masks need two classes or more")
    return inputs.detach(), labels


def _batches(samples: int, batch_size: int, seed: int, device: torch.device):
    """Endless row numbers [batch], every epoch in a new order; drawn on the CPU, so alike on every device."""
    generator = torch.Generator().manual_seed(member_seed(seed, 0, "mask batches"))
    while True:
        yield from torch.randperm(samples, generator=generator).to(device).split(batch_size)


def _coin(p: Tensor) -> Tensor:
    """Entropy of a coin, nats."""
    return torch.special.entr(p) + torch.special.entr(1 - p)


class _Keep(nn.Module):
    """The features that the first layer keeps."""

    index: Tensor

    def __init__(self, index: Int[Tensor, " kept"]):
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.index)


def _small_member(parts: list[nn.Module], index: int) -> nn.Sequential:
    """The hard member `index` of a sequence of modules, without the units that it does not use.

    Between two linear layers with nothing but elementwise modules, a unit is needed if the second layer keeps its
    column and the first its row. If only the column is kept, the unit shows what the elementwise modules make of its
    bias, a constant that moves into the second layer's bias.
    """
    linear = {i: part for i, part in enumerate(parts) if isinstance(part, MaskedLinear)}
    rows, columns = {}, {}  # which features of layer i are kept [out], [in]
    for i, layer in linear.items():
        kept = [None if mask is None else mask[index].bool() for mask in layer.masks()]
        ones = [torch.ones(features, dtype=torch.bool, device=layer.weight.device) for features in layer.weight.shape]
        rows[i], columns[i] = (one if mask is None else mask for mask, one in zip(kept, ones, strict=True))
    after = {a: b for a, b in itertools.pairwise(linear) if all(type(p) in ELEMENTWISE for p in parts[a + 1 : b])}
    before = {b: a for a, b in after.items()}
    small: list[nn.Module] = []
    for i, part in enumerate(parts):
        if i not in linear:
            small.append(copy.deepcopy(part))
            continue
        weight = linear[i].weight.detach() * rows[i][:, None]
        bias = _bias(linear[i]).clone()
        inside = columns[i]
        if i in before:
            constant = _bias(linear[before[i]])
            for between in parts[before[i] + 1 : i]:
                constant = between(constant)
            bias += weight @ (constant * (columns[i] & ~rows[before[i]]))
            inside = columns[i] & rows[before[i]]
        elif not inside.all():
            small.append(_Keep(inside.nonzero().flatten()))
        needed = rows[i] & columns[after[i]] if i in after else slice(None)
        weight, bias = weight[needed][:, inside], bias[needed]
        small.append(plain_linear(weight, bias if linear[i].bias is not None or bias.any() else None))
    return nn.Sequential(*small).eval()


def _bias(layer: MaskedLinear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias.detach()
