"""Training: one program for all members equals the members trained one by one."""

import contextlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from same import near
from small_training import INPUTS, LABELS, small_mlp, trained, weights
from torch import nn
from torch.testing import assert_close

from uqlab import ensembles, models, training
from uqlab.core import modules


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "scheduler": "cosine", "warmup": 3},
        {"optimizer": "adam", "lr": 0.01},
        {"max_grad_norm": 0.5, "dropout": 0.0},
    ],
    ids=["sgd", "momentum", "adam", "clip"],
)
def test_ten_members_equal_four_and_six_and_ones(settings):
    whole, history = trained(10, **settings)
    first, first_history = trained(range(4), **settings)
    rest, _ = trained(range(4, 10), **settings)
    alone, _ = trained(range(7, 8), **settings)
    near(weights(whole), weights(first) + weights(rest))
    near(weights(whole)[7], weights(alone)[0])
    near(history.loss[:, :4], first_history.loss)
    assert (history.loss[-1] < history.loss[0]).all()  # it learns


def test_shards_side_by_side_equal_one_program(monkeypatch, tmp_path):
    settings = {"optimizer": "adam", "lr": 0.01}
    one, history = trained(5, **settings)
    monkeypatch.setattr(modules, "ONE_THREAD", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # shards of 2, 1 and 2 members
    several, sharded_history = trained(5, resume=tmp_path, **settings)
    near(weights(one), weights(several))
    near(history.loss, sharded_history.loss)
    resumed, rest = trained(5, resume=tmp_path, **settings)
    torch.set_num_threads(threads)
    assert rest.steps == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(several), weights(resumed), strict=True)
    )


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0])
VARIANTS = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "step": {"scheduler": "step", "milestones": (1,)},
    "cosine after warm-up": {"scheduler": "cosine", "warmup": 3},
    "clip": {"max_grad_norm": 0.2},
    "class weights": {"class_weights": WEIGHTS},
    "mse": {"loss": "mse"},
}
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def rate(settings, step, epoch):
    if settings.get("scheduler") == "step":
        return 1.0 if epoch < 1 else 0.1
    if settings.get("scheduler") == "cosine":
        later = (1 + math.cos(math.pi * (step - 3) / 7)) / 2
        return (step + 1) / 3 if step < 3 else later
    return 1.0


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_equals_a_plain_loop_with_torch_optim(variant, bias):
    def make():
        layers = (nn.Linear(16, 11, bias), nn.ReLU(), nn.Linear(11, 7, bias), nn.ReLU())
        return nn.Sequential(*layers, nn.Linear(7, 4, bias))

    how = {"epochs": 2, "lr": 0.1, "batch_size": 64, "seed": 5} | variant
    mse, weight = how.get("loss") == "mse", how.get("class_weights")
    labels = F.one_hot(LABELS, 4).float() if mse else LABELS
    ensemble = ensembles.deep(make, 2, seed=5)
    plain = [ensemble.member(m).train() for m in range(2)]
    history = training.fit(ensemble, INPUTS, labels, progress=False, **how)
    options = {k: how[k] for k in ("weight_decay", "momentum") if k in how}
    for m, net in enumerate(plain):
        kind = KINDS[how.get("optimizer", "sgd")]
        optimizer = kind(net.parameters(), how["lr"], **options)
        step = total = 0
        for epoch in range(2):
            total = 0.0
            seed = ensembles.member_seed(5, m, "order", epoch)
            order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
            for rows in order.split(64):
                optimizer.param_groups[0]["lr"] = rate(how, step, epoch) * how["lr"]
                z, y = net(INPUTS[rows]), labels[rows]
                loss = F.mse_loss(z, y) if mse else F.cross_entropy(z, y, weight)
                optimizer.zero_grad()
                loss.backward()
                if limit := how.get("max_grad_norm"):
                    nn.utils.clip_grad_norm_(net.parameters(), limit)
                optimizer.step()
                step, total = step + 1, total + loss.item() * len(rows) / 300
        near(weights(ensemble)[m], torch.cat([p.flatten() for p in net.parameters()]))
        assert history.loss[-1, m].item() == pytest.approx(total, rel=1e-4)


def test_frozen_layers_stay_as_they_are():
    other = lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    for make, threshold in ((small_mlp, 1e8), (small_mlp, 0), (other, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modules, "ONE_THREAD", threshold)
            ensemble = ensembles.deep(make, 2)
            frozen = [next(p for p in ensemble.parameters() if p.requires_grad)]
            for p in frozen:
                p.requires_grad_(False)
            before = [p.clone() for p in frozen]
            training.fit(ensemble, INPUTS, LABELS, epochs=1, lr=0.5, progress=False)
            assert all(torch.equal(p, q) for p, q in zip(frozen, before, strict=True))


def test_cross_entropy_and_its_gradient_equal_torch():
    logits = torch.randn(3, 20, 5, requires_grad=True)
    labels = torch.randint(0, 5, (3, 20))
    for class_weights, smoothing in itertools.product(
        (None, torch.rand(5)), (0.0, 0.1)
    ):
        mine = training.cross_entropy(logits, labels, class_weights, smoothing)
        (gradient,) = torch.autograd.grad(mine.sum(), logits)
        how = {"weight": class_weights, "label_smoothing": smoothing}
        theirs = torch.stack(
            [F.cross_entropy(z, y, **how) for z, y in zip(logits, labels, strict=True)]
        )
        (expected,) = torch.autograd.grad(theirs.sum(), logits)
        near(mine, theirs)
        near(gradient, expected)


def test_convolutional_members_with_batchnorm():
    x, y = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))

    def run(members):
        make = lambda: models.wide_resnet(10, 1, classes=3, channels=1)  # noqa: E731
        ensemble = ensembles.deep(make, members)
        how = {"epochs": 2, "lr": 0.05, "batch_size": 16, "momentum": 0.9}
        how |= {"augment": training.crop_flip, "progress": False}
        training.fit(ensemble, x, y, **how)
        return training.predict(ensemble, x)

    both, second = run(2), run(range(1, 2))
    near(both[1:], second)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


@pytest.mark.parametrize("mirrored", [True, False])
def test_crop_flip_moves_whole_images(mirrored):
    x = torch.arange(2 * 3 * 2 * 6 * 5, dtype=torch.float32).view(2, 3, 2, 6, 5) + 1
    made = lambda: [torch.Generator().manual_seed(m) for m in range(2)]  # noqa: E731
    out = training.crop_flip(x, made(), 2, mirrored)
    for m, generator in enumerate(made()):
        down, right = torch.randint(5, (2, 3), generator=generator)
        flip = torch.rand(3, generator=generator) < 0.5
        for b in range(3):
            rows, columns = slice(down[b], down[b] + 6), slice(right[b], right[b] + 5)
            crop = F.pad(x[m, b], (2, 2, 2, 2))[:, rows, columns]
            near(out[m, b], crop.flip(-1) if flip[b] and mirrored else crop)


def test_bfloat16_keeps_float32_weights_and_says_where_it_is_no_use():
    _, history = trained(2)
    matrix_units = torch.cpu.get_capabilities().get("amx_bf16", False)
    with (
        contextlib.nullcontext()
        if matrix_units
        else pytest.warns(UserWarning, match="stay float32")
    ):
        rounded, rounded_history = trained(2, precision="bfloat16")
    assert all(p.dtype == torch.float32 for p in rounded.parameters())
    assert_close(rounded_history.loss, history.loss, rtol=0.05, atol=0.02)


ONE_HIGH = LABELS.new_zeros(300).index_fill_(0, torch.tensor(1), 4)
ONE_NAN = INPUTS.index_fill(0, torch.tensor(1), math.nan)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": INPUTS[:0], "labels": LABELS[:0]}, ValueError, "at least one"),
        ({"labels": LABELS[:10]}, ValueError, r"\[samples\] = \[300\] .*got \[10\]"),
        ({"labels": ONE_HIGH}, ValueError, "0 to 3.*got 0 to 4"),
        ({"labels": LABELS.float()}, TypeError, "labels must be"),
        ({"labels": torch.randn(300, 3), "loss": "mse"}, ValueError, "mse"),
        ({"data": ONE_NAN}, ValueError, "NaN"),
        (
            {"data": INPUTS * 1e3, "lr": 1e30, "epochs": 3},
            FloatingPointError,
            "lower lr",
        ),
        ({"optimizer": "lion"}, ValueError, "^optimizer must be one of 'sgd'"),
        ({"scheduler": "step"}, ValueError, "needs milestones"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
        ({"warmup": 0.1}, TypeError, "warmup must be"),
        ({"scheduler": "step", "milestones": [0.5]}, TypeError, "milestone must be"),
        ({"class_weights": [1.0, 1.0, 1.0, -1.0]}, ValueError, "class_weights must"),
        ({"class_weights": [1.0, 1.0, 1.0, math.nan]}, ValueError, "class_weights"),
        ({"class_weights": torch.zeros(4)}, ValueError, "class_weights must"),
        (
            {"loss": lambda z, y: z.sum((1, 2)), "class_weights": torch.ones(4)},
            ValueError,
            "^class_weights need loss=",
        ),
    ],
)
def test_bad_input(change, error, message, unchecked):
    given = {"data": INPUTS, "labels": LABELS, "epochs": 1, "lr": 0.1} | change
    with pytest.raises(error, match=message):
        training.fit(ensembles.deep(small_mlp, 2), progress=False, **given)
