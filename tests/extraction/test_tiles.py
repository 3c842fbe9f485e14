"""Tiles: their mean is the network, and each is the classifier on its window of the map."""

import pytest
import torch
import transformers
from same import near, unchanged
from small_networks import logits
from torch import nn

from uqlab import ensembles, models, training
from uqlab.extraction import tiles

torch.manual_seed(0)


def body(width=6, stride=1):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()
    )


def plain(pool=None, tail=(), width=6):
    """A map as large as the image, a pool and a head."""
    return nn.Sequential(
        body(width),
        pool or nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        *tail,
        nn.Linear(width, 5),
    ).eval()


class Torchvision(nn.Module):
    """The names and the order of torchvision's ResNet, with a squeeze-and-excitation average inside."""

    def __init__(self):
        super().__init__()
        self.layer4 = body()
        self.squeeze, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.layer4(x)
        x = x * self.gate(self.squeeze(x)).sigmoid()
        return self.fc(torch.flatten(self.avgpool(x), 1))


class FastAdaptiveAvgPool(nn.Module):
    """As in timm/layers/adaptive_avgmax_pool.py."""

    def __init__(self, flatten, dim):
        super().__init__()
        self.flatten, self.dim = flatten, dim

    def forward(self, x):
        return x.mean(self.dim, keepdim=not self.flatten)


class SelectAdaptivePool2d(nn.Module):
    """As in timm/layers/adaptive_avgmax_pool.py."""

    def __init__(self, pool_type="fast", flatten=True, dim=(2, 3)):
        super().__init__()
        self.pool_type = pool_type
        if pool_type == "fast":
            self.pool, self.flatten = FastAdaptiveAvgPool(flatten, dim), nn.Identity()
        else:
            self.pool = (
                nn.AdaptiveAvgPool2d(1)
                if pool_type == "avg"
                else nn.AdaptiveMaxPool2d(1)
            )
            self.flatten = nn.Flatten(1) if flatten else nn.Identity()

    def forward(self, x):
        return self.flatten(self.pool(x))


class Timm(nn.Module):
    """The names and the order of timm's ResNet."""

    def __init__(self, pool_type="avg"):
        super().__init__()
        self.stages = body()
        self.global_pool = SelectAdaptivePool2d(pool_type)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.global_pool(self.stages(x)))


class TimmHead(nn.Module):
    """The names and the order of timm's ClassifierHead, by convolution or on maps [batch, height, width, channels]."""

    def __init__(self, last):
        super().__init__()
        self.last, self.stages, self.head = last, body(), nn.Module()
        self.head.global_pool = SelectAdaptivePool2d(
            "fast", last, (1, 2) if last else (2, 3)
        )
        self.head.drop = nn.Dropout(0.5)
        self.head.fc = nn.Linear(6, 5) if last else nn.Conv2d(6, 5, 1)
        self.head.flatten = nn.Identity() if last else nn.Flatten(1)

    def forward(self, x):
        x = self.stages(x)
        x = self.head.drop(
            self.head.global_pool(x.permute(0, 2, 3, 1) if self.last else x)
        )
        return self.head.flatten(self.head.fc(x))


def huggingface_resnet():
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[6], depths=[1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(
        config
    )  # a map a fourth of the image


def swin():
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1],
        num_heads=[2],
        window_size=2,
        num_labels=5,
    )
    return transformers.SwinForImageClassification(config)


VIT = {
    "image_size": 16,
    "patch_size": 2,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VIT |= {"intermediate_size": 16, "num_labels": 5}
LAYOUTS = {
    "sequential": plain,
    "window": lambda: plain(nn.AvgPool2d(8)),
    "window larger than the map": lambda: plain(nn.AvgPool2d(99, ceil_mode=True)),
    "dropout": lambda: plain(tail=[nn.Dropout(0.5), nn.BatchNorm1d(6)]),
    "wide_resnet": lambda: models.wide_resnet(10, 1, 5),
    "cifar_resnet": lambda: models.cifar_resnet(8, 5),
    "small_cnn": lambda: models.small_cnn(5, 3),
    "torchvision": Torchvision,
    "timm": Timm,
    "timm fast": lambda: Timm("fast"),
    "timm convolution": lambda: TimmHead(False),
    "timm channels last": lambda: TimmHead(True),
    "transformers resnet": huggingface_resnet,
    "transformers swin": swin,
    "transformers ijepa": lambda: transformers.IJepaForImageClassification(
        transformers.IJepaConfig(**VIT)
    ),
}


def images(name="", count=3):
    side = (
        32
        if name in ("wide_resnet", "cifar_resnet", "transformers resnet")
        else 16
        if "transf" in name
        else 8
    )
    return torch.randn(count, 3, side, side)


def random_statistics(model):
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_mean_of_the_tiles_is_the_model(name):
    model, x = random_statistics(LAYOUTS[name]()), images(name)
    own = logits(model, x)
    for size in (1, 2, 4, 8):
        ensemble = tiles(model, size)
        found = ensemble(x)
        near(found.mean(0), own)
        if size > 1:
            assert found.std(0).max() > 1e-3  # members differ
        for member in (0, size * size - 1):
            near(ensemble.member(member)(x), found[member])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_tile_is_the_head_on_its_window_row_by_row(size):
    model = random_statistics(plain())
    x = torch.randn(4, 3, 8, 10)
    grid, head = model[0](x), model[-1]
    found = tiles(model, size)(x)
    edges = [
        [(i * n // size, -(-(i + 1) * n // size)) for i in range(size)] for n in (8, 10)
    ]  # torch's windows
    for i, (top, bottom) in enumerate(edges[0]):
        for j, (left, right) in enumerate(edges[1]):
            expected = head(grid[:, :, top:bottom, left:right].mean((2, 3)))
            near(found[i * size + j], expected)


def test_patches_of_a_vision_transformer():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT)).eval()
    model.classifier.weight.data.normal_()
    x = images("transformers")
    patches = model.vit(x).last_hidden_state[:, 1:]  # [batch, patches, features]
    expected = model.classifier(patches).permute(1, 0, 2)
    near(tiles(model, 8)(x), expected)
    near(tiles(nn.Sequential(model), 1)(x)[0], expected.mean(0))
    first = expected.unflatten(0, (8, 8))[:4, :4].mean((0, 1))
    near(tiles(model, 2, pool="vit.layernorm")(x)[0], first)
    assert (
        tiles(model, 1)(x)[0] - model(x).logits
    ).abs().max() > 0.1  # the class token says something else
    with pytest.raises(
        ValueError, match=r"1 to 8, the side of the map at 'vit\.layernorm'"
    ):
        tiles(model, 9)(x)


def test_one_pass_of_the_backbone():
    model, calls = plain(), []
    ensemble = tiles(model, 4)
    ensemble(images())
    next(
        m for m in ensemble.modules() if isinstance(m, nn.Conv2d)
    ).register_forward_hook(lambda *_: calls.append(1))
    ensemble(images())
    assert len(calls) == 1


def test_the_model_never_changes_and_shares_its_weights():
    model = random_statistics(Torchvision()).train()
    modes = [module.training for module in model.modules()]
    x = images()
    with unchanged(model):
        ensemble = tiles(model, 2)
        ensemble(x)
    assert not any(module.training for module in ensemble.modules())
    assert [module.training for module in model.modules()] == modes
    assert {id(p) for p in ensemble.parameters()} == {id(p) for p in model.parameters()}
    assert {id(b) for b in ensemble.buffers()} == {id(b) for b in model.buffers()}
    wide = ensemble.double()(x.double())  # casting copies
    assert wide.dtype == torch.float64
    assert model.fc.weight.dtype == torch.float32
    near(wide.mean(0).float(), model.eval()(x))


def test_an_ensemble_like_others():
    model = random_statistics(plain())
    ensemble, x = tiles(model, 3), images(count=7)
    found = ensemble(x)
    assert isinstance(ensemble, ensembles.Ensemble)
    assert (ensemble.members, ensemble.can_shard()) == (9, False)
    near(training.predict(ensemble, x, batch_size=4), found)
    near(ensemble.shard(slice(2, 5))(x), found[2:5])
    near(ensemble.shard(slice(2, 8)).shard(slice(1, 2))(x), found[3:4])
    near(ensemble.shard(slice(2, 5)).member(1)(x), found[3])
    mine = torch.randn(9, 2, 3, 8, 8)
    expected = torch.stack([ensemble.member(m)(mine[m]) for m in range(9)])
    near(ensemble.forward_each(mine), expected)
    (rows,) = ensemble.passes(mine)
    near(ensemble.run(mine[rows], rows), expected)
    with pytest.raises(IndexError, match="out of range"):
        ensemble.member(9)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_training_follows_the_members_mean_loss(clip, monkeypatch):
    """Their gradient is clipped once, and no member is built for it."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *head)
    ensemble, x, y = tiles(model, 2), images(count=7), torch.arange(7) % 5
    losses = torch.stack([nn.functional.cross_entropy(z, y) for z in ensemble(x)])
    slopes = torch.autograd.grad(losses.sum(), list(model.parameters()))
    step = torch.cat([slope.flatten() for slope in slopes])
    step = clip * step / step.norm() if clip else step
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    monkeypatch.setattr(
        type(ensemble), "member", lambda self, index: pytest.fail("a member was built")
    )
    settings = {"max_grad_norm": clip} if clip else {}
    training.fit(
        ensemble, x, y, epochs=1, lr=0.3, batch_size=7, progress=False, **settings
    )  # one step
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    near(moved, -0.3 * step, rtol=1e-3, atol=1e-6)


class Own(nn.Module):
    """A pool of its own, and whatever comes after it."""

    def __init__(self, average, after=lambda x, _: x.flatten(1)):
        super().__init__()
        self.body, self.average, self.head, self.after = (
            body(),
            average,
            nn.Linear(6, 5),
            after,
        )

    def forward(self, x):
        return self.head(self.after(self.average(self.body(x)), x))


class Pool(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_named_modules():
    model, x = random_statistics(Own(Pool(lambda x: x.mean((2, 3))))), images()
    with pytest.raises(ValueError, match=r"Own has no module that averages .* name it"):
        tiles(model, 2)
    near(tiles(model, 2, pool="average")(x).mean(0), model(x))
    model = random_statistics(Torchvision())
    named = tiles(model, 2, pool="avgpool", head="fc")
    assert torch.equal(named(x), tiles(model, 2)(x))
    odd = Torchvision()
    odd.late = nn.ReLU()  # registered after the pool, used nowhere
    assert tiles(odd, 2)(x).shape == (4, 3, 5)
    inside = random_statistics(TimmHead(False))
    assert torch.equal(tiles(inside, 2, head="head")(x), tiles(inside, 2)(x))


def test_a_head_that_is_not_linear_is_asked_at_every_position_if_it_is_named():
    """As MaxViT's: LayerNorm, linear, tanh, linear. Logits are averaged, not features."""
    classifier = nn.Sequential(
        nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)
    )
    model, x = (
        nn.Sequential(body(), nn.AdaptiveAvgPool2d(1), classifier).eval(),
        images(),
    )
    with pytest.raises(ValueError, match="what follows the pool is not linear"):
        tiles(model, 2)(x)
    ensemble = tiles(model, 2, head="2")
    grid = model[0](x)  # [batch, channels, 8, 8]
    each = [[classifier(grid[:, :, i, j]) for j in range(8)] for i in range(8)]
    every = torch.stack([torch.stack(row) for row in each])  # [8, 8, batch, classes]
    for size in (1, 2, 3, 8):
        windows = [(i * 8 // size, -(-(i + 1) * 8 // size)) for i in range(size)]
        found = iter(tiles(model, size, head="2")(x))
        for top, bottom in windows:
            for left, right in windows:
                expected = every[top:bottom, left:right].mean((0, 1))
                near(next(found), expected)
    near(ensemble(x).mean(0), every.mean((0, 1)))
    assert (ensemble(x).mean(0) - model(x)).abs().max() > 1e-3
    near(ensemble.member(3)(x), ensemble(x)[3])
    near(ensemble.shard(slice(1, 3))(x), ensemble(x)[1:3])
    assert ensemble(x[:0]).shape == (4, 0, 5)
    reads_more = Own(
        nn.AdaptiveAvgPool2d(1), lambda p, x: p.flatten(1) + x[:, 0, 0, :1]
    )
    reads_more.head = nn.Sequential(nn.Tanh(), nn.Linear(6, 5))
    with pytest.raises(RuntimeError, match="size of tensor"):
        tiles(reads_more, 2, head="head")(x)
