"""The pretrained network in the package: what it has seen, that it is whole, and what is kept of it."""

import copy

import make_backbone
import torch

from uqlab import data, models, training
from uqlab.core.files import sha256

SHA256 = "fd48d4b6ddd4a62ecdb7bf2c9cc3ef17a8b9f92d4784ad93babadc5bde132e91"


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
