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
from uqlab.core import devices


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


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}],
    ids=["sgd", "adam"],
)
def test_shards_side_by_side_equal_one_program(monkeypatch, tmp_path, settings):
    one, history = trained(5, **settings)
    monkeypatch.setattr(devices, "ONE_THREAD", 0)
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
    "sgd": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "both": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "step": {"scheduler": "step", "milestones": (1,)},
    "cosine after warm-up": {"scheduler": "cosine", "warmup": 3},
    "clip": {"max_grad_norm": 0.2},
    "class weights": {"class_weights": WEIGHTS},
    "mse": {"loss": "mse"},
    "mse, adam": {"loss": "mse", "optimizer": "adam", "lr": 0.01},
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_equals_a_plain_loop_with_torch_optim(variant, bias):
    def make():
        return nn.Sequential(
            nn.Linear(16, 11, bias),
            nn.ReLU(),
            nn.Linear(11, 7, bias),
            nn.ReLU(),
            nn.Linear(7, 4, bias),
        )

    settings = {"epochs": 2, "lr": 0.1, "batch_size": 64, "seed": 5} | variant
    mse = settings.get("loss") == "mse"
    labels = F.one_hot(LABELS, 4).float() if mse else LABELS
    ensemble = ensembles.deep(make, 2, seed=5)
    plain = [ensemble.member(m).train() for m in range(2)]
    history = training.fit(ensemble, INPUTS, labels, progress=False, **settings)
    kinds = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    options = {"weight_decay": settings.get("weight_decay", 0.0)}
    if "momentum" in settings:
        options["momentum"] = settings["momentum"]
    for m, net in enumerate(plain):
        optimizer = kinds[settings.get("optimizer", "sgd")](
            net.parameters(), settings["lr"], **options
        )
        step, total = 0, 0.0
        for epoch in range(2):
            total = 0.0
            generator = torch.Generator().manual_seed(
                ensembles.member_seed(5, m, "order", epoch)
            )
            for rows in torch.randperm(300, generator=generator).split(64):
                factor = 1.0
                if settings.get("scheduler") == "step":
                    factor = 1.0 if epoch < 1 else 0.1
                elif settings.get("scheduler") == "cosine":
                    factor = (
                        (step + 1) / 3
                        if step < 3
                        else (1 + math.cos(math.pi * (step - 3) / 7)) / 2
                    )
                optimizer.param_groups[0]["lr"] = factor * settings["lr"]
                outputs = net(INPUTS[rows])
                weight = settings.get("class_weights")
                loss = (
                    F.mse_loss(outputs, labels[rows])
                    if mse
                    else F.cross_entropy(outputs, labels[rows], weight)
                )
                optimizer.zero_grad()
                loss.backward()
                if "max_grad_norm" in settings:
                    nn.utils.clip_grad_norm_(
                        net.parameters(), settings["max_grad_norm"]
                    )
                optimizer.step()
                step, total = step + 1, total + loss.item() * len(rows) / 300
        reference = torch.cat([p.flatten() for p in net.parameters()])
        near(weights(ensemble)[m], reference)
        assert history.loss[-1, m].item() == pytest.approx(total, rel=1e-4)


def test_frozen_layers_stay_as_they_are():
    other = lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))  # noqa: E731
    for make, threshold in ((small_mlp, 1e8), (small_mlp, 0), (other, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "ONE_THREAD", threshold)
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
        ensemble = ensembles.deep(
            lambda: models.wide_resnet(10, 1, classes=3, channels=1), members
        )
        training.fit(
            ensemble,
            x,
            y,
            epochs=2,
            lr=0.05,
            batch_size=16,
            momentum=0.9,
            augment=training.crop_flip,
            progress=False,
        )
        return training.predict(ensemble, x)

    both, second = run(2), run(range(1, 2))
    near(both[1:], second)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


@pytest.mark.parametrize("mirrored", [True, False])
def test_crop_flip_moves_whole_images(mirrored):
    x = torch.arange(2 * 3 * 2 * 6 * 5, dtype=torch.float32).view(2, 3, 2, 6, 5) + 1
    out = training.crop_flip(
        x,
        [torch.Generator().manual_seed(m) for m in range(2)],
        padding=2,
        flip=mirrored,
    )
    for m in range(2):
        generator = torch.Generator().manual_seed(m)
        down, right = torch.randint(5, (2, 3), generator=generator)
        flip = torch.rand(3, generator=generator) < 0.5
        for b in range(3):
            crop = F.pad(x[m, b], (2, 2, 2, 2))[
                :, down[b] : down[b] + 6, right[b] : right[b] + 5
            ]
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
        ({"labels": LABELS > 1}, TypeError, "labels must be"),
        ({"labels": LABELS[:, None]}, ValueError, "labels must be"),
        ({"labels": torch.randn(300, 3), "loss": "mse"}, ValueError, "mse"),
        ({"data": ONE_NAN}, ValueError, "NaN"),
        (
            {"data": INPUTS * 1e3, "lr": 1e30, "epochs": 3},
            FloatingPointError,
            "lower lr",
        ),
        ({"optimizer": "lion"}, ValueError, '^optimizer must be "sgd"'),
        ({"scheduler": "linear"}, ValueError, '^scheduler must be "constant"'),
        ({"loss": "hinge"}, ValueError, "^loss must be .* got 'hinge'"),
        ({"precision": "float64"}, ValueError, "^precision must be"),
        ({"scheduler": "step"}, ValueError, "needs milestones"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
        ({"warmup": 0.1}, TypeError, "warmup must be"),
        ({"scheduler": "step", "milestones": [0.5]}, TypeError, "milestone must be"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
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
