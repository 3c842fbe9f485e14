"""Singular vectors of weights before and after training, and of members.

Vectors are compared by |cos|. Left vectors are directions of a layer's output, right
vectors of its input. Where singular values are equal, their vectors are arbitrary
within the subspace that they span.
"""

import re
import warnings
from math import nan
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy import integrate, stats
from scipy.linalg import eigh
from torch import Tensor, nn

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
from uqlab.ensembles import Ensemble, plain, weights_of
from uqlab.models import PROJECTIONS

Side = Literal["left", "right"]


class Intruders(NamedTuple):
    """Intruders among the k leading singular vectors after training.

    Attributes
    ----------
    count
        The number of intruders.
    max_cosine
        The largest |cos| of each vector with a singular vector before training.
    energy
        The intruders' share of the k squared singular values.
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
        |cos| of the first member's vectors (rows) and the second's (columns).
    before_values
        The singular values before training.
    initial
        |cos| of a member's vectors (rows) and those before training (columns).
    max_cosine
        The largest |cos| of each vector with a singular vector before training.
    off_diagonal
        The share of ||W_m||_F^2 off the diagonal of U^T W_m V, in [0, 1]: 0 where only
        singular values changed. U and V are the singular vectors before training.
    """

    values: Float[Tensor, "members k"]
    between: Float[Tensor, "members members k k"]
    before_values: Float[Tensor, " k"] | None = None
    initial: Float[Tensor, "members k k"] | None = None
    max_cosine: Float[Tensor, "members k"] | None = None
    off_diagonal: Float[Tensor, " members"] | None = None

    def intruders(self, k: int = 10, threshold: float = 0.5) -> Intruders:
        """Return every member's intruders among its k leading vectors.

        Raises
        ------
        ValueError
            If the weights before training are unknown, or k is above that of these
            spectra.
        """
        if self.max_cosine is None:
            raise ValueError(
                "intruders need the weights before training: "
                "give ensemble_spectra(before=...)"
            )
        between("k", k, 1, self.values.shape[1])
        return _intruders(self.values[:, :k], self.max_cosine[:, :k], threshold)

    def mean_between(self) -> Float[Tensor, "k k"]:
        """Return `between`, averaged over pairs of different members."""
        if len(self.between) < 2:
            raise ValueError("pairs need at least two members, got 1")
        return self.between[~torch.eye(len(self.between), dtype=torch.bool)].nanmean(0)


def singular_vector_similarity(
    before: ArrayLike, after: ArrayLike, k: int = 16, side: Side = "left"
) -> Float[Tensor, "*batch k k"]:
    """Return |cos| between the k leading singular vectors of two matrices.

    Parameters
    ----------
    before, after
        [..., out, in]; one matrix is compared with all matrices of the other argument.
    k
        The number of vectors, at most the rank of the matrices.
    side
        "left", directions of the output, or "right", directions of the input.

    Returns
    -------
    Tensor
        Rows: vectors of `after`; columns: vectors of `before`.

    Raises
    ------
    ValueError
        If the shapes differ, values are not finite, or k is above the rank.

    References
    ----------
    Muhlematter et al. 2024, section 4 and appendix D.
    """
    before, after = _checked(before, after, k, side)
    _, old = _full_rank("before", before, k)
    _, new = _full_rank("after", after, k)
    return _cosines(new, old)


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
    values, vectors = _full_rank("after", after, k)
    u, s, _ = torch.linalg.svd(before, full_matrices=False)
    u = u * _nonzero(s, before)[..., None, :]  # a value of 0 has no direction
    return _intruders(values, _cosines(vectors, u).amax(-1), threshold)


def random_level(dimension: int, vectors: int | None = None) -> float:
    """Return the largest |cos| to expect of a random vector with orthonormal ones.

    It is E max |g_i| / E ||g|| for a Normal g, since the direction and the length of g
    are independent.

    Parameters
    ----------
    dimension
        The dimension of the space.
    vectors
        The number of orthonormal vectors; None for a whole basis.

    Examples
    --------
    >>> round(random_level(768), 2)
    0.12
    """
    at_least("dimension", dimension)
    vectors = dimension if vectors is None else vectors
    between("vectors", vectors, 1, dimension)
    largest, _ = integrate.quad(lambda x: 1 - stats.chi(1).cdf(x) ** vectors, 0, 12)
    return largest / float(stats.chi(dimension).mean())


def projection(name: str) -> str | None:
    """Return the attention's matrix that a layer is, by its name.

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
    side: Side = "left",
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
        The number of vectors, at most the smaller side of a layer.
    before
        The network that the members started from. None takes its weights from the
        ensemble, if it still holds them unchanged, as LoRA and masks do.
    side
        "left", directions of the output, or "right", directions of the input.

    Raises
    ------
    ValueError
        If `target` matches no linear layer, k is above a layer's size, or `before`
        lacks layers or has other shapes.

    References
    ----------
    Muhlematter et al. 2024, section 4 and appendix D.
    """
    if before is not None:
        one_network(before, "ensemble_spectra(before=...)")
        before = plain(before)  # Conv1D of transformers holds a transposed matrix
    names = layer_names(ensemble, target)
    spectra = {name: _layer(ensemble, name, k, before, side) for name in names}
    own = [layer.between.diagonal().diagonal() for layer in spectra.values()]
    missing = int(torch.stack(own).isnan().sum())  # |cos| of vectors with themselves
    if missing:
        warnings.warn(
            f"{missing} of {len(names) * ensemble.members * k} singular vectors are "
            f"NaN: their singular values are 0, because k={k} exceeds the rank of some "
            "matrices",
            stacklevel=2,
        )
    return spectra


@torch.no_grad()
def _layer(
    ensemble: Ensemble, name: str, k: int, before: nn.Module | None, side: Side
) -> LayerSpectra:
    """Return one layer's spectra, on the CPU."""
    after = member_weights(ensemble, name)
    start = _start(ensemble, name, before)
    base, after = _checked(after[0] if start is None else start, after, k, side)
    values, vectors = _leading(after, k)  # [members, k], [members, out or in, k]
    vectors = vectors.where(_nonzero(values, after)[:, None], nan)
    spectra = LayerSpectra(values.cpu(), _cosines(vectors[:, None], vectors).cpu())
    return spectra if start is None else _compared(spectra, base, after, vectors)


def _compared(
    spectra: LayerSpectra, before: Tensor, after: Tensor, vectors: Tensor
) -> LayerSpectra:
    """Return the spectra with the fields that need the weights before training."""
    u, s, vh = torch.linalg.svd(before, full_matrices=False)
    nonzero = _nonzero(s, before)
    k = vectors.shape[-1]
    cosines = _cosines(vectors, u * nonzero)  # [members, k, all vectors before]
    return spectra._replace(
        before_values=s[:k].cpu(),
        initial=cosines[..., :k].where(nonzero[:k], nan).cpu(),
        max_cosine=cosines.amax(-1).cpu(),
        off_diagonal=_off_diagonal(u, vh, after).cpu(),
    )


def _start(ensemble: Ensemble, name: str, before: nn.Module | None) -> Tensor | None:
    """Return a layer's weight before training, if it is known."""
    if before is not None:
        full = weights_of(before).get(name)
        if full is None:
            raise ValueError(f"`before` has no linear layer {name}")
        return before.get_parameter(full).flatten(1)
    if not ensemble.seen:
        return None
    start = ensemble.start(weights_of(ensemble.network)[name])
    return None if start is None else start.flatten(1)


def _leading(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k leading singular values [..., k] and left vectors [..., out, k].

    A few of many vectors in float32 are eigenvectors of the Gram matrix in float64: for
    768 x 768 and k = 16 in a third of the time of torch.linalg.svd, and no less exact
    down to the values that count as 0.
    """
    rows, columns = w.shape[-2:]
    if w.dtype == torch.float64 or not 8 * k <= rows <= columns:
        u, s, _ = torch.linalg.svd(w, full_matrices=False)
        return s[..., :k], u[..., :k]
    flat = w.double().cpu().reshape(-1, rows, columns)
    values, vectors = zip(*(_leading_of_gram(m @ m.mT, k) for m in flat), strict=True)
    values = torch.stack(values).view(*w.shape[:-2], k)
    vectors = torch.stack(vectors).view(*w.shape[:-1], k)
    return values.to(w), vectors.to(w)


def _leading_of_gram(gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    last = len(gram) - 1
    squares, u = eigh(gram.numpy(), subset_by_index=(last - k + 1, last))
    values = torch.from_numpy(squares).flip(0).clamp(min=0).sqrt()
    return values, torch.from_numpy(u).flip(1)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return |cos| of unit vectors [..., n, i] and [..., n, j]: [..., i, j]."""
    return (a.mT @ b).abs().clamp(max=1)


def _nonzero(values: Tensor, w: Tensor) -> Tensor:
    """Return which singular values are not 0, by the rule of torch.linalg.matrix_rank.

    `values` are the leading singular values of `w`.
    """
    return values > torch.finfo(values.dtype).eps * max(w.shape[-2:]) * values[..., :1]


def _off_diagonal(u: Tensor, vh: Tensor, w: Tensor) -> Tensor:
    diagonal = ((u.mT @ w) * vh).sum(-1)  # u_i^T W v_i
    share = 1 - diagonal.square().sum(-1) / w.square().sum((-2, -1))
    return share.nan_to_num(0).clamp(min=0)  # where W is 0


def _intruders(values: Tensor, max_cosine: Tensor, threshold: float) -> Intruders:
    within("threshold", threshold, "(0, 1]")
    intruding = max_cosine < threshold
    squares = (values / values[..., :1]).square()
    energy = (squares * intruding).sum(-1) / squares.sum(-1)
    return Intruders(intruding.sum(-1), max_cosine, energy)


def _full_rank(name: str, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return `_leading`; raise ValueError if the rank is below k."""
    values, vectors = _leading(w, k)
    rank = int(_nonzero(values, w).sum(-1).min())
    if rank < k:
        raise ValueError(
            f"k={k} exceeds the rank {rank} of a matrix `{name}`: vectors of singular "
            f"values that are 0 are arbitrary; choose k up to {rank}"
        )
    return values, vectors


def _checked(
    before: ArrayLike, after: ArrayLike, k: int, side: Side
) -> tuple[Tensor, Tensor]:
    """Return both matrices in the working precision, transposed for side "right"."""
    one_of("side", side, ("left", "right"))
    before, after = as_tensor("before", before), as_tensor("after", after)
    finite("before", before)
    finite("after", after)
    shape = after.shape[-2:]
    if len(shape) < 2 or before.shape[-2:] != shape:
        raise ValueError(
            "`before` and `after` must be matrices [..., out, in] of one shape, "
            f"got {list(before.shape)} and {list(after.shape)}"
        )
    between("k", k, 1, min(shape))
    dtype = torch.promote_types(before.dtype, after.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    before = before.detach().to(after.device, dtype)
    after = after.detach().to(dtype)
    return (before, after) if side == "left" else (before.mT, after.mT)
