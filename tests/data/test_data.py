"""Data sets: identities of the embedded ones, parts of a set, registered files."""

import hashlib
import re

import numpy as np
import pytest
import torch
from same import near
from sklearn.datasets import load_digits
from small_files import same

from uqlab import data
from uqlab.data.readers import ASSETS

SPLITS = "train", "test"
EMBEDDED = ["digits", "ambiguous-digits", "letters", "textures", "glyphs"]
MINIS = {"mnist-mini": (6000, 2000), "fashion-mini": (4000, 2000), "kmnist-mini": (0, 1000)}  # fmt: skip


def sampled_from_two_classes(d):
    """Five labels an image, drawn from its probabilities of two classes."""
    near(d.label_probs.sum(1), torch.ones(len(d)))
    assert ((d.label_probs > 0).sum(1) == 2).all()
    assert d.label_probs.max() <= 0.8
    chance = d.label_probs.gather(1, d.labels[:, None])[:, 0]
    assert chance.min() > 0
    # E[p(label)] = sum p^2 if labels are drawn from p; its error here is below 0.01
    assert abs(chance.mean() - (d.label_probs**2).sum(1).mean()) < 0.02
    assert torch.equal(d.inputs, d.inputs[::5].repeat_interleave(5, 0))


# embedded sets -----------------------------------------------------------------------


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets_keep_the_contract_and_splits_share_no_image(name):
    images = []
    for split in SPLITS:
        d = data.load(name, split)
        assert d.inputs.dtype == torch.float32
        assert d.inputs.shape == (len(d), 1, 8, 8)
        assert 0 <= d.inputs.min() < 0.1
        assert 0.9 < d.inputs.max() <= 1
        assert d.labels.dtype == torch.int64
        assert d.labels.unique().tolist() == list(range(len(d.classes)))
        assert same(d, data.load(name, split, seed=1))  # the seed moves `limit` only
        images.append(d.inputs.flatten(1).clone())
        d.inputs.zero_()  # what is loaded may be written to
        assert data.load(name, split).inputs.sum() > 0
    assert torch.cdist(*images).min() > 0.05


def test_digits_are_scikit_learns_split_once():
    both = [data.load("digits", split) for split in SPLITS]
    x = torch.cat([d.inputs.flatten(1) for d in both]) * 16
    y = torch.cat([d.labels for d in both])
    theirs = load_digits()
    assert sorted(zip(x.tolist(), y.tolist(), strict=True)) == sorted(
        zip(theirs.data.tolist(), theirs.target.tolist(), strict=True)
    )
    share = both[1].labels.bincount() / y.bincount()
    assert (share - 0.3).abs().max() < 0.01


@pytest.mark.parametrize("name", ["letters", "glyphs"])
def test_rendered_sets_are_drawn_again_in_28_pixels(name):
    d = data.load(name, limit=200)
    assert not {*d.classes} & {*"0123456789"}
    assert same(d.resize(8), d)
    large = d[::2].resize(28)
    assert large.inputs.shape == (100, 1, 28, 28)
    ink = large.inputs > 0
    assert max(ink.any(3).sum(2).max(), ink.any(2).sum(2).max()) == 20
    middle = torch.arange(28.0)
    for axis in (2, 3):
        mass = large.inputs.sum((1, axis)) @ middle / large.inputs.sum((1, 2, 3))
        assert (mass - 13.5).abs().max() < 3
        assert (mass - 13.5).abs().median() < 0.5


def test_assets_are_those_listed():
    listed = re.findall(
        r"`(\S+\.xz)` \| `([0-9a-f]{64})`", (ASSETS / "README.md").read_text()
    )
    files = {path.name: path.read_bytes() for path in ASSETS.glob("*.xz")}
    assert {n: hashlib.sha256(c).hexdigest() for n, c in files.items()} == dict(listed)


@pytest.mark.parametrize("name", MINIS)
def test_minis_are_balanced_and_no_image_is_there_twice(name):
    images = []
    for split, size in zip(SPLITS, MINIS[name], strict=True):
        if size == 0:
            with pytest.raises(ValueError, match=f"{name} has no {split} split"):
                data.load(name, split)
            continue
        d = data.load(name, split)
        assert d.inputs.shape == (size, 1, 28, 28)
        assert (d.labels.bincount() == size // 10).all()
        assert d.labels[:100].unique().numel() == 10  # not sorted by class
        images.append((d.inputs.flatten(1) * 255).round().byte().numpy())
    distinct = {image.tobytes() for image in np.concatenate(images)}
    assert len(distinct) == sum(MINIS[name])


@pytest.mark.parametrize("split", SPLITS)
def test_ambiguous_sets_lie_between_two_images(split):
    sampled_from_two_classes(data.load("ambiguous-digits", split))
    d, base = data.load("ambiguous-mnist-mini", split), data.load("mnist-mini", split)
    sampled_from_two_classes(d)
    images = d.inputs[::5].flatten(1)[:50]
    nearest = torch.cdist(images, base.inputs.flatten(1)).topk(2, largest=False).indices
    classes = d.label_probs[::5][:50].topk(2).indices.sort().values
    found = base.labels[nearest].sort().values  # mostly what it was made from
    assert (found == classes).all(1).float().mean() > 0.5


# parts of a set ----------------------------------------------------------------------


def test_classes_are_selected_and_relabelled_in_order():
    d, part = data.load("digits"), data.load("digits[7-9]")
    assert torch.equal(part.inputs, d.inputs[d.labels > 6])
    assert torch.equal(part.labels, d.labels[d.labels > 6] - 7)
    assert part.classes == ("7", "8", "9")
    mixed = data.load("digits[9,0,2-3]")
    assert mixed.classes == ("9", "0", "2", "3")
    for new, old in enumerate([9, 0, 2, 3]):
        assert torch.equal(mixed.inputs[mixed.labels == new], d.inputs[d.labels == old])


def test_selected_soft_labels_lie_wholly_inside():
    d, part = data.load("ambiguous-digits"), data.load("ambiguous-digits[5-9]")
    inside = d.label_probs[:, 5:].sum(1) > 0.999
    assert torch.equal(part.inputs, d.inputs[inside])
    assert torch.equal(part.label_probs, d.label_probs[inside, 5:])
    assert 0 < len(part) < (d.labels >= 5).sum()


def test_limit_is_a_reproducible_prefix():
    d = data.load("ambiguous-digits")
    small, large, every = (
        data.load("ambiguous-digits", limit=n) for n in (10, 300, 10**6)
    )
    assert same(small, large[:10])
    assert same(large, every[:300])
    assert torch.equal(small.label_probs, every.label_probs[:10])
    sums = [each.inputs.sum((1, 2, 3)).sort().values for each in (every, d)]
    assert torch.equal(*sums)
    assert same(data.load("ambiguous-digits", limit=0), d)
    assert not same(small, data.load("ambiguous-digits", limit=10, seed=1))


def test_indexing():
    d = data.load("ambiguous-digits")
    x, y = d[3]
    assert torch.equal(x, d.inputs[3])
    assert y == d.labels[3]
    assert isinstance(y, int)
    mask = d.labels == 4
    index = mask.nonzero()[:, 0]
    for rows in (mask, index, mask.numpy(), index.tolist(), mask.tolist()):
        assert torch.equal(d[rows].inputs, d.inputs[mask])
        assert torch.equal(d[rows].label_probs, d.label_probs[mask])
        assert d[rows].labels.unique().tolist() == [4]
    assert same(d[2:5], d[torch.tensor([2, 3, 4])])
    assert len(list(d[:4])) == 4  # iteration ends
    texts = data.Dataset(["a", "b", "c"], torch.tensor([0, 1, 0]), "t", "test", ("x", "y"))  # fmt: skip
    assert texts[1] == ("b", 1)
    assert texts[1:].inputs == texts[[False, True, True]].inputs == ["b", "c"]
    with pytest.raises(TypeError, match="text"):
        texts.resize(8)


def test_resize(unchecked):
    d = data.load("digits", limit=5)
    blocks = d.inputs.reshape(5, 1, 4, 2, 4, 2).mean((3, 5))
    near(d.resize(4).inputs, blocks)  # area averages
    assert same(d.resize(8), d)
    large = d.resize(28, channels=3)
    assert large.inputs.shape == (5, 3, 28, 28)
    assert (large.inputs == large.inputs[:, :1]).all()
    assert 0 <= large.inputs.min() <= large.inputs.max() <= 1
    x = torch.tensor([1.0, 0, 0]).reshape(1, 3, 1, 1)
    red = data.Dataset(x, torch.tensor([0]), "", "", ())
    near(red.resize(1, channels=1).inputs.item(), 0.299)
    for wrong in (255 * x.byte(), x[0]):  # bytes have no shades of 0.299
        with pytest.raises((TypeError, ValueError), match=r"float\(\)|height, width"):
            data.read(wrong).resize(1, channels=1)
    with pytest.raises(TypeError, match="size must be an integer"):
        d.resize((8, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("minst",), "'mnist'.*'the path of a file"),
        (("digits", "val"), "split must be one of 'train', 'test'"),
        (("digits[0-99999999999]",), "out of 10, got '0-99999999999'"),
        (("digits[3-1]",), "classes must be like"),
        (("digits[]",), "classes must be like"),
        (("digits[1,1]",), "each once"),
        (("ambiguous-digits[3]",), "no items"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_load_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.load(*arguments)


# registered files --------------------------------------------------------------------


def test_a_registered_file_by_its_name(tmp_path, monkeypatch, register):
    name, content = "resnet_cifar10/resnet20-12fca82f.th", b"weights"
    register({name: content})
    monkeypatch.setenv("UQLAB_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"(?s){name} is missing.*by hand"):
        data.file(name)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    assert data.file(name) == data.file(name, root=tmp_path) == tmp_path / name
    assert data.fetched() == (tmp_path, ["resnet_cifar10"])
    (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="corrupted"):
        data.file(name)
    with pytest.raises(ValueError, match=r"name must be .*got 'resnet20\.th'"):
        data.file("resnet20.th")
