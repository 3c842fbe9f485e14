"""Checkpoints: an interrupted run goes on bit for bit, and a checkpoint of anything else is refused."""

import functools

import pytest
import torch
from same import near
from small_training import INPUTS, LABELS, small_mlp, trained, weights
from torch import nn
from torch.testing import assert_close

from uqlab import ensembles, training
from uqlab.core import devices


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_interrupted_run_resumes_bit_identically(tmp_path, momentum):
    whole, _ = trained(3, epochs=4, momentum=momentum)
    interrupted = ensembles.deep(small_mlp, 3, seed=5)

    class Stop(Exception):
        pass

    def stop_once_in_the_third_epoch(x, generators):
        seen.append(1)
        if len(seen) == 13:
            raise Stop
        return x

    seen: list[int] = []
    settings = {
        "epochs": 4,
        "lr": 0.1,
        "batch_size": 64,
        "seed": 5,
        "progress": False,
        "momentum": momentum,
    }
    settings |= {
        "resume": tmp_path,
        "augment": stop_once_in_the_third_epoch,
    }
    with pytest.raises(Stop):
        training.fit(interrupted, INPUTS, LABELS, **settings)
    resumed = ensembles.deep(small_mlp, 3, seed=5)
    history = training.fit(resumed, INPUTS, LABELS, **settings)
    assert history.steps == 2 * 5  # two of the four epochs were left
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["training.pt"]


@pytest.mark.parametrize(
    "change",
    [{"lr": 0.2}, {"seed": 6}, {"optimizer": "adam"}, {"momentum": 0.9}],
)
def test_checkpoint_of_another_run_is_refused(tmp_path, change):
    trained(2, resume=tmp_path)
    with pytest.raises(ValueError, match="another run"):
        trained(2, resume=tmp_path, **change)
    with pytest.raises(ValueError, match="another run"):
        trained(range(2, 4), resume=tmp_path)


def stopped_after(steps, ensemble, **settings):
    """Train, and stop as Ctrl-C does in a notebook."""

    def watch(x, generators):
        seen.append(1)
        if len(seen) in stops:
            raise KeyboardInterrupt
        return x

    seen: list[int] = []
    stops = [steps]
    settings |= {"lr": 0.1, "seed": 5, "batch_size": 64, "progress": False}
    training.fit(ensemble, INPUTS, LABELS, augment=watch, **settings)


@pytest.mark.parametrize("steps", [3, 13])  # before the first epoch ended, and after
def test_the_ensemble_that_was_stopped_goes_on(tmp_path, steps):
    whole, _ = trained(3, epochs=4)
    ensemble = ensembles.deep(small_mlp, 3, seed=5)
    settings = {"epochs": 4, "resume": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        stopped_after(steps, ensemble, **settings)
    stopped_after(0, ensemble, **settings)
    assert_close(weights(ensemble), weights(whole), rtol=0, atol=0)


def test_more_epochs_than_before_go_on(tmp_path):
    whole, _ = trained(3, epochs=6)
    settings = {"resume": tmp_path}
    _, before = trained(3, epochs=2, **settings)
    longer, history = trained(3, epochs=6, **settings)
    assert history.loss[:2].tolist() == before.loss.tolist()
    assert_close(weights(longer), weights(whole), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has done 6 epochs"):
        trained(3, epochs=4, **settings)


def test_other_epochs_of_a_cosine_are_refused(tmp_path):
    settings = {"resume": tmp_path, "scheduler": "cosine"}
    trained(2, epochs=2, **settings)
    with pytest.raises(ValueError, match="with other epochs"):
        trained(2, epochs=3, **settings)


def other_data(x, generators):
    return x + 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"precision": "bfloat16"}, "precision"),
        ({"class_weights": torch.tensor([1.0, 1.0, 1.0, 2.0])}, "class_weights"),
        ({"augment": other_data}, "augment"),
        ({"augment": functools.partial(training.crop_flip, padding=2)}, "augment"),
        (
            {"loss": lambda outputs, labels: training.cross_entropy(outputs, labels)},
            "loss",
        ),
    ],
)
def test_checkpoint_of_another_loss_or_precision_is_refused(tmp_path, change, what):
    trained(2, resume=tmp_path)
    with pytest.raises(ValueError, match=f"another run, with other {what};"):
        trained(2, resume=tmp_path, **change)


@pytest.mark.parametrize("what", ["inputs", "labels"])
def test_checkpoint_of_other_data_is_refused(tmp_path, what):
    """Data of the same shape that differ in one value."""
    settings = {
        "epochs": 1,
        "lr": 0.1,
        "progress": False,
        "resume": tmp_path,
    }
    training.fit(ensembles.deep(small_mlp, 2), INPUTS, LABELS, **settings)
    data = {"inputs": INPUTS.clone(), "labels": LABELS.clone()}
    data[what][-1] = 1 - data[what][-1].clamp(max=1)
    with pytest.raises(ValueError, match=f"another run, with other {what};"):
        training.fit(ensembles.deep(small_mlp, 2), *data.values(), **settings)


def test_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "training.pt"
    trained(2, resume=tmp_path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", b"text", whole[:-100], flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            trained(2, resume=tmp_path)


def test_another_file_of_tensors_is_refused(tmp_path):
    path = tmp_path / "training.pt"
    torch.save({"losses": torch.zeros(7)}, path)
    with pytest.raises(ValueError, match="none of ours"):
        trained(2, resume=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}],
    ids=["sgd", "adam"],
)
def test_resumes_on_another_number_of_threads(monkeypatch, tmp_path, settings):
    monkeypatch.setattr(devices, "ONE_THREAD", 0)
    whole, _ = trained(5, **settings)

    def stop(x, generators):
        calls.append(1)
        if len(calls) > 11 and not stopped:
            raise KeyboardInterrupt
        return x

    calls, stopped = [], []
    settings |= {"resume": tmp_path, "augment": stop}
    with pytest.raises(KeyboardInterrupt):
        trained(5, **settings)
    stopped.append(True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resumed, history = trained(5, **settings)
    torch.set_num_threads(threads)
    assert 0 < history.steps < 15
    near(weights(whole), weights(resumed))


@pytest.mark.parametrize("method", ["packed", "masksembles", "film"])
def test_members_statistics_go_on_from_a_checkpoint_and_a_plain_mapping(
    tmp_path, method
):
    def make():
        torch.manual_seed(0)
        parts = [nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
        return getattr(ensembles, method)(nn.Sequential(*parts), 2)

    x, y = torch.randn(64, 2), torch.arange(64) % 3
    for epochs in (1, 2):
        made = make()
        settings = {"epochs": epochs, "lr": 0.05, "progress": False}
        training.fit(made, x, y, resume=tmp_path, **settings)
    whole = make()
    training.fit(whole, x, y, **settings)
    assert all(
        map(torch.equal, whole.state_dict().values(), made.state_dict().values())
    )
    other = make()
    other.load_state_dict(dict(made.state_dict()))
    assert torch.equal(other.eval()(x), made.eval()(x))


class Scaled:
    """An augmentation with a setting."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x, generators):
        return x * self.by

    def method(self, x, generators):
        return x * self.by


def closure(by):
    return lambda x, generators: x * by


def default(by):
    return lambda x, generators, by=by: x * by


@pytest.mark.parametrize(
    "make", [Scaled, lambda by: Scaled(by).method, closure, default]
)
def test_a_checkpoint_of_other_values_in_an_augmentation_is_refused(tmp_path, make):
    settings = {"resume": tmp_path}
    trained(2, augment=make(1.0), **settings)
    trained(2, augment=make(1.0), **settings)
    with pytest.raises(ValueError, match="another run, with other augment"):
        trained(2, augment=make(1.5), **settings)


class Counting(nn.Linear):
    count: object = 1

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def counting(count, tmp_path, epochs):
    torch.manual_seed(0)
    network = nn.Sequential(Counting(6, 4), nn.Linear(4, 3))
    network[0].count = count
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    how = {"lr": 0.1, "progress": False, "resume": tmp_path}
    return training.fit(ensembles.lora(network, 2, 1), x, y, epochs=epochs, **how)


def test_a_state_that_is_no_tensor_is_kept(tmp_path):
    counting(7, tmp_path, 1)
    assert counting(7, tmp_path, 3).steps == 2


def test_a_state_that_would_not_be_read_again_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="damaged or none of ours"):
        counting(Scaled(1.0), tmp_path, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda: ensembles.deep(lambda: made(nn.Tanh()), 2),
        lambda: ensembles.deep(lambda: made(nn.ReLU(), 0.5), 2),
        lambda: ensembles.deep(lambda: made(nn.ReLU(), frozen=True), 2),
    ],
)
def test_a_network_of_the_same_weights_is_another_network(tmp_path, other):
    how = {"lr": 0.1, "progress": False, "resume": tmp_path / "run"}
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    training.fit(ensembles.deep(lambda: made(nn.ReLU()), 2), x, y, epochs=1, **how)
    with pytest.raises(ValueError, match="with other network"):
        training.fit(other(), x, y, epochs=2, **how)
    again = ensembles.deep(lambda: made(nn.ReLU()), 2)
    assert training.fit(again, x, y, epochs=2, **how).steps == 1


def made(activation, p=0.1, frozen=False):
    first = nn.Linear(6, 8).requires_grad_(not frozen)
    return nn.Sequential(first, activation, nn.Dropout(p), nn.Linear(8, 3))


def test_an_implicit_ensemble_of_other_settings_is_another_network(tmp_path):
    torch.manual_seed(0)
    backbone = nn.Sequential(made(nn.ReLU()), nn.ReLU(), nn.Linear(3, 3))
    how = {"lr": 0.1, "progress": False, "resume": tmp_path / "run"}
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    training.fit(ensembles.lora(backbone, 2, 2), x, y, epochs=1, **how)
    with pytest.raises(ValueError, match="with other network"):
        training.fit(ensembles.lora(backbone, 2, 2, scale=3.0), x, y, epochs=2, **how)
    went_on = training.fit(ensembles.lora(backbone, 2, 2), x, y, epochs=2, **how)
    assert went_on.steps == 1
