"""MC dropout as an ensemble: every member drops other units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from uqlab.core.checks import one_network, within
from uqlab.core.modules import layers_of
from uqlab.ensembles.base import (
    Ensemble,
    Members,
    Own,
    member_range,
    member_seed,
    recorded,
)
from uqlab.ensembles.implicit import plain, put
from uqlab.models import classifier

DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip


# What AlphaDropout puts in place of a unit: the least value of SELU.
LEAST = -1.7580993408473766


class _FixedDropout(nn.Module):
    """Dropout of the same features for all inputs: x diag(mask).

    A mask has the shape of one input's features, [features] where the input is [batch,
    features] or [batch, tokens, features], or of its map [channels, height, width];
    [channels] in place of a layer that drops these whole. The masks of the calls in a
    pass of the network stand one after the other in `mask`. They are drawn on the first
    pass from a seed; without one, later passes must have calls of the same sizes.
    """

    mask: Tensor

    def __init__(self, p, seed: int | None = 0, kind: type = nn.Dropout):
        super().__init__()
        self.p, self.seed, self.kind = p, seed, kind
        self.forget()

    def forget(self):
        """Draw masks anew at the next call."""
        self.sizes, self.call = [], 0
        self.register_buffer("mask", torch.empty(0), persistent=False)

    def drawn(self, seed):
        """Return masks: 0, or 1 / (1 - p) where a feature is kept."""
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.rand(size, generator=generator) for size in (0, *self.sizes)]
        return (torch.cat(noise) >= self.p) / (1 - self.p)

    def forward(self, x):
        """Drop the features of x [batch, ...]."""
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if not issubclass(self.kind, nn.Dropout | nn.AlphaDropout):
            shape = torch.Size([x.shape[1], *[1] * (x.ndim - 2)])
        size, done = shape.numel(), self.sizes[: self.call]
        if self.sizes[self.call : self.call + 1] != [size]:
            if self.seed is None:
                raise ValueError(
                    "MC dropout needs a network that calls its layers in the same way "
                    "for all inputs of one shape: use another nn.Dropout for each layer"
                )
            self.sizes = [*done, size]
            self.mask = self.drawn(self.seed).to(x.device)
        self.call += 1
        return self.drop(x, self.mask[sum(done) :][:size].view(shape).to(x.dtype))

    def drop(self, x, mask):
        """Put zero, or the least value of SELU, where the mask is zero."""
        if not issubclass(self.kind, nn.AlphaDropout | nn.FeatureAlphaDropout):
            return x * mask
        kept, p = (mask > 0).to(x.dtype), self.p  # mean and variance stay
        scale = ((1 - p) * (1 + p * LEAST**2)) ** -0.5
        return scale * (x * kept + LEAST * (1 - p - kept))


def _begin(network, _):
    """Note that a pass begins."""
    for layer in layers_of(network, _FixedDropout):
        layer.call = 0


class _DropoutEnsemble(Ensemble):
    """MC dropout: a member drops the same units for all inputs, until `resample`."""

    def resample(self, seed: int) -> "_DropoutEnsemble":
        """Choose new units, from (seed, member) alone, and return the ensemble."""
        self._shapes = None  # of the inputs that masks were drawn for
        return self.with_recipe({**self.recipe, "seed": seed})

    def member(self, index):
        """Return one member, whose masks are drawn on its first call."""
        network = super().member(index)
        for number, layer in enumerate(layers_of(network, _FixedDropout)):
            layer.forget()
            layer.seed = self._seeds(number)[index]
        return network

    def _check_first(self, network, inputs):
        for layer in layers_of(network, _FixedDropout):
            layer.p = 0.0  # layers beside each other then see the same
        super()._check_first(network, inputs)

    def _seeds(self, number):
        seed = self.recipe["seed"]
        return [member_seed(seed, m, "mc dropout", number) for m in self.member_ids]

    def _run(self, args, named, each, members):
        leaves = tree_leaves((args, named))
        shapes = [t.shape[1 + each :] for t in leaves if isinstance(t, Tensor)]
        if shapes != self._shapes:  # by a pass the network's own masks have theirs
            layers = layers_of(self.network, _FixedDropout)
            for layer in layers:
                layer.forget()
                layer.seed = 0

            def given(t):
                return (t[0] if each else t).clone()

            one, more = tree_map_only(Tensor, given, (args, named))
            with torch.no_grad():
                self.network(*one, **more)
            for number, (layer, part) in enumerate(
                zip(layers, self.parts, strict=True)
            ):
                masks = [layer.drawn(s).to(layer.mask) for s in self._seeds(number)]
                part.kind.value, layer.seed = torch.stack(masks), None
            self._shapes = shapes
        return super()._run(args, named, each, members)


@recorded
def dropout(
    model: nn.Module, members: Members, p: float = 0.2, *, seed: int = 0
) -> Any:
    """Make MC dropout an ensemble: member m keeps a fixed part of the units.

    Parameters
    ----------
    model : nn.Module
        A trained network, whose weights are shared, not copied, and frozen. What is
        dropped is the input of every layer of dropout or, in a network without, of
        every linear layer but the first, or of the classifier where that is the only
        one. Dropout inside functions and inside attention is off.
    members : int or range
        As in `lora`.
    p : float
        The probability that a unit is dropped, in [0, 1), whatever the modules' own.
        Active in evaluation mode too.
    seed : int
        What member m drops depends on (seed, m) alone.

    Returns
    -------
    Ensemble
        With `resample(seed)`, which chooses other units.

    Raises
    ------
    ValueError
        For members below 1, p outside [0, 1) and a network without a linear layer.

    References
    ----------
    Gal, Ghahramani, "Dropout as a Bayesian approximation", 2016.
    """
    ids = member_range(members)
    within("dropout probability", p, "[0, 1)")
    network = plain(model)
    kinds = {name: type(layer) for name, layer in network.named_modules()}
    linear = [name for name, kind in kinds.items() if kind is nn.Linear]
    placed = any(issubclass(kind, DROPOUT) for kind in kinds.values())
    network = place_dropout(network, lambda: _FixedDropout(p))
    network.register_forward_pre_hook(_begin)
    for layer in layers_of(network, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # the fused form would pass dropout by
    sees = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _FixedDropout):
            own = [Own(torch.empty(0), False, kept=False) for _ in ids]
            sees[f"{name}.mask"] = own
            layer.kind = kinds[name] if placed else nn.Dropout
    ensemble = _DropoutEnsemble(network, ids, sees).resample(seed)
    ensemble.ordered = [] if placed else linear
    return ensemble.eval()


def place_dropout(network: Any, make: Callable[[], nn.Module]) -> Any:
    """Put modules of dropout into a network, in place, and return it.

    They stand where its layers of dropout stood, an nn.Dropout as one of the kind that
    it replaces, which may drop whole channels; or, in a network without, before every
    linear layer but the first, or before the classifier where that is the only one.

    Parameters
    ----------
    network : nn.Module
        A lone linear layer is put into a new network.
    make : callable
        Returns a new module of dropout.
    """
    one_network(network, "place_dropout")
    layers = dict(network.named_modules())
    found = [name for name, part in layers.items() if isinstance(part, DROPOUT)]
    for name in found:
        made = make()
        plainest = type(made) is nn.Dropout
        put(network, name, type(layers[name])(made.p) if plainest else made)
    if found:
        return network
    head = classifier(network)
    if not head:
        return nn.Sequential(make(), network)
    linear = [name for name, part in layers.items() if type(part) is nn.Linear]
    for name in linear[1:] or [head]:
        put(network, name, nn.Sequential(make(), layers[name]))
    return network
