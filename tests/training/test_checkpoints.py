"""Checkpoints: an interrupted run goes on bit for bit, and a checkpoint of anything else is refused."""

import random

import numpy as np
import pytest
import torch
from same import near
from small_training import INPUTS, LABELS, small_mlp, trained, weights
from torch import nn
from torch.testing import assert_close

from uqlab import ensembles, training
from uqlab.core import modules


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

    class Watch:  # what a function notes in lists around it would be its settings
        seen, stop = 0, steps

    def watch(x, generators):
        Watch.seen += 1
        if Watch.seen == Watch.stop:
            raise KeyboardInterrupt
        return x

    settings |= {"lr": 0.1, "seed": 5, "batch_size": 64, "progress": False}
    training.fit(ensemble, INPUTS, LABELS, augment=watch, **settings)


@pytest.mark.parametrize("steps", [3, 13])  # before the first epoch ended, and after
def test_the_ensemble_that_was_stopped_goes_on(tmp_path, steps):
    whole, _ = trained(3, epochs=4, momentum=0.9)
    ensemble = ensembles.deep(small_mlp, 3, seed=5)
    settings = {"epochs": 4, "momentum": 0.9, "resume": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        stopped_after(steps, ensemble, **settings)
    stopped_after(0, ensemble, **settings)
    assert_close(weights(ensemble), weights(whole), rtol=0, atol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["training.pt"]


def test_more_epochs_than_before_go_on(tmp_path):
    whole, _ = trained(3, epochs=6)
    settings = {"resume": tmp_path}
    _, before = trained(3, epochs=2, **settings)
    longer, history = trained(3, epochs=6, **settings)
    assert history.loss[:2].tolist() == before.loss.tolist()
    assert_close(weights(longer), weights(whole), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has done 6 epochs"):
        trained(3, epochs=4, **settings)
    settings = {"scheduler": "cosine", "resume": tmp_path / "cosine"}
    trained(1, epochs=1, **settings)
    with pytest.raises(ValueError, match="epochs, on whose number the cosine depends"):
        trained(1, epochs=2, **settings)


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


def first(images):
    return torch.utils.data.TensorDataset(images, LABELS)


def loader(images=INPUTS, **how):
    return torch.utils.data.DataLoader(first(images), 64, **how)


@pytest.mark.parametrize(
    "others",
    [
        (first(INPUTS), first(INPUTS + 1)),
        (loader(), loader(INPUTS + 1)),
        (loader(), loader(shuffle=True)),
        (loader(), loader(drop_last=True)),
    ],
)
def test_checkpoint_of_another_dataset_is_refused(tmp_path, others):
    how = {"epochs": 1, "lr": 0.1, "progress": False, "resume": tmp_path}
    for _ in range(2):
        training.fit(ensembles.deep(small_mlp, 2), others[0], **how)
    with pytest.raises(ValueError, match="another run, with other data;"):
        training.fit(ensembles.deep(small_mlp, 2), others[1], **how)


class Drawn(torch.utils.data.Dataset):
    """Draws from wherever augmentations draw."""

    def __init__(self):
        self.own = np.random.default_rng()

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, i):
        noise = torch.randn(16) + random.random() + np.random.rand()  # noqa: NPY002
        return INPUTS[i] + noise + self.own.random(), LABELS[i]


def test_a_dataset_that_draws_is_no_other_one(tmp_path):
    how = {"lr": 0.1, "progress": False, "resume": tmp_path}
    for epochs in (1, 2):
        data = Drawn()
        history = training.fit(ensembles.deep(small_mlp, 2), data, epochs=epochs, **how)
        assert history.steps == 3


def decay(settings):
    return lambda o: torch.optim.lr_scheduler.ExponentialLR(o, **settings)


def smoothed(rates):
    return lambda z, y: training.cross_entropy(z, y, smoothing=max(rates))


def noisy(scales):
    return lambda x, generators: x * scales[0]


SHARE = {"smoothing": 0.0}


def by_global(z, y):
    return training.cross_entropy(z, y, **SHARE)


class Powered(nn.Module):
    def forward(self, x):
        return self.power(x)

    def power(self, x):
        return x**2


class Cubed(Powered):
    def power(self, x):
        return x**3


Cubed.__qualname__ = Cubed.__name__ = "Powered"


def powered(kind):
    return ensembles.deep(lambda: nn.Sequential(nn.Linear(16, 4), kind()), 2)


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("scheduler", decay({"gamma": 0.9}), decay({"gamma": 0.1})),
        ("loss", smoothed({0.1}), smoothed({0.2})),
        ("augment", noisy([1.0]), noisy([2.0])),
        ("ensemble", powered(Powered), powered(Cubed)),
    ],
)
def test_checkpoint_of_another_function_is_refused(tmp_path, what, one, other):
    def fit(given, epochs):
        how = {"ensemble": ensembles.deep(small_mlp, 2), "lr": 0.01, what: given}
        how |= {"epochs": epochs, "progress": False, "resume": tmp_path}
        training.fit(data=INPUTS, labels=LABELS, **how)

    fit(one, 1)
    fit(one, 2)
    with pytest.raises(ValueError, match="another run, with other"):
        fit(other, 3)


def test_checkpoint_of_another_value_of_the_module_is_refused(tmp_path, monkeypatch):
    how = {"epochs": 1, "loss": by_global, "progress": False, "resume": tmp_path}
    training.fit(ensembles.deep(small_mlp, 2), INPUTS, LABELS, **how)
    monkeypatch.setitem(SHARE, "smoothing", 0.2)
    with pytest.raises(ValueError, match="another run, with other loss"):
        training.fit(ensembles.deep(small_mlp, 2), INPUTS, LABELS, **how)


class Notes:
    """A callback that keeps what it is told to after the first epoch."""

    def __init__(self, kept=None):
        self.kept = kept

    def __call__(self, state):
        self.seen = self.kept

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, known):
        vars(self).update(known)


@pytest.mark.filterwarnings("ignore:the format of")
def test_a_callback_may_keep_numbers_of_numpy(tmp_path):
    trained(2, epochs=1, resume=tmp_path, callbacks=Notes([np.float64(1), np.ones(3)]))
    again = Notes()
    trained(2, epochs=2, resume=tmp_path, callbacks=again)
    assert np.array_equal(again.seen[1], np.ones(3))


def test_what_a_callback_cannot_keep_is_refused_before_it_is_needed(tmp_path):
    class Late(Notes):
        def __call__(self, state):
            self.seen = range(3) if state.epoch == 3 else None

    with pytest.raises(ValueError, match="of a callback"):
        trained(2, epochs=5, resume=tmp_path, callbacks=[Late()])
    _, history = trained(2, epochs=5, resume=tmp_path, callbacks=[Notes()])
    assert history.steps == 3 * trained(2, epochs=1)[1].steps


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


def test_resumes_on_another_number_of_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(modules, "ONE_THREAD", 0)
    settings = {"optimizer": "adam", "lr": 0.01}
    whole, _ = trained(5, **settings)

    class Watch:
        calls, stopped = 0, False

    def stop(x, generators):
        Watch.calls += 1
        if Watch.calls > 11 and not Watch.stopped:
            raise KeyboardInterrupt
        return x

    settings |= {"resume": tmp_path, "augment": stop}
    with pytest.raises(KeyboardInterrupt):
        trained(5, **settings)
    Watch.stopped = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resumed, history = trained(5, **settings)
    torch.set_num_threads(threads)
    assert 0 < history.steps < 15
    near(weights(whole), weights(resumed))


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
