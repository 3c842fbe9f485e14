"""Implicit ensembles on disk: the members own numbers, and no backbone."""

import pytest
import torch
from safetensors.torch import save_file
from same import near
from small_networks import ALL, count, images, moved, vit
from torch import nn

from uqlab import ensembles
from uqlab.core.tensors import load_tensors, save_tensors


@ALL
def test_saved_without_the_backbone(make, tmp_path):
    ensemble, (x, _) = moved(make(vit())), images()
    path = tmp_path / "new" / "ensemble.safetensors"
    ensembles.save(ensemble, path, backbone="some/vit")
    again = vit()
    nn.init.zeros_(again.classifier.weight)  # the classifier is no part of the backbone
    near(ensembles.load(path, again)(x), ensemble(x))
    header = 200 * sum(p.requires_grad for p in ensemble.parameters())
    assert path.stat().st_size < 4 * count(ensemble) + header + 1000
    assert b"some/vit" in path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["ensemble.safetensors"]


def test_dropout_is_saved_without_a_weight(tmp_path):
    path, (x, _) = tmp_path / "e.safetensors", images()
    ensemble = ensembles.dropout(vit(), 3, 0.4, seed=1).resample(5)
    ensembles.save(ensemble, path)
    assert path.stat().st_size < 2000
    near(ensembles.load(path, vit())(x), ensemble(x))
    other = vit()
    other.classifier.weight.data += 0.1
    with pytest.raises(ValueError, match="belongs to another backbone"):
        ensembles.load(path, other)


def test_what_cannot_be_loaded(tmp_path, unchecked):
    path = tmp_path / "e.safetensors"
    ensembles.save(ensembles.singular_value(vit(), 2), path, backbone="some/vit")
    other = vit()
    other.vit.layers[0].attention.q_proj.weight.data[0, 0] += 0.1
    with pytest.raises(ValueError, match=r"another backbone \(some/vit\)"):
        ensembles.load(path, other)
    with pytest.raises(FileNotFoundError, match="no file"):
        ensembles.load(tmp_path / "nowhere.safetensors", vit())
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="none of ours: it has no 'uqlab'"):
        ensembles.load(path, vit())
    save_tensors(path, {"a": torch.ones(2)}, {"recipe": {"method": "lora"}})
    with pytest.raises(ValueError, match=r"none of ours.*'members'"):
        ensembles.load(path, vit())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or none of ours"):
        ensembles.load(path, vit())
    with pytest.raises(TypeError, match="got SeparateEnsemble"):
        ensembles.save(ensembles.from_members([nn.Linear(2, 2)]), path)


def rewritten(path, **recipe):
    """A file that `save` might have written, of another recipe: its checksum is right."""
    tensors, header = load_tensors(path)
    header["recipe"] |= recipe
    save_tensors(path, tensors, header)


def test_a_changed_file_is_refused(tmp_path):
    path = tmp_path / "e.safetensors"
    ensembles.save(ensembles.lora(vit(), 2), path)
    whole = path.read_bytes()
    for at in (len(whole) - 1, len(whole) // 2, 40, whole.index(b"rank") + 8):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged or none of ours"):
            ensembles.load(path, vit())
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            {"method": "frozen"},
            'damaged or none of ours.*its method must be "lora".* got .frozen',
        ),
        (
            {"order": 1},
            "damaged or none of ours.*unexpected keyword argument 'order'",
        ),
        ({"members": None}, "damaged or none of ours"),
        ({"members": 3}, "belongs to another backbone"),
    ],
)
def test_a_recipe_of_another_hand_runs_nothing(tmp_path, recipe, message, unchecked):
    path = tmp_path / "e.safetensors"
    ensembles.save(ensembles.lora(vit(), 2), path)
    rewritten(path, **recipe)
    with pytest.raises(ValueError, match=message):
        ensembles.load(path, vit())
