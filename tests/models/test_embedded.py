"""The pretrained network in the package: what it has seen, that it is whole, and that it is worth starting from."""

import copy
import json

import make_backbone
import pytest
import torch
import torch.nn.functional as F
from small_files import FOLDER, needs

from uqlab import data, models, training
from uqlab.core.files import sha256

SHA256 = "fd48d4b6ddd4a62ecdb7bf2c9cc3ef17a8b9f92d4784ad93babadc5bde132e91"


def random_network():
    torch.manual_seed(0)
    return models.vit(28, 7, width=128, layers=4, heads=8)


def features(network, x):
    with torch.no_grad():
        return network.vit(x).last_hidden_state[:, 0]


def test_the_file_says_what_it_has_seen():
    assert sha256(make_backbone.TARGET) == SHA256
    about = models.embedded().provenance
    assert set(about["seen"]) == {"EMNIST letters", "notMNIST", "glyphs"}
    assert about["accuracy"] >= 0.88
    assert len(about["commit"]) == 40


def test_the_classifier_of_letters_is_kept_and_any_other_is_new():
    letters = data.load("letters").resize(28)  # fonts that were not in `glyphs`
    known = models.embedded(26)
    right = training.predict(known, letters.inputs)[0].argmax(1)
    names = torch.tensor(
        [make_backbone.LETTERS.index(name.upper()) for name in letters.classes]
    )
    assert (right == names[letters.labels]).float().mean() > 0.85
    first, second = models.embedded(10), models.embedded(10)
    assert first.classifier.weight.shape == (10, 128)
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    x = letters.inputs[:3]
    assert torch.equal(features(first, x), features(known, x))
    assert not first.training
    assert copy.deepcopy(first).provenance == first.provenance


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-mini", "train", limit=1000), data.load(
        "mnist-mini", limit=400
    )


def test_its_features_tell_digits_apart(digits):
    train, test = digits
    found = []
    for network in (models.embedded(), random_network()):
        x, y = (
            F.pad(features(network, part.inputs), (0, 1), value=1.0).double()
            for part in digits
        )
        ridge = x.mT @ x + 1.0 * torch.eye(x.shape[1])
        probe = torch.linalg.solve(ridge, x.mT @ F.one_hot(train.labels).double())
        found.append(((y @ probe).argmax(1) == test.labels).double().mean())
    assert found[0] > 0.92
    assert found[0] > found[1] + 0.2


# how it was made ---------------------------------------------------------------------


@pytest.mark.release
@needs("emnist/letters.npz", "notmnist")
def test_it_is_made_from_letters_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_backbone, "EMNIST", 2)
    monkeypatch.setattr(make_backbone, "HELD_OUT", 1)
    monkeypatch.setattr(make_backbone, "EPOCHS", 1)
    sets = make_backbone.sources(FOLDER)
    assert {*sets} == {"EMNIST letters", "notMNIST", "glyphs", "held out"}
    held_out, trained = sets["held out"], sets["EMNIST letters"]
    assert held_out.labels.tolist() == trained.labels.tolist() == list(range(26))
    assert torch.cdist(held_out.inputs.flatten(1), trained.inputs.flatten(1)).min() > 0
    make_backbone.main(
        str(FOLDER), str(tmp_path / "run"), tmp_path / "made.safetensors"
    )
    about = json.loads(capsys.readouterr().out)
    assert about["seen"]["EMNIST letters"].startswith("26 images")
    monkeypatch.setattr(models.networks, "EMBEDDED", tmp_path / "made.safetensors")
    network = models.embedded(26)
    assert network.provenance == about
    assert network.state_dict().keys() == random_network().state_dict().keys()


def test_warps_move_and_bend_but_keep_the_ink():
    letters = data.load("letters", limit=200).resize(28).inputs
    warped = make_backbone.warp(letters[None], [torch.Generator().manual_seed(0)])[0]
    assert warped.shape == letters.shape
    assert 0 <= warped.min() <= warped.max() <= 1
    assert warped.mean() == pytest.approx(letters.mean().item(), rel=0.3)
    assert ((warped - letters).flatten(1).norm(dim=1) > 1).float().mean() > 0.9
