"""Singular vectors of weights before and after training, and of members: what was kept, what is new.

Vectors are compared by |cos|. Left vectors are directions of a layer's output, right vectors of its input. Where
singular values are equal, their vectors are arbitrary within the subspace that they span.
"""

import math
import re
import warnings
from typing import Literal, NamedTuple

import scipy.linalg
import threadpoolctl
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from uqlab.core import door
from uqlab.core.checks import finite, floating, one_network, within
from uqlab.diversity import layer_names, member_weights, weights
from uqlab.ensembles import Ensemble
from uqlab.models import PROJECTIONS

Matrices = Float[Tensor, "*#batch out in"]
Side = Literal["left", "right"]


class Intruders(NamedTuple):
    """How many of the k leading singular vectors after training are intruders."""

    count: Int[Tensor, "*batch"]  # type: ignore[override]  # a tuple has a method of this name
    max_cosine: Float[
        Tensor, "*batch k"
    ]  # of each vector with the vector before that is most like it
    energy: Float[
        Tensor, "*batch"
    ]  # the intruders' share of the k squared singular values, in [0, 1]


class LayerSpectra(NamedTuple):
    """One layer of an ensemble: the k leading singular values and vectors of every member's matrix.

    NaN stands for vectors whose singular value is 0.
    """

    values: Float[Tensor, "members k"]
    between: Float[
        Tensor, "members members k k"
    ]  # |cos| of the first member's vectors (rows) and the second's
    before_values: (
        Float[Tensor, " k"] | None
    )  # from here on None if the weights before training are unknown
    initial: (
        Float[Tensor, "members k k"] | None
    )  # |cos| of a member's vectors (rows) and those before (columns)
    max_cosine: (
        Float[Tensor, "members k"] | None
    )  # with the vector before that is most like it
    off_diagonal: Float[Tensor, " members"] | None  # see the function

    def intruders(self, k: int = 10, threshold: float = 0.5) -> Intruders:
        """Every member's intruders among its k leading vectors; raises ValueError if the weights before are unknown."""
        if self.max_cosine is None:
            raise ValueError(
                "intruders are found by the weights before training: give ensemble_spectra(before=...)"
            )
        if not 1 <= k <= self.values.shape[1]:
            raise ValueError(
                f"k must be 1 to {self.values.shape[1]}, the k of ensemble_spectra, got {k}"
            )
        return _intruders(self.values[:, :k], self.max_cosine[:, :k], threshold)

    def mean_between(self) -> Float[Tensor, "k k"]:
        """`between`, averaged over all pairs of different members. Raises ValueError for a single member."""
        members = len(self.between)
        if members < 2:
            raise ValueError("pairs need at least two members, got 1")
        return self.between[~torch.eye(members, dtype=torch.bool)].nanmean(0)


def singular_vector_similarity(
    before: Matrices, after: Matrices, k: int = 16, side: Side = "left"
) -> Float[Tensor, "*batch k k"]:
    """|cos| between the k leading singular vectors of `after` (rows) and of `before` (columns).

    A single matrix is compared with all matrices of the other argument. side: "left" (of the output) or "right" (of the
    input). Raises ValueError for matrices of different shape, values that are not finite, and a k below 1 or above the
    rank of a matrix. Muhlematter et al. 2024, section 4 and appendix D.
    """
    before, after = _checked(before, after, k, side)
    (old, u0), (new, u1) = _leading(before, k), _leading(after, k)
    _check_rank("before", old, before.shape)
    _check_rank("after", new, after.shape)
    return _cosines(u1, u0)


def intruder_dimensions(
    before: Matrices,
    after: Matrices,
    k: int = 10,
    threshold: float = 0.5,
    side: Side = "left",
) -> Intruders:
    """The intruders among the k leading singular vectors of `after`: they are unlike all singular vectors of `before`.

    The |cos| of an intruder with every vector of `before`, not only with the k leading ones, is below `threshold`, in
    (0, 1]; `random_level` is what to expect of a random vector. The rest is as in `singular_vector_similarity`.
    Shuttleworth et al. 2025 (2410.21228); the share of the energy is our addition, because counts saturate.
    """
    before, after = _checked(before, after, k, side)
    u0, s0, _ = torch.linalg.svd(before, full_matrices=False)
    values, u1 = _leading(after, k)
    _check_rank("after", values, after.shape)
    u0 = (
        u0 * _alive(s0, before.shape)[..., None, :]
    )  # no direction belongs to a singular value of 0
    return _intruders(values, _cosines(u1, u0).amax(-1), threshold)


def random_level(dimension: int, vectors: int | None = None) -> float:
    """The largest |cos| to expect between a random unit vector and `vectors` orthonormal ones; None for a whole basis.

    It is E max |g_i| / E ||g|| for a Normal g, since the direction and the length of g are independent: 0.12 for 768.
    """
    vectors = dimension if vectors is None else vectors
    if vectors > dimension:
        raise ValueError(
            f"vectors must be 1 to the dimension {dimension}, got {vectors}"
        )
    x = torch.linspace(0, 12, 24001, dtype=torch.float64)
    largest = torch.trapezoid(
        1 - torch.erf(x / math.sqrt(2)) ** vectors, x
    ).item()  # E max of half-normals
    length = math.sqrt(2) * math.exp(
        math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2)
    )
    return largest / length


def off_diagonal(before: Matrices, after: Matrices) -> Float[Tensor, "*batch"]:
    """Share of ||W||_F^2 that lies off the diagonal of U^T W V, for W = `after` and U, V of `before`: in [0, 1].

    It is 0 where only singular values changed. Errors as in `singular_vector_similarity`.
    """
    before, after = _checked(before, after, 1)
    u, _, vh = torch.linalg.svd(before, full_matrices=False)
    return _off_diagonal(u, vh, after)


def projection(name: str) -> str | None:
    """Tell which matrix of the attention a layer is, by its name.

    Parameters
    ----------
    name : str
        The name of a layer.

    Returns
    -------
    str or None
        "query", "key", "value", "output", "query, key, value" for a matrix that holds
        all three, or None for any other layer.
    """
    for kind, pattern in PROJECTIONS.items():
        if re.search(pattern, name):
            return kind
    return None


def ensemble_spectra(
    ensemble: Ensemble,
    target: str | None = None,
    k: int = 16,
    *,
    before: nn.Module | None = None,
    update: bool = False,
    side: Side = "left",
    progress: bool = True,
) -> dict[str, LayerSpectra]:
    """The spectra of an ensemble's linear layers, by name: members against the weights before and against each other.

    target: a regular expression on layer names, as in `diversity.layer_names`.
    before: the network that the members started from. None takes its weights from the ensemble, if it still holds them
        unchanged, as LoRA, BatchEnsemble++ and masks do.
    update: analyse what was added, W_m - W (for LoRA B_m A_m), and not W_m. Its rank bounds the useful k.

    Only one layer's matrices are held at a time. Vectors whose singular value is 0 are NaN, and a warning counts them.
    Raises ValueError for a target without a linear layer, a k outside 1 to a layer's size, a `before` that lacks layers
    or has other shapes, and `update` without the weights before; TypeError unless it is an ensemble. Muhlematter et al.
    2024, section 4 and appendix D.
    """
    if before is not None:
        one_network(before, "ensemble_spectra(before=...)")
    starts = {
        name: _start(ensemble, name, before) for name in layer_names(ensemble, target)
    }
    for name, start in starts.items():
        shape = member_weights(ensemble, name, [0]).shape[1:]
        if not 1 <= k <= min(shape):
            raise ValueError(
                f"k must be 1 to {min(shape)} for {name} {list(shape)}, got {k}; choose k or target"
            )
        if start is None and update:
            raise ValueError(
                f"the update of {name} needs the weights before training: give before=the backbone"
            )
        if start is not None and start.shape != shape:
            raise ValueError(
                f"{name} is {list(shape)} in the ensemble, but {list(start.shape)} before"
            )
    found, missing, vectors = {}, 0, ensemble.members * k * len(starts)
    for name in tqdm(
        starts, desc="spectra", unit="layer", disable=not progress, leave=False
    ):
        found[name], dead = _layer(ensemble, name, starts[name], k, update, side)
        missing += dead
    if missing:
        warnings.warn(
            f"{missing} of {vectors} singular vectors are NaN: their singular values are 0, that is k={k} exceeds the "
            "rank of some matrices",
            stacklevel=3,
        )
    return found


@torch.no_grad()
def _layer(
    ensemble: Ensemble,
    name: str,
    start: Tensor | None,
    k: int,
    update: bool,
    side: Side,
) -> tuple[LayerSpectra, int]:
    """One layer's spectra, on the CPU, and how many of its members' vectors are NaN."""
    after = (
        member_weights(ensemble, name)
        if not update or start is None
        else _update(ensemble, name, start)
    )
    base, after = _checked(
        after[0] if start is None else start.to(after.device), after, k
    )
    left = side == "left"
    values, vectors = _leading(
        after if left else after.mT, k
    )  # [members, k], [members, out or in, k]
    alive = _alive(values, after.shape)
    vectors = vectors.where(alive[:, None], math.nan)
    flat = vectors.mT.flatten(0, 1)  # [members * k, out or in]
    between = (
        _cosines(flat.mT, flat.mT)
        .unflatten(0, (-1, k))
        .unflatten(2, (-1, k))
        .transpose(1, 2)
    )
    known: list = [None] * 4
    if start is not None:
        u, s, vh = torch.linalg.svd(base, full_matrices=False)
        old, kept = u if left else vh.mT, _alive(s, base.shape)
        cosines = _cosines(vectors, old * kept)  # [members, k, all vectors before]
        initial = cosines[..., :k].where(kept[:k], math.nan)
        known = [
            s[:k].cpu(),
            initial.cpu(),
            cosines.amax(-1).cpu(),
            _off_diagonal(u, vh, after).cpu(),
        ]
    return LayerSpectra(values.cpu(), between.contiguous().cpu(), *known), int(
        (~alive).sum()
    )


def _start(ensemble: Ensemble, name: str, before: nn.Module | None) -> Tensor | None:
    """The weight of a layer before training, from `before` or from an ensemble that still holds it, else None."""
    if before is not None:
        weight = getattr(dict(before.named_modules()).get(name), "weight", None)
        if not isinstance(weight, Tensor):
            linear = [
                n for n, part in before.named_modules() if isinstance(part, nn.Linear)
            ]
            raise ValueError(
                f"before has no linear layer {name}; it has {', '.join(linear) or 'none'}"
            )
        return weight.detach()
    seen = weights(ensemble)[name]
    start = None if isinstance(seen, Tensor) else seen.start()
    return None if start is None else start.flatten(1)


def _update(ensemble: Ensemble, name: str, start: Tensor) -> Tensor:
    """W_m - W of every member [members, out, in]. If the layer knows it, no digits are lost by rounding W_m."""
    seen = weights(ensemble)[name]
    if not isinstance(seen, Tensor):
        updates = [seen.update(m) for m in range(ensemble.members)]
        if known := [update.flatten(1) for update in updates if update is not None]:
            return torch.stack(known)
    after = member_weights(ensemble, name)
    return after - start.to(after)


def _leading(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k leading singular values [..., k] and left vectors [..., out, k] of matrices [..., out, in], exactly.

    For a k that is small against the matrix they come from the k leading eigenvectors of the smaller Gram matrix, in
    float64. Measured for 768 x 768 and k = 16 on one CPU core: 27 ms, against 125 (float32) for torch.linalg.svd.
    torch.svd_lowrank is faster still, but wrong for flat spectra. Squaring loses accuracy by s_1 / s_i, which is less
    than float32 loses; where s_k < s_1 / 1000 the whole decomposition is computed instead.
    """
    rows, columns = w.shape[-2:]
    if 8 * k > min(rows, columns):
        u, s, _ = torch.linalg.svd(w, full_matrices=False)
        return s[..., :k], u[..., :k]
    with threadpoolctl.threadpool_limits(
        1, "blas"
    ):  # more threads gain nothing, and wait for each other
        found = [_leading_by_gram(matrix, k) for matrix in w.reshape(-1, rows, columns)]
    values, vectors = (torch.stack(part) for part in zip(*found, strict=True))
    return values.view(*w.shape[:-2], k), vectors.view(*w.shape[:-2], rows, k)


def _leading_by_gram(w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same for one matrix [out, in], on the CPU by SciPy, which computes only the wanted eigenvectors."""
    wide = w.double()
    small = wide if len(w) <= w.shape[1] else wide.mT
    gram, last = (small @ small.mT).cpu().numpy(), len(small) - 1
    solved = scipy.linalg.eigh(
        gram, subset_by_index=(last - k + 1, last), check_finite=False
    )
    squares, vectors = (torch.from_numpy(part).to(w.device).flip(-1) for part in solved)
    values = squares.clamp(min=0).sqrt()
    if values[-1] <= 1e-3 * values[0]:
        u, s, _ = torch.linalg.svd(w, full_matrices=False)
        return s[:k], u[:, :k]
    if small is not wide:
        vectors = wide @ (vectors / values)
    return values.to(w), vectors.to(w)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """|cos| of unit vectors [..., n, i] and [..., n, j]: [..., i, j]."""
    return (a.mT @ b).abs().clamp(max=1)


def _alive(values: Tensor, shape: torch.Size) -> Tensor:
    """Which singular values are not 0, by the rule of torch.linalg.matrix_rank."""
    return values > torch.finfo(values.dtype).eps * max(shape[-2:]) * values[..., :1]


def _off_diagonal(u: Tensor, vh: Tensor, w: Tensor) -> Tensor:
    w = w / w.abs().amax(
        (-2, -1), keepdim=True
    )  # the squares of very large or small weights are no numbers
    diagonal = ((u.mT @ w) * vh).sum(-1)  # u_i^T W v_i
    share = 1 - diagonal.square().sum(-1) / w.square().sum((-2, -1))
    return share.nan_to_num(0).clamp(
        min=0
    )  # of a W that is 0 nothing lies off the diagonal


def _intruders(values: Tensor, max_cosine: Tensor, threshold: float) -> Intruders:
    within("threshold", threshold, "(0, 1]")
    strange, squares = max_cosine < threshold, (values / values[..., :1]).square()
    return Intruders(
        strange.sum(-1), max_cosine, (squares * strange).sum(-1) / squares.sum(-1)
    )


def _check_rank(name: str, values: Tensor, shape: torch.Size) -> None:
    rank = int(_alive(values, shape).sum(-1).min())
    if rank < values.shape[-1]:
        raise ValueError(
            f"k={values.shape[-1]} exceeds the rank {rank} of a matrix {name}: vectors of singular values that are 0 "
            f"are arbitrary; choose k up to {rank}"
        )


def _checked(
    before: Tensor, after: Tensor, k: int, side: Side = "left"
) -> tuple[Tensor, Tensor]:
    """Both matrices in the working precision, and transposed for side "right"."""
    for name, w in (("before", before), ("after", after)):
        floating(name, w)
        finite(name, w)
    if before.ndim < 2 or after.ndim < 2 or before.shape[-2:] != after.shape[-2:]:
        raise ValueError(
            f"before and after must be matrices [..., out, in] of one shape, got {list(before.shape)} and "
            f"{list(after.shape)}"
        )
    if not 1 <= k <= min(after.shape[-2:]):
        raise ValueError(
            f"k must be 1 to {min(after.shape[-2:])} for matrices {list(after.shape)}, got {k}"
        )
    given = torch.promote_types(
        torch.promote_types(before.dtype, after.dtype), torch.float32
    )
    before, after = before.detach().to(given), after.detach().to(given)
    return (before, after) if side == "left" else (before.mT, after.mT)


door.room(__name__)
