"""MC dropout as an ensemble: every member drops other units."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

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


class _FixedDropout(nn.Module):
    """Dropout of the same features for all inputs: x diag(mask).

    The mask has the shape of one input's features, [features] where the input is
    [batch, features] or [batch, tokens, features], or of its map [channels, height,
    width]. It is drawn on the first call from a seed.
    """

    mask: Tensor

    def __init__(self, p, seed=0):
        super().__init__()
        self.p, self.seed = p, seed
        self.register_buffer("mask", torch.empty(0), persistent=False)

    def drawn(self, shape, seed):
        """Return a mask: 0, or 1 / (1 - p) where a feature is kept."""
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return (noise >= self.p) / (1 - self.p)

    def forward(self, x):
        """Drop the features of x [batch, ...]."""
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if self.mask.shape != shape:
            self.mask = self.drawn(shape, self.seed).to(x.device)
        return x * self.mask.to(x.dtype)


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
            layer.seed, layer.mask = self._seeds(number)[index], torch.empty(0)
        return network

    def _seeds(self, number):
        seed = self.recipe["seed"]
        return [member_seed(seed, m, "mc dropout", number) for m in self.member_ids]

    def _run(self, args, named, each, members):
        leaves = tree_leaves((args, named))
        shapes = [t.shape[1 + each :] for t in leaves if isinstance(t, Tensor)]
        if shapes != self._shapes:  # by a pass the network's own masks have theirs
            one, more = tree_map(lambda t: t[0] if each else t, (args, named))
            with torch.no_grad():
                self.network(*one, **more)
            layers = layers_of(self.network, _FixedDropout)
            for number, (layer, part) in enumerate(
                zip(layers, self.parts, strict=True)
            ):
                like, seeds = layer.mask, self._seeds(number)
                masks = [layer.drawn(like.shape, s).to(like) for s in seeds]
                part.kind.value = torch.stack(masks)
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
    network = place_dropout(plain(model), lambda: _FixedDropout(p))
    for layer in layers_of(network, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # the fused form would pass dropout by
    sees = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _FixedDropout):
            own = [Own(torch.empty(0), False, kept=False) for _ in ids]
            sees[f"{name}.mask"] = own
    return _DropoutEnsemble(network, ids, sees).resample(seed).eval()


def place_dropout(network: Any, make: Callable[[], nn.Module]) -> Any:
    """Put modules of dropout into a network, in place, and return it.

    They stand where its layers of dropout stood or, in a network without, before every
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
        put(network, name, make())
    if found:
        return network
    head = classifier(network)
    if not head:
        return nn.Sequential(make(), network)
    linear = [name for name, part in layers.items() if type(part) is nn.Linear]
    for name in linear[1:] or [head]:
        put(network, name, nn.Sequential(make(), layers[name]))
    return network
