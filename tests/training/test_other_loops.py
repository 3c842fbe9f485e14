"""Loops of others, as the guide prints them, train as `fit` does."""

import re
from pathlib import Path

import pytest
import torch
from same import near
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from uqlab import ensembles, metrics, training

GUIDE = Path(__file__).parents[2] / "book" / "guides" / "own_loop.md"
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
QUIET = [
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    "ignore::FutureWarning",
    "ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning",
]


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def network():
    torch.manual_seed(0)
    return perceptron()


FACTORIES = {
    "deep": lambda: ensembles.deep(perceptron, 3),
    "lora": lambda: ensembles.lora(network(), 3, 2),
    "shared weights": lambda: ensembles.batch(network(), 3, std=0.5),
    "mimo": lambda: ensembles.mimo(network(), 3, repeats=1, rho=1.0),
}


@pytest.fixture(scope="module")
def guide():
    names = {}
    for block in re.findall(r"```python\n(.+?)```", GUIDE.read_text(), re.S):
        exec(compile(block, GUIDE.name, "exec"), names)
    return names


def by_trainer(guide, ensemble, folder):
    whole = {"num_train_epochs": 3, "per_device_train_batch_size": 6}
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    quiet = {"use_cpu": True, "disable_tqdm": True, "output_dir": str(folder)}
    guide["with_trainer"](ensemble, X, Y, **whole, **plain, **quiet)


def by_lightning(guide, ensemble, _):
    guide["with_lightning"](ensemble, DataLoader(TensorDataset(X, Y), 6), 3)


def by_accelerate(guide, ensemble, _):
    guide["with_accelerate"](ensemble, DataLoader(TensorDataset(X, Y), 6), 3)


@pytest.mark.parametrize("way", [by_trainer, by_lightning, by_accelerate])
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
@pytest.mark.filterwarnings(*QUIET)
def test_other_loops_and_fit_train_alike(way, make, guide, tmp_path):
    start, theirs, ours = make(), make(), make()
    way(guide, theirs, tmp_path)
    how = {"epochs": 3, "lr": 0.1, "batch_size": 6, "order": "shared"}
    training.fit(ours, X, Y, **how, progress=False)
    near(theirs(X), ours(X))
    assert not torch.allclose(ours(X), start.eval()(X))


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "mimo"])
def test_members_in_turn_have_the_gradients_of_all_at_once(name, guide):
    plain, turned = FACTORIES[name]().train(), FACTORIES[name]().train()
    training.member_mean(plain(X), Y).backward()
    logits = guide["in_turn"](turned, X)
    near(logits, plain(X))
    training.member_mean(logits, Y).backward()
    for one, other in zip(turned.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            near(one.grad, other.grad)


def test_the_guides_own_loops_learn(guide):
    """Chance is 0.1; the loops took 6 steps and 20."""
    few = guide["few"]
    for name in ("lora", "deep"):
        logits = training.predict(guide[name], few.inputs)
        assert metrics.accuracy(logits, few.labels) > 0.25
