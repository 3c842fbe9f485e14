"""Members of one network: units dropped for good, and the states of one training run."""

import pytest
import torch
from same import near
from small_networks import bert, images, vit
from torch import nn

from uqlab import ensembles, models, training


# MC dropout -----------------------------------------------------------------------------------------------------------
def perceptron(dropout=0.1):
    torch.manual_seed(0)
    return models.mlp(64, (40, 30), 3, dropout).eval()


@pytest.mark.parametrize(
    "backbone", [perceptron, vit, bert], ids=["mlp", "vit", "bert"]
)
def test_dropout_members_keep_their_masks(backbone):
    x = images()[0] if backbone is not bert else torch.randint(50, (4, 7))
    model = backbone()
    ensemble = ensembles.dropout(model, 3, 0.4, seed=5)
    together = ensemble(x)
    assert torch.equal(together, ensemble.train()(x)) or backbone is bert
    ensemble.eval()
    near(ensemble(x[1:2])[:, 0], together[:, 1])  # whatever the batch
    ensemble.chunk_size = 2
    near(ensemble(x), together)
    near(ensemble.shard(slice(1, 3))(x), together[1:])
    assert not torch.equal(ensemble.resample(6)(x), together)
    near(ensemble.resample(5)(x), together)


def test_dropout_is_the_weight_times_a_diagonal():
    net, x = perceptron(), torch.rand(5, 64)
    ensemble = ensembles.dropout(net, 1000, 0.25)
    ensemble.mode = "loop"  # a hook sees no numbers under vmap
    masks = []
    hook = ensemble.network[3].register_forward_hook(
        lambda _, args, out: masks.append((out / args[0]).nan_to_num())
    )
    ensemble(x)
    hook.remove()
    z = torch.stack(masks[-1000:])
    assert ((z == 0) | ((z - 4 / 3).abs() < 1e-4)).all()
    alive = net[2](net[1](x.flatten(1))) > 0
    assert (z[:, 0][:, alive[0]] == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    both = alive[0] & alive[1]
    assert torch.equal(
        z[:, 0][:, both] == 0, z[:, 1][:, both] == 0
    )  # one mask a member, for all inputs


def test_without_dropout_modules_linear_layers_are_preceded_by_it():
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        torch.rand(4, 6),
    )
    near(ensembles.dropout(net, 2, 0.0)(x), net(x).expand(2, -1, -1))
    assert (ensembles.dropout(net, 2, 0.5)(x)[0] - net(x)).abs().max() > 1e-4


# Snapshots ------------------------------------------------------------------------------------------------------------
def test_snapshots_are_one_network_over_time():
    x, y = torch.rand(12, 8), torch.arange(12) % 3
    seen = []

    def train(one, cycle):
        training.fit(
            one, x, y, epochs=2, lr=0.1, scheduler="cosine", seed=cycle, progress=False
        )
        seen.append(one(x)[0].detach().clone())

    ensemble = ensembles.snapshot(lambda: models.mlp(8, (12, 6), 3), 3, train, seed=4)
    near(ensemble.eval()(x), torch.stack(seen))
    assert (seen[0] - seen[2]).abs().max() > 1e-4
