"""MC dropout as an ensemble: every member drops units of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import one_network, within
from uqlab.core.modules import layers_of, sharing_copy
from uqlab.ensembles.base import Members, SeparateEnsemble, member_seed
from uqlab.ensembles.implicit import check_backbone, plain, put
from uqlab.ensembles.recipes import recorded
from uqlab.models import classifier

DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip


class FixedDropout(nn.Module):
    """Dropout of the same features for all inputs: x diag(mask).

    The mask has the shape of one input's features, [features] where the input is
    [batch, features] or [batch, tokens, features], or of its map [channels, height,
    width]. It is drawn from the seed for the first input of a shape.
    """

    mask: Tensor

    def __init__(self, p: float, seed: int = 0):
        super().__init__()
        self.p = p
        self.register_buffer("mask", None, persistent=False)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Draw the next mask from another seed."""
        self.seed, self.mask = seed, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """Drop the features of x [batch, ...]."""
        shape = x.shape[-1:] if x.ndim == 3 else x.shape[1:]
        if self.mask.shape != shape:
            generator = torch.Generator().manual_seed(self.seed)
            kept = torch.rand(shape, generator=generator) >= self.p
            self.mask = (kept / (1 - self.p)).to(x.device)
        return x * self.mask.to(x.dtype)


class DropoutEnsemble(SeparateEnsemble):
    """MC dropout: a member drops the same units for all inputs, until `resample`.

    The members are copies of one network that share its tensors.
    """

    def __init__(self, models: Sequence[nn.Module], members: Members):
        super().__init__(models, members)
        self.borrowed = {name for name, _ in self.network.named_parameters()}
        self.eval()

    def train(self, mode: bool = True) -> "DropoutEnsemble":
        """Keep the frozen networks in evaluation mode."""
        return super().train(False)

    def resample(self, seed: int) -> "DropoutEnsemble":
        """Choose new units, from (seed, member) alone, and return the ensemble."""
        for m, network in zip(self.member_ids, self.network, strict=True):
            for number, layer in enumerate(layers_of(network, FixedDropout)):
                layer.reset(member_seed(seed, m, "mc dropout", number))
        return self.with_recipe({**self.recipe, "seed": seed})


@recorded
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
    members : int or range
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
    copies = [sharing_copy(network) for _ in ids]
    return DropoutEnsemble(copies, ids).resample(seed)


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
    layers = list(network.named_modules())
    found = [name for name, part in layers if isinstance(part, DROPOUT)]
    for name in found:
        put(network, name, make())
    if found:
        return network
    head = classifier(network)
    if not head:
        return nn.Sequential(make(), network)
    linear = [name for name, part in layers if type(part) is nn.Linear]
    for name in linear[1:] or [head]:
        put(network, name, nn.Sequential(make(), network.get_submodule(name)))
    return network
