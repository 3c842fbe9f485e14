"""Tiles: the ensemble in a network that averages its last feature map before a linear classifier (Kirsch 2024, D.4).

A linear classifier of an average equals the average of the classifier's outputs: the network's logits are the mean of
the logits at the positions of the map. Without that average, the positions are members, or size x size tiles of them.
A tile's logits are the mean of those at its positions, whatever the classifier.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from uqlab.core.checks import one_network
from uqlab.core.modules import logits_of, sharing_copy
from uqlab.ensembles import Ensemble

# What may follow the pool: each is affine on a map of one position in evaluation mode.
_AFFINE = (
    nn.Linear, nn.Conv2d, nn.Flatten, nn.Unflatten, nn.Identity, nn.BatchNorm1d, nn.BatchNorm2d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout,
)  # fmt: skip
_OTHERWISE = (
    "If another module averages the map, name it: tiles(model, size, pool='...', head='...'); if a function call does, "
    "make it a module, nn.AdaptiveAvgPool2d(1)."
)
_TOLERANCE = 1e-2  # of the largest tile logit: above the error of bfloat16 products, below that of a nonlinear head


def tiles(
    model: nn.Module, size: int, *, pool: str | None = None, head: str | None = None
) -> Ensemble:
    """The ensemble of the size x size tiles of the map that `model` averages before its linear classifier.

    Member i * size + j sees only the tile in row i and column j. Where size divides the map, the mean of the members'
    logits is the model's own; elsewhere tiles are the windows of torch's adaptive pooling, which may overlap. All
    members together cost one pass of the backbone. The ensemble shares the model's weights until it is moved or cast.

    A vision transformer whose classifier reads the class token has tiles too: its patch tokens after the final layer
    norm. The mean of their logits is not the model's prediction.

    size: tiles a side, from 1 to the map's side.
    pool: the name of the module that averages the map, or of the final nn.LayerNorm of a transformer. None takes the
        last module whose class is named an average pool (AvgPool), else the `layernorm` of a model of transformers.
    head: the name of the module that holds the classifier; None for everything that is registered after the pool. A
        head that is not linear must be named: it is asked at every position of the map, and its logits are averaged
        within each tile, as in the paper. Their mean over all positions is not the model's prediction.

    Raises TypeError unless `model` is one network; ValueError for a size below 1 or larger than the map, an unknown
    name, and a model whose logits are not linear in an average over a map, unless its head is named. What only data
    show (how large the map is, which functions follow the pool) is checked on the first call, with two inputs.
    """
    one_network(model, "tiles")
    modules = dict(model.named_modules())
    for name in (pool, head):
        if name is not None and name not in modules:
            raise ValueError(
                f"no module {name!r}; the last ones are {', '.join(list(modules)[-8:])}"
            )
    name = _find_pool(model, modules) if pool is None else pool
    grid = _token_grid(model, name) if isinstance(modules[name], nn.LayerNorm) else None
    stand_in = _Tiles(
        modules[name],
        name,
        size,
        range(size * size),
        grid,
        _check_head(modules, name, head),
    )
    return TiledEnsemble(
        sharing_copy(_Logits(model), {modules[name]: stand_in}), range(size * size)
    )


class TiledEnsemble(Ensemble):
    """A network in which the tiles are folded into the batch from the pool on, member-major."""

    def __init__(self, network: nn.Module, member_ids: range):
        super().__init__(member_ids)
        self.network = network
        self.checked = False
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if not self.checked and len(x):
            self._check(x[:2])
        return self.network(x).unflatten(0, (self.members, len(x)))

    def run(self, x: Tensor, rows: slice) -> Tensor:
        logits = self(x.flatten(0, 1)).unflatten(
            1, x.shape[:2]
        )  # [members, members, batch, classes]
        return logits.diagonal().movedim(-1, 0)

    def member(self, index: int) -> nn.Module:
        self._check_index(index)
        return self.shard(slice(index, index + 1)).network

    def shard(self, rows: slice) -> "TiledEnsemble":
        tiles = self._tiles()
        return TiledEnsemble(
            self._with(tiles.changed(tiles.size, tiles.chosen[rows])),
            self.member_ids[rows],
        )

    def _apply(self, fn, recurse=True):
        # To move shared weights would move the model's parameters, and leave its buffers where they are.
        self.network = copy.deepcopy(self.network)
        return super()._apply(fn, recurse)

    def _tiles(self) -> "_Tiles":
        return next(
            module for module in self.network.modules() if isinstance(module, _Tiles)
        )

    def _with(self, instead: nn.Module) -> nn.Module:
        return sharing_copy(self.network, {self._tiles(): instead}).eval()

    @torch.no_grad()
    def _check(self, x: Tensor) -> None:
        """Raise ValueError unless the model's logits are the mean of the logits at all positions of the map, or, if its
        head is not linear, those of one tile that is the whole map.
        """
        tiles, maps = self._tiles(), []
        model = self._with(tiles.pool)
        with tiles.pool.register_forward_pre_hook(
            lambda _, inputs: maps.append(inputs[0])
        ):
            expected = model(x)
        if not isinstance(expected, Tensor) or expected.ndim != 2:
            kind = (
                list(expected.shape)
                if isinstance(expected, Tensor)
                else type(expected).__name__
            )
            raise ValueError(
                f"tiles needs a classifier with logits [batch, classes], got {kind}"
            )
        if len(maps) != 1:
            raise ValueError(
                f"the pool {tiles.name!r} must run once in a forward pass, it ran {len(maps)} times"
            )
        positions = tiles.check_average(maps[0])
        try:
            every = self._with(tiles.changed(None, range(0)))(x).unflatten(
                0, (positions, len(x))
            )
        except RuntimeError as error:
            raise ValueError(
                f"after the pool {tiles.name!r} this model expects the batch that it was given, but tiles are more: "
                f"flatten with x.flatten(1), and feed nothing but the pool to the head ({error})"
            ) from error
        if not expected.isfinite().all():
            return  # such inputs show nothing
        largest = _TOLERANCE * every.abs().max()
        one_tile = self._with(
            tiles.changed(1, range(1), linear=True)
        )  # of mean features
        if tiles.grid is not None:
            with tiles.pool.register_forward_hook(
                lambda module, inputs, output: output[:, :1]
            ):
                reads_class_token = (model(x) - expected).abs().max() <= largest
            if reads_class_token:
                expected = one_tile(x)
        found = every.mean(0) if tiles.linear else one_tile(x)
        if not (found - expected).abs().max() <= largest:  # True for NaN too
            raise ValueError(
                f"the mean of the tiles' logits is not the logits of the mean over the map at {tiles.name!r}: what "
                "follows the pool is not linear, or it sees more than the pool's output. Tiles of this model are no "
                "ensemble of its predictions"
            )
        self.checked = True


class _Logits(nn.Module):
    """A model that returns logits alone: those of its tiles, where it has any."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = logits_of(self.model(x))
        for part in self.modules():
            if isinstance(part, _Tiles):
                return part.of_positions(logits)
        return logits


class _Tiles(nn.Module):
    """Replaces the pool: averages over the chosen tiles, [tiles * batch, ...], each in the form that the pool gives.

    The map has size x size tiles; size None makes every position a tile. For the final layer norm of a transformer
    `grid` is the number of rows and columns of its patches: each tile is then a sequence of one token. linear: whether
    all modules of the head are. If not, every position goes to the head, and `of_positions` averages the logits.
    """

    def __init__(
        self,
        pool: nn.Module,
        name: str,
        size: int | None,
        chosen: range,
        grid: tuple[int, int] | None,
        linear: bool,
    ):
        super().__init__()
        self.pool = sharing_copy(pool)
        self.name, self.size, self.chosen, self.grid, self.linear = (
            name,
            size,
            chosen,
            grid,
            linear,
        )
        self.sides = (1, 1)  # of the map in the last pass
        if grid is not None:
            self._check_size(*grid)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x)
        means = self._map(x, pooled)
        self.sides = means.shape[2:]
        if self.size and self.linear:
            means = self._averages(means)
        form = (1, pooled.shape[-1]) if self.grid else pooled.shape[1:]
        tiles = (
            means.flatten(2).permute(2, 0, 1).flatten(0, 1)
        )  # [tiles * batch, channels]
        return tiles.unflatten(1, form)

    def of_positions(self, logits: Tensor) -> Tensor:
        """The tiles' logits [tiles * batch, classes] from what the head says, which is theirs if it is linear."""
        if self.linear or not self.size:
            return logits
        rows = len(logits) // math.prod(self.sides)
        each = logits.unflatten(
            0, (*self.sides, rows)
        )  # [height, width, batch, classes]
        return self._averages(each.permute(2, 3, 0, 1)).permute(2, 0, 1).flatten(0, 1)

    def _averages(self, grid: Tensor) -> Tensor:
        """The means of the chosen tiles of a map, [batch, channels, tiles]."""
        return adaptive_avg_pool2d(grid, self.size or 1).flatten(2)[
            :, :, list(self.chosen)
        ]

    def _map(self, x: Tensor, pooled: Tensor) -> Tensor:
        """What the pool averages, [batch, channels, height, width]."""
        if self.grid is not None:
            patches = math.prod(self.grid)
            if x.ndim != 3 or x.shape[1] < patches:
                raise ValueError(
                    f"{self.name!r} takes {list(x.shape)}, not [batch, tokens, features] with {patches} patches"
                )
            return pooled[:, -patches:].mT.unflatten(
                2, self.grid
            )  # class tokens come first
        channels_last = x.shape[1] != pooled.shape[1:].numel() == x.shape[-1]
        grid = x.movedim(-1, 1) if channels_last else x
        side = math.isqrt(grid.shape[-1])
        if grid.ndim == 3 and grid.shape[2] == side**2:  # tokens, as Swin's are
            grid = grid.unflatten(2, (side, side))
        if grid.ndim != 4:
            raise ValueError(
                f"there is no map at {self.name!r}: it takes {list(x.shape)}, not [batch, channels, height, width] or "
                "the tokens of a square map"
            )
        self._check_size(*grid.shape[2:])
        return grid

    def _check_size(self, height: int, width: int) -> None:
        if (self.size or 1) > min(height, width):
            raise ValueError(
                f"size {self.size} is larger than the map at {self.name!r}, {height} x {width}; choose 1 to "
                f"{min(height, width)}"
            )

    def check_average(self, x: Tensor) -> int:
        """The number of positions of the map x; raises ValueError unless the pool averages over all of them."""
        pooled = self.pool(x)
        grid = self._map(x, pooled)
        if self.grid is None:
            mean = grid.mean((2, 3)).flatten()
            near = pooled.numel() == mean.numel()
            if (
                not near
                or (pooled.flatten() - mean).abs().max() > _TOLERANCE * grid.abs().max()
            ):
                raise ValueError(
                    f"{self.name!r} does not average over its whole map, {grid.shape[2]} x {grid.shape[3]}: its output "
                    f"{list(pooled.shape)} is not the mean of the tiles, as for a maximum or a generalized mean"
                )
        return grid[0, 0].numel()

    def changed(
        self, size: int | None, chosen: range, linear: bool | None = None
    ) -> "_Tiles":
        tiles = sharing_copy(self)
        tiles.size, tiles.chosen = size, chosen
        tiles.linear = self.linear if linear is None else linear
        return tiles


def _find_pool(model: nn.Module, modules: dict[str, nn.Module]) -> str:
    """The name of the last average over a map, else of the final layer norm of a vision transformer."""
    pools = {
        name: type(part).__name__
        for name, part in modules.items()
        if "Pool" in type(part).__name__
    }
    to_one = [
        name
        for name in pools
        if getattr(modules[name], "output_size", 1) in (1, (1,), (1, 1))
    ]
    if averages := [
        name
        for name in to_one
        if "AvgPool" in pools[name] and not list(modules[name].children())
    ]:
        return averages[-1]
    for module in modules.values():  # ViT, DeiT, IJEPA, ... of transformers
        base, classifier = (
            getattr(module, "base_model", None),
            getattr(module, "classifier", None),
        )
        norm, embeddings = (
            getattr(base, "layernorm", None),
            getattr(base, "embeddings", None),
        )
        if (
            isinstance(norm, nn.LayerNorm)
            and isinstance(classifier, nn.Linear)
            and norm.normalized_shape == (classifier.in_features,)
            and getattr(embeddings, "position_embeddings", None) is not None
        ):
            return next(name for name, part in modules.items() if part is norm)
    others = ", ".join(f"{name} ({kind})" for name, kind in pools.items())
    raise ValueError(
        f"{type(model).__name__} has no module that averages a map to 1 x 1 (pools: {others or 'none'}); tiles are an "
        f"ensemble only where an average comes before a linear head. {_OTHERWISE}"
    )


def _check_head(modules: dict[str, nn.Module], pool: str, head: str | None) -> bool:
    """Whether all modules after the pool are affine. Raises ValueError if none is a linear layer, and if one is not
    affine though the head is not named.
    """

    def within(name: str, whole: str | None) -> bool:
        return whole is None or f"{name}.".startswith(f"{whole}.")

    names = list(modules)
    after = names[names.index(pool) + 1 :] if within(pool, head) else names
    inside = [name for name in after if within(name, head) and not within(name, pool)]
    leaves = [name for name in inside if not list(modules[name].children())]
    others = [name for name in leaves if not isinstance(modules[name], _AFFINE)]
    if others and head is None:
        raise ValueError(
            f"{others[0]!r} ({type(modules[others[0]]).__name__}) comes after the pool {pool!r} and is not linear: the "
            "logits of an average are then not the average of logits, so tiles of this model are no ensemble of its "
            f"predictions. If it does not run there, or if you want them all the same, name pool and head. {_OTHERWISE}"
        )
    if not any(isinstance(modules[name], nn.Linear | nn.Conv2d) for name in leaves):
        raise ValueError(
            f"there is no linear layer after the pool {pool!r}; name the head: tiles(..., head='...')"
        )
    return not others


def _token_grid(model: nn.Module, name: str) -> tuple[int, int]:
    """How many rows and columns of patches a vision transformer has, by its configuration or its attributes."""
    for module in model.modules():
        for place in (module, getattr(module, "config", None)):
            image, patch = (
                getattr(place, "image_size", None),
                getattr(place, "patch_size", None),
            )
            if image is not None and patch is not None:
                height, width = torch.tensor(image).expand(2) // torch.tensor(
                    patch
                )  # one number, or one a side
                return int(height), int(width)
    raise ValueError(
        f"the pool {name!r} is a layer norm, after which the tokens of a transformer are taken, but nothing in "
        f"{type(model).__name__} has image_size and patch_size to say how they lie"
    )
