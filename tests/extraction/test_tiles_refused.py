"""Networks and calls that tiles refuse, each in words."""

import pytest
import torch
import transformers
from test_tiles import (
    Own,
    Pool,
    Timm,
    body,
    images,
    plain,
    random_statistics,
)
from torch import nn

from uqlab import ensembles, models
from uqlab.extraction import tiles


def by_function():
    model = Own(nn.Identity(), lambda x, _: x.mean((2, 3)))
    del model.average
    model.average = lambda x: x
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: plain(tail=[nn.Linear(6, 6), nn.ReLU()]),
            "what follows the pool is not linear",
        ),
        (lambda: plain(tail=[nn.LayerNorm(6)]), "name the head"),
        (lambda: plain(nn.AdaptiveMaxPool2d(1)), r"pools: 1 \(AdaptiveMaxPool2d\)"),
        (
            lambda: plain(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.MaxPool2d(4))),
            "no module that averages",
        ),
        (lambda: Timm("max"), r"pools: global_pool \(SelectAdaptivePool2d\)"),
        (
            lambda: models.mlp(192),
            r"no module that averages a map to 1 x 1 \(pools: none\)",
        ),
        (
            by_function,
            r"a function call does, make it a module, nn\.AdaptiveAvgPool2d\(1\)",
        ),
        (
            lambda: transformers.ConvNextForImageClassification(
                transformers.ConvNextConfig(
                    num_stages=1, hidden_sizes=[6], depths=[1], num_labels=5
                )
            ),
            "ConvNextForImageClassification has no module",
        ),
        (
            lambda: transformers.Dinov2ForImageClassification(
                transformers.Dinov2Config(
                    image_size=16,
                    patch_size=2,
                    hidden_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                )
            ),
            "Dinov2ForImageClassification has no module",
        ),
    ],
)
def test_models_without_valid_tiles_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        tiles(random_statistics(make()), 2)(images())


def twice():
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(body(), pool, pool, nn.Flatten(), nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("make", "pool", "reason"),
    [
        (
            lambda: plain(nn.AdaptiveMaxPool2d(1)),
            "1",
            "'1' does not average over its whole map",
        ),
        (
            lambda: Own(Pool(lambda x: (x**3).mean((2, 3)).pow(1 / 3))),
            "average",
            "generalized mean",
        ),
        (lambda: Timm("max"), "global_pool", "does not average"),
        (
            lambda: plain(nn.AvgPool2d(4), [nn.Linear(24, 6)]),
            None,
            "output is not the mean",
        ),
        (
            lambda: Own(nn.AdaptiveAvgPool2d(1), lambda p, x: p.flatten(1).sin()),
            None,
            "is not linear, or it sees more",
        ),
        (
            lambda: Own(nn.AdaptiveAvgPool2d(1), lambda p, x: 9 * p.flatten(1) ** 2),
            None,
            "is not linear, or it sees more",
        ),
        (
            lambda: Own(nn.AdaptiveAvgPool2d(1), lambda p, x: p.view(len(x), -1)),
            None,
            r"flatten with x\.flatten\(1\)",
        ),
        (
            lambda: Own(
                nn.AdaptiveAvgPool2d(1), lambda p, x: x[:, :1, 0, :6].flatten(1)
            ),
            None,
            "by the pool 'average' alone",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), Pool(torch.relu), nn.Linear(192, 5)),
            "1",
            r"no map at '1': .* \[2, 192\]",
        ),
        (
            lambda: nn.Sequential(plain(), nn.Unflatten(1, (5, 1))),
            None,
            r"logits \[batch, classes\], .* got \[128, 5, 1\]",
        ),
        (twice, None, "which runs once"),
    ],
)
def test_what_only_data_show_is_refused_on_the_first_call(make, pool, reason):
    ensemble = tiles(random_statistics(make()), 2, pool=pool)
    with pytest.raises(ValueError, match=reason):
        ensemble(images())


def test_inputs_that_tell_nothing_leave_the_check_open():
    ensemble = tiles(Own(nn.AdaptiveAvgPool2d(1), lambda p, x: p.flatten(1).sin()), 2)
    assert ensemble(images() * torch.nan).isnan().all()
    assert ensemble(images()[:0]).shape == (4, 0, 5)
    with pytest.raises(ValueError, match="is not linear, or it sees more"):
        ensemble(images())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiles(plain(), 0), "size must be at least 1, got 0"),
        (lambda: tiles(plain(), 2.0), "integer"),
        (lambda: tiles(plain(), 9)(images()), "9 is larger than the map at '1', 8 x 8"),
        (lambda: tiles(plain(), 2, pool="gap"), "no module 'gap'; the last ones are"),
        (lambda: tiles(plain(), 2, head="classifier"), "no module 'classifier'"),
        (lambda: tiles(nn.Sequential(nn.LayerNorm(4)), 2, pool="0"), "has image_size"),
        (lambda: tiles(ensembles.from_members([plain()]), 2), r"ensemble\.member\(0\)"),
    ],
)
def test_bad_input(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
