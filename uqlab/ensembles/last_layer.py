"""Last-layer Laplace: members share all but the classifier of a trained network."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uqlab.core.checks import InputsLike, as_inputs, positive
from uqlab.core.modules import (
    Inputs,
    call,
    classifier_of,
    given_for_logits,
    logits_of,
    trainable,
)
from uqlab.ensembles.base import Ensemble, Members, member_generators
from uqlab.ensembles.functional import Own
from uqlab.ensembles.implicit import check_backbone, plain
from uqlab.ensembles.laplace import Curvature, Outputs, each_curvature, sums

WHOLE = 2000  # classes, of which a curvature is kept whole
VARIANCES = torch.logspace(-6, 6, 121, dtype=torch.float64)


def own_classifiers(network: nn.Module, members: Members, classifier: str) -> Ensemble:
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
    sees = {}
    for name, p in network.get_submodule(classifier).named_parameters():
        sees[f"{classifier}.{name}"] = [Own(p.detach().clone()) for _ in ids]
    ensemble = Ensemble(network, ids, sees)
    ensemble.shares_most = True
    return ensemble.with_recipe({"method": "laplace", "classifier": classifier})


def laplace(
    network: nn.Module,
    inputs: InputsLike,
    members: Members,
    *,
    prior_variance: float | None = None,
    outputs: Outputs = None,
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
    members : int, str or range
        As in `lora`. Member m depends on (seed, m) and `network` alone.
    prior_variance : float, optional
        Of each number in the classifier. None for the one with the largest marginal
        likelihood among `VARIANCES`.
    outputs : str, optional
        What the logits are: "classes" of a softmax, "binary", one of a sigmoid,
        "multilabel", several of sigmoids, or "gaussian", means. None: one is binary,
        several are classes.
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
    x = as_inputs(inputs)
    name = classifier_of(network, x)
    ensemble = own_classifiers(network, members, name)
    own = sorted(trainable(ensemble), key=lambda p: -p.ndim)
    parts = [p.data if p.ndim == 3 else p.data[..., None] for p in own]
    mean = torch.cat([p[0] for p in parts], 1).double()
    found = curvature(network, name, x, batch_size, outputs, noise_variance)
    if prior_variance is None:
        prior_variance = likeliest(mean, found)
    positive("prior_variance", prior_variance)
    generators = member_generators(seed, ensemble.member_ids, "laplace")
    drawn = mean + found.draws(1 / prior_variance, generators)
    sizes = [p.shape[-1] for p in parts]
    for p, w in zip(parts, drawn.split(sizes, -1), strict=True):
        p.copy_(w)
    return ensemble.eval()


def curvature(
    network: nn.Module,
    classifier: str,
    inputs: Inputs,
    batch_size: int = 64,
    outputs: Outputs = None,
    noise_variance: float | None = None,
) -> Curvature:
    """Return the curvature of a classifier's weight and bias, side by side."""
    layer: Any = network.get_submodule(classifier)
    ones = int(layer.bias is not None)
    if layer.out_features > WHOLE and outputs in (None, "classes"):
        said = f"more than {WHOLE:,} classes: the output factor of laplace is diagonal"
        warnings.warn(said, stacklevel=3)

    @torch.no_grad()
    def look(batch):
        z = logits_of(call(network, batch)).double()
        h = given_for_logits(network, {classifier: layer}, batch)[classifier]
        by_logits = _by_logits(z, outputs, noise_variance)
        return [(classifier, F.pad(h, (0, ones), value=1.0), by_logits)]

    return sums(network, inputs, batch_size, look)[classifier]


def _by_logits(z, *kind):
    """Return the curvature by logits [samples, outputs], summed over the samples."""
    each, p = each_curvature(z, *kind)
    if p is None or z.shape[1] > WHOLE:
        return each.sum(0)
    return p.sum(0).diag() - p.mT @ p


def likeliest(mean: Tensor, found: Curvature) -> float:
    """Return the prior variance among VARIANCES with the largest evidence."""
    eigenvalues = found.spectrum()[0]
    evidence = [log_evidence(mean, eigenvalues, float(v)) for v in VARIANCES]
    return float(VARIANCES[torch.stack(evidence).argmax()])


def log_evidence(mean: Tensor, eigenvalues: Tensor, prior_variance: float) -> Tensor:
    """Return the log marginal likelihood by a Laplace approximation, up to a constant.

    It is -(|mean|^2 / v + log det(I + v H)) / 2 for a prior variance v and a curvature
    H; the constant is the log-likelihood of the trained weights.
    """
    width = (prior_variance * eigenvalues).log1p().sum()
    return -(mean.square().sum() / prior_variance + width) / 2
