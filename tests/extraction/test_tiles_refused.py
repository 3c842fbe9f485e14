"""Networks and calls that tiles refuse, each in words."""

import pytest
import torch
import transformers
from test_tiles import (
    Own,
    Pool,
    body,
    images,
    plain,
    random_statistics,
)
from torch import nn

from uqlab import ensembles
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
        (lambda: plain(tail=[nn.LayerNorm(6)]), "name the classifier"),
        (lambda: plain(nn.AdaptiveMaxPool2d(1)), "no module that averages"),
        (
            lambda: plain(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.MaxPool2d(4))),
            "no module that averages",
        ),
        (
            by_function,
            r"make it a module, nn\.AdaptiveAvgPool2d\(1\)",
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
        (lambda: plain(nn.AdaptiveMaxPool2d(1)), "1", "'1' does not average"),
        (
            lambda: Own(Pool(lambda x: (x**3).mean((2, 3)).pow(1 / 3))),
            "average",
            "does not average",
        ),
        (
            lambda: plain(nn.AvgPool2d(4), [nn.Linear(24, 6)]),
            None,
            "does not average",
        ),
        (
            lambda: Own(nn.AdaptiveAvgPool2d(1), lambda p, x: p.flatten(1).sin()),
            None,
            "is not linear, or reads more",
        ),
        (
            lambda: Own(
                nn.AdaptiveAvgPool2d(1), lambda p, x: x[:, :1, 0, :6].flatten(1)
            ),
            None,
            "reads only the pool 'average'",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), Pool(torch.relu), nn.Linear(192, 5)),
            "1",
            "there is no map",
        ),
        (
            lambda: nn.Sequential(plain(), nn.Unflatten(1, (5, 1))),
            None,
            r"logits \[batch, classes\]",
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
    with pytest.raises(ValueError, match="is not linear, or reads more"):
        ensemble(images())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiles(plain(), 0), "size must be at least 1, got 0"),
        (lambda: tiles(plain(), 2.0), "integer"),
        (lambda: tiles(plain(), 9)(images()), "must be 1 to 8, the side of the map"),
        (lambda: tiles(plain(), 2, pool="gap"), "no module 'gap'"),
        (lambda: tiles(plain(), 2, head="classifier"), "no module 'classifier'"),
        (lambda: tiles(nn.Sequential(nn.LayerNorm(4)), 2, pool="0"), "image_size"),
        (lambda: tiles(ensembles.from_members([plain()]), 2), r"ensemble\.member\(0\)"),
    ],
)
def test_bad_input(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
