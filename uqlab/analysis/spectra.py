"""Singular vectors of weights before and after training, and of members.

Vectors are compared by |cos|. Left vectors are directions of a layer's output, right
vectors of its input. Where singular values are equal, their vectors are arbitrary
within the subspace that they span.
"""

import math
import re
import warnings
from typing import Literal, NamedTuple

import scipy.linalg
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.analysis.diversity import layer_names, member_weights
from uqlab.core.checks import (
    ArrayLike,
    Target,
    as_tensor,
    at_least,
    between,
    finite,
    one_network,
    one_of,
    within,
)
from uqlab.ensembles import Ensemble, weights_of
from uqlab.models import PROJECTIONS

Side = Literal["left", "right"]


class Intruders(NamedTuple):
    """How many of the k leading singular vectors after training are intruders.

    `max_cosine` is that of each vector with the vector before that is most like it;
    `energy` is the intruders' share of the k squared singular values.
    """

    count: Int[Tensor, "*batch"]  # type: ignore[override]  # tuples have such a method
    max_cosine: Float[Tensor, "*batch k"]
    energy: Float[Tensor, "*batch"]


class LayerSpectra(NamedTuple):
    """The k leading singular values and vectors of a layer, of every member.

    NaN stands for vectors whose singular value is 0. The fields from `before_values` on
    are None if the weights before training are unknown.

    Attributes
    ----------
    values
        The members' singular values.
    between
        |cos| of the first member's vectors (rows) and the second's.
    before_values
        Those before training.
    initial
        |cos| of a member's vectors (rows) and those before (columns).
    max_cosine
        Of each vector with the vector before that is most like it.
    off_diagonal
        Of the members' matrices, as the function `off_diagonal` has it.
    """

    values: Float[Tensor, "members k"]
    between: Float[Tensor, "members members k k"]
    before_values: Float[Tensor, " k"] | None = None
    initial: Float[Tensor, "members k k"] | None = None
    max_cosine: Float[Tensor, "members k"] | None = None
    off_diagonal: Float[Tensor, " members"] | None = None

    def intruders(self, k: int = 10, threshold: float = 0.5) -> Intruders:
        """Return every member's intruders among its k leading vectors.

        Raises ValueError if the weights before training are unknown.
        """
        if self.max_cosine is None:
            raise ValueError(
                "intruders are found by the weights before training: "
                "give ensemble_spectra(before=...)"
            )
        between("k", k, 1, self.values.shape[1], ", the k of these spectra")
        return _intruders(self.values[:, :k], self.max_cosine[:, :k], threshold)

    def mean_between(self) -> Float[Tensor, "k k"]:
        """Return `between`, averaged over pairs; raises ValueError for one member."""
        members = len(self.between)
        if members < 2:
            raise ValueError("pairs need at least two members, got 1")
        return self.between[~torch.eye(members, dtype=torch.bool)].nanmean(0)


def singular_vector_similarity(
    before: ArrayLike, after: ArrayLike, k: int = 16, side: Side = "left"
) -> Float[Tensor, "*batch k k"]:
    """Return |cos| between the k leading singular vectors of two matrices.

    Parameters
    ----------
    before, after
        [..., out, in]; one matrix is compared with all matrices of the other argument.
    k
        At most the rank of the matrices.
    side
        "left", of the output, or "right", of the input.

    Returns
    -------
    Tensor
        Rows: vectors of `after`; columns: of `before`.

    Raises
    ------
    ValueError
        For shapes that differ, values that are not finite, and a k above the rank.

    References
    ----------
    Muhlematter et al. 2024, section 4 and appendix D.
    """
    before, after = _checked(before, after, k, side)
    old, u0 = _leading(before, k)
    new, u1 = _leading(after, k)
    _check_rank("before", old, before.shape)
    _check_rank("after", new, after.shape)
    return _cosines(u1, u0)


def intruder_dimensions(
    before: ArrayLike,
    after: ArrayLike,
    k: int = 10,
    threshold: float = 0.5,
    side: Side = "left",
) -> Intruders:
    """Return the intruders among the k leading singular vectors of `after`.

    An intruder is unlike all singular vectors of `before`, not only the k leading ones:
    every |cos| is below `threshold`, in (0, 1]. `random_level` is what to expect of a
    random vector. The rest is as in `singular_vector_similarity`.

    References
    ----------
    Shuttleworth et al. 2025, arXiv 2410.21228; the share of the energy is our addition,
    because counts saturate.
    """
    before, after = _checked(before, after, k, side)
    u0, s0, _ = torch.linalg.svd(before, full_matrices=False)
    values, u1 = _leading(after, k)
    _check_rank("after", values, after.shape)
    u0 = u0 * _alive(s0, before.shape)[..., None, :]  # a value of 0 has no direction
    return _intruders(values, _cosines(u1, u0).amax(-1), threshold)


def random_level(dimension: int, vectors: int | None = None) -> float:
    """Return the largest |cos| to expect of a random vector with orthonormal ones.

    It is E max |g_i| / E ||g|| for a Normal g, since the direction and the length of g
    are independent.

    Parameters
    ----------
    dimension
        Of the space.
    vectors
        How many orthonormal vectors; None for a whole basis.

    Examples
    --------
    >>> round(random_level(768), 2)
    0.12
    """
    at_least("dimension", dimension)
    vectors = dimension if vectors is None else vectors
    between("vectors", vectors, 1, dimension, ", the dimension")
    x = torch.linspace(0, 12, 24001, dtype=torch.float64)
    beyond = 1 - torch.erf(x / math.sqrt(2)) ** vectors  # P(max |g_i| > x)
    logarithms = math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2)
    length = math.sqrt(2) * math.exp(logarithms)  # E ||g||
    return torch.trapezoid(beyond, x).item() / length


def off_diagonal(before: ArrayLike, after: ArrayLike) -> Float[Tensor, "*batch"]:
    """Return the share of ||W||_F^2 off the diagonal of U^T W V, in [0, 1].

    W is `after`, and U, V are the singular vectors of `before`: the share is 0 where
    only singular values changed. Errors as in `singular_vector_similarity`.
    """
    before, after = _checked(before, after, 1)
    u, _, vh = torch.linalg.svd(before, full_matrices=False)
    return _off_diagonal(u, vh, after)


def projection(name: str) -> str | None:
    """Tell which matrix of the attention a layer is, by its name.

    Returns
    -------
    str or None
        "query", "key", "value", "output", "query, key, value" for a matrix that holds
        all three, or None for any other layer.
    """
    kinds = (kind for kind, pattern in PROJECTIONS.items() if re.search(pattern, name))
    return next(kinds, None)


def ensemble_spectra(
    ensemble: Ensemble,
    target: Target | None = None,
    k: int = 16,
    *,
    before: nn.Module | None = None,
    update: bool = False,
    side: Side = "left",
    progress: bool = True,
) -> dict[str, LayerSpectra]:
    """Return the spectra of an ensemble's linear layers, by name.

    Members are compared with the weights before and with each other; only one layer's
    matrices are held at a time. Vectors whose singular value is 0 are NaN, and a
    warning counts them.

    Parameters
    ----------
    ensemble
        Any ensemble of networks with linear layers.
    target
        A regular expression on layer names, as in `diversity.layer_names`.
    k
        How many vectors, at most the smaller side of a layer.
    before
        The network that the members started from. None takes its weights from the
        ensemble, if it still holds them unchanged, as LoRA and masks do.
    update
        Analyse what was added, W_m - W (for LoRA B_m A_m), and not W_m. Its rank bounds
        the useful k.
    side
        "left", of the output, or "right", of the input.
    progress
        Show a bar.

    Raises
    ------
    ValueError
        For a target without a linear layer, a k above a layer's size, a `before` that
        lacks layers or has other shapes, and `update` without the weights before.

    References
    ----------
    Muhlematter et al. 2024, section 4 and appendix D.
    """
    if before is not None:
        one_network(before, "ensemble_spectra(before=...)")
    names = layer_names(ensemble, target)
    starts = {name: _start(ensemble, name, before) for name in names}
    for name, start in starts.items():
        shape = member_weights(ensemble, name, [0]).shape[1:]
        _check_size(k, shape, f"{name} ")
        _check_start(name, start, shape, update)
    bar = tqdm(starts, desc="spectra", unit="layer", disable=not progress, leave=False)
    spectra = {n: _layer(ensemble, n, starts[n], k, update, side) for n in bar}
    alike = [layer.between.diagonal().diagonal() for layer in spectra.values()]
    missing = int(torch.stack(alike).isnan().sum())  # |cos| of vectors with themselves
    if missing:
        warnings.warn(
            f"{missing} of {len(names) * ensemble.members * k} singular vectors are "
            "NaN: their singular values are 0, "
            f"that is k={k} exceeds the rank of some matrices",
            stacklevel=2,
        )
    return spectra


@torch.no_grad()
def _layer(
    ensemble: Ensemble,
    name: str,
    start: Tensor | None,
    k: int,
    update: bool,
    side: Side,
) -> LayerSpectra:
    """Return one layer's spectra, on the CPU."""
    after = member_weights(ensemble, name)
    if update and start is not None:
        after = _update(ensemble, name, start, after)
    base, after = _checked(after[0] if start is None else start, after, k, side)
    values, vectors = _leading(after, k)  # [members, k], [members, out or in, k]
    vectors = vectors.where(_alive(values, after.shape)[:, None], math.nan)
    spectra = LayerSpectra(values.cpu(), _cosines(vectors[:, None], vectors).cpu())
    return spectra if start is None else _compared(spectra, base, after, vectors)


def _compared(
    spectra: LayerSpectra, before: Tensor, after: Tensor, vectors: Tensor
) -> LayerSpectra:
    """Return the spectra with what compares members' vectors with those before."""
    u, s, vh = torch.linalg.svd(before, full_matrices=False)
    alive = _alive(s, before.shape)
    k = vectors.shape[-1]
    cosines = _cosines(vectors, u * alive)  # [members, k, all vectors before]
    return spectra._replace(
        before_values=s[:k].cpu(),
        initial=cosines[..., :k].where(alive[:k], math.nan).cpu(),
        max_cosine=cosines.amax(-1).cpu(),
        off_diagonal=_off_diagonal(u, vh, after).cpu(),
    )


def _check_start(
    name: str, start: Tensor | None, shape: torch.Size, update: bool
) -> None:
    """Raise ValueError for a start that is absent or of another shape."""
    if start is None and update:
        raise ValueError(
            f"the update of {name} needs the weights before training: "
            "give before=the backbone"
        )
    if start is not None and start.shape != shape:
        raise ValueError(
            f"{name} is {list(shape)} in the ensemble, but {list(start.shape)} before"
        )


def _start(ensemble: Ensemble, name: str, before: nn.Module | None) -> Tensor | None:
    """Return a layer's weight before training, if it is known."""
    if before is not None:
        weight = getattr(dict(before.named_modules()).get(name), "weight", None)
        if not isinstance(weight, Tensor):
            raise ValueError(f"before has no linear layer {name}")
        return weight.detach()
    if not ensemble.seen:
        return None
    start = ensemble.start(weights_of(ensemble.network)[name])
    return None if start is None else start.flatten(1)


def _update(ensemble: Ensemble, name: str, start: Tensor, after: Tensor) -> Tensor:
    """Return W_m - W of every member, if possible without rounding W_m."""
    if ensemble.seen:
        full = weights_of(ensemble.network)[name]
        updates = [ensemble.update(full, m) for m in range(ensemble.members)]
        known = [update.flatten(1) for update in updates if update is not None]
        if len(known) == len(updates):
            return torch.stack(known)
    return after - start.to(after)


def _leading(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k leading singular values [..., k] and left vectors [..., out, k].

    For a k that is small against the matrix they come from the k leading eigenvectors
    of the smaller Gram matrix, in float64: for 768 x 768 and k = 16 in a fifth of the
    time of torch.linalg.svd. Squaring loses accuracy by s_1 / s_i, less than float32
    loses; where s_k < s_1 / 1000 the whole decomposition is computed instead.
    """
    rows, columns = w.shape[-2:]
    if 8 * k <= min(rows, columns):
        pairs = [_leading_by_gram(matrix, k) for matrix in w.reshape(-1, rows, columns)]
        values = torch.stack([s for s, _ in pairs]).view(*w.shape[:-2], k)
        if (values[..., -1] > 1e-3 * values[..., 0]).all():
            vectors = torch.stack([u for _, u in pairs])
            return values.to(w), vectors.view(*w.shape[:-2], rows, k).to(w)
    u, s, _ = torch.linalg.svd(w, full_matrices=False)
    return s[..., :k], u[..., :k]


def _leading_by_gram(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return them for one matrix; SciPy computes only the wanted eigenvectors."""
    w = w.double()
    wide = w if len(w) <= w.shape[1] else w.mT
    last = len(wide) - 1
    squares, vectors = scipy.linalg.eigh(
        (wide @ wide.mT).cpu().numpy(), subset_by_index=(last - k + 1, last)
    )
    values = torch.from_numpy(squares).to(w.device).flip(0).clamp(min=0).sqrt()
    u = torch.from_numpy(vectors).to(w.device).flip(1)
    return values, u if wide is w else w @ (u / values)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return |cos| of unit vectors [..., n, i] and [..., n, j]: [..., i, j]."""
    return (a.mT @ b).abs().clamp(max=1)


def _alive(values: Tensor, shape: torch.Size) -> Tensor:
    """Tell which singular values are not 0, by the rule of torch.linalg.matrix_rank."""
    return values > torch.finfo(values.dtype).eps * max(shape[-2:]) * values[..., :1]


def _off_diagonal(u: Tensor, vh: Tensor, w: Tensor) -> Tensor:
    w = w / w.abs().amax((-2, -1), keepdim=True)  # squares of large ones are no numbers
    diagonal = ((u.mT @ w) * vh).sum(-1)  # u_i^T W v_i
    share = 1 - diagonal.square().sum(-1) / w.square().sum((-2, -1))
    return share.nan_to_num(0).clamp(min=0)  # nothing of a W that is 0 lies off it


def _intruders(values: Tensor, max_cosine: Tensor, threshold: float) -> Intruders:
    within("threshold", threshold, "(0, 1]")
    strange = max_cosine < threshold
    squares = (values / values[..., :1]).square()
    energy = (squares * strange).sum(-1) / squares.sum(-1)
    return Intruders(strange.sum(-1), max_cosine, energy)


def _check_rank(name: str, values: Tensor, shape: torch.Size) -> None:
    rank = int(_alive(values, shape).sum(-1).min())
    if rank < values.shape[-1]:
        raise ValueError(
            f"k={values.shape[-1]} exceeds the rank {rank} of a matrix {name}: vectors "
            f"of singular values that are 0 are arbitrary; choose k up to {rank}"
        )


def _check_size(k: int, shape: torch.Size, name: str = "") -> None:
    between("k", k, 1, min(shape[-2:]), f" for {name}{list(shape)}")


def _checked(
    before: ArrayLike, after: ArrayLike, k: int, side: Side = "left"
) -> tuple[Tensor, Tensor]:
    """Return both matrices in the working precision, transposed for side "right"."""
    one_of("side", side, ("left", "right"))
    before = as_tensor("before", before)
    after = as_tensor("after", after)
    finite("before", before)
    finite("after", after)
    if min(before.ndim, after.ndim) < 2 or before.shape[-2:] != after.shape[-2:]:
        raise ValueError(
            "before and after must be matrices [..., out, in] of one shape, "
            f"got {list(before.shape)} and {list(after.shape)}"
        )
    _check_size(k, after.shape)
    dtype = torch.promote_types(before.dtype, after.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    before = before.detach().to(after.device, dtype)
    after = after.detach().to(dtype)
    return (before, after) if side == "left" else (before.mT, after.mT)
