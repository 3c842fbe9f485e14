"""Tiles: the ensemble in a network that averages its last feature map before a linear classifier (Kirsch 2024, D.4).

A linear classifier of an average equals the average of the classifier's outputs: the network's logits are the mean of
the logits at the positions of the map. Without that average, the positions are members, or size x size tiles of them.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from uqlab.core.checks import at_least, one_network
from uqlab.core.modules import logits_of, sharing_copy
from uqlab.ensembles import Ensemble

# What may follow the pool: each is an affine map in evaluation mode, so it may be applied before an average or after.
_AFFINE = (
    nn.Linear, nn.Flatten, nn.Unflatten, nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout,
)  # fmt: skip
_OTHERWISE = (
    "If another module averages the map, name it: tiles(model, size, pool='...', head='...'); if a function call does, "
    "make it a module, nn.AdaptiveAvgPool2d(1)."
)
_TOLERANCE = 1e-2  # of the largest tile logit: above the error of bfloat16 products, below that of a nonlinear head


def tiles(model: nn.Module, size: int, *, pool: str | None = None, head: str | None = None) -> Ensemble:
    """The ensemble of the size x size tiles of the map that `model` averages before its linear classifier.

    Member i * size + j sees only the tile in row i and column j. Where size divides the map, the mean of the members'
    logits is the model's own; elsewhere tiles are the windows of torch's adaptive pooling, which may overlap. All
    members together cost one pass of the backbone. The ensemble is in evaluation mode and shares the model's weights
    until it is moved or cast, which copies them.

    A vision transformer whose classifier reads the class token has tiles too: its patch tokens after the final layer
    norm. The mean of their logits is not the model's prediction.

    size: tiles a side, from 1 to the map's side.
    pool: the dotted name of the module that averages the map to 1 x 1, or of the final nn.LayerNorm of a transformer.
        None searches for the last average over a map (nn.AdaptiveAvgPool2d(1), nn.AvgPool2d, timm's `global_pool`) or
        over tokens (nn.AdaptiveAvgPool1d(1)), or the `layernorm` of a model of transformers.
    head: the name of the module that holds the classifier; None for everything that is registered after the pool.

    Raises TypeError unless `model` is one network and size an integer; ValueError for a size below 1 or larger than the
    map, an unknown name, and a model whose logits are not linear in an average over a map. What only data show (how
    large the map is, which functions follow the pool) is checked on the first call, with its first two inputs.
    """
    one_network(model, "tiles")
    size = at_least("size", size)
    modules = dict(model.named_modules())
    for name in (pool, head):
        if name is not None and name not in modules:
            raise ValueError(f"no module {name!r}; the last ones are {', '.join(list(modules)[-8:])}")
    name = _find_pool(model, modules) if pool is None else pool
    if isinstance(modules[name], nn.LayerNorm):
        stand_in: _Tiles = _TokenTiles(modules[name], name, size, range(size * size), _token_grid(model, name))
        stand_in.check_size(*stand_in.grid)
    else:
        stand_in = _Tiles(modules[name], name, size, range(size * size))
    _check_head(modules, name, head)
    return TiledEnsemble(sharing_copy(_Logits(model), {modules[name]: stand_in}), range(size * size))


class TiledEnsemble(Ensemble):
    """A network in which, from the pool on, the tiles are folded into the batch, member-major."""

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(member_ids)
        self.network = network
        self.checked = False
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if not self.checked and len(x):
            self._check(x[:2])
        return self.network(x).unflatten(0, (self.members, len(x)))

    def forward_members(self, x: Tensor) -> Tensor:
        logits = self(x.flatten(0, 1)).unflatten(1, x.shape[:2])  # [members, members, batch, classes]
        return logits.diagonal().movedim(-1, 0)

    def passes(self, x: Tensor) -> list[slice]:
        return [slice(None)]

    def run(self, x: Tensor, rows: slice) -> Tensor:
        return self.forward_members(x)

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return self.shard(slice(index, index + 1)).network

    def shard(self, rows: slice) -> "TiledEnsemble":
        tiles = self._tiles()
        return TiledEnsemble(self._with(tiles.changed(tiles.size, tiles.chosen[rows])), self.member_ids[rows])

    def can_shard(self) -> bool:
        return False

    def shared_parameters(self) -> dict[nn.Parameter, int]:
        return {p: self.members for p in self.parameters() if p.requires_grad}

    def _apply(self, fn, recurse=True):
        # To move shared weights would move the model's parameters, and leave its buffers where they are.
        self.network = copy.deepcopy(self.network)
        return super()._apply(fn, recurse)

    def _tiles(self) -> "_Tiles":
        return next(module for module in self.network.modules() if isinstance(module, _Tiles))

    def _with(self, instead: nn.Module) -> nn.Module:
        return sharing_copy(self.network, {self._tiles(): instead})

    @torch.no_grad()
    def _check(self, x: Tensor) -> None:
        """Raise ValueError unless the model's logits are the mean of the logits at all positions of the map."""
        tiles, maps = self._tiles(), []
        model = self._with(tiles.pool).eval()
        with tiles.pool.register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0])):
            own = model(x)
        if not isinstance(own, Tensor) or own.ndim != 2:
            raise ValueError(f"tiles needs a classifier with logits [batch, classes], got {_shape(own)}")
        if len(maps) != 1:
            raise ValueError(f"the pool {tiles.name!r} must run once in a forward pass, it ran {len(maps)} times")
        positions = tiles.check_map(maps[0])
        try:
            single = self._with(tiles.changed(1, range(1))).eval()(x)
            every = self._with(tiles.changed(None, range(0))).eval()(x)
            every = every.unflatten(0, (positions, len(x)))
        except RuntimeError as error:
            raise ValueError(
                f"after the pool {tiles.name!r} this model expects the batch that it was given, but tiles are more: "
                f"flatten with x.flatten(1), and feed nothing but the pool to the head ({error})"
            ) from error
        if not own.isfinite().all():
            return  # such inputs show nothing
        largest = _TOLERANCE * every.abs().max()
        reads_class_token = False
        if isinstance(tiles, _TokenTiles):
            with tiles.pool.register_forward_hook(lambda module, inputs, output: output[:, :1]):
                reads_class_token = bool((model(x) - own).abs().max() <= largest)
        if not reads_class_token and not (single - own).abs().max() <= largest:  # True for NaN too
            raise ValueError(
                f"the head does not see the average of the map at {tiles.name!r} alone, so tiles of this model are no "
                "ensemble of its predictions"
            )
        if not (every.mean(0) - single).abs().max() <= largest:
            raise ValueError(
                f"what follows the pool {tiles.name!r} is not linear: the mean of the tiles' logits is not the logits "
                "of the mean, so tiles of this model are no ensemble of its predictions"
            )
        self.checked = True


class _Logits(nn.Module):
    """A model that returns logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x))


class _Tiles(nn.Module):
    """Replaces the pool: averages over the chosen tiles, [tiles * batch, ...], each in the form that the pool gives.

    The map has size x size tiles; size None makes every position a tile.
    """

    def __init__(self, pool: nn.Module, name: str, size: int | None, chosen: range):
        super().__init__()
        self.pool = sharing_copy(pool)
        self.name, self.size, self.chosen = name, size, chosen

    def forward(self, x: Tensor) -> Tensor:
        grid = self.as_map(x)  # [batch, channels, height, width]
        self.check_size(*grid.shape[2:])
        means = adaptive_avg_pool2d(grid, self.size).flatten(2) if self.size else grid.flatten(2)
        if self.size:
            means = means[:, :, self.chosen.start : self.chosen.stop : self.chosen.step]
        return self.as_pooled(means.permute(2, 0, 1).flatten(0, 1))  # [tiles * batch, channels] -> what the pool gives

    def as_map(self, x: Tensor) -> Tensor:
        if isinstance(self.pool, nn.AdaptiveAvgPool1d):  # tokens [batch, channels, tokens], as Swin's are
            side = math.isqrt(x.shape[-1])
            if side * side != x.shape[-1]:
                raise ValueError(f"the {x.shape[-1]} tokens at {self.name!r} are no square map")
            return x.unflatten(-1, (side, side))
        if x.ndim != 4:
            raise ValueError(f"there is no map at {self.name!r}: it takes {_shape(x)}, not [batch, channels, h, w]")
        return x.movedim(3, 1) if self._channels_last() else x

    def as_pooled(self, means: Tensor) -> Tensor:
        """Averages [tiles * batch, channels] in the form that the pool gives: it keeps a map of one position."""
        if isinstance(self.pool, nn.AvgPool2d):
            return means[:, :, None, None]
        if isinstance(self.pool, nn.AdaptiveAvgPool1d):
            return self.pool(means[:, :, None])
        return self.pool(means[:, None, None, :] if self._channels_last() else means[:, :, None, None])

    def check_size(self, height: int, width: int) -> None:
        if (self.size or 1) > min(height, width):
            raise ValueError(
                f"size {self.size} is larger than the map at {self.name!r}, {height} x {width}; choose 1 to "
                f"{min(height, width)}"
            )

    def check_map(self, x: Tensor) -> int:
        """The number of positions of the map x; raises ValueError unless the pool averages over all of them."""
        grid = self.as_map(x)
        self.check_size(*grid.shape[2:])
        mean, pooled = grid.mean((2, 3)), self.pool(x)
        near = pooled.numel() == mean.numel()
        if not near or (pooled.flatten() - mean.flatten()).abs().max() > _TOLERANCE * grid.abs().max():
            raise ValueError(
                f"{self.name!r} does not average over its whole map, {grid.shape[2]} x {grid.shape[3]}: its output "
                f"{_shape(pooled)} is not the mean of the tiles, as for a maximum or a generalized mean"
            )
        return grid[0, 0].numel()

    def changed(self, size: int | None, chosen: range) -> "_Tiles":
        tiles = sharing_copy(self)
        tiles.size, tiles.chosen = size, chosen
        return tiles

    def _channels_last(self) -> bool:
        return getattr(getattr(self.pool, "pool", None), "dim", None) == (1, 2)  # timm's FastAdaptiveAvgPool, NHWC


class _TokenTiles(_Tiles):
    """Replaces the final layer norm of a transformer: tiles of its patch tokens, each as a sequence of one token."""

    def __init__(self, pool: nn.Module, name: str, size: int | None, chosen: range, grid: tuple[int, int]):
        super().__init__(pool, name, size, chosen)
        self.grid = grid

    def as_map(self, x: Tensor) -> Tensor:
        patches = self.grid[0] * self.grid[1]
        if x.ndim != 3 or x.shape[1] < patches:
            raise ValueError(f"{self.name!r} takes {_shape(x)}, not [batch, tokens, features] with {patches} patches")
        return self.pool(x)[:, x.shape[1] - patches :].mT.unflatten(2, self.grid)  # class tokens come first

    def as_pooled(self, means: Tensor) -> Tensor:
        return means[:, None]

    def check_map(self, x: Tensor) -> int:
        return self.as_map(x)[0, 0].numel()


def _shape(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _find_pool(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    """The name of the last average over a map, else of the final layer norm of a vision transformer."""
    found: list[str] = []
    for name, module in modules.items():
        if _averages(module) and not (found and name.startswith(f"{found[-1]}.")):
            found.append(name)
    if found:
        return found[-1]
    for name, module in modules.items():  # ViT, DeiT, IJEPA, ... of transformers
        base, classifier = getattr(module, "base_model", None), getattr(module, "classifier", None)
        norm, embeddings = getattr(base, "layernorm", None), getattr(base, "embeddings", None)
        if (
            isinstance(norm, nn.LayerNorm)
            and isinstance(classifier, nn.Linear)
            and norm.normalized_shape == (classifier.in_features,)
            and getattr(embeddings, "position_embeddings", None) is not None
        ):
            return next(name for name, module in modules.items() if module is norm)
    others = [f"{name} ({type(module).__name__})" for name, module in modules.items() if _is_pool(name, module)]
    raise ValueError(
        f"{type(model).__name__} has no module that averages a map to 1 x 1 (pools: {', '.join(others) or 'none'}); "
        f"tiles are an ensemble only where an average comes before a linear head. {_OTHERWISE}"
    )


def _is_pool(name: str, module: nn.Module) -> bool:
    return "pool" in (name.rpartition(".")[2] + type(module).__name__).lower()


def _averages(module: nn.Module) -> bool:
    if isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool1d):
        return module.output_size in (1, (1,), (1, 1))
    if getattr(module, "pool_type", None) in ("avg", "fast", "fastavg"):  # of timm, unless it holds the whole head
        return not any(True for _ in module.parameters())
    return isinstance(module, nn.AvgPool2d)


def _check_head(modules: dict[str, nn.Module], pool: str, head: str | None) -> None:
    """Raise ValueError if a module after the pool is not affine, or if none is a linear layer."""
    names = list(modules)
    after = names[names.index(pool) + 1 :]
    if head is not None and not pool.startswith(f"{head}."):
        after = names
    inside = [
        name
        for name in after
        if not name.startswith(f"{pool}.")
        and (head is None or name == head or name.startswith(f"{head}."))
        and not any(True for _ in modules[name].children())
    ]
    for name in inside:
        module = modules[name]
        pointwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        if not (pointwise or isinstance(module, _AFFINE)):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) comes after the pool {pool!r} and is not linear: the logits of "
                "an average are then not the average of logits, so tiles of this model are no ensemble of its "
                f"predictions. If it does not run there, name pool and head. {_OTHERWISE}"
            )
    if not any(isinstance(modules[name], nn.Linear | nn.Conv2d) for name in inside):
        raise ValueError(f"there is no linear layer after the pool {pool!r}; name the head: tiles(..., head='...')")


def _token_grid(model: nn.Module, name: str) -> tuple[int, int]:
    """How many rows and columns of patches a vision transformer has, by its configuration or its attributes."""
    for module in model.modules():
        for place in (module, getattr(module, "config", None)):
            image, patch = getattr(place, "image_size", None), getattr(place, "patch_size", None)
            if image is not None and patch is not None:
                high, wide = (image, image) if isinstance(image, int) else image
                tall, broad = (patch, patch) if isinstance(patch, int) else patch
                return high // tall, wide // broad
    raise ValueError(
        f"the pool {name!r} is a layer norm, after which the tokens of a transformer are taken, but nothing in "
        f"{type(model).__name__} has image_size and patch_size to say how they lie"
    )
