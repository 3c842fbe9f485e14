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

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import inf, nan
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core.checks import (
    ArrayLike,
    InputsLike,
    Target,
    as_inputs,
    as_tensor,
    at_least,
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
    given_for_logits,
    hooked,
)
from uqlab.heads import head_features

Features = Float[Tensor, "samples _"]
FeatureSets = Sequence[ArrayLike] | Tensor
Kernel = Literal["linear", "rbf"]


class _Kernel(NamedTuple):
    """The centred kernel matrix K: F with K = F F^T if linear, else K, as the root."""

    root: Tensor
    diagonal: Tensor  # of K, [n]
    linear: bool


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
        If the numbers of samples differ or are below 4 (biased: 2), or values are not
        finite.

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


def head_cka(
    model: nn.Module, inputs: InputsLike, layer: int = -1
) -> Float[Tensor, "heads heads"]:
    """Return the CKA of every two attention heads of one layer.

    Parameters
    ----------
    model, inputs
        A network and inputs that `heads.head_features` takes.
    layer
        The layer's number; -1 is the last.

    Returns
    -------
    Tensor
        float64. A head that does not vary has NaN in its row and column.

    References
    ----------
    Gabetni et al. 2025, figure 4.
    """
    return cka_matrix(head_features(model, inputs)[layer].unbind(1))


@torch.no_grad()
def layer_features(
    model: nn.Module, inputs: InputsLike, target: Target, *, batch_size: int = 256
) -> dict[str, Tensor]:
    """Return the outputs of a network's layers in evaluation mode, by the layer's name.

    Parameters
    ----------
    model
        One network.
    inputs
        [samples, ...].
    target
        A regular expression on module names, or a list of how they end.
    batch_size
        Samples in one pass.

    Returns
    -------
    dict
        [samples, ...] of each layer, float32 on the CPU. Of a transformer's block x
        [samples, tokens, width], x[:, 0] are the features of the first token.

    Raises
    ------
    TypeError
        If `model` is an ensemble.
    ValueError
        If `target` matches no module, or a module does not give one output
        [batch, ...] in every pass.
    """
    one_network(model, "layer_features")
    x, pattern = as_inputs(inputs), pattern_of(target)
    layers = {n: part for n, part in model.named_modules() if re.search(pattern, n)}
    if not layers:
        raise ValueError(f"`target` {target!r} matches no module of the network")
    outputs: dict[str, list[Tensor]] = {name: [] for name in layers}

    def keep(name):
        return lambda *given: outputs[name].extend(_states(given[-1]))

    hooks = (part.register_forward_hook(keep(n)) for n, part in layers.items())
    with evaluating(model), hooked(hooks):
        for _, batch in batches(model, x, batch_size):
            call(model, batch)
    for name, parts in outputs.items():
        if sum(map(len, parts)) != count(x):
            raise ValueError(
                f"`target` takes layers that run once in a pass and give a tensor, not "
                f"{name}; choose others"
            )
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def _states(output: Any) -> list[Tensor]:
    """Return the first tensor of an output; a mapping's of transformers are states."""
    if isinstance(output, Mapping):
        output = next(iter(output.values()), None)
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor):
        return []
    return [first.to("cpu", torch.float32, copy=True)]  # it may be changed in place


@torch.no_grad()
def penultimate(
    model: nn.Module, inputs: InputsLike, *, batch_size: int = 256
) -> Features:
    """Return the inputs of the classifier, the layer whose output is the logits.

    Returns
    -------
    Tensor
        [samples, features], float32 on the CPU, in evaluation mode; where there are
        several tokens, those of the token that gives the logits.

    Raises
    ------
    TypeError
        If `model` is an ensemble.
    ValueError
        If the network's logits are not a linear layer's output.
    """
    one_network(model, "penultimate")
    x = as_inputs(inputs)
    try:
        name = classifier_of(model, x)
    except ValueError as error:
        error.add_note("layer_features(model, inputs) reads any other layer")
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

    Embed sets that you compare (ID and OOD, members) together. UMAP has at most 15
    neighbours and t-SNE perplexity 30, both less for few samples.

    Parameters
    ----------
    X
        [samples, features].
    method
        "pca", "umap" (McInnes et al. 2018) or "tsne" (van der Maaten and Hinton 2008).
    components
        Dimensions of the result; at most 3 for t-SNE.
    seed
        The random state of UMAP and t-SNE.

    Raises
    ------
    ValueError
        If values are not finite.
    """
    one_of("method", method, ("pca", "umap", "tsne"))
    x = _representation(X)
    few = len(x) - 1
    if method == "umap":
        at_least("umap's number of samples (pca takes two)", len(x), 3)
        with warnings.catch_warnings(), extra("notebooks"):
            warnings.simplefilter("ignore", ImportWarning)  # umap misses TensorFlow
            from umap import UMAP as Reducer
        settings: dict[str, Any] = {"n_neighbors": min(15, few), "n_jobs": 1}
        settings["init"] = "pca"
    elif method == "tsne":  # scikit-learn takes long to import
        from sklearn.manifold import TSNE as Reducer

        settings = {"perplexity": min(30.0, few / 3)}
    else:
        from sklearn.decomposition import PCA as Reducer

        settings = {"svd_solver": "full"}
    reducer = Reducer(n_components=components, random_state=seed, **settings)
    points = torch.from_numpy(reducer.fit_transform(x.double().cpu().numpy()))
    return points.to(x.device, torch.promote_types(x.dtype, torch.float32))


def _cka(
    batches: Iterable[tuple[FeatureSets, FeatureSets | None]],
    kernel: str,
    unbiased: bool,
) -> Tensor:
    """Return the ratio of sums over batches: [A, B]."""
    one_of("kernel", kernel, ("linear", "rbf"))
    cross = norms_a = norms_b = torch.zeros(())
    for features_a, features_b in batches:
        a = b = [_prepare(x, kernel) for x in features_a]
        if features_b is not None:
            b = [_prepare(x, kernel) for x in features_b]
        _check_samples(a, b, 4 if unbiased else 2)
        cross = cross + torch.stack([_hsic(x, y, unbiased) for x in a for y in b])
        norms_a = norms_a + torch.stack([_own_hsic(x, unbiased) for x in a])
        norms_b = norms_b + torch.stack([_own_hsic(y, unbiased) for y in b])
    if not cross.ndim:
        raise ValueError("minibatch CKA needs at least one batch, got an empty stream")
    if not norms_a.all() or not norms_b.all():
        warnings.warn(
            "some representations do not vary over the samples, or in only one of "
            "them: their CKA is 0/0, NaN",
            stacklevel=3,
        )
    norms = torch.outer(norms_a, norms_b)
    return cross.view_as(norms) / norms.where(norms > 0, nan).sqrt()


def _check_samples(a: list[_Kernel], b: list[_Kernel], least: int) -> None:
    samples = {len(kernel.diagonal) for kernel in a + b}
    if len(samples) != 1 or min(samples) < least:
        raise ValueError(
            f"CKA compares representations of the same {least} or more samples, "
            f"got {samples or 'no'} samples"
        )


def _representation(x: ArrayLike) -> Tensor:
    x = as_tensor("a representation", x, "samples features").detach()
    finite("a representation", x)
    if 0 in x.shape:
        raise ValueError(f"a representation must not be empty, got {list(x.shape)}")
    return x


def _prepare(x: ArrayLike, kernel: str) -> _Kernel:
    """Return the centred kernel; zeros where x varies by no more than its rounding."""
    x = _representation(x)
    exact = x.double()
    root = exact - exact.mean(0)
    if root.norm() <= 4 * torch.finfo(x.dtype).eps * exact.norm():
        root = torch.zeros_like(root)
    if root.shape[1] > len(root):
        root = torch.linalg.qr(root.mT, mode="r").R.mT
    if kernel == "linear":
        return _Kernel(root, root.square().sum(1), linear=True)
    squares = torch.cdist(root, root).square()
    median = float(np.median(squares.cpu())) or inf  # most samples equal: K is 0
    gram = (squares / (-2 * median)).exp()
    means = gram.mean(0)
    gram = gram - means - (means - means.mean())[:, None]
    return _Kernel(gram, gram.diagonal(), linear=False)


def _hsic(x: _Kernel, y: _Kernel, unbiased: bool) -> Tensor:
    """Return HSIC1 or HSIC0."""
    terms = (x.root.mT @ y.root).square() if x.linear else x.root * y.root
    inner = terms.sum()
    n = len(x.diagonal)
    if not unbiased:
        return inner / (n - 1) ** 2
    sums = x.diagonal.sum() * y.diagonal.sum() / ((n - 1) * (n - 2))
    return (inner - n / (n - 2) * (x.diagonal @ y.diagonal) + sums) / (n * (n - 3))


def _own_hsic(x: _Kernel, unbiased: bool) -> Tensor:
    """Return the HSIC of a kernel with itself, 0 where it is rounding error."""
    value = _hsic(x, x, unbiased)
    return value.where(value > 1e-14 * x.diagonal.mean().square(), 0.0)
