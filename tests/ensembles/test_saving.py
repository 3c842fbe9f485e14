"""Implicit ensembles on disk: the members own numbers, and no backbone."""

import pytest
import torch
from small_networks import EVERY, count, images, moved, vit
from torch import nn

from uqlab import ensembles


@EVERY
def test_saved_without_the_backbone(make, tmp_path):
    ensemble, (x, _) = moved(make(vit())), images()
    path = tmp_path / "new" / "ensemble.safetensors"
    ensembles.save(ensemble, path, backbone="some/vit")
    again = vit()
    nn.init.zeros_(again.classifier.weight)  # the classifier is no part of the backbone
    torch.testing.assert_close(ensembles.load(path, again)(x), ensemble(x))
    assert path.stat().st_size < 4 * count(ensemble) + 12_000
    assert b"some/vit" in path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["ensemble.safetensors"]


def test_what_cannot_be_loaded(tmp_path, unchecked):
    path = tmp_path / "e.safetensors"
    ensembles.save(ensembles.singular_value(vit(), 2), path, backbone="some/vit")
    other = vit()
    other.vit.layers[0].attention.q_proj.weight.data[0, 0] += 0.1
    with pytest.raises(ValueError, match=r"another backbone \(some/vit\)"):
        ensembles.load(path, other)
    with pytest.raises(FileNotFoundError, match="no file"):
        ensembles.load(tmp_path / "nowhere.safetensors", vit())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or none of ours"):
        ensembles.load(path, vit())
    with pytest.raises(TypeError, match="got SeparateEnsemble"):
        ensembles.save(ensembles.from_members([nn.Linear(2, 2)]), path)
