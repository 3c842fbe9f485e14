"""Ensembles of every kind in a folder: they come back exactly, and nothing else is taken for one."""

import json

import pytest
import torch
from same import near, unchanged
from small_networks import ALL, cnn, count, images, mlp, moved, resnet, vit
from torch import nn

from uqlab import ensembles, extraction, heads, models, training
from uqlab.core.modules import load_tensors, save_tensors

X, Y = images(12)
FIT = {"epochs": 1, "lr": 0.05, "batch_size": 4, "momentum": 0.9, "progress": False}


def one_lora(network, **settings):
    one = ensembles.lora(network, 1, 2, **settings)
    training.fit(one, X, Y, **FIT)
    return one


def pruned(network, of=heads.prune):
    return [of(network, [(0, m)] * (m < 2)) for m in range(3)]


def sharing():
    """Two members that share their first layer, one of them under two names."""
    first = nn.Linear(64, 5)
    return [
        nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(5, 3)) for _ in "ab"
    ]


def cycle(one, number):
    training.fit(one, X, Y, seed=number, **FIT)


class Tied(nn.Module):
    """Its first matrix undoes what it did."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.b.weight, self.last = self.a.weight, nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.b(self.a(x.flatten(1)).relu()))


# Of a network: the ensemble. What stands beside it makes the network, here and where the folder is read.
KINDS = {
    "deep": (vit, lambda net: ensembles.deep(vit, 3)),
    "deep, batch norm": (cnn, lambda net: ensembles.deep(cnn, 3)),
    "deep, shard": (mlp, lambda net: ensembles.deep(mlp, range(4, 8, 2))),
    "deep, tied": (Tied, lambda net: ensembles.deep(Tied, 2)),
    "members": (resnet, lambda net: ensembles.from_members([resnet(), cnn_like(resnet)])),
    "members of two architectures": (lambda: [mlp(), cnn()], lambda net: ensembles.from_members([mlp(), cnn()])),
    "members that share": (lambda: sharing()[0], lambda net: ensembles.from_members(sharing())),
    "snapshot": (mlp, lambda net: ensembles.snapshot(mlp, 2, cycle)),
    "lora": (vit, lambda net: ensembles.lora(net, 3, 2, scale=0.5)),
    "lora, shard": (vit, lambda net: ensembles.lora(net, range(4, 8), 2)),
    "lora, shared classifier": (vit, lambda net: ensembles.lora(net, 3, 2, classifiers="shared")),
    "lora, backbone trained": (resnet, lambda net: ensembles.lora(net, 2, 2, train_backbone=True)),
    "lora, tied": (Tied, lambda net: ensembles.lora(net, 2, 2)),
    "singular_value": (vit, lambda net: ensembles.singular_value(net, 3)),
    "batch": (cnn, lambda net: ensembles.batch(net, 3)),
    "batch++": (vit, lambda net: ensembles.batch(net, 3, additive=True)),
    "film": (cnn, lambda net: ensembles.film(net, 3)),
    "masksembles": (cnn, lambda net: ensembles.masksembles(net, range(1, 3), total_members=4)),
    "dropout": (mlp, lambda net: ensembles.dropout(net, 3).resample(7)),
    "packed": (vit, lambda net: ensembles.packed(net, 2)),
    "mimo": (cnn, lambda net: ensembles.mimo(net, 2)),
    "laplace": (mlp, lambda net: ensembles.laplace(net, X, 3)),
    "laplace_lora": (vit, lambda net: ensembles.laplace_lora(one_lora(net), X, range(2, 4))),
    "laplace_lora, all trained": (
        vit, lambda net: ensembles.laplace_lora(one_lora(net, train_backbone=True), X, 2)
    ),
    "laplace_lora, samples": (
        vit, lambda net: ensembles.laplace_lora(one_lora(net, classifiers="shared"), X, 2, linearised=False)
    ),
    "masks": (mlp, lambda net: extraction.masks(net, range(1, 4))),
    "masks, hard": (mlp, lambda net: extraction.masks(net, 3).harden(0.4)),
    "tiles": (cnn, lambda net: extraction.tiles(net, 2)),
    "tiles, frozen": (cnn, lambda net: extraction.tiles(net.requires_grad_(False), 2).shard(slice(1, 3))),
    "fused": (vit, lambda net: heads.fuse(pruned(net))),
    "fused, shard": (vit, lambda net: heads.fuse(pruned(net), norms="merged").shard(slice(1, 3))),
}  # fmt: skip


def cnn_like(make):
    torch.manual_seed(1)
    network = make()
    with torch.no_grad():
        for p in network.parameters():
            p += 0.1 * torch.rand_like(p)
    return network


EVERY = pytest.mark.parametrize("kind", KINDS)


@EVERY
def test_an_ensemble_comes_back_exactly_and_learns_on(kind, tmp_path):
    make, of = KINDS[kind]
    ensemble = of(make())
    learns = any(p.requires_grad for p in ensemble.parameters())
    learns = learns and kind != "masks, hard"
    if learns:
        training.fit(ensemble, X, Y, **FIT)
    ensemble.save_pretrained(tmp_path)
    given = make()
    networks = given if isinstance(given, list) else [given]
    with unchanged(*networks):
        again = ensembles.from_pretrained(tmp_path, given)
        assert torch.equal(again(X), ensemble.eval()(X))
        for name in ("recipe", "member_ids", "training"):
            assert getattr(again, name) == getattr(ensemble, name)
        assert type(again) is type(ensemble)
        assert trained(again) == trained(ensemble)
        if learns:
            for each in (again, ensemble):
                training.fit(each, X, Y, seed=1, **FIT)
            near(again(X), ensemble(X))
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES


FILES = ["ensemble.safetensors", "uqlab.json"]


def trained(ensemble):
    return [name for name, p in ensemble.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("make", ["embedded", "pretrained", "from_pretrained"])
@pytest.mark.parametrize("kind", ["lora", "film", "packed", "deep", "masks", "fused"])
def test_a_folder_that_names_its_backbone_suffices(make, kind, tmp_path):
    models.vit(28, 7, width=16, layers=1, heads=2).save_pretrained(tmp_path / "vit")
    network = {
        "embedded": lambda: models.embedded(26),
        "pretrained": lambda: models.pretrained("letters"),
        "from_pretrained": lambda: models.from_pretrained(tmp_path / "vit", 10),
    }[make]
    _, of = KINDS[kind]
    ensemble = ensembles.deep(network, 2) if kind == "deep" else of(network())
    moved(ensemble)
    ensemble.save_pretrained(tmp_path / "saved")
    x, state = torch.rand(3, 1, 28, 28), torch.get_rng_state()
    again = ensembles.from_pretrained(tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again(x), ensemble(x))
    assert again.source == ensemble.source
    again.save_pretrained(tmp_path / "again")
    same = [(tmp_path / name / "uqlab.json").read_text() for name in ("saved", "again")]
    assert same[0] == same[1]


def test_another_backbone_is_refused_and_both_are_named(tmp_path):
    network = models.embedded(3)
    ensembles.lora(network, 2, 2).save_pretrained(tmp_path / "lora")
    theirs = json.loads((tmp_path / "lora" / "uqlab.json").read_text())["backbone"]
    other = models.embedded(3)
    other.vit.layers[0].attention.q_proj.weight.data[0, 0] += 0.1
    with pytest.raises(ValueError, match=f"{theirs['digest']}.*ViTForImage") as caught:
        ensembles.from_pretrained(tmp_path / "lora", other)
    ensembles.lora(other, 2, 2).save_pretrained(tmp_path / "other")
    mine = json.loads((tmp_path / "other" / "uqlab.json").read_text())["backbone"]
    assert mine["digest"] in str(caught.value)
    with pytest.raises(ValueError, match=theirs["digest"]):
        ensembles.from_pretrained(tmp_path / "other")  # trained since `models` made it
    with torch.no_grad():
        network.classifier.weight.zero_()  # which is no part of the backbone
    ensembles.from_pretrained(tmp_path / "lora", network)


@ALL
def test_the_backbone_is_not_written(make, tmp_path):
    ensemble = moved(make(vit()))
    ensemble.save_pretrained(tmp_path)
    own = 4 * count(ensemble) + 500 * len(trained(ensemble))
    assert (tmp_path / "ensemble.safetensors").stat().st_size < own + 2000


def test_dropout_is_saved_without_a_weight(tmp_path):
    ensemble = ensembles.dropout(vit(), 3, 0.4, seed=1).resample(5)
    ensemble(X)
    ensemble.save_pretrained(tmp_path)
    assert (tmp_path / "ensemble.safetensors").stat().st_size < 2000


def test_what_was_stopped_between_its_two_files_is_refused(tmp_path):
    ensembles.lora(vit(), 2, 2).save_pretrained(tmp_path)
    old = (tmp_path / "uqlab.json").read_bytes()
    ensembles.lora(vit(), 3, 2).save_pretrained(tmp_path)
    (tmp_path / "uqlab.json").write_bytes(old)
    with pytest.raises(ValueError, match="copy both files"):
        ensembles.from_pretrained(tmp_path, vit())


def test_what_is_absent_cut_or_of_others(tmp_path):
    ensemble = ensembles.lora(vit(), 2, 2)
    ensemble.save_pretrained(tmp_path)
    tensors = tmp_path / "ensemble.safetensors"
    whole = tensors.read_bytes()
    for at in (len(whole) - 1, len(whole) // 2, 40, whole.index(b"rank") + 8):
        tensors.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged or not written by uqlab"):
            ensembles.from_pretrained(tmp_path, vit())
    save_tensors(tensors, {"a": torch.ones(2)}, {"recipe": 1})
    with pytest.raises(ValueError, match="was changed"):
        ensembles.from_pretrained(tmp_path, vit())
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match="save_pretrained wrote"):
        ensembles.from_pretrained(tmp_path, vit())


def edited(about, change):
    for name, value in change.items():
        inside = isinstance(value, dict) and isinstance(about[name], dict)
        about[name] = about[name] | value if inside else value
    return about


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "frozen"}, "method must be"),
        ({"settings": {"order": 1}}, "unexpected keyword argument 'order'"),
        ({"settings": {"rank": 3}}, "size mismatch"),
        ({"members": None}, "cannot be loaded"),
        ({"backbone": {"made_by": "load_weights", "path": "/etc/passwd"}}, "give a network"),
        ({"backbone": {"made_by": "pretrained", "name": "../../secret"}}, "cannot be loaded"),
    ],
)  # fmt: skip
def test_a_folder_of_another_hand_runs_nothing(change, message, tmp_path, unchecked):
    """Its checksums are right."""
    ensembles.lora(models.embedded(3), 2, 2).save_pretrained(tmp_path)
    tensors, header = load_tensors(tmp_path / "ensemble.safetensors")
    edited(header["about"], change)
    save_tensors(tmp_path / "ensemble.safetensors", tensors, header)
    (tmp_path / "uqlab.json").write_text(json.dumps(header["about"]))
    with pytest.raises(ValueError, match=message):
        ensembles.from_pretrained(tmp_path)


class Attribute(nn.Module):
    """A matrix that is no buffer, as in random features."""

    def __init__(self, seed):
        super().__init__()
        self.drawn = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(x.flatten(1) @ self.drawn)


def test_what_no_folder_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="make them buffers"):
        ensembles.from_members([Attribute(0), Attribute(1)]).save_pretrained(tmp_path)
