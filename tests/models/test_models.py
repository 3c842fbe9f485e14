"""Networks against plain references, and weights from files."""

import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from same import near, unchanged
from torch import nn

from uqlab import models

pytestmark = pytest.mark.filterwarnings("ignore:the format of .* holds no checksum")


def plain_resnet(state, x, depth):
    """He et al. 2016 with option A, written out over a state dict."""

    def normed(name, x):
        return F.batch_norm(
            x,
            *(
                state[f"{name}.{k}"]
                for k in ("running_mean", "running_var", "weight", "bias")
            ),
        )

    x = normed("bn1", F.conv2d(x, state["conv1.weight"], padding=1)).relu()
    for layer in (1, 2, 3):
        for i in range((depth - 2) // 6):
            name, stride = f"layer{layer}.{i}", 2 if layer > 1 and i == 0 else 1
            y = normed(
                f"{name}.bn1",
                F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1),
            ).relu()
            y = normed(
                f"{name}.bn2", F.conv2d(y, state[f"{name}.conv2.weight"], padding=1)
            )
            shortcut = torch.zeros_like(y)
            quarter = y.shape[1] // 4 if stride == 2 else 0
            shortcut[:, quarter : quarter + x.shape[1]] = x[:, :, ::stride, ::stride]
            x = (y + shortcut).relu()
    return F.linear(x.mean((2, 3)), state["linear.weight"], state["linear.bias"])


@pytest.mark.parametrize("depth", [8, 20])
def test_cifar_resnet(depth):
    network = models.cifar_resnet(depth, classes=7).eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    x = torch.randn(3, 3, 32, 32)
    near(network(x), plain_resnet(network.state_dict(), x, depth))


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)]
)
def test_cifar_resnets_have_the_published_numbers_of_parameters(depth, millions):
    count = sum(p.numel() for p in models.cifar_resnet(depth).parameters())
    assert count / 1e6 == pytest.approx(
        millions, abs=0.05 if depth == 110 else 0.005
    )  # He et al. 2016, table 6


def test_small_cnn_keeps_the_map():
    map_of = models.small_cnn(width=8)[:-3]
    assert map_of(torch.rand(2, 1, 8, 8)).shape == (2, 16, 8, 8)
    map_of = models.small_cnn(width=8, patch=4)[:-3]
    assert map_of(torch.rand(2, 1, 28, 28)).shape == (2, 16, 7, 7)


@pytest.fixture
def saved():
    return models.small_cnn(3, width=4)


def same(a, b):
    weights = b.state_dict()
    return all(
        torch.equal(value, weights[name]) for name, value in a.state_dict().items()
    )


@pytest.mark.parametrize("name", ["w.th", "w.pt", "w.pth", "w.safetensors"])
def test_weights_come_back(name, saved, tmp_path):
    state = saved.state_dict()
    (save_file if name == "w.safetensors" else torch.save)(state, tmp_path / name)
    model = models.small_cnn(3, width=4)
    assert not same(model, saved)
    assert models.load_weights(model, tmp_path / name) is model
    assert same(model, saved)
    assert same(
        models.load_weights(models.small_cnn(3, width=4), str(tmp_path / name)), saved
    )


def test_weights_as_others_save_them(saved, tmp_path):
    state = {
        f"module.{name}": w
        for name, w in saved.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "w.th")
    assert same(
        models.load_weights(models.small_cnn(3, width=4), tmp_path / "w.th"), saved
    )


def test_weights_of_another_model_are_refused(saved, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(saved.state_dict(), path)
    model = models.small_cnn(5, width=4)
    shapes = r"(?s)w\.pt does not fit: .*11\.weight.*\[3, 8\].*\[5, 8\].*11\.bias"
    with unchanged(model), pytest.raises(ValueError, match=shapes):
        models.load_weights(model, path)
    with pytest.raises(
        ValueError, match=r"(?s)Missing key.*conv1\.weight.*Unexpected key.*0\.weight"
    ):
        models.load_weights(models.cifar_resnet(8), path)


def test_a_checksum_stands_for_the_one_that_the_format_lacks(saved, tmp_path):
    path, model = tmp_path / "w.safetensors", models.small_cnn(3, width=4)
    save_file(saved.state_dict(), path)
    with pytest.warns(
        UserWarning, match=r"format of w.safetensors holds no checksum.* give sha256="
    ) as told:
        models.load_weights(model, path)
    digest = str(told[0].message).partition('sha256="')[2][:16]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        ValueError,
        match=rf"w.safetensors has the sha256 \w+, not {digest}; fetch it again",
    ):
        models.load_weights(models.small_cnn(3, width=4), path, sha256=digest)
    path.write_bytes(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(
            models.load_weights(models.small_cnn(3, width=4), path, sha256=digest),
            saved,
        )


class Code:
    def __reduce__(self):
        return pytest.fail, ("this must not run",)


def test_files_that_hold_no_weights_are_refused(saved, tmp_path):
    for name in ("nowhere.pt", "nowhere.safetensors"):
        with pytest.raises(FileNotFoundError, match=name):
            models.load_weights(saved, tmp_path / name)
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for name, content in (
        ("empty.pt", b""),
        ("short.pt", whole[:-100]),
        ("text.pt", b"no weights"),
        ("code.pt", pickle.dumps(Code(), 2)),
        ("text.safetensors", b"no weights"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{name} cannot be read: .*save model.state_dict"
        ):
            models.load_weights(saved, tmp_path / name)
    torch.save(saved, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt cannot be read: .*Python objects"):
        models.load_weights(saved, tmp_path / "model.pt")
    for content in (
        [1, 2],
        {"epoch": 3},
        torch.zeros(2),
        {0: torch.zeros(2)},
        {"state_dict": {1: torch.zeros(2)}},
    ):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=r"other\.pt holds no state dict"):
            models.load_weights(saved, tmp_path / "other.pt")


def test_bad_input():
    for depth in (2, 18, 21):
        with pytest.raises(ValueError, match=f"6 n \\+ 2 .*got {depth}"):
            models.cifar_resnet(depth)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"patch_size": 3},
            "patch_size must divide image_size.*image_size=8, patch_size=3",
        ),
        ({"heads": 5}, "heads must divide width.*heads=5"),
    ],
)
def test_bad_vits(sizes, message):
    with pytest.raises(ValueError, match=message):
        models.vit(**{"image_size": 8, "patch_size": 4} | sizes)
