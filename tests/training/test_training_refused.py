"""What `fit` refuses only when it meets it leaves the ensemble's modes as they were."""

import pytest
import torch
from small_training import INPUTS, LABELS, small_mlp
from torch import nn
from torch.nn import functional as F

from uqlab import ensembles, training


def test_the_last_update_is_checked_too():
    """One step from a finite loss to infinite weights: no later loss shows it."""
    ensemble = ensembles.deep(small_mlp, 2)
    how = {"epochs": 1, "lr": 1e38, "batch_size": 300, "progress": False}
    with pytest.raises(FloatingPointError, match="a weight is not finite in epoch 1"):
        training.fit(ensemble, INPUTS * 1e8, LABELS, **how)


@pytest.mark.parametrize("mode", [True, False])
def test_an_error_leaves_the_modes_as_they_were(mode):
    ensemble = ensembles.deep(small_mlp, 2).train(mode)
    first = next(ensemble.modules())
    modes = [part.training for part in ensemble.modules()]

    def fails(*_):
        assert first.training
        raise RuntimeError("augment")

    with pytest.raises(RuntimeError, match="augment"):
        training.fit(
            ensemble, INPUTS, LABELS, epochs=1, lr=0.1, augment=fails, progress=False
        )
    assert [part.training for part in ensemble.modules()] == modes
    with pytest.raises(ValueError, match="labels must be 0 to 3"):
        training.fit(ensemble, INPUTS, LABELS + 1, epochs=1, lr=0.1, progress=False)
    assert [part.training for part in ensemble.modules()] == modes
    assert torch.is_grad_enabled()


def test_augmented_inputs_are_the_same_samples():
    """One member's would be those of all, each with its own labels."""
    ensemble = ensembles.deep(small_mlp, 2)
    with pytest.raises(ValueError, match="augment must return inputs"):
        training.fit(
            ensemble, INPUTS, LABELS, epochs=1, augment=lambda x, _: x[:1],
            progress=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, labels: F.cross_entropy(outputs.flatten(0, 1), labels.ravel()),
        lambda outputs, labels: outputs.mean(2),
        nn.CrossEntropyLoss(),  # which raises itself
    ],
)
def test_a_loss_has_one_value_a_member(loss):
    """The mean over the members would train each with a part of its gradient."""
    ensemble = ensembles.deep(small_mlp, 2)
    with pytest.raises((ValueError, RuntimeError), match="one value a member"):
        training.fit(
            ensemble, INPUTS, LABELS, epochs=1, lr=0.1, loss=loss, progress=False
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ensembles.dropout(small_mlp(0.0), 2),
        lambda: ensembles.deep(small_mlp, 2).requires_grad_(False),
    ],
)
def test_an_ensemble_without_anything_to_train_says_so(make):
    with pytest.raises(ValueError, match="nothing in this ensemble is trained"):
        training.fit(make(), INPUTS, LABELS, epochs=1, progress=False)
