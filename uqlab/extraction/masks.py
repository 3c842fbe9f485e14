"""Sub-models that are hidden in one trained network, found by masks on its weights.

Nothing of the network is trained again: all members use its frozen weights (Kirsch
2024).
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.special import entr
from tqdm.auto import tqdm

from uqlab.core.checks import (
    InputsLike,
    as_inputs,
    as_labels,
    at_least,
    held,
    one_network,
    positive,
    within,
)
from uqlab.core.modules import like_parameters, trainable
from uqlab.ensembles import (
    Ensemble,
    Scaled,
    member_generators,
    member_range,
    member_seed,
    plain,
    recorded,
)
from uqlab.training import cross_entropy

ELEMENTWISE = {
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU,
    nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh, nn.Hardswish,
}  # fmt: skip


class Masks(NamedTuple):
    """The masks of one linear layer, in [0, 1]; None where nothing is masked."""

    rows: Float[Tensor, "members out"] | None
    columns: Float[Tensor, "members in"] | None


class Masked(Scaled):
    """W * row col^T, what one member sees of W: the rows and columns that it keeps.

    A mask is the sigmoid of its logits or, with a `threshold`, 1 where the sigmoid
    exceeds the threshold and 0 elsewhere.

    Parameters
    ----------
    row_logits, column_logits
        [out] and [in], which are trained; None masks nothing.
    """

    def __init__(self, row_logits: Tensor | None, column_logits: Tensor | None):
        super().__init__(None, None)
        self.threshold: float | None = None
        self.row_logits = None if row_logits is None else nn.Parameter(row_logits)
        self.column_logits = None
        if column_logits is not None:
            self.column_logits = nn.Parameter(column_logits)

    def factors(self) -> Masks:
        """Return the masks."""
        return Masks(self._mask(self.row_logits), self._mask(self.column_logits))

    def _mask(self, logits: Tensor | None) -> Tensor | None:
        if logits is None:
            return None
        p = logits.sigmoid()
        return p if self.threshold is None else (p > self.threshold).to(p.dtype)


class MaskEnsemble(Ensemble):
    """Members that keep some rows and columns of one network's linear layers.

    The masks are soft until `harden`.
    """

    @property
    def took_last_linear(self) -> bool:
        """Its rows are never masked."""
        return True

    def train(self, mode: bool = True) -> "MaskEnsemble":
        """Keep the frozen network in evaluation mode: no dropout, no new statistics."""
        super().train(mode)
        self.network.eval()
        return self

    def layers(self) -> dict[str, Masked]:
        """Return what members hold for each layer, by its name; [members, ...] each."""
        parts = self.seen.items()
        return {name.removesuffix(".weight"): p.kind for name, p in parts}  # type: ignore[misc]

    @torch.no_grad()
    def masks(self) -> dict[str, Masks]:
        """Return the masks of every layer, by its name in the network."""
        return {name: kind.factors() for name, kind in self.layers().items()}

    def harden(self, threshold: float | None = 0.5) -> "MaskEnsemble":
        """Make masks 1 where they exceed `threshold` and 0 elsewhere, until `soften`.

        Returns the ensemble itself.
        """
        if threshold is not None:
            within("threshold", threshold, "[0, 1)")
        for layer in self.layers().values():
            layer.threshold = threshold
        return self.with_recipe({**self.recipe, "threshold": threshold})

    def soften(self) -> "MaskEnsemble":
        """Make masks the sigmoids of their logits again; return the ensemble itself."""
        return self.harden(None)

    def member(self, index: int) -> nn.Module:
        """Return a member as a plain network.

        With hard masks in an nn.Sequential it is a smaller one, without the units that
        its masks leave out.
        """
        network = super().member(index).eval()
        if any(layer.threshold is None for layer in self.layers().values()):
            return network
        small = type(network) is nn.Sequential
        return _dense(_sequence(network)).eval() if small else network


@recorded
def masks(
    model: nn.Module,
    members: int | range = 10,
    *,
    inputs: bool = True,
    std: float = 0.5,
    threshold: float | None = None,
    seed: int = 0,
) -> MaskEnsemble:
    """Make an ensemble of sub-models of one network, whose weights are frozen.

    Every `nn.Linear` gets row and column masks; train them with `fit_masks`.

    Parameters
    ----------
    model
        The trained network. It is copied, and the copy is always in evaluation mode.
        Its last linear layer gives the classes, so its rows are never masked; the first
        call raises ValueError where another layer does.
    members
        How many sub-models, or the numbers of a shard, `range(8, 16)`.
    inputs
        Whether the columns of the first linear layer, its input features, are masked.
    std
        Of the initial mask logits, which for member m depend on (seed, m) alone.
    threshold
        Where masks are hard, as after `harden`; None for soft ones.

    Raises
    ------
    TypeError
        Unless `model` is one network.
    ValueError
        For a model without linear layers, members < 1 and std <= 0.

    References
    ----------
    Kirsch 2024, section D.4.
    """
    one_network(model, "masks")
    ids = member_range(members)
    positive("std", std)
    network = copy.deepcopy(plain(model))
    network = nn.Sequential(network) if isinstance(network, nn.Linear) else network
    linear = {k: m for k, m in network.named_modules() if type(m) is nn.Linear}
    if not linear:
        raise ValueError(
            "model has no nn.Linear layer to mask; masks need one, tiles take "
            "convolutional networks"
        )
    generators = member_generators(seed, ids, "masks")
    first, last = next(iter(linear)), next(reversed(linear))
    sees = {}
    for name, layer in linear.items():
        out, width = layer.weight.shape
        sizes = out * (name != last), width * (inputs or name != first)
        drawn = [_drawn(layer.weight, sizes, std, g) for g in generators]
        sees[f"{name}.weight"] = drawn
    return MaskEnsemble(network, ids, sees).harden(threshold).eval()


def _drawn(like: Tensor, sizes: tuple[int, int], std: float, generator) -> Masked:
    """Draw the masks of a layer for one member; a size of 0 masks nothing."""
    drawn = [std * torch.randn(n, generator=generator).to(like) for n in sizes]
    return Masked(*(logits if len(logits) else None for logits in drawn))


def mask_diversity(ensemble: MaskEnsemble) -> Float[Tensor, ""]:
    """Return I[mask; member] of each mask element, averaged over all elements.

    A mask element p is read as a coin that shows 1 with probability p, with entropy
    H(p): the information is H(mean over members of p) - mean over members of H(p).
    Kirsch 2024, section D.4, does not say whether the elements are summed or averaged;
    our mean makes the term independent of the width.

    Returns
    -------
    Tensor
        Nats, in [0, log 2].
    """
    masks = []
    for layer in ensemble.masks().values():
        masks += [mask for mask in layer if mask is not None]
    return _information(torch.cat(masks, 1)).clamp(min=0)


def _information(p: Float[Tensor, "members elements"]) -> Float[Tensor, ""]:
    """Return the mean over elements of I[coin; member], in nats."""
    eps = torch.finfo(p.dtype).eps
    p = p.clamp(eps, 1 - eps)  # at 0 and 1 the slope of the entropy is infinite
    return (_coin_entropy(p.mean(0)) - _coin_entropy(p).mean(0)).mean()


def _coin_entropy(p: Tensor) -> Tensor:
    return entr(p) + entr(1 - p)


class _SelectFeatures(nn.Module):
    """The input features that a small member keeps."""

    index: Tensor

    def __init__(self, index: Int[Tensor, " kept"]):
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.index)


def _sequence(network: nn.Module) -> list[nn.Module]:
    """Return the modules of nested Sequentials in the order of their calls."""
    if type(network) is not nn.Sequential:
        return [network]
    leaves = []
    for module in network:
        leaves += _sequence(module)
    return leaves


@torch.no_grad()
def _dense(modules: list[nn.Module]) -> nn.Sequential:
    """Return a network without the units that its linear layers do not use."""
    dense = []
    before = None  # the linear layer after which all modules were elementwise
    for module in modules:
        if type(module) is nn.Linear:
            if before is None:
                used = module.weight.any(0)
                if not used.all():
                    dense.append(_SelectFeatures(used.nonzero().flatten()))
                _set(module, module.weight[:, used], module.bias)
            else:
                _join(before, dense[dense.index(before) + 1 :], module)
            before = module
        elif type(module) not in ELEMENTWISE:
            before = None
        dense.append(module)
    return nn.Sequential(*dense)


def _join(first: nn.Linear, between: list[nn.Module], second: nn.Linear) -> None:
    """Take out the units between two linear layers that do not depend on the input.

    A unit without weights into it is constant, namely what the elementwise modules make
    of its bias: the second layer's bias takes that over. One without weights from it
    adds nothing.
    """
    live = first.weight.any(1)
    bias = second.bias
    constant = first.weight.new_zeros(len(live)) if first.bias is None else first.bias
    for elementwise in between:
        constant = elementwise(constant)
    added = second.weight @ (constant * ~live)
    if bias is not None or added.any():
        bias = added if bias is None else bias + added
    kept = live & second.weight.any(0)
    _set(first, first.weight[kept], None if first.bias is None else first.bias[kept])
    _set(second, second.weight[:, kept], bias)


def _set(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight = nn.Parameter(weight)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    layer.out_features, layer.in_features = weight.shape


class MaskHistory(NamedTuple):
    """The course of a training of masks.

    Attributes
    ----------
    loss
        Cross-entropy [steps, members], nats.
    diversity
        Mask diversity [steps], nats.
    """

    loss: Tensor
    diversity: Tensor


def fit_masks(
    ensemble: MaskEnsemble,
    inputs: InputsLike,
    labels: Any = None,
    *,
    diversity: float = 2.0,
    steps: int = 600,
    lr: float = 0.05,
    batch_size: int = 128,
    seed: int = 0,
    progress: bool = True,
) -> MaskHistory:
    """Train the masks of `masks(...)` by Adam; afterwards they are soft.

    The loss is the members' mean cross-entropy - diversity * `mask_diversity`. All
    members see the same batches of inputs, whose order follows from `seed`.

    Raises
    ------
    TypeError
        If labels are not integers.
    ValueError
        If labels are all of one class or out of range, inputs are empty or not finite,
        or settings are out of range.
    FloatingPointError
        If a loss or, after the last step, a mask is not finite.

    References
    ----------
    Kirsch 2024, section D.4 (weight 2.0); optimiser and steps are our choice.
    """
    at_least("steps", steps)
    positive("lr", lr)
    within("diversity", diversity, "[0, inf)")
    ensemble.soften().eval()
    x, y = _data(ensemble, inputs, labels)
    masks: Any = trainable(ensemble)  # logits of all layers, [members, features]
    optimizer = torch.optim.Adam(masks, lr, fused=True)
    batches, measured = _batches(len(x), batch_size, seed), []
    for _ in tqdm(range(steps), "fit masks", disable=not progress, leave=False):
        rows = next(batches)
        logits = ensemble(x[rows])
        loss = cross_entropy(logits, y[rows].expand(logits.shape[:2]))
        shared = _information(torch.cat(masks, 1).sigmoid())
        optimizer.zero_grad()
        (loss.mean() - diversity * shared).backward()
        optimizer.step()
        measured.append((loss.detach(), shared.detach()))
    return _history(measured, masks)


def _history(measured: list[tuple[Tensor, Tensor]], masks: list[Tensor]) -> MaskHistory:
    """Return the history; raise FloatingPointError where it or a mask is not finite."""
    losses, diversities = (
        torch.stack(part).cpu() for part in zip(*measured, strict=True)
    )
    finite = losses.isfinite().all(1)
    if not finite.all():
        step = int(finite.int().argmin())
        raise FloatingPointError(f"the loss is not finite from step {step}; lower `lr`")
    if not all(mask.isfinite().all() for mask in masks):
        raise FloatingPointError("a mask is not finite; lower `lr`")
    return MaskHistory(losses, diversities)


def _data(
    ensemble: MaskEnsemble, inputs: InputsLike, labels: Any
) -> tuple[Tensor, Tensor]:
    """Return inputs, and labels of two classes or more, on the ensemble's device."""
    inputs, labels = held(inputs, labels)
    x = like_parameters(ensemble, as_inputs(inputs, by_name=False))
    with torch.no_grad():
        classes = ensemble(x[:1]).shape[-1]
    y = as_labels(labels, len(x), classes).to(x.device)
    if (y == y[0]).all():
        raise ValueError(f"all labels are {int(y[0])}; masks need two classes or more")
    return x, y


def _batches(
    samples: int, batch_size: int, seed: int
) -> Iterator[Int[Tensor, " batch"]]:
    """Yield row numbers without end, every epoch in a new order."""
    generator = torch.Generator().manual_seed(member_seed(seed, 0, "mask batches"))
    while True:
        yield from torch.randperm(samples, generator=generator).split(batch_size)
