"""Tiles: the ensemble in a network that averages its last map before a linear head.

A linear classifier of an average equals the average of the classifier's outputs: the
network's logits are the mean of the logits at the positions of the map. Without that
average the positions are members, or size x size tiles of them (Kirsch 2024, D.4). A
tile's logits are the mean of those at its positions, whatever the classifier.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from uqlab.core.checks import at_least, one_network
from uqlab.core.modules import hooked, layers_of, logits_of
from uqlab.ensembles import MeanGradient, OneNetwork, recorded

_NO_AVERAGE = "does not average over its whole map"
# Of the largest number: above the error of bfloat16 products, below that of a head that
# is not linear.
_TOLERANCE = 1e-2


@recorded
def tiles(
    model: nn.Module, size: int, *, pool: str | None = None, head: str | None = None
) -> "TiledEnsemble":
    """Make the ensemble of the tiles of the map that a network averages.

    Member i * size + j sees only the tile in row i and column j. Where size divides the
    map, the mean of the members' logits is the model's own; elsewhere tiles are the
    windows of torch's adaptive pooling, which may overlap. All members together cost
    one pass of the backbone. The ensemble shares the model's weights until it is moved
    or cast.

    A vision transformer whose classifier reads the class token has tiles too: its patch
    tokens after the final layer norm. The mean of their logits is not the model's
    prediction.

    Parameters
    ----------
    model
        A classifier with logits [batch, classes].
    size
        Tiles a side, from 1 to the map's side.
    pool
        The name of the module that averages the map, or of the final nn.LayerNorm of a
        transformer. None takes the last module whose class is named an average pool
        (AvgPool), else the `layernorm` of a model of transformers.
    head
        The name of the module that holds a classifier which is not linear; None where
        what follows the pool is. The mean of a named head's logits over all positions
        need not be the model's prediction.

    Raises
    ------
    TypeError
        Unless `model` is one network.
    ValueError
        For a size below 1, an unknown name, and a model without an average pool. On the
        first call, with two inputs, for a size larger than the map, a pool that is no
        average, and a model whose logits are not linear in it, unless a head is named.
    """
    one_network(model, "tiles")
    at_least("size", size)
    modules = dict(model.named_modules())
    for name in (pool, head):
        if name is not None and name not in modules:
            raise ValueError(f"no module {name!r}; choose among {', '.join(modules)}")
    name = _find_pool(model, modules) if pool is None else pool
    grid = _token_grid(model, name) if isinstance(modules[name], nn.LayerNorm) else None
    positions = _Positions(modules[name], name, grid)
    network = _sharing_copy(model, (modules[name], positions))
    return TiledEnsemble(network, size, head is None, range(size * size))


def _sharing_copy(model: Any, *replaced: Any) -> Any:
    """Return a copy that shares all tensors; in each pair the second replaces one."""
    shared = [(t, t) for t in (*model.parameters(), *model.buffers())]
    memo = {id(old): new for old, new in [*shared, *replaced]}
    return copy.deepcopy(model, memo)  # deepcopy takes what `memo` already holds


class TiledEnsemble(OneNetwork):
    """A network whose head runs at every position; members are means over tiles.

    Parameters
    ----------
    network
        The model, with `_Positions` in the place of the pool.
    size
        Tiles a side.
    linear
        Whether the head must be linear: the mean of members is then the model.
    member_ids
        The numbers of the tiles, row by row.
    """

    def __init__(self, network: nn.Module, size: int, linear: bool, member_ids: range):
        super().__init__(network, member_ids)
        self.size = size
        self.linear = linear
        self.checked = False
        self.borrowed = set()
        self.eval()

    def _run(self, args, named, each, members):
        (x,) = args
        if each:
            pairs = zip(range(self.members)[members], x, strict=True)
            return torch.stack([self(inputs)[m] for m, inputs in pairs])
        self._check(x[:2])
        grid = adaptive_avg_pool2d(self._at_positions(x), self.size)
        logits = grid.flatten(2)[:, :, list(self.member_ids)].permute(2, 0, 1)
        return MeanGradient.apply(logits, self.members)

    def member(self, index: int) -> nn.Module:
        index = range(self.members)[index]
        return _OneTile(self.shard(slice(index, index + 1)))

    def shard(self, rows: slice) -> "TiledEnsemble":
        network = _sharing_copy(self.network)
        shard = TiledEnsemble(network, self.size, self.linear, self.member_ids[rows])
        shard.checked, shard.source = self.checked, self.source
        return shard.with_recipe(self.recipe)

    def _apply(self, fn, recurse=True):
        # To move shared weights would move the model's parameters, and leave its
        # buffers where they are.
        self.network = copy.deepcopy(self.network)
        return super()._apply(fn, recurse)

    def _positions(self) -> "_Positions":
        return layers_of(self.network, _Positions)[0]

    def _at_positions(self, x: Tensor) -> Tensor:
        """Return logits at all positions, [batch, classes, height, width]."""
        logits = logits_of(self.network(x.clone()))
        name = self._positions().name
        height, width = self._positions().sides
        if logits.shape[:-1] != (height * width * len(x),):
            raise ValueError(
                "tiles need logits [batch, classes] of a head that reads only the pool "
                f"{name!r}, which runs once; at {height} x {width} positions of "
                f"{len(x)} inputs they are {list(logits.shape)}"
            )
        at_most = min(height, width)
        if self.size > at_most:
            raise ValueError(
                f"`size` must be 1 to {at_most}, the side of the map at {name!r}, got "
                f"{self.size}"
            )
        return logits.unflatten(0, (height, width, len(x))).permute(2, 3, 0, 1)

    @torch.no_grad()
    def _check(self, x: Tensor) -> None:
        """Raise ValueError unless the pool is an average, the head linear if so said.

        The model's logits are then those of the mean over the map. It is checked once.
        """
        if self.checked or not len(x):
            return
        positions = self._positions()
        every = self._at_positions(x)
        if not every.isfinite().all():
            return  # such inputs show nothing
        with hooked([positions.register_forward_hook(_averaged)]):
            whole = logits_of(self.network(x.clone()))
        difference = (every.mean((2, 3)) - whole).abs().max()
        if self.linear and not difference <= _TOLERANCE * every.abs().max():
            raise ValueError(
                f"the mean of the tiles' logits at {positions.name!r} differs from the "
                "model's logits: what follows the pool is not linear, or reads more "
                "than its output. To take tiles nevertheless, name the classifier: "
                "tiles(..., head='...')"
            )
        self.checked = True


class _OneTile(nn.Module):
    """A member as a plain network: inputs -> logits [batch, classes]."""

    def __init__(self, tile: TiledEnsemble):
        super().__init__()
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        return self.tile(x)[0]


class _Positions(nn.Module):
    """Stands in the place of a pool: gives each position of the map, as if averaged.

    Parameters
    ----------
    pool
        The pool that it replaces; its output has the form that the head expects.
    name
        The pool's name, for messages.
    grid
        Rows and columns of a transformer's patches, if the pool is its final layer
        norm: each position is then a sequence of one token.
    """

    def __init__(self, pool: nn.Module, name: str, grid: tuple[int, int] | None):
        super().__init__()
        self.pool = _sharing_copy(pool)
        self.name = name
        self.grid = grid
        self.sides = (1, 1)  # of the map in the last pass

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x)
        if self.grid:  # class tokens come first
            form = pooled[:, :1].shape[1:]
            features = pooled[:, -math.prod(self.grid) :].mT.unflatten(2, self.grid)
        else:
            form = pooled.shape[1:]
            features = self._map(x, form.numel())
        self.sides = features.shape[2:]
        return features.flatten(2).permute(2, 0, 1).flatten(0, 1).unflatten(1, form)

    def _map(self, x: Tensor, channels: int) -> Tensor:
        """Return what the pool averages, [batch, channels, height, width]."""
        grid = x.movedim(-1, 1) if x.shape[1] != channels == x.shape[-1] else x
        side = math.isqrt(grid.shape[-1])
        if grid.ndim == 3 and grid.shape[2] == side**2:  # tokens, as Swin's are
            grid = grid.unflatten(2, (side, side))
        if grid.ndim != 4 or grid.shape[1] != channels:
            raise ValueError(
                f"{self.name!r} {_NO_AVERAGE}, or there is no map: it takes "
                f"{list(x.shape)} and returns {channels} features"
            )
        return grid


def _averaged(positions: _Positions, args: tuple[Tensor], features: Tensor) -> Tensor:
    """Return the mean of the positions instead of them, as the pool does.

    It is a forward hook. Raises ValueError if the pool gives something else.
    """
    (x,) = args
    mean = features.unflatten(0, (-1, len(x))).mean(0)
    if positions.grid is None:
        difference = (positions.pool(x) - mean).abs().max()
        if not difference <= _TOLERANCE * x.abs().max():
            raise ValueError(f"{positions.name!r} {_NO_AVERAGE}")
    return mean


def _find_pool(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    """Return the name of the last average over a map, else of a transformer's norm."""
    kinds = {name: type(module).__name__ for name, module in modules.items()}
    for name in reversed(modules):
        size = getattr(modules[name], "output_size", 1)
        if "AvgPool" in kinds[name] and size in (1, (1,), (1, 1)):
            return name
    for module in modules.values():  # ViT, DeiT, IJEPA, ... of transformers
        norm = getattr(getattr(module, "base_model", None), "layernorm", None)
        if isinstance(norm, nn.LayerNorm) and _reads_tokens(module, norm):
            return next(name for name, m in modules.items() if m is norm)
    raise ValueError(
        f"{type(model).__name__} has no module that averages a map to 1 x 1; tiles are "
        "an ensemble only where an average comes before a linear head. If another "
        "module averages the map, name it: tiles(model, size, pool='...'); if a "
        "function call does, make it a module, nn.AdaptiveAvgPool2d(1)"
    )


def _reads_tokens(module: Any, norm: nn.LayerNorm) -> bool:
    """Return whether a classifier of transformers reads the tokens of a norm."""
    width = getattr(getattr(module, "classifier", None), "in_features", None)
    embeddings = getattr(module.base_model, "embeddings", None)
    positions = getattr(embeddings, "position_embeddings", None)
    return norm.normalized_shape == (width,) and positions is not None


def _token_grid(model: nn.Module, name: str) -> tuple[int, int]:
    """Return how many rows and columns of patches a vision transformer has."""
    for module in model.modules():
        for place in (module, getattr(module, "config", None)):
            image = getattr(place, "image_size", None)
            patch = getattr(place, "patch_size", None)
            if image is not None and patch is not None:
                sides = torch.tensor(image).expand(2) // torch.tensor(patch)
                return int(sides[0]), int(sides[1])
    raise ValueError(
        f"the pool {name!r} is a layer norm, but no module of the network has "
        "`image_size` and `patch_size`, which say how the tokens lie"
    )
