"""Implicit ensembles refuse what they cannot do, and say what to do instead."""

import math

import pytest
from small_networks import vit
from torch import nn

from uqlab import ensembles


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ensembles.lora(vit(), 2, target="q_project"),
            "matches no layer.*vit.layers.0.attention.q_proj",
        ),
        (lambda: ensembles.lora(vit(), 2, rank=0), "rank must be at least 1"),
        (lambda: ensembles.lora(vit(), 0), "at least one member"),
        (lambda: ensembles.lora(vit(), 2, classifiers="none"), "classifiers must be"),
        (lambda: ensembles.singular_value(vit(), 2, init_std=-1.0), "init_std"),
        (lambda: ensembles.singular_value(vit(), 2, share=0.0), "share"),
        (lambda: ensembles.batch(vit(), 2, std=math.nan), "std must be"),
        (lambda: ensembles.lora(nn.Conv2d(1, 2, 3), 2), "no linear layer"),
        (
            lambda: ensembles.lora(nn.Sequential(nn.Linear(3, 2)), 2),
            "before its classifier",
        ),
        (lambda: ensembles.lora(ensembles.deep(vit, 2), 2), "one torch module"),
        (lambda: ensembles.dropout(vit(), 2, 1.0), "dropout probability"),
        (lambda: ensembles.snapshot(vit, 0, print), "members must be at least 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
