"""Training: one program for all members equals the members trained one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uqlab import ensembles, models, training

INPUTS = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, :4]).argmax(1)


def small_mlp(dropout=0.2):
    return models.mlp(16, (12, 8), classes=4, dropout=dropout)


def trained(members, fold=None, dropout=0.2, **settings):
    ensemble = ensembles.deep(lambda: small_mlp(dropout), members, seed=5, fold=fold)
    settings = {"epochs": 3, "lr": 0.1, "batch_size": 64, "seed": 5, "progress": False} | settings
    return ensemble, training.fit(ensemble, INPUTS, LABELS, **settings)


def weights(ensemble):
    return [torch.cat([p.flatten() for p in ensemble.member(m).parameters()]) for m in range(ensemble.members)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine", "warmup": 3},
        {"optimizer": "adam", "lr": 0.01},
        {"clip": 0.5},
    ],
    ids=["sgd", "momentum", "adam", "clip"],
)
def test_ten_members_equal_four_and_six_and_ones(settings):
    whole, history = trained(10, **settings)
    first, first_history = trained(range(4), **settings)
    rest, _ = trained(range(4, 10), **settings)
    alone, _ = trained(range(7, 8), **settings)
    torch.testing.assert_close(weights(whole), weights(first) + weights(rest), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(whole)[7], weights(alone)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(history.loss[:, :4], first_history.loss, rtol=1e-4, atol=1e-5)
    assert (history.loss[-1] < history.loss[0]).all()  # it learns


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=["sgd", "adam"])
def test_shards_side_by_side_equal_one_program(monkeypatch, tmp_path, settings):
    one, history = trained(5, **settings)
    monkeypatch.setattr(training, "SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # shards of 2, 1 and 2 members
    several, sharded_history = trained(5, checkpoint=tmp_path / "run.pt", **settings)
    torch.testing.assert_close(weights(one), weights(several), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(history.loss, sharded_history.loss, rtol=1e-4, atol=1e-5)
    resumed, rest = trained(5, checkpoint=tmp_path / "run.pt", **settings)
    assert rest.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(several), weights(resumed), strict=True))


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw", "lr": 0.01, "clip": 1.0}], ids=["sgd", "adamw"])
def test_folded_equals_separate(settings):
    folded, _ = trained(3, fold=True, **settings)
    separate, _ = trained(3, fold=False, **settings)
    torch.testing.assert_close(weights(folded), weights(separate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.0, 0.1), (0.9, 0.0), (0.9, 0.1)])
def test_fused_step_equals_a_plain_loop(momentum, weight_decay):
    make = lambda: small_mlp(dropout=0.0)  # noqa: E731
    ensemble = ensembles.deep(make, 2, seed=5)
    plain = [ensemble.member(m) for m in range(2)]
    training.fit(
        ensemble, INPUTS, LABELS, epochs=2, lr=0.1, batch_size=64, momentum=momentum, weight_decay=weight_decay,
        schedule="step", milestones=(1,), seed=5, progress=False,
    )  # fmt: skip
    for m, net in enumerate(plain):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum, weight_decay=weight_decay)
        for epoch in range(2):
            optimizer.param_groups[0]["lr"] = 0.1 if epoch == 0 else 0.01
            generator = torch.Generator().manual_seed(ensembles.member_seed(5, m, "order", epoch))
            for rows in torch.randperm(300, generator=generator).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(INPUTS[rows]), LABELS[rows]).backward()
                optimizer.step()
        reference = torch.cat([p.flatten() for p in net.parameters()])
        torch.testing.assert_close(weights(ensemble)[m], reference, rtol=1e-4, atol=1e-5)


def test_cross_entropy_and_its_gradient_equal_torch():
    logits = torch.randn(3, 20, 5, requires_grad=True)
    labels = torch.randint(0, 5, (3, 20))
    for class_weights in (None, torch.rand(5)):
        mine = training.cross_entropy(logits, labels, class_weights)
        (gradient,) = torch.autograd.grad(mine.sum(), logits)
        theirs = torch.stack([F.cross_entropy(z, y, class_weights) for z, y in zip(logits, labels, strict=True)])
        (expected,) = torch.autograd.grad(theirs.sum(), logits)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(gradient, expected)


def test_full_batch_regression():
    x = torch.linspace(-1, 1, 50)[:, None]
    ensemble = ensembles.deep(lambda: models.mlp(1, (20,), classes=1, dropout=0.0), 4)
    history = training.fit(
        ensemble, x, x.square(), epochs=200, lr=0.01, batch_size=50, optimizer="adam", loss="mse", progress=False
    )
    assert history.loss[-1].max() < 0.02
    errors = (training.predict(ensemble, x) - x.square()).square().flatten(1).mean(1)
    torch.testing.assert_close(history.loss[-1], errors, rtol=0.3, atol=1e-4)


def test_convolutional_members_with_batchnorm():
    x, y = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))

    def run(members):
        ensemble = ensembles.deep(lambda: models.wide_resnet(10, 1, classes=3, channels=1), members)
        training.fit(
            ensemble, x, y, epochs=2, lr=0.05, batch_size=16, momentum=0.9, augment=training.crop_flip, progress=False
        )
        return training.predict(ensemble, x)

    both, second = run(2), run(range(1, 2))
    torch.testing.assert_close(both[1:], second, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


def test_crop_flip_moves_whole_images():
    x = torch.arange(2 * 3 * 2 * 6 * 5, dtype=torch.float32).view(2, 3, 2, 6, 5) + 1
    out = training.crop_flip(x, [torch.Generator().manual_seed(m) for m in range(2)], padding=2)
    assert out.shape == x.shape
    for m in range(2):
        generator = torch.Generator().manual_seed(m)
        down, right = torch.randint(5, (2, 3), generator=generator)
        flip = torch.rand(3, generator=generator) < 0.5
        for b in range(3):
            crop = F.pad(x[m, b], (2, 2, 2, 2))[:, down[b] : down[b] + 6, right[b] : right[b] + 5]
            torch.testing.assert_close(out[m, b], crop.flip(-1) if flip[b] else crop)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_interrupted_run_resumes_bit_identically(tmp_path, momentum):
    whole, _ = trained(3, epochs=4, momentum=momentum)
    interrupted = ensembles.deep(small_mlp, 3, seed=5)

    class Stop(Exception):
        pass

    def stop_in_the_third_epoch(x, generators):
        seen.append(1)
        if len(seen) > 12:
            raise Stop
        return x

    seen: list[int] = []
    settings = {"epochs": 4, "lr": 0.1, "batch_size": 64, "seed": 5, "progress": False, "momentum": momentum}
    settings["checkpoint"] = tmp_path / "run.pt"
    with pytest.raises(Stop):
        training.fit(interrupted, INPUTS, LABELS, augment=stop_in_the_third_epoch, **settings)
    resumed = ensembles.deep(small_mlp, 3, seed=5)
    history = training.fit(resumed, INPUTS, LABELS, **settings)
    assert history.steps == 2 * 5  # two of the four epochs were left
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]


def test_predict_in_evaluation_mode():
    ensemble, _ = trained(3, epochs=1)
    ensemble.train()
    logits = training.predict(ensemble, INPUTS, batch_size=70)
    assert ensemble.training
    torch.testing.assert_close(logits, ensemble.eval()(INPUTS))
    torch.testing.assert_close(training.predict(ensemble.member(2), INPUTS)[0], logits[2])


def test_bfloat16_keeps_float32_weights():
    _, history = trained(2)
    rounded, rounded_history = trained(2, precision="bfloat16")
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    torch.testing.assert_close(rounded_history.loss, history.loss, rtol=0.05, atol=0.02)


def test_rounded_products_leave_the_backend_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    with training.arithmetic("bfloat16", torch.device("cpu")):
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        _, history = trained(2)  # runs through the path that a processor with AMX takes
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"
    assert history.loss.isfinite().all()


def test_bad_input(unchecked):
    ensemble = ensembles.deep(small_mlp, 2)
    good = {"epochs": 1, "lr": 0.1, "progress": False}
    with pytest.raises(ValueError, match="empty"):
        training.fit(ensemble, INPUTS[:0], LABELS[:0], **good)
    with pytest.raises(ValueError, match="300 inputs and 10 labels"):
        training.fit(ensemble, INPUTS, LABELS[:10], **good)
    with pytest.raises(ValueError, match=r"0 to 3.*got 0 to 4"):
        training.fit(ensemble, INPUTS, LABELS.clone().fill_(0).index_fill_(0, torch.tensor([1]), 4), **good)
    with pytest.raises(ValueError, match="NaN"):
        training.fit(ensemble, INPUTS.clone().index_fill_(0, torch.tensor([1]), float("nan")), LABELS, **good)
    with pytest.raises(FloatingPointError, match="lower lr"):
        training.fit(ensemble, INPUTS * 1e3, LABELS, **(good | {"lr": 1e30, "epochs": 3}))
    for wrong in ({"optimizer": "lion"}, {"schedule": "linear"}, {"loss": "hinge"}, {"precision": "float64"},
                  {"lr": -1.0}, {"schedule": "step"}, {"epochs": 0}):  # fmt: skip
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            training.fit(ensemble, INPUTS, LABELS, **(good | wrong))
    with pytest.raises(ValueError, match="at least one input"):
        training.predict(ensemble, INPUTS[:0])


def test_checkpoint_of_another_run_is_refused(tmp_path):
    trained(2, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match="delete the file"):
        trained(3, checkpoint=tmp_path / "run.pt")


def test_a_layer_used_twice_is_not_stepped_in_the_backward_pass():
    shared = nn.Linear(16, 16)

    def make():
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(16, 4))

    x = INPUTS
    ensemble = ensembles.deep(make, 2)
    plain = ensemble.member(0)
    training.fit(ensemble, x, LABELS, epochs=1, lr=0.1, batch_size=300, progress=False)
    F.cross_entropy(plain(x), LABELS).backward()
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.1 * p.grad
    torch.testing.assert_close(weights(ensemble)[0], torch.cat([p.flatten() for p in plain.parameters()]))
