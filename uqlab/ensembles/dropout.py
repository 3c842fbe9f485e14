"""MC dropout as an ensemble: every member drops units of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from uqlab.core.checks import within
from uqlab.core.modules import hooked, layers_of
from uqlab.ensembles.base import Ensemble, Members, member_seed
from uqlab.ensembles.functional import Own
from uqlab.ensembles.implicit import check_backbone, plain
from uqlab.models import classifier

DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip


class FixedDropout(nn.Module):
    """Dropout of the same features for all inputs: x diag(mask).

    The mask has the shape of one input's features, [features] where the input is
    [batch, features] or [batch, tokens, features], or of its map [channels, height,
    width]. It is drawn on the first call from a seed.
    """

    mask: Tensor

    def __init__(self, p: float, seed: int = 0):
        super().__init__()
        self.p, self.seed = p, seed
        self.register_buffer("mask", torch.empty(0), persistent=False)

    def drawn(self, shape: torch.Size, seed: int) -> Tensor:
        """Return a mask: 0, or 1 / (1 - p) where a feature is kept."""
        noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        return (noise >= self.p) / (1 - self.p)

    def forward(self, x: Tensor) -> Tensor:
        """Drop the features of x [batch, ...]."""
        shape = self.features(x)
        if self.mask.shape != shape:
            self.mask = self.drawn(shape, self.seed).to(x.device)
        return x * self.mask.to(x.dtype)

    def features(self, x: Tensor) -> torch.Size:
        """Return the shape of what is dropped alike in all inputs."""
        return x.shape[-1:] if x.ndim == 3 else x.shape[1:]


class DropoutEnsemble(Ensemble):
    """MC dropout: a member drops the same units for all inputs, until `resample`."""

    _drawn: set[Any]

    def resample(self, seed: int) -> "DropoutEnsemble":
        """Choose new units, from (seed, member) alone, and return the ensemble."""
        self._drawn = set()
        return self.with_recipe({**(self.recipe or {}), "seed": seed})

    def member(self, index):
        """Return one member, whose masks are drawn on its first call."""
        network = super().member(index)
        for number, layer in enumerate(layers_of(network, FixedDropout)):
            layer.seed, layer.mask = self._seed(index, number), torch.empty(0)
        return network

    def _seed(self, index: int, number: int) -> int:
        seed = (self.recipe or {})["seed"]
        return member_seed(seed, self.member_ids[index], "mc dropout", number)

    def _run(self, args, named, each, members):
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        shapes = tuple(t.shape[1 + each :] for t in tensors)
        if shapes not in self._drawn:
            one = tree_map(lambda t: t[0] if each else t, (args, named))
            self._draw(*one)
            self._drawn = {shapes}
        return super()._run(args, named, each, members)

    @torch.no_grad()
    def _draw(self, args, named):
        """Draw the masks for what the network gives its layers of dropout."""
        shapes: dict[Any, Any] = {}
        layers = layers_of(self.network, FixedDropout)

        def note(layer, given):
            shapes[layer] = layer.features(given[0]), given[0].device

        with hooked(layer.register_forward_pre_hook(note) for layer in layers):
            if len(args) == 1 and isinstance(args[0], Mapping):
                args, named = (), args[0]
            self.network(*args, **named)
        for number, (layer, part) in enumerate(zip(layers, self.parts, strict=True)):
            shape, device = shapes.get(layer, (torch.Size([0]), "cpu"))
            seeds = [self._seed(m, number) for m in range(self.members)]
            masks = [layer.drawn(shape, seed) for seed in seeds]
            part.kind.value = torch.stack(masks).to(device)


def dropout(
    model: nn.Module, members: Members, p: float = 0.2, *, seed: int = 0
) -> DropoutEnsemble:
    """Make MC dropout an ensemble: member m keeps a fixed part of the units.

    Parameters
    ----------
    model : nn.Module
        A trained network, whose weights are shared, not copied, and frozen. What is
        dropped is the input of every layer of dropout or, in a network without, of
        every linear layer but the first, or of the classifier where that is the only
        one. Dropout inside functions and inside attention is off.
    members : int, str or range
        As in `lora`.
    p : float
        The probability that a unit is dropped, in [0, 1), whatever the modules' own.
        Active in evaluation mode too.
    seed : int
        What member m drops depends on (seed, m) alone.

    Returns
    -------
    DropoutEnsemble

    Raises
    ------
    ValueError
        For members below 1, p outside [0, 1) and a network without a linear layer.

    References
    ----------
    Gal, Ghahramani, "Dropout as a Bayesian approximation", 2016.
    """
    ids = check_backbone(model, members)
    within("dropout probability", p, "[0, 1)")
    network = place_dropout(plain(model), lambda: FixedDropout(p))
    for layer in layers_of(network, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # the fused form would pass dropout by
    sees = {}
    for name, layer in network.named_modules():
        if isinstance(layer, FixedDropout):
            full = f"{name}.mask".lstrip(".")
            sees[full] = [Own(torch.empty(0), trained=False) for _ in ids]
    ensemble = DropoutEnsemble(network, ids, sees)
    ensemble.with_recipe({"method": "dropout", "p": p})
    return ensemble.resample(seed).eval()


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
    layers = list(network.named_modules(remove_duplicate=False))
    new = {part: make() for _, part in layers if isinstance(part, DROPOUT)}
    for name, part in layers:
        if part in new:
            network.set_submodule(name, new[part])
    if new:
        return network
    head = classifier(network)
    if not head:
        return nn.Sequential(make(), network)
    linear = [name for name, part in layers if type(part) is nn.Linear]
    for name in linear[1:] or [head]:
        behind = nn.Sequential(make(), network.get_submodule(name))
        network.set_submodule(name, behind)
    return network
