"""Trainings that were done before: read bit for bit, and only where nothing that they depend on has changed."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from uqlab import ensembles, models, training
from uqlab.training import cache, loop

X = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
SETTINGS = {"epochs": 2, "lr": 0.1, "batch_size": 16, "progress": False}
MAKE = {
    "perceptrons": lambda: ensembles.deep(
        lambda: models.mlp(64, (16, 8), classes=3), 3
    ),
    "batch statistics": lambda: ensembles.deep(lambda: models.small_cnn(3, width=4), 2),
    "low rank": lambda: ensembles.lora(backbone(), 2, rank=2),
    "singular values": lambda: ensembles.singular_value(backbone(), 2),
    "hidden in transformers": lambda: ensembles.from_members([backbone()]),
}


def backbone():
    torch.manual_seed(0)
    return models.vit(8, 4, classes=3, width=16, layers=1, heads=2)


def state(ensemble):
    return {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}


def fit(ensemble=None, x=X, y=Y, **changes):
    return training.fit(ensemble or MAKE["perceptrons"](), x, y, **SETTINGS | changes)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("UQLAB_CACHE", str(tmp_path / "trainings"))
    monkeypatch.setattr(cache, "WORTH", 0.0)
    return tmp_path / "trainings"


@pytest.fixture
def trained(monkeypatch):
    """How many trainings there were so far."""
    count = []
    started = loop.Workers.__init__
    monkeypatch.setattr(
        loop.Workers, "__init__", lambda *a, **k: (count.append(1), started(*a, **k))[1]
    )
    return count


@pytest.mark.parametrize("kind", MAKE)
def test_the_second_of_two_equal_trainings_is_read_bit_for_bit(folder, trained, kind):
    first, second = MAKE[kind](), MAKE[kind]()
    before = state(first)
    made, read = fit(first), fit(second)
    assert len(trained) == len(list(folder.iterdir())) == 1
    assert any(
        not tensor.equal(before[name]) for name, tensor in first.state_dict().items()
    )
    assert all(
        tensor.equal(second.state_dict()[name])
        for name, tensor in first.state_dict().items()
    )
    assert made.loss.equal(read.loss)
    assert (made.steps, made.seconds) == (read.steps, read.seconds)
    assert not second.training
    assert all(p.grad is None for p in second.parameters())
    fit(second)  # which starts where the first training ended
    assert len(trained) == 2


def test_a_training_that_was_stopped_goes_on_and_ends_bit_for_bit_as_if_it_had_not_been(
    folder, monkeypatch
):
    monkeypatch.setattr(cache, "EVERY", 0.0)
    whole, stopped, other = (MAKE["low rank"]() for _ in range(3))
    made = fit(whole, epochs=4)
    (file,) = folder.iterdir()
    file.unlink()
    checks = []
    check = loop._check_finite
    monkeypatch.setattr(
        loop,
        "_check_finite",
        lambda *a: (checks.append(1), 1 / (len(checks) - 3), check(*a))[2],
    )
    with pytest.raises(ZeroDivisionError):  # in the third epoch
        fit(stopped, epochs=4)
    assert [path.suffix for path in folder.iterdir()] == [".checkpoint"]
    read = fit(other, epochs=4)
    assert (made.steps, read.steps) == (12, 6)
    assert made.loss.equal(read.loss)
    assert all(
        tensor.equal(other.state_dict()[name])
        for name, tensor in whole.state_dict().items()
    )
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]


def test_the_state_of_a_stopped_training_may_be_damaged_or_unwritable(
    folder, trained, monkeypatch
):
    monkeypatch.setattr(cache, "EVERY", 0.0)
    fit()
    (file,) = folder.iterdir()
    file.rename(file.with_suffix(".checkpoint"))  # which is none
    assert fit().steps == 6
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    monkeypatch.setattr(cache.Checkpoint, "write", lambda *_: os.listdir("/nowhere"))
    assert fit(epochs=3).steps == 9


def changed_weights():
    ensemble = MAKE["perceptrons"]()
    with torch.no_grad():
        next(ensemble.parameters())[0, 0, 0] += 1e-3
    return ensemble


def frozen_layer():
    ensemble = MAKE["perceptrons"]()
    next(ensemble.parameters()).requires_grad_(False)
    return ensemble


def other_activation():
    ensemble = MAKE["perceptrons"]()
    ensemble.network[2] = nn.Tanh()
    return ensemble


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 3}, {"lr": 0.2}, {"batch_size": 20}, {"optimizer": "adam"}, {"weight_decay": 0.1}, {"momentum": 0.5},
        {"schedule": "cosine"}, {"schedule": "step", "milestones": [1]}, {"warmup": 2}, {"clip": 1.0}, {"seed": 1},
        {"class_weights": torch.tensor([1.0, 2, 3])}, {"augment": training.crop_flip},
        {"x": X.roll(1, 0)}, {"y": Y.roll(1)},
        {"ensemble": changed_weights}, {"ensemble": frozen_layer}, {"ensemble": other_activation},
        {"ensemble": lambda: ensembles.deep(lambda: models.mlp(64, (16, 8), classes=3, dropout=0.2), 3)},
        {"ensemble": lambda: ensembles.deep(lambda: models.mlp(64, (16, 8), classes=3), "3:6")},
    ],
    ids=lambda changes: ",".join(changes),
)  # fmt: skip
def test_whatever_is_changed_is_trained_anew(folder, trained, changes):
    fit()
    make = changes.get("ensemble", MAKE["perceptrons"])
    for _ in range(2):
        fit(**changes | {"ensemble": make()})
    assert len(trained) == len(list(folder.iterdir())) == 2


def test_settings_of_a_transformer_that_no_weight_shows(folder, trained):
    for heads, gain in ((2, 1.0), (4, 1.0), (2, 2.0)):
        torch.manual_seed(0)
        network = models.vit(8, 4, classes=3, width=16, layers=1, heads=heads)
        fit(ensembles.lora(network, 2, rank=2, gain=gain))
    assert len(trained) == 3


def test_other_code_is_trained_anew(folder, trained, monkeypatch):
    fit()
    monkeypatch.setattr(cache, "_code", lambda: "changed")
    fit()
    assert len(trained) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-9], lambda b: b[:-9] + bytes(9), lambda b: b"{}", lambda b: b""],
)
def test_a_damaged_file_is_trained_anew(folder, trained, damage):
    made = fit()
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = fit()
    assert len(trained) == 2
    assert made.loss.equal(again.loss)
    fit()
    assert len(trained) == 2


class Own(nn.Linear):
    """A layer whose code the cache does not know."""


def hooked():
    ensemble = MAKE["perceptrons"]()
    ensemble.network[1].register_forward_hook(lambda *_: None)
    return ensemble


def with_dropout():
    return ensembles.from_members(
        [nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))]
    )


def noisy(x, generators):
    return x + torch.randn(())


noisy.__module__ = "uqlab.training.made_up"


def elsewhere(x, generators):
    return x


elsewhere.__module__ = "uqlab.widgets.made_up"


@pytest.mark.parametrize(
    "changes",
    [
        {
            "ensemble": lambda: ensembles.deep(
                lambda: nn.Sequential(nn.Flatten(), Own(64, 3)), 2
            )
        },
        {"ensemble": hooked},
        {"augment": lambda x, generators: x},
        {"augment": noisy},  # draws from the global generator
        {"augment": elsewhere},  # what it calls is in no digest
        {"loss": lambda outputs, labels: outputs.square().mean((1, 2))},
    ],
    ids=["module", "hook", "augment", "noise", "elsewhere", "loss"],
)
def test_what_cannot_be_told_apart_is_not_kept(folder, trained, changes):
    for _ in range(2):
        fit(
            **{"ensemble": MAKE["perceptrons"], **changes}
            | {"ensemble": changes.get("ensemble", MAKE["perceptrons"])()}
        )
    assert len(trained) == 2
    assert not folder.exists()


@pytest.mark.parametrize("value", [None, ""])
def test_nothing_is_kept_unless_asked(tmp_path, trained, monkeypatch, value):
    monkeypatch.setattr(cache, "WORTH", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UQLAB_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("UQLAB_CACHE", value)
    fit()
    fit()
    assert len(trained) == 2
    assert not list(tmp_path.iterdir())


def test_short_watched_and_checkpointed_trainings_are_not_kept(
    folder, trained, monkeypatch, tmp_path
):
    fit(checkpoint=tmp_path / "run.pt")
    fit(watch=print)
    monkeypatch.setattr(cache, "WORTH", 60.0)
    fit()
    assert not folder.exists()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(folder, monkeypatch, error):
    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(cache, "save_file", half)
    try:
        fit()
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert not list(folder.iterdir())


def test_the_least_recently_used_make_room(folder, trained, monkeypatch):
    fit()
    (first,) = folder.iterdir()
    monkeypatch.setattr(cache, "ROOM", 4.5 * first.stat().st_size)
    for seed in range(1, 4):
        fit(seed=seed)
    for age, path in enumerate(
        sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    ):
        os.utime(path, (1e9 - age, 1e9 - age))
    fit()  # the oldest, which is used again
    fit(seed=4)
    assert len(trained) == 5
    assert len(list(folder.iterdir())) == 4
    assert first.exists()
    fit(seed=1)
    assert len(trained) == 6
    monkeypatch.setattr(cache, "ROOM", 2 * first.stat().st_size)
    fit(seed=5)  # more than a quarter of the room
    assert len(trained) == 7
    fit(seed=5)
    assert len(trained) == 8


def test_another_process_reads_it(folder):
    """What names a file must not depend on addresses, nor on the order of sets.

    The number of threads is said to both: with another one, the singular value decomposition rounds otherwise.
    """
    for make in MAKE.values():
        fit(make())
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_cache as t; t.cache.WORTH = 0"
    code += f"; t.torch.set_num_threads({torch.get_num_threads()}); [t.fit(make()) for make in t.MAKE.values()]"
    environment = os.environ | {
        "PYTHONHASHSEED": str(1 + int(os.environ.get("PYTHONHASHSEED") or 0))
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert len(list(folder.iterdir())) == len(MAKE)
