"""Models of one's own, from each kind of place; what is wrong is refused in words."""

import importlib
import warnings

import pytest
import torch
import transformers
from same import near
from torch import nn

from uqlab import data, ensembles, models
from uqlab.study import bring, methods

MINE = """
from torch import nn

def make(classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def several():
    return [make(), make()]

def number():
    return 3

def features():
    return nn.Sequential(nn.Flatten(0))

class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.net = factor, make()

    def forward(self, x):
        return self.factor * self.net(x)

def unlike():
    return [Scaled(float(m)) for m in range(11)]

def ensemble():
    from uqlab import ensembles
    return ensembles.deep(make, 2)
"""


@pytest.fixture(scope="module")
def task():
    return data.load("digits", "train", limit=60)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def linear(classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def same(found, expected, x):
    near(found.model(x), expected(x))


def test_a_function_of_a_file_or_of_a_module(mine, task):
    found = bring.model("mine.py:make", task)
    bring.check(found.model, task.inputs, task)
    assert not found.model.training
    assert found.files == {}
    two = bring.model("mine.py:several", task).model
    assert isinstance(two, ensembles.Ensemble)
    assert two.members == 2
    small = bring.model("uqlab.models:small_cnn", task, settings={"width": 4}).model
    bring.check(small, task.inputs, task)
    assert (
        bring.model("mine.py:make", data.load("digits[0-3]", "train", limit=9))
        .model[1]
        .out_features
        == 4
    )


def test_the_number_of_classes_is_given_where_it_is_asked_for(mine, task):
    three = bring.model("mine.py:make", task, settings={"classes": 3}).model
    with pytest.raises(
        ValueError, match=r"\[batch, 10\], .* each class of digits, got \[2, 3\]"
    ):
        bring.check(three, task.inputs, task)


def test_weights_of_one_file_and_of_a_folder(mine, task):
    networks = [linear(), linear()]
    torch.save(networks[0].state_dict(), mine / "one.pt")
    (mine / "both").mkdir()
    torch.save(networks[0].state_dict(), mine / "both" / "0.pt")
    torch.save({"state_dict": networks[1].state_dict()}, mine / "both" / "1.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = bring.model("mine.py:make", task, weights="one.pt")
    same(one, networks[0], task.inputs)
    ((name, digits),) = one.files.items()
    assert name == "one.pt"
    assert len(digits) == 16
    for place in ("both", ["both/*.pt*"], ["both/0.pt", "both/1.pth"]):
        same(
            bring.model("mine.py:make", task, weights=place),
            ensembles.from_members(networks),
            task.inputs,
        )
    scaled = bring.model("mine.py:make", task, weights="one.pt", mean=[0.5], std=[0.2])
    same(
        scaled,
        nn.Sequential(models.Standardize([0.5], [0.2]), networks[0]),
        task.inputs,
    )


def test_files_of_one_name_are_all_told(mine, task):
    weights = [f"{run}/checkpoints/best.pt" for run in ("one", "two")]
    for place in weights:
        (mine / place).parent.mkdir(parents=True)
        torch.save(linear().state_dict(), mine / place)
    assert bring.model("mine.py:make", task, weights=weights).files.keys() == {*weights}


def test_of_several_networks_each_gets_its_own_file(mine, task):
    """Also the tenth, whose name is before that of the second."""
    (mine / "runs[1]").mkdir()
    networks = [linear() for _ in range(11)]
    for m, network in enumerate(networks):
        state = {f"net.{name}": w for name, w in network.state_dict().items()}
        torch.save(state, mine / "runs[1]" / f"{m}.pt")
    found = bring.model("mine.py:unlike", task, weights="runs[1]")
    expected = torch.stack([m * net(task.inputs) for m, net in enumerate(networks)])
    near(found.model(task.inputs), expected)
    with pytest.raises(ValueError, match=r"11 files, one for each network .* got 1"):
        bring.model("mine.py:unlike", task, weights="runs[1]/3.pt")


@pytest.mark.parametrize(
    "beside", ["optimizer.pt", "rng_state_0.pth", "training_args.bin", "training.pt"]
)
def test_what_a_training_keeps_beside_the_weights_is_left_out(mine, task, beside):
    network, folder = linear(), mine / "run"
    folder.mkdir()
    torch.save(network.state_dict(), folder / "training_3.pt")
    torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, folder / beside)
    found = bring.model("mine.py:make", task, weights=folder)
    same(found, network, task.inputs)
    two = ensembles.deep(linear, 2)
    two.save_pretrained(folder)
    same(bring.model("mine.py:make", task, weights=folder), two, task.inputs)


def test_a_file_of_two_networks_is_refused(mine, task):
    states = {"student": linear().state_dict(), "teacher": linear().state_dict()}
    torch.save(states, mine / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt does not fit"):
        bring.model("mine.py:make", task, weights="a.pt")


def test_a_file_of_a_package_s_name_hides_no_package(mine, task):
    (mine / "colorsys.py").write_text(MINE)
    bring.model("colorsys.py:make", task)
    assert importlib.import_module("colorsys").rgb_to_hsv


def test_a_pickle_is_not_read(mine, task):
    class Danger:
        def __reduce__(self):
            return (open, (str(mine / "it_ran"), "w"))

    torch.save(linear(), mine / "network.pt")
    torch.save({"state_dict": Danger()}, mine / "danger.pt")
    for file in ("network.pt", "danger.pt"):
        with pytest.raises(
            ValueError, match="holds Python objects, which would run code"
        ):
            bring.model("mine.py:make", task, weights=file)
    assert not (mine / "it_ran").exists()


def test_an_ensemble_that_was_saved(tmp_path):
    (task,) = methods.suited("", data.load("digits", "train", limit=4))
    two = ensembles.lora(models.embedded(10), 2, 2, seed=1)
    two.save_pretrained(tmp_path / "two")
    for source in ("uqlab.models:embedded", ""):
        same(
            bring.model(source, task, weights=tmp_path / "two"),
            two,
            task.inputs,
        )
    with pytest.raises(ValueError, match="saved ensemble"):
        bring.model("", task, weights=tmp_path / "two", mean=[0.5], std=[0.5])


def test_a_folder_of_transformers(tmp_path, task):
    network = models.vit(8, 4, width=8, layers=1, heads=2)
    network.save_pretrained(tmp_path / "vit")
    same(bring.model(tmp_path / "vit", task), network, task.inputs)
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5], "image_std": [0.5]}'
    )
    same(bring.model(tmp_path / "vit", task), lambda x: network(2 * x - 1), task.inputs)
    with pytest.raises(ValueError, match="has its own scale"):
        bring.model(tmp_path / "vit", task, mean=[0.1], std=[1.0])
    larger = task.resize(16)
    bring.check(bring.model(tmp_path / "vit", larger).model, larger.inputs, larger)
    four = data.load("digits[0-3]", "train", limit=9)
    with pytest.raises(ValueError, match="must classify the 4 classes"):
        bring.model(tmp_path / "vit", four)
    bring.check(
        bring.model(tmp_path / "vit", four, new_classifier=True).model,
        four.inputs,
        four,
    )


@pytest.mark.parametrize("side", [8, 16, 4])
@pytest.mark.parametrize("resample", [2, 3])
def test_a_folder_with_its_preprocessor_is_the_pipeline_of_transformers(
    tmp_path, task, side, resample
):
    """Of images as large as it takes exactly; else but for PIL's rounding to bytes."""
    network = models.vit(side, 2, channels=3, width=8, layers=1, heads=2)
    network.save_pretrained(tmp_path)
    shape = {"height": side, "width": side}
    scale = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    processor = transformers.ViTImageProcessor(size=shape, resample=resample, **scale)
    processor.save_pretrained(tmp_path)
    task = task.resize(8, 3)
    images = (255 * task.inputs).round().to(torch.uint8)
    each = list(images.permute(0, 2, 3, 1).numpy())
    expected = network(**processor(each, return_tensors="pt"))
    found = bring.model(tmp_path, task).model(images / 255)
    if side == 8:
        near(found, expected)
    else:
        near(found, expected, atol=0.02 * expected.std().item(), rtol=0)


@pytest.mark.parametrize(
    "text",
    [
        "{broken",
        '{"do_normalize": true}',
        '{"do_rescale": false, "image_mean": [0.5], "image_std": [0.5]}',
        '{"do_flip_channel_order": true}',
    ],
)
def test_a_preprocessor_that_is_not_understood_is_refused(tmp_path, task, text):
    models.vit(8, 4, width=8, layers=1, heads=2).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match="folder without one"):
        bring.model(tmp_path, task)


def test_a_name_on_the_hub_without_a_preprocessor_is_refused(monkeypatch, task):
    network = models.vit(8, 4, width=8, layers=1, heads=2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(models, "from_pretrained", lambda *_, **__: network)
    with pytest.raises(ValueError, match="folder without one"):
        methods.backbone("no/such-network", task)


def test_a_folder_of_texts(tmp_path):
    (tmp_path / "films.tsv").write_text(
        "sentence\tlabel\n" + "a good film\t1\na dull film\t0\n" * 20
    )
    films = data.load(tmp_path / "films.tsv", "train")
    with pytest.raises(ValueError, match="BertModel"):
        bring.model(models.minilm(), films)
    reader = bring.model(models.minilm(), films, new_classifier=True).model
    bring.check(reader, methods.encode(reader, films)[0], films)


WRONG = {
    "no file": ("nowhere.py:make", {}, FileNotFoundError, "no file .*nowhere.py"),
    "no function at all": ("mine", {}, ValueError, "files of weights go into"),
    "no such function": ("mine.py:mkae", {}, ValueError, "no function 'mkae', .*make"),
    "no such function of a module": (
        "uqlab.models:smal_cnn",
        {},
        ValueError,
        "no function 'smal_cnn', .*small_cnn",
    ),
    "a scale for an ensemble": (
        "mine.py:ensemble",
        {"mean": [0.5], "std": [0.5]},
        ValueError,
        "mean and std do not apply to an ensemble",
    ),
    "no network": ("mine.py:number", {}, TypeError, "must return torch modules"),
    "no std": ("mine.py:make", {"mean": [0.5]}, ValueError, "mean and std"),
    "no weights": (
        "mine.py:make",
        {"weights": "none.pt"},
        FileNotFoundError,
        "none.pt",
    ),
    "other weights": (
        "mine.py:make",
        {"weights": "other.pt"},
        ValueError,
        "other.pt does not fit",
    ),
    "an empty folder": (".", {}, ValueError, "has no config.json|no config.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sources_and_weights_are_refused(mine, task, name):
    source, more, kind, words = WRONG[name]
    torch.save(linear(4).state_dict(), mine / "other.pt")
    with pytest.raises(kind, match=words):
        bring.model(source, task, **more)


@pytest.mark.parametrize("size", [28, 4])
def test_a_network_for_images_of_another_size_is_refused_by_name(mine, size):
    found = bring.model("mine.py:make", data.load("digits"))
    other = data.load("digits", limit=4).resize(size)
    words = rf"Sequential does not take inputs \[1, {size}, {size}\] of digits"
    with pytest.raises(ValueError, match=words):
        bring.check(found.model, other.inputs, other)
