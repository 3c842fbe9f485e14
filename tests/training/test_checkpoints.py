"""Checkpoints: an interrupted run goes on bit for bit, and a checkpoint of anything else is refused."""

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
