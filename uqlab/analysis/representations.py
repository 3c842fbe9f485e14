"""Representations compared: centred kernel alignment (CKA), and embeddings in a plane.

Features are [samples, features]. Two representations are compared on the same samples
in the same order. Let K and L be the kernel matrices of the centred X and Y, and k and
l the diagonals of K and L. CKA is computed in float64 from::

    biased    HSIC0 = <K, L> / (n - 1)^2
    unbiased  HSIC1 = (<K, L> - n / (n - 2) k.l + sum(k) sum(l) / ((n - 1)(n - 2)))
                      / (n (n - 3))

(Song et al. 2012, eq. 5, for K and L whose rows sum to 0). For a linear kernel <K, L> =
||X^T Y||_F^2, which needs no n x n matrix.
"""

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    InputsLike,
    Target,
    as_inputs,
    as_tensor,
    between,
    count,
    finite,
    one_network,
    one_of,
    pattern_of,
)
from uqlab.core.extras import extra
from uqlab.core.modules import (
    batches,
    call,
    classifier_of,
    evaluating,
    first_of,
    given_for_logits,
    hooked,
)

Features = Float[Tensor, "samples _"]
FeatureSets = Sequence[ArrayLike] | Tensor
Kernel = Literal["linear", "rbf"]
Tokens = Literal["first", "mean", "all"]


class Matching(NamedTuple):
    """Row rows[i] is matched with column columns[i]; they have similarity[i]."""

    rows: Int[Tensor, " pairs"]
    columns: Int[Tensor, " pairs"]
    similarity: Float[Tensor, " pairs"]


class _Kernel(NamedTuple):
    """The centred kernel matrix K [n, n], or F with K = F F^T; the diagonal of K."""

    root: Tensor
    diagonal: Tensor


def cka(
    X: ArrayLike, Y: ArrayLike, kernel: Kernel = "linear", unbiased: bool = True
) -> float:
    """Return the centred kernel alignment of two representations of the same samples.

    It is 1 if they differ by rotation and scale.

    Parameters
    ----------
    X, Y
        [samples, p] and [samples, q].
    kernel
        "linear", in O(n p q); or "rbf", exp(-D^2 / (2 median(D^2))) over all pairs, in
        O(n^2) memory.
    unbiased
        HSIC1, which is near 0 for independent features and may be negative; else HSIC0,
        which stays far above 0 unless there are many more samples than features.

    Returns
    -------
    float
        NaN, with a warning, for features that do not vary.

    Raises
    ------
    ValueError
        For different numbers of samples, fewer than 4 (biased: 2), and values that are
        not finite.

    References
    ----------
    Kornblith et al. 2019; unbiased: Nguyen et al. 2021, eq. 3.
    """
    return _cka([([X], [Y])], kernel, unbiased).item()


def minibatch_cka(
    batches_of_pairs: Iterable[tuple[ArrayLike, ArrayLike]],
    kernel: Kernel = "linear",
    unbiased: bool = True,
) -> float:
    """Return the CKA of a stream of batches of samples in random order.

    One batch is held at a time. It is the ratio of sums, sum_b HSIC(X_b, Y_b) /
    sqrt(sum_b HSIC(X_b, X_b) sum_b HSIC(Y_b, Y_b)). If `unbiased`, the batch size
    changes only the noise; else small batches give larger values.

    Parameters
    ----------
    batches_of_pairs
        X [batch, p] and Y [batch, q]; leave out a short last batch.
    kernel, unbiased
        As in `cka`, whose errors hold for every batch.

    References
    ----------
    Nguyen et al. 2021, eq. 5.
    """
    return _cka((([x], [y]) for x, y in batches_of_pairs), kernel, unbiased).item()


def cka_matrix(
    features_a: FeatureSets,
    features_b: FeatureSets | None = None,
    kernel: Kernel = "linear",
    unbiased: bool = True,
) -> Float[Tensor, "a b"]:
    """Return the CKA of every representation of one list with every one of another.

    Parameters
    ----------
    features_a, features_b
        Lists of [samples, features] of any widths, or tensors [representations,
        samples, features]; None for the same as the first. For heads in x [samples,
        heads, d_head] it is `x.unbind(1)`.
    kernel, unbiased
        As in `cka`, with its errors.

    Returns
    -------
    Tensor
        float64. A representation that does not vary has NaN in its row or column.
    """
    return _cka([(features_a, features_b)], kernel, unbiased)


def match(similarity: ArrayLike) -> Matching:
    """Return one-to-one pairs of rows and columns with the largest total similarity.

    By the Hungarian method (Kuhn 1955). The min(A, B) pairs are in the order of the
    rows.

    Parameters
    ----------
    similarity
        [A, B]; NaN is worse than any number and stays NaN.

    Raises
    ------
    ValueError
        For an empty matrix and infinite values.
    """
    similarity = as_tensor("similarity", similarity, "A B")
    if similarity.numel() == 0 or similarity.isinf().any():
        raise ValueError(
            "similarity must be a matrix [A, B] of finite values or NaN, "
            f"got {list(similarity.shape)}"
        )
    known = similarity.detach().cpu().double()
    worst = -1 - known.nan_to_num(0).abs().sum() * 2 * min(known.shape)
    pairs = linear_sum_assignment(known.nan_to_num(worst.item()), maximize=True)
    rows, columns = (torch.as_tensor(i, device=similarity.device) for i in pairs)
    return Matching(rows, columns, similarity[rows, columns])


@torch.no_grad()
def layer_features(
    model: nn.Module,
    inputs: InputsLike,
    target: Target | None = None,
    *,
    tokens: Tokens = "first",
    batch_size: int = 256,
) -> dict[str, Features]:
    """Return the outputs of a network's layers in evaluation mode, by the layer's name.

    Parameters
    ----------
    model
        One network.
    inputs
        [samples, ...].
    target
        A regular expression on module names, or a list of how they end. None takes the
        blocks of a transformer (its longest nn.ModuleList), or without such a list
        every linear and convolutional layer.
    tokens
        "first" (CLS), "mean" or "all" (flattened) of outputs [samples, tokens, width].
        For maps [samples, channels, height, width] "mean" averages over the map. Other
        outputs are flattened.
    batch_size
        Samples of one pass.

    Returns
    -------
    dict
        [samples, features] of each layer, float32 on the CPU.

    Raises
    ------
    TypeError
        For an ensemble.
    ValueError
        For a target that matches no module, and for a module that does not give one
        output [batch, ...] in every pass.
    """
    one_network(model, "layer_features")
    one_of("tokens", tokens, ("first", "mean", "all"))
    x = as_inputs(inputs)
    outputs = {name: [] for name in _layers(model, target)}

    def keep(name):
        def hook(_, args, output):
            outputs[name].append(_reduced(name, output, tokens))

        return model.get_submodule(name).register_forward_hook(hook)

    with evaluating(model), hooked(map(keep, outputs)):
        for _, batch in batches(model, x, batch_size):
            call(model, batch)
    return {name: _joined(name, seen, count(x)) for name, seen in outputs.items()}


@torch.no_grad()
def penultimate(
    model: nn.Module, inputs: InputsLike, *, batch_size: int = 256
) -> Features:
    """Return what the classifier, the layer whose output is the logits, is given.

    Returns
    -------
    Tensor
        [samples, features], float32 on the CPU, in evaluation mode; of tokens the one
        that the logits are made of.

    Raises
    ------
    TypeError
        For an ensemble.
    ValueError
        For a network whose logits are no linear layer's output.
    """
    one_network(model, "penultimate")
    x = as_inputs(inputs)
    try:
        name = classifier_of(model, x)
    except ValueError as error:
        error.add_note("any layer's features: layer_features(model, inputs)")
        raise
    layer = {name: model.get_submodule(name)}
    with evaluating(model):
        features = [
            given_for_logits(model, layer, batch)[name].float().cpu()
            for _, batch in batches(model, x, batch_size)
        ]
    return torch.cat(features)


def embed(
    X: ArrayLike,
    method: Literal["pca", "umap", "tsne"] = "pca",
    components: int = 2,
    seed: int = 0,
) -> Float[Tensor, "samples components"]:
    """Return samples as points in few dimensions.

    Embed sets that you compare (ID and OOD, members) together. PCA turns each axis so
    that its largest score is positive. UMAP has at most 15 neighbours and t-SNE
    perplexity 30, both less for few samples. All three see only distances, so more
    features than samples (whole weight matrices, for example) are first rotated to as
    many as samples.

    Parameters
    ----------
    X
        [samples, features].
    method
        "pca", "umap" (McInnes et al. 2018) or "tsne" (van der Maaten and Hinton 2008).
    components
        1 to min(samples - 1, features).
    seed
        Of UMAP and t-SNE.

    Raises
    ------
    ValueError
        For values that are not finite, other components, and equal samples.
    """
    one_of("method", method, ("pca", "umap", "tsne"))
    (x,) = _representations([X], "")
    samples, width = x.shape
    most = min(samples - 1, width)
    between("components", components, 1, most, f" for features {list(x.shape)}")
    if method == "umap" and samples < 3:
        raise ValueError(
            f'method="umap" needs three samples or more, got {samples}; use "pca"'
        )
    root, varies = _centred(x)
    if not varies:
        raise ValueError("all samples are alike; there is nothing to embed")
    if method == "pca":
        points = _principal(root, components)
    else:
        reducer = _reducer(method, samples, components, seed)
        points = torch.from_numpy(reducer.fit_transform(root.cpu().numpy()))
    return points.to(x.device, torch.promote_types(x.dtype, torch.float32))


def _principal(root: Tensor, components: int) -> Tensor:
    """Return scores on the principal axes, the largest of each positive."""
    axes = torch.linalg.eigh(root.mT @ root).eigenvectors[:, -components:].flip(1)
    points = root @ axes
    return points * points.gather(0, points.abs().argmax(0, keepdim=True)).sign()


def _reducer(method: str, samples: int, components: int, seed: int) -> Any:
    """Return scikit-learn's t-SNE or UMAP; both take long to import."""
    if method == "tsne":
        from sklearn.manifold import TSNE

        return TSNE(
            components,
            perplexity=min(30.0, (samples - 1) / 3),
            random_state=seed,
            method="barnes_hut" if components < 4 else "exact",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # umap misses TensorFlow
        with extra("notebooks"):
            from umap import UMAP
    return UMAP(
        n_neighbors=min(15, samples - 1),
        n_components=components,
        random_state=seed,
        n_jobs=1,
        init="pca",
    )


def _cka(
    batches: Iterable[tuple[FeatureSets, FeatureSets | None]],
    kernel: str,
    unbiased: bool,
) -> Tensor:
    """Return the ratio of sums over batches: [A, B]."""
    one_of("kernel", kernel, ("linear", "rbf"))
    cross = norms_a = norms_b = torch.zeros(())
    number = 0
    for number, (features_a, features_b) in enumerate(batches, 1):
        where = f"batch {number - 1}: " if number > 1 else ""
        left = right = _kernels(features_a, where, kernel)
        if features_b is not None:
            right = _kernels(features_b, where, kernel)
        _check_samples(left + right, 4 if unbiased else 2, where)
        cross = cross + _hsic(left, right, kernel, unbiased)
        norms_a = norms_a + _own_hsic(left, kernel, unbiased)
        norms_b = norms_b + _own_hsic(right, kernel, unbiased)
    if not number:
        raise ValueError("minibatch CKA needs at least one batch, got an empty stream")
    if (norms_a <= 0).any() or (norms_b <= 0).any():
        warnings.warn(
            "some representations do not vary over the samples, or in one alone: "
            "their CKA is 0/0, NaN",
            stacklevel=3,
        )
    roots = [norms.where(norms > 0, math.nan).sqrt() for norms in (norms_a, norms_b)]
    return cross / torch.outer(*roots)


def _check_samples(kernels: list[_Kernel], least: int, where: str) -> None:
    """Raise ValueError for different numbers of samples, or too few."""
    samples = {len(kernel.diagonal) for kernel in kernels}
    if len(samples) > 1 or min(samples) < least:
        raise ValueError(
            f"{where}CKA compares representations of the same samples, {least} or more "
            f"of them, got {' and '.join(map(str, sorted(samples)))} samples"
        )


def _representations(features: FeatureSets, where: str) -> list[Tensor]:
    name = f"{where}a representation"
    tensors = [as_tensor(name, x, "samples features").detach() for x in features]
    for x in tensors:
        finite(name, x)
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got {list(x.shape)}")
    if not tensors:
        raise ValueError(f"{where}needs at least one representation, got an empty list")
    return tensors


def _centred(x: Tensor) -> tuple[Tensor, bool]:
    """Return F [n, <= n] in float64 with F F^T = X X^T for the centred X.

    And whether X varies by more than its rounding.
    """
    exact = x.double()
    rounding = 4 * torch.finfo(x.dtype).eps * exact.norm()
    root = exact - exact.mean(0)
    varies = bool(root.norm() > rounding)
    if root.shape[1] > len(root):
        root = torch.linalg.qr(root.mT, mode="r").R.mT
    return root, varies


def _kernels(features: FeatureSets, where: str, kernel: str) -> list[_Kernel]:
    return [_prepare(x, kernel) for x in _representations(features, where)]


def _prepare(x: Tensor, kernel: str) -> _Kernel:
    root, varies = _centred(x)
    if not varies:  # contributes nothing to any sum
        root = torch.zeros_like(root)
    if kernel == "linear":
        return _Kernel(root, root.square().sum(1))
    squares = torch.cdist(root, root).square()
    median = squares.quantile(0.5) if squares.numel() < 1e7 else squares.median()
    if not median:  # most samples are equal: there is no length scale
        return _Kernel(torch.zeros_like(squares), squares.diagonal() * 0)
    gram = (squares / (-2 * median)).exp()
    means = gram.mean(0)
    gram = gram - means - (means - means.mean())[:, None]
    return _Kernel(gram, gram.diagonal())


def _inner(x: _Kernel, y: _Kernel, kernel: str) -> Tensor:
    """Return <K, L>."""
    if kernel == "rbf":
        return (x.root * y.root).sum()
    return (x.root.mT @ y.root).square().sum()


def _hsic(a: list[_Kernel], b: list[_Kernel], kernel: str, unbiased: bool) -> Tensor:
    """Return HSIC1 or HSIC0 of all pairs: [A, B]."""
    pairs = itertools.product(a, b)
    inner = torch.stack([_inner(x, y, kernel) for x, y in pairs]).view(len(a), -1)
    k = torch.stack([x.diagonal for x in a])  # [A, n]
    m = torch.stack([y.diagonal for y in b])  # [B, n]
    n = k.shape[1]
    if not unbiased:
        return inner / (n - 1) ** 2
    sums = torch.outer(k.sum(1), m.sum(1)) / ((n - 1) * (n - 2))
    return (inner - n / (n - 2) * (k @ m.mT) + sums) / (n * (n - 3))


def _own_hsic(kernels: list[_Kernel], kernel: str, unbiased: bool) -> Tensor:
    """Return the HSIC of every kernel with itself [A], 0 where it is rounding error."""
    values = torch.cat([_hsic([x], [x], kernel, unbiased)[0] for x in kernels])
    rounding = 1e-14 * torch.stack([x.diagonal.mean() for x in kernels]).square()
    return values.where(values > rounding, 0.0)


def _layers(model: nn.Module, target: Target | None) -> list[str]:
    """Return the names of the modules that `target` finds, or of the default ones."""
    modules = {name: module for name, module in model.named_modules() if name}
    lists = [n for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m)]
    if target is not None:
        pattern = pattern_of(target)
        chosen = [name for name in modules if re.search(pattern, name)]
    elif lists:
        longest = max(lists, key=lambda name: len(list(modules[name].children())))
        chosen = [name for name in modules if name.rpartition(".")[0] == longest]
    else:
        kinds = nn.Linear | nn.Conv2d
        chosen = [name for name, module in modules.items() if isinstance(module, kinds)]
    if not chosen:
        raise ValueError(
            f"target {target!r} matches no module; "
            f"there are {', '.join(modules) or 'none'}"
        )
    return chosen


def _joined(name: str, outputs: list[Tensor], samples: int) -> Tensor:
    """Return a layer's outputs for all batches as one tensor."""
    shapes = [list(x.shape) for x in outputs]
    widths = {width for _, width in shapes}
    if len(widths) != 1 or sum(map(len, outputs)) != samples:
        raise ValueError(
            f"{name} must give one output [batch, ...] of one width in every pass, "
            f"got {shapes[:3] or 'nothing'}; choose another target or tokens"
        )
    return torch.cat(outputs)


def _reduced(name: str, output: Any, tokens: str) -> Tensor:
    """Return one layer's output as [batch, features]."""
    x = first_of(output)
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise ValueError(
            f"{name} returns {type(x).__name__}, not a tensor [batch, ...]; "
            "choose another target"
        )
    if x.ndim == 3 and tokens != "all":
        x = x[:, 0] if tokens == "first" else x.mean(1)
    elif x.ndim == 4 and tokens == "mean":
        x = x.mean((2, 3))
    return x.flatten(1).float().cpu()
