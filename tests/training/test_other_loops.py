"""A loop of one's own and transformers' Trainer, as the guide prints them, train as `fit` does."""

import re
from pathlib import Path

import pytest
import torch
from same import near
from torch import nn

from uqlab import ensembles, training

GUIDE = Path(__file__).parents[2] / "book" / "guides" / "network.md"
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


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
def trained():
    names = {"nn": nn, "training": training}
    blocks = re.findall(r"```python\n(.+?)```", GUIDE.read_text(), re.S)
    (block,) = (block for block in blocks if "TrainingArguments" in block)
    exec(compile(block, GUIDE.name, "exec"), names)
    return names["trained"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_transformers_trainer_and_fit_train_alike(make, trained, tmp_path):
    start, theirs, ours = make(), make(), make()
    whole = {"num_train_epochs": 3, "per_device_train_batch_size": 6}
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    quiet = {"use_cpu": True, "disable_tqdm": True, "output_dir": str(tmp_path)}
    trained(theirs, X, Y, **whole, **plain, **quiet)
    training.fit(ours, X, Y, epochs=3, lr=0.1, batch_size=6, progress=False)
    near(theirs(X), ours(X))
    assert not torch.allclose(ours(X), start.eval()(X))
