"""Last-layer Laplace: members share all but the classifier of a trained network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import ArrayLike, as_inputs, first_tensor, positive
from uqlab.core.modules import (
    Inputs,
    batches,
    call,
    classifier_of,
    evaluating,
    given_for_logits,
    hooked,
    layers_of,
    logits_of,
    map_tensors,
    trainable,
)
from uqlab.ensembles.base import FoldedEnsemble, Members, member_generators
from uqlab.ensembles.implicit import check_backbone, place, plain
from uqlab.ensembles.laplace import Curvature, square_root
from uqlab.ensembles.layers import active_members, own_dropout
from uqlab.ensembles.members import MemberModule, Own


class LastLayerEnsemble(FoldedEnsemble):
    """Members that differ in the classifier alone: what is below it runs once for all.

    In training it does not: dropout is the members' own.
    """

    _once: bool | None = None  # whether that gives the members' logits; not known yet

    def members_per_pass(self, x):
        """Return all members: a member more costs a classifier more."""
        return self.members

    def run(self, x, rows):
        """Return logits of some members on x [rows, batch, ...], in one pass."""
        first = first_tensor(x)
        if self.training or len(first) == 1 or first.stride(0):
            return super().run(x, rows)
        if self._once is None:  # by two inputs: not where rows are chosen by the batch
            few = map_tensors(lambda t: t[:, :2], x)
            apart = super().run(few, rows)
            try:
                once = self._run_once(few, rows)
                self._once = once.shape == apart.shape and once.allclose(
                    apart, 1e-3, 1e-5
                )
            except (RuntimeError, IndexError):
                self._once = False
        return self._run_once(x, rows) if self._once else super().run(x, rows)

    def _run_once(self, x, rows):
        count = len(first_tensor(x))
        [unit] = layers_of(self.network, MemberModule)

        def repeat(_, args):
            return args[0].repeat(count, *[1] * (args[0].ndim - 1)), *args[1:]

        with active_members(rows), hooked([unit.register_forward_pre_hook(repeat)]):
            logits = logits_of(call(self.network, map_tensors(lambda t: t[0], x)))
        return logits.unflatten(0, (count, -1))


VARIANCES = torch.logspace(-6, 6, 121, dtype=torch.float64)


def own_classifiers(
    network: nn.Module, members: Members, classifier: str
) -> LastLayerEnsemble:
    """Give each member a copy of a network's classifier; all else is shared and frozen.

    Raises
    ------
    ValueError
        For a network that is nothing but a classifier.
    """
    ids = check_backbone(network, members)
    network = plain(network)
    if not classifier:
        raise ValueError(
            f"{type(network).__name__} has no layer before its classifier to share"
        )
    last = network.get_submodule(classifier).named_parameters()
    copies = {p: torch.stack([value.detach()] * len(ids)) for p, value in last}
    place(network, {classifier: {p: Own(nn.Parameter(w)) for p, w in copies.items()}})
    own_dropout(network, len(ids))
    recipe = {"method": "laplace", "classifier": classifier}
    return LastLayerEnsemble(network, ids).with_recipe(recipe)


def laplace(
    network: nn.Module,
    inputs: Inputs | ArrayLike,
    members: Members,
    *,
    prior_variance: float | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> FoldedEnsemble:
    """Draw members around a trained network, the classifier by a Kronecker posterior.

    This is the last-layer Laplace approximation.

    Parameters
    ----------
    network : nn.Module
        Any trained network whose logits are a linear layer's output, the classifier's.
        One logit is a sigmoid's.
    inputs : tensor, array or tensors by name
        Those that it was trained on, [samples, ...]; a generalised Gauss-Newton matrix
        needs no labels.
    members : int, str or range
        As in `lora`. Member m depends on (seed, m) and `network` alone.
    prior_variance : float, optional
        Of each number in the classifier. None for the one with the largest marginal
        likelihood among `VARIANCES`.
    batch_size : int
        Inputs in a pass.

    Returns
    -------
    FoldedEnsemble

    Raises
    ------
    ValueError
        For a prior variance that is not positive, inputs that are not finite, a network
        that is nothing but a classifier, and one whose logits are no layer's output.

    Notes
    -----
    Weight and bias W have the precision G (x) S + I / prior_variance, with the
    curvature G of the logits and the second moment S of the features and a one; of
    tokens those that the logits are made of.

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
    x = as_inputs(inputs)
    name = classifier_of(network, x)
    ensemble = own_classifiers(network, members, name)
    parts = _weight_and_bias(ensemble)
    mean = torch.cat([p[0].detach() for p in parts], 1).double()
    found = curvature(network, name, x, batch_size)
    if prior_variance is None:
        prior_variance = likeliest(mean, found)
    positive("prior_variance", prior_variance)
    generators = member_generators(seed, ensemble.member_ids, "laplace")
    drawn = mean + found.draws(1 / prior_variance, generators)
    sizes = [p.shape[-1] for p in parts]
    for p, w in zip(_weight_and_bias(ensemble), drawn.split(sizes, -1), strict=True):
        p.data.copy_(w)
    return ensemble.eval()


@torch.no_grad()
def curvature(
    network: nn.Module, classifier: str, inputs: Inputs, batch_size: int = 64
) -> Curvature:
    """Return the curvature of a classifier's weight and bias, side by side."""
    layer: Any = network.get_submodule(classifier)
    ones = int(layer.bias is not None)
    outputs: Any = 0
    inner: Any = 0
    rows = 0
    with evaluating(network):
        for _, batch in batches(network, inputs, batch_size):
            roots = square_root(logits_of(call(network, batch))).flatten(0, 1).double()
            h = given_for_logits(network, {classifier: layer}, batch)[classifier]
            h = F.pad(h.double(), (0, ones), value=1.0)
            outputs, inner = outputs + roots.mT @ roots, inner + h.mT @ h
            rows += len(h)
    return Curvature(outputs, inner / rows)


def likeliest(mean: Tensor, found: Curvature) -> float:
    """Return the prior variance among VARIANCES with the largest evidence."""
    large, small = (torch.linalg.eigvalsh(part).clamp(min=0) for part in found)
    eigenvalues = torch.outer(large, small)
    evidence = [log_evidence(mean, eigenvalues, float(v)) for v in VARIANCES]
    return float(VARIANCES[torch.stack(evidence).argmax()])


def log_evidence(mean: Tensor, eigenvalues: Tensor, prior_variance: float) -> Tensor:
    """Return the log marginal likelihood by a Laplace approximation, up to a constant.

    It is -(|mean|^2 / v + log det(I + v H)) / 2 for a prior variance v and a curvature
    H; the constant is the log-likelihood of the trained weights.
    """
    width = (prior_variance * eigenvalues).log1p().sum()
    return -(mean.square().sum() / prior_variance + width) / 2


def _weight_and_bias(ensemble: FoldedEnsemble) -> list[Tensor]:
    """Return the classifiers' weights [members, classes, ...], then biases [..., 1]."""
    own = sorted(trainable(ensemble), key=lambda p: -p.ndim)
    return [p if p.ndim == 3 else p[..., None] for p in own]
