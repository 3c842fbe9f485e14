"""Pictures with captions: what is held out, that a picture shows its caption, and what no caption names."""

import pytest
import torch

from uqlab import data
from uqlab.data import captions

COLOUR, SHAPE = 2, 3


def words(name, split):
    return [label.split(" ", 3) for label in data.load(name, split).classes]


def test_a_fifth_of_the_pairs_of_colour_and_shape_is_held_out():
    train, test = (words("captions", split) for split in ("train", "test"))
    pairs = [{(each[COLOUR], each[SHAPE]) for each in part} for part in (train, test)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == 8 * 12
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.2, abs=0.01)
    for place in range(4):  # yet every word occurs in training
        assert {each[place] for each in test} <= {each[place] for each in train}
    new = [{each[SHAPE] for each in words("new-shapes", s)} for s in ("train", "test")]
    assert not {each[SHAPE] for each in train + test} & (new[0] | new[1])
    assert not new[0] & new[1]


@pytest.mark.parametrize("name", ["captions", "new-shapes"])
def test_the_sets_keep_the_contract(name):
    for split in ("train", "test"):
        d = data.load(name, split)
        assert d.inputs.shape == (len(d), 3, 32, 32)
        assert 0 <= d.inputs.min() < d.inputs.max() <= 1
        assert d.labels.unique().tolist() == list(range(len(d.classes)))


def shown(caption, count=40, **more):
    return captions.pictures([caption] * count, **more)


def ink(size, fill, shape):
    """The share of each picture in which the colour shows."""
    red, cyan = (shown(f"{size} {fill} {colour} {shape}") for colour in ("red", "cyan"))
    return ((red - cyan).abs().mean(1) > 0.2).float().mean((1, 2))


def test_a_picture_shows_its_caption():
    filled, striped, hollow = (ink("large", fill, "square") for fill in captions.FILLS)
    assert (filled > striped).all()
    assert (filled > 1.3 * hollow).all()
    small = ink("small", "filled", "circle")
    assert (ink("large", "filled", "circle") > 1.5 * small).all()
    paints = torch.tensor([*captions.COLOURS.values()])
    for number, colour in enumerate(captions.COLOURS):
        d = shown(f"large filled {colour} square", 200)
        middle = d[:, :, 14:18, 14:18].mean((0, 2, 3))
        assert (middle - paints).norm(dim=1).argmin() == number
    once, again, other = (shown("large filled red star", seed=s) for s in (3, 3, 4))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
