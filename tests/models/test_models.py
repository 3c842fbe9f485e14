"""Networks against plain references, and weights from files."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from same import near, unchanged
from torch import nn

from uqlab import models


def plain_resnet(state, x, depth):
    """He et al. 2016 with option A, written out over a state dict."""

    def normed(name, x):
        names = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(state[f"{name}.{k}"] for k in names))

    x = normed("bn1", F.conv2d(x, state["conv1.weight"], padding=1)).relu()
    for layer in (1, 2, 3):
        for i in range((depth - 2) // 6):
            name, stride = f"layer{layer}.{i}", 2 if layer > 1 and i == 0 else 1
            y = F.conv2d(x, state[f"{name}.conv1.weight"], stride=stride, padding=1)
            y = normed(f"{name}.bn1", y).relu()
            y = F.conv2d(y, state[f"{name}.conv2.weight"], padding=1)
            y = normed(f"{name}.bn2", y)
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


@pytest.fixture
def saved():
    return models.small_cnn(3, width=4)


def same(a, b):
    own, other = a.state_dict(), b.state_dict()
    return all(torch.equal(value, other[name]) for name, value in own.items())


@pytest.mark.parametrize("name", ["w.th", "w.safetensors"])
def test_weights_come_back(name, saved, tmp_path):
    save = save_file if name == "w.safetensors" else torch.save
    save(saved.state_dict(), tmp_path / name)
    model = models.small_cnn(3, width=4)
    assert models.load_weights(model, tmp_path / name) is model
    assert same(model, saved)


def test_old_weights_without_a_count_of_batches(saved, tmp_path):
    state = saved.state_dict()
    old = {f"module.{n}": w for n, w in state.items() if "num_batches" not in n}
    torch.save({"epoch": 3, "state_dict": old}, tmp_path / "w.th")
    model = models.load_weights(models.small_cnn(3, width=4), tmp_path / "w.th")
    assert same(model, saved)


class Code:
    def __reduce__(self):
        return pytest.fail, ("this must not run",)


def test_files_that_hold_no_weights_of_the_model_are_refused(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt"):
        models.load_weights(saved, tmp_path / "nowhere.pt")
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for name, content in (
        ("short.pt", whole[:-100]),
        ("text.safetensors", b"no weights"),
        ("code.pt", pickle.dumps(Code(), 2)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            models.load_weights(saved, tmp_path / name)
    for content in ([1, 2], {"epoch": 3}, torch.zeros(2), {0: torch.zeros(2)}):
        torch.save(content, tmp_path / "other.pt")
        with (
            unchanged(saved),
            pytest.raises(ValueError, match=r"holds no state|not fit"),
        ):
            models.load_weights(saved, tmp_path / "other.pt")
    model = models.small_cnn(5, width=4)
    shapes = r"(?s)w\.pt does not fit: .*11\.weight.*\[3, 8\].*\[5, 8\]"
    with unchanged(model), pytest.raises(ValueError, match=shapes):
        models.load_weights(model, tmp_path / "w.pt")


def test_sizes_that_do_not_divide_each_other_are_refused():
    with pytest.raises(ValueError, match=r"6 n \+ 2 .*got 18"):
        models.cifar_resnet(18)
    with pytest.raises(ValueError, match="image_size=8, patch_size=3"):
        models.vit(8, 3)
    with pytest.raises(ValueError, match="heads=5"):
        models.vit(8, 4, heads=5)
