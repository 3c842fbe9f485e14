"""Representations compared: centred kernel alignment (CKA) of layers and heads, and embeddings in a plane.

Features are [samples, features]. Two representations are compared on the same samples in the same order. Let K and L be
the kernel matrices of the centred X and Y, and k and l the diagonals of K and L. CKA is computed in float64 from

    biased    HSIC0 = <K, L> / (n - 1)^2
    unbiased  HSIC1 = (<K, L> - n / (n - 2) k.l + sum(k) sum(l) / ((n - 1)(n - 2))) / (n (n - 3))

(Song et al. 2012, eq. 5, for K and L whose rows sum to 0). For a linear kernel <K, L> = ||X^T Y||_F^2, which needs no
n x n matrix.
"""

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from uqlab.core import door
from uqlab.core.checks import count_samples, finite, floating, one_network
from uqlab.core.modules import evaluating, hooked, like_parameters

Inputs = Shaped[Tensor, "samples ..."]
Features = Float[Tensor, "samples _"]
FeatureSets = Sequence[Features] | Float[Tensor, "_ samples _"]
Kernel = Literal["linear", "rbf"]
Tokens = Literal["first", "mean", "all"]


class Matching(NamedTuple):
    """Row rows[i] is matched with column columns[i]; they have similarity[i]."""

    rows: Int[Tensor, " pairs"]
    columns: Int[Tensor, " pairs"]
    similarity: Float[Tensor, " pairs"]


class _Kernel(NamedTuple):
    """`root` is the centred kernel matrix K [n, n], or F [n, <= n] with K = F F^T if linear; the diagonal of K [n]."""

    root: Tensor
    diagonal: Tensor


def cka(
    X: Features, Y: Features, kernel: Kernel = "linear", unbiased: bool = True
) -> float:
    """Centred kernel alignment of two representations of the same samples: 1 if they differ by rotation and scale.

    X [samples, p], Y [samples, q].
    kernel: "linear", in O(n p q); or "rbf", exp(-D^2 / (2 median(D^2))) over all n^2 pairs, in O(n^2) memory.
    unbiased: HSIC1, which is near 0 for independent features and may be negative; else HSIC0, which stays far above 0
        unless there are many more samples than features.

    Features that do not vary give NaN and a warning. Raises ValueError for different numbers of samples, for fewer than
    4 (biased: 2) and for values that are not finite; TypeError unless both are floating tensors. Kornblith et al. 2019;
    unbiased: Nguyen et al. 2021, eq. 3.
    """
    return _cka([([X], [Y])], kernel, unbiased).item()


def minibatch_cka(
    batches_of_pairs: Iterable[tuple[Tensor, Tensor]],
    kernel: Kernel = "linear",
    unbiased: bool = True,
) -> float:
    """CKA of a stream of batches (X [batch, p], Y [batch, q]) of samples in random order; one batch is held at a time.

    It is the ratio of sums, sum_b HSIC(X_b, Y_b) / sqrt(sum_b HSIC(X_b, X_b) sum_b HSIC(Y_b, Y_b)). If `unbiased`, the
    batch size changes only the noise; else small batches give larger values. The errors of `cka` hold for every batch:
    leave out a short last one. Nguyen et al. 2021, eq. 5.
    """
    return _cka((([x], [y]) for x, y in batches_of_pairs), kernel, unbiased).item()


def cka_matrix(
    features_a: FeatureSets,
    features_b: FeatureSets | None = None,
    kernel: Kernel = "linear",
    unbiased: bool = True,
) -> Float[Tensor, "a b"]:
    """CKA of every representation in `features_a` with every one in `features_b`, None for the same: float64.

    Each is a list of [samples, features] of any widths, or a tensor [representations, samples, features]; for heads in
    x [samples, heads, d_head] it is `x.unbind(1)`. A representation that does not vary has NaN in its row or column.
    The errors are those of `cka`.
    """
    return _cka([(features_a, features_b)], kernel, unbiased)


def match(similarity: Float[Tensor, "a b"]) -> Matching:
    """One-to-one pairs of rows and columns with the largest total similarity, by the Hungarian method (Kuhn 1955).

    The min(A, B) pairs are in the order of the rows. NaN is worse than any number and stays NaN. Raises ValueError
    unless `similarity` is a matrix, and for infinite values.
    """
    if similarity.numel() == 0 or similarity.isinf().any():
        raise ValueError(
            f"similarity must be a matrix [A, B] of finite values or NaN, got {list(similarity.shape)}"
        )
    known = similarity.detach().cpu().double()
    lowest = (
        known.nan_to_num(math.inf).min().clamp(max=0)
        - 2 * len(known)
        - known.nan_to_num(0).abs().sum()
    )
    found = linear_sum_assignment(
        known.where(~known.isnan(), lowest).numpy(), maximize=True
    )
    rows, columns = (torch.as_tensor(each, device=similarity.device) for each in found)
    return Matching(rows, columns, similarity[rows, columns])


@torch.no_grad()
def layer_features(
    model: nn.Module,
    inputs: Inputs,
    target: str | None = None,
    *,
    tokens: Tokens = "first",
    batch_size: int = 256,
) -> dict[str, Features]:
    """The outputs of the layers of one network in evaluation mode, by the layer's name: float32 on the CPU.

    target: a regular expression on module names. None takes the blocks of a transformer (its longest nn.ModuleList), or
        without such a list every linear and convolutional layer.
    tokens: "first" (CLS), "mean" or "all" (flattened) of outputs [samples, tokens, width]. For maps [samples, channels,
        height, width] "mean" averages over the map. Other outputs are flattened.

    Raises TypeError for an ensemble; ValueError for a target that matches no module, for no inputs, and for a module
    that does not give one output [batch, ...] in every pass.
    """
    one_network(model, "layer_features")
    count_samples(inputs)
    outputs: dict[str, list[Tensor]] = {name: [] for name in _layers(model, target)}

    def keep(name: str):
        return lambda _, args, output: outputs[name].append(
            _reduced(name, output, tokens)
        )

    hooks = (
        model.get_submodule(name).register_forward_hook(keep(name)) for name in outputs
    )
    starts = range(0, len(inputs), batch_size)
    with evaluating(model), hooked(hooks):
        for start in starts:
            model(like_parameters(model, inputs[start : start + batch_size]))
    for name, parts in outputs.items():
        shapes = [list(part.shape) for part in parts]
        if (
            sum(map(len, parts)) != len(inputs)
            or len({width for _, width in shapes}) > 1
        ):
            raise ValueError(
                f"{name} must give one output [batch, ...] of one width in every pass, got {shapes[:3] or 'nothing'} "
                f"in {len(starts)} passes of {len(inputs)} inputs; choose another target or tokens"
            )
    return {name: torch.cat(parts) for name, parts in outputs.items()}


@torch.no_grad()
def penultimate(model: nn.Module, inputs: Inputs, *, batch_size: int = 256) -> Features:
    """What the last linear layer that a network calls is given, in most its classifier: [samples, features].

    Float32 on the CPU, in evaluation mode; of tokens the first. Raises TypeError for an ensemble; ValueError for no
    inputs and for a network that calls no linear layer.
    """
    one_network(model, "penultimate")
    count_samples(inputs)
    last: dict[str, Tensor] = {}
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    parts = []
    with (
        evaluating(model),
        hooked(
            p.register_forward_pre_hook(lambda _, x: last.update(x=x[0]))
            for p in linear
        ),
    ):
        for some in inputs.split(batch_size):
            model(like_parameters(model, some))
            if "x" not in last:
                raise ValueError(
                    f"{type(model).__name__} calls no linear layer; take layer_features(model, inputs)"
                )
            parts.append(_reduced("the last linear layer", last.pop("x"), "first"))
    return torch.cat(parts)


def embed(
    X: Features,
    method: Literal["pca", "umap", "tsne"] = "pca",
    components: int = 2,
    seed: int = 0,
) -> Float[Tensor, "samples components"]:
    """Samples as points in few dimensions; embed sets that you compare (ID and OOD, members) together.

    PCA turns each axis so that its largest score is positive. UMAP has at most 15 neighbours and t-SNE perplexity 30,
    both less for few samples. All three see only distances, so more features than samples (whole weight matrices, for
    example) are first rotated to as many as samples. Raises ValueError for values that are not finite, components
    outside 1 to min(samples - 1, features), and equal samples. McInnes et al. 2018; van der Maaten & Hinton 2008.
    """
    (x,) = _representations([X], "")
    samples, width = x.shape
    if not 1 <= components <= min(samples - 1, width):
        raise ValueError(
            f"components must be 1 to {min(samples - 1, width)} for features {list(x.shape)}, got {components}"
        )
    root, varies = _centred(x)
    if not varies:
        raise ValueError("all samples are alike; there is nothing to embed")
    if method == "pca":
        axes = torch.linalg.eigh(root.mT @ root).eigenvectors[:, -components:].flip(1)
        found = root @ axes
        found = found * found.gather(0, found.abs().argmax(0, keepdim=True)).sign()
    elif method == "tsne":
        from sklearn.manifold import TSNE

        style = "barnes_hut" if components < 4 else "exact"
        tsne = TSNE(
            components,
            perplexity=min(30.0, (samples - 1) / 3),
            random_state=seed,
            method=style,
        )
        found = torch.from_numpy(tsne.fit_transform(root.cpu().numpy()))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportWarning)  # umap misses TensorFlow
            from umap import UMAP  # here, because the import takes seconds

        umap = UMAP(
            n_neighbors=min(15, samples - 1),
            n_components=components,
            random_state=seed,
            n_jobs=1,
            init="pca",
        )
        found = torch.from_numpy(umap.fit_transform(root.cpu().numpy()))
    return found.to(X.device, torch.promote_types(X.dtype, torch.float32))


def _cka(
    batches: Iterable[tuple[FeatureSets, FeatureSets | None]],
    kernel: str,
    unbiased: bool,
) -> Tensor:
    """The ratio of sums over batches: [A, B]."""
    fewest = 4 if unbiased else 2
    totals: list[Tensor] = []
    for number, (features_a, features_b) in enumerate(batches):
        where = f"batch {number}: " if number else ""
        sets = [
            _representations(each, where)
            for each in (features_a, features_b)
            if each is not None
        ]
        samples = {len(x) for each in sets for x in each}
        if len(samples) > 1 or min(samples) < fewest:
            raise ValueError(
                f"{where}CKA compares representations of the same samples, {fewest} or more of them, got "
                f"{' and '.join(map(str, sorted(samples)))} samples"
            )
        prepared = [[_prepare(x, kernel) for x in each] for each in sets]
        found = [_hsic(prepared[0], prepared[-1], kernel, unbiased)]
        found += [part for each in prepared for part in _own(each, kernel, unbiased)]
        totals = (
            [t + f for t, f in zip(totals, found, strict=True)] if totals else found
        )
    if not totals:
        raise ValueError("minibatch CKA needs at least one batch, got an empty stream")
    cross, *owns = totals
    undefined = [own <= floor for own, floor in zip(owns[::2], owns[1::2], strict=True)]
    if count := sum(int(each.sum()) for each in undefined):
        warnings.warn(
            f"{count} of {sum(map(len, undefined))} representations do not vary over the samples, or in one alone: "
            "their CKA is 0/0, NaN",
            stacklevel=4,
        )
    norms = [
        own.where(~none, math.nan).sqrt()
        for own, none in zip(owns[::2], undefined, strict=True)
    ]
    return cross / torch.outer(norms[0], norms[-1])


def _representations(features: FeatureSets, where: str) -> list[Tensor]:
    found = list(features)
    for x in found:
        floating(f"{where}a representation", x)
        if x.ndim != 2 or 0 in x.shape:
            raise ValueError(
                f"{where}a representation must be [samples, features], got {list(x.shape)}"
            )
        finite(f"{where}a representation", x)
    if not found:
        raise ValueError(f"{where}needs at least one representation, got an empty list")
    return [x.detach() for x in found]


def _centred(x: Tensor) -> tuple[Tensor, bool]:
    """F [n, <= n] in float64 with F F^T = X X^T for the centred X; and whether X varies by more than its rounding."""
    root = x.to(torch.float64, copy=True)
    rounding = 4 * torch.finfo(x.dtype).eps * root.norm()
    varies = bool(root.sub_(root.mean(0)).norm() > rounding)
    return (
        torch.linalg.qr(root.mT, mode="r").R.mT if root.shape[1] > len(root) else root
    ), varies


def _prepare(x: Tensor, kernel: str) -> _Kernel:
    root, varies = _centred(x)
    if not varies:  # contributes nothing to any sum
        root = torch.zeros_like(root)
    if kernel == "linear":
        return _Kernel(root, root.square().sum(1))
    gram = root @ root.mT
    lengths = gram.diagonal().clone()
    squares = (
        gram.mul_(-2)
        .add_(lengths)
        .add_(lengths[:, None])
        .clamp_(min=0)
        .fill_diagonal_(0)
    )  # D^2
    median = (
        squares.median() - (-squares).median()
    ) / 2  # the mean of the middle two of an even number
    if not median:  # most samples are equal: there is no length scale
        return _Kernel(squares.zero_(), squares.diagonal())
    gram = squares.div_(-2 * median).exp_()
    means = gram.mean(0)
    gram.sub_(means).sub_((means - means.mean())[:, None])
    return _Kernel(gram, gram.diagonal())


def _inner(a: list[_Kernel], b: list[_Kernel], kernel: str) -> Tensor:
    """<K, L> for all pairs: [A, B]."""
    if kernel == "rbf":
        return torch.stack(
            [torch.stack([(x.root * y.root).sum() for y in b]) for x in a]
        )
    joined, widths = torch.cat([y.root for y in b], 1), [y.root.shape[1] for y in b]
    rows = [(x.root.mT @ joined).square_().sum(0).split(widths) for x in a]
    return torch.stack([torch.stack([part.sum() for part in row]) for row in rows])


def _hsic(a: list[_Kernel], b: list[_Kernel], kernel: str, unbiased: bool) -> Tensor:
    """HSIC1 or HSIC0 of all pairs: [A, B]."""
    inner = _inner(a, b, kernel)
    k, m = (
        torch.stack([x.diagonal for x in each]) for each in (a, b)
    )  # [A, n], [B, n]
    n = k.shape[1]
    if not unbiased:
        return inner / (n - 1) ** 2
    sums = torch.outer(k.sum(1), m.sum(1)) / ((n - 1) * (n - 2))
    return (inner - n / (n - 2) * (k @ m.mT) + sums) / (n * (n - 3))


def _own(a: list[_Kernel], kernel: str, unbiased: bool) -> tuple[Tensor, Tensor]:
    """HSIC of every kernel with itself [A], and the value up to which it is rounding error [A]."""
    own = torch.cat([_hsic([x], [x], kernel, unbiased)[0] for x in a])
    return own, 1e-14 * torch.stack([x.diagonal.mean() for x in a]).square()


def _layers(model: nn.Module, target: str | None) -> list[str]:
    """The names of the modules that `target` finds, or of the default ones."""
    modules = {name: part for name, part in model.named_modules() if name}
    lists = [
        name
        for name, part in modules.items()
        if isinstance(part, nn.ModuleList) and len(part)
    ]
    if target is not None:
        chosen = [name for name in modules if re.search(target, name)]
    elif lists:
        longest = max(lists, key=lambda name: len(list(modules[name].children())))
        chosen = [name for name in modules if name.rpartition(".")[0] == longest]
    else:
        chosen = [
            name
            for name, part in modules.items()
            if isinstance(part, nn.Linear | nn.Conv2d)
        ]
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no module; there are {', '.join(modules) or 'none'}"
        )
    return chosen


def _reduced(name: str, output: Any, tokens: str) -> Tensor:
    """One layer's output as [batch, features]."""
    x = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise ValueError(
            f"{name} returns {type(x).__name__}, not a tensor [batch, ...]; choose another target"
        )
    if x.ndim == 3 and tokens != "all":
        x = x[:, 0] if tokens == "first" else x.mean(1)
    elif x.ndim == 4 and tokens == "mean":
        x = x.mean((2, 3))
    return x.flatten(1).float().cpu()


door.room(__name__)
