"""What researchers bring is read, or refused at once in a sentence with a way out."""

import argparse
import itertools
import time
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from uqlab import (
    data,
    ensembles,
    extraction,
    gradients,
    heads,
    metrics,
    models,
    runs,
    training,
    uncertainty,
)
from uqlab.analysis import representations
from uqlab.study import baselines, bring, decide, methods, scoreboard, scores

pytestmark = pytest.mark.usefixtures("unchecked")  # annotations are no refusals
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
PAIRS = TensorDataset(X, Y)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


NETWORK = network()


def fit(inputs=X, labels=Y, ensemble=None):
    ensemble = ensemble or ensembles.deep(network, 2)
    return training.fit(ensemble, inputs, labels, epochs=1, lr=0.1, progress=False)


class NoEnd(Dataset):
    def __getitem__(self, index):
        return X[0], 0


class Listed(NoEnd, Sequence):
    def __len__(self):
        return 3


class Named(NoEnd, Mapping):
    def __iter__(self):
        return itertools.repeat("x")

    __len__ = Listed.__len__


class Stream(IterableDataset):
    def __iter__(self):
        return itertools.repeat((X[0], 0))


class HuggingFace:
    """As much of a dataset that streams as is looked at."""

    def with_format(self, kind):
        return Stream()


ENDLESS = {
    "Dataset": NoEnd(),
    "IterableDataset": Stream(),
    "loader": DataLoader(Stream()),
    "generator": itertools.repeat(X),
    "Hugging Face": HuggingFace(),
}
LISTS = {
    "Datasets": [NoEnd()],
    "loaders in lists": [[DataLoader(Stream())]],
}
WITH_AN_END = {
    "Dataset": PAIRS,
    "Subset": Subset(PAIRS, range(12)),
    "loader": DataLoader(PAIRS, 5),
    "pair": (X, Y),
}


def board(given, y):
    known = given if y is None else (given, y)
    how = {"methods": ["single"], "scores": ["energy"], "seeds": [0], "epochs": 1}
    far = {"far": X + 1}
    row = scoreboard.measure(network(), known, known, far, repeats=1, **how).iloc[0]
    return torch.tensor([row["aurc"], row["auroc_energy_far"]])


TAKERS = {
    "score": lambda given, y: scores.SCORES["entropy"](network(), given),
    "score that learns": lambda given, y: scores.SCORES["knn"].fit(NETWORK, given, y)(
        NETWORK, X
    ),
    "laplace": lambda given, y: ensembles.laplace(
        network(), given, 4, prior_variance=1.0
    )(X),
    "masks": lambda given, y: (
        extraction.fit_masks(
            extraction.masks(network(), members=2), given, y, steps=2, progress=False
        ).loss
    ),
    "gradients": lambda given, y: gradients.exgrad(network(), given),
    "features": lambda given, y: representations.penultimate(network(), given),
    "method": lambda given, y: methods.train(
        "lora", network(), given, y, members=2, epochs=1, lr=0.1, rank=2, progress=False
    )(X),
    "board": board,
}


@pytest.mark.parametrize("given", WITH_AN_END.values(), ids=WITH_AN_END)
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_datasets_and_loaders_are_read_where_tensors_are(taker, given):
    found = []
    for inputs, labels in ((X, Y), (given, None)):
        torch.manual_seed(0)
        found.append(taker(inputs, labels))
    assert_close(*found)


@pytest.mark.parametrize("given", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_what_may_have_no_end_is_refused_at_once_with_a_way_out(taker, given):
    began = time.process_time()
    with pytest.raises(TypeError, match="islice"):
        taker(given, None)
    assert time.process_time() - began < 5  # nothing was read: it has no end


@pytest.mark.parametrize("given", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("taker", TAKERS.values(), ids=TAKERS)
def test_lists_of_datasets_are_no_data(taker, given):
    with pytest.raises(TypeError, match="make them first"):
        taker(given, Y)


def test_the_printed_lines_make_tensors():
    batches = DataLoader(PAIRS, 5)
    names = {"batches": batches, "torch": torch}
    with pytest.raises(TypeError) as refused:
        gradients.exgrad(network(), (batch for batch in batches))
    lines = str(refused.value).partition("of it:\n")[2]
    exec("\n".join(map(str.strip, lines.splitlines())), names)
    assert torch.equal(names["x"], X)
    assert torch.equal(names["y"], Y)


def test_heads_are_asked_by_loaders():
    x, y = torch.randn(9, 1, 8, 8), torch.arange(9) % 3
    network = models.vit(8, 4, width=16, layers=1, heads=2, classes=3)
    loader = DataLoader(TensorDataset(x, y), 4)
    assert_close(
        heads.taylor_scores(network, loader), heads.taylor_scores(network, x, y)
    )
    found = heads.greedy_circuit(
        network, loader, None, loader, budget=1, progress=False
    )
    assert found == heads.greedy_circuit(network, x, y, x, budget=1, progress=False)
    assert_close(heads.head_features(network, loader), heads.head_features(network, x))


@pytest.mark.parametrize(
    "take",
    [uncertainty.decompose, lambda given: metrics.accuracy(X[None, :, :3], given)],
)
def test_logits_and_labels_are_tensors(take):
    with pytest.raises(TypeError, match="make them first"):
        take(DataLoader(PAIRS))


class Returns(nn.Module):
    """A network with a way of its own to return logits."""

    def __init__(self, wrap):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.head(self.body(x)))


WRAPS = {
    "tuple": lambda z: (z, z[:1]),
    "mapping": lambda z: {"hidden": z[:1], "logits": z},
    "first of a mapping": lambda z: {"out": z, "aux": z[:1]},
    "attribute": lambda z: argparse.Namespace(logits=z),
    "after a loss": lambda z: (z.sum(), z),
    "beside a loss": lambda z: {"loss": z.sum(), "output": z},
}


def masked(model):
    ensemble = extraction.masks(model, members=2)
    extraction.fit_masks(ensemble, X, Y, steps=1, progress=False)
    return ensemble(X)


USERS = {
    "predict": lambda m: training.predict(m, X),
    "members": lambda m: ensembles.from_members([m, m])(X),
    "laplace": lambda m: ensembles.laplace(m, X, 2, prior_variance=1e-12)(X),
    "lora": lambda m: ensembles.lora(m, 2, 2, seed=0)(X),
    "masks": masked,
    "exgrad": lambda m: gradients.exgrad(m, X),
    "exgrad, parallel": lambda m: gradients.exgrad(nn.DataParallel(m), X),
    "scores": lambda m: scores.SCORES["entropy"](m, X),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_networks_return_logits_in_any_usual_way(user, wrap):
    plain = Returns(lambda z: z)
    wrapped = Returns(WRAPS[wrap])
    wrapped.load_state_dict(plain.state_dict())
    found = []
    for model in (plain, wrapped):
        torch.manual_seed(0)
        found.append(USERS[user](model))
    assert_close(found[1], found[0])


def test_several_tensors_by_name_are_refused():
    model = Returns(lambda z: {"features": z + 1, "output": z})
    with pytest.raises(TypeError, match="features, output"):
        training.predict(model, X)


def test_a_deep_ensemble_of_networks_that_return_mappings_is_trained():
    ensemble = ensembles.deep(lambda: Returns(WRAPS["mapping"]), 2)
    assert "2 members" in repr(fit(ensemble=ensemble))
    assert "\n" not in repr(fit(ensemble=ensemble))


@pytest.mark.parametrize(
    ("labels", "way_out"),
    [
        (np.array(list("abc") * 4), "numpy.unique"),
        (nn.functional.one_hot(Y), "labels.argmax"),
        (Y[:, None], r"labels\[:, 0\]"),
        (Y + 1, "labels - 1"),
        (Y.float(), "astype"),
        (pd.Series(Y.double()), "astype"),
        (torch.where(Y == 0, -100, Y), "keep = labels"),
        (np.ma.masked_equal(Y.numpy(), 0), "masked"),
        (pd.Series([0, 1, None] * 4, dtype="object"), "astype"),
        (None, "must be"),
    ],
)
def test_labels_that_are_no_class_numbers(labels, way_out):
    with pytest.raises((TypeError, ValueError), match=way_out):
        fit(labels=labels)


@pytest.mark.parametrize(
    "labels",
    [
        Y.numpy().astype(np.uint16),
        Y.to(torch.uint16),
        Y.to(torch.uint64),
        pd.Series(Y, index=range(12, 0, -1)),
        [*Y],
    ],
)
def test_labels_of_other_kinds_are_read(labels):
    assert metrics.accuracy(nn.functional.one_hot(Y)[None].float(), labels) == 1


@pytest.mark.parametrize(
    ("inputs", "way_out"),
    [
        (np.array([[1, None]] * 12), "astype"),
        (pd.DataFrame({"a": ["x"] * 12}), "astype"),
        (["a.png"] * 12, "list of <U5"),
        (np.zeros((12, 8, 8, 3), np.uint8), "/ 255"),
        ({"x": X}, "unexpected keyword argument"),
        ([X[0], X[0, :3]], "different lengths"),
        ([*PAIRS], r"zip\(\*pairs"),
        ([(x.numpy(), int(y)) for x, y in PAIRS], r"zip\(\*pairs"),
    ],
)
def test_inputs_that_are_not_taken(inputs, way_out):
    with pytest.raises((TypeError, ValueError), match=way_out):
        fit(inputs)


def test_inputs_of_other_kinds_are_read():
    model = network()
    expected = training.predict(model, X)
    for given in (pd.DataFrame(X.numpy()), [*X], X.numpy().astype(">f8")):
        assert_close(training.predict(model, given), expected)
    leaves = [row.clone().requires_grad_() for row in X]
    assert_close(training.predict(model, leaves), expected)


def scripted():
    """A network that torch.jit compiled, which torch itself calls deprecated."""
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(network())


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: training.predict("model.pt", X), "load_weights"),
        (lambda: training.predict(network().state_dict(), X), "load_weights"),
        (lambda: training.predict(nn.Linear, X), r"make one: Linear\("),
        (lambda: ensembles.lora([network()], 2), "from_members"),
        (lambda: ensembles.lora(scripted(), 2), "it was made of"),
        (lambda: ensembles.deep(lambda: nn.LazyLinear(3), 2), "call the lazy network"),
        (lambda: fit(ensemble=ensembles.deep(one_logit, 2)), "two outputs"),
        (lambda: ensembles.laplace(flat(), X, 2), "no linear layer whose output"),
        (lambda: ensembles.deep(network(), 2), "lambda"),
        (lambda: ensembles.from_members(network()), "a list of networks"),
        (lambda: fit(ensemble=ensembles.dropout(dropping(), 2)), "requires_grad"),
        (lambda: representations.embed(X[:2], "umap", 1), "use .pca"),
    ],
)
def test_what_is_no_network_or_not_enough(call, way_out):
    with pytest.raises((TypeError, ValueError), match=way_out):
        call()


def one_logit():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def flat():
    return nn.Sequential(one_logit(), nn.Flatten(0))


def dropping():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_ensembles_of_a_network_without_heads():
    model = models.vit(8, 4, classes=3, width=16, layers=1, heads=2)
    small = heads.prune(model, [(0, 0), (0, 1)])
    images = torch.rand(2, 1, 8, 8)
    for method in (ensembles.lora, ensembles.singular_value, ensembles.batch):
        assert method(small, 2)(images).shape == (2, 2, 3)


# Files --------------------------------------------------------------------------------


def prefixed(state, start):
    return {f"{start}{name}": weight for name, weight in state.items()}


CHECKPOINTS = {
    "compiled": lambda s: prefixed(s, "_orig_mod."),
    "compiled, parallel": lambda s: prefixed(s, "module._orig_mod."),
    "Lightning": lambda s: {"state_dict": prefixed(s, "net."), "epoch": 3},
    "model_state_dict": lambda s: {"model_state_dict": s, "optimizer": {"lr": 0.1}},
    "model": lambda s: {"model": prefixed(s, "model."), "best": 0.9},
}


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoints_of_wrapped_networks_are_read(tmp_path, how):
    saved = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    torch.save(CHECKPOINTS[how](saved.state_dict()), tmp_path / "w.pt")
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    models.load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model(X), saved(X))


def test_checkpoints_of_two_networks_are_refused(tmp_path):
    state = network().state_dict()
    both = prefixed(state, "student.") | prefixed(state, "teacher.")
    torch.save(both, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="does not fit"):
        models.load_weights(network(), tmp_path / "w.pt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of jit
def test_weights_of_a_plain_network_go_into_a_compiled_one(tmp_path):
    saved = network()
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    compiled = torch.compile(network())
    models.load_weights(compiled, tmp_path / "w.pt")
    assert torch.equal(compiled._orig_mod[0].weight, saved[0].weight)


Z = np.random.default_rng(0).normal(size=(12, 3))


@pytest.mark.parametrize("kind", ["npy", "one probability", "one column", "sigmoid"])
def test_saved_logits_of_other_kinds_are_read(tmp_path, kind):
    p = 1 / (1 + np.exp(-Z[:, 0]))
    arrays = {
        "one probability": {"probabilities": p},
        "one column": {"probabilities": p[:, None]},
        "sigmoid": {"logits": Z[:, 0]},
    }
    if kind == "npy":
        np.save(tmp_path / "z.npy", Z)
        assert_close(decide.saved(tmp_path / "z.npy").logits[0], torch.tensor(Z))
        return
    np.savez(tmp_path / "z.npz", labels=np.arange(12) % 2, **arrays[kind])
    found = decide.saved(tmp_path / "z.npz").logits
    assert_close(found.softmax(-1)[0, :, 1], torch.tensor(p))


@pytest.mark.parametrize("kind", ["csv", "empty", "cut off", "pickled", "onnx"])
def test_saved_logits_that_cannot_be_read_say_what_to_do(tmp_path, kind):
    np.savez(tmp_path / "z.npz", logits=Z)
    content = {
        "csv": b"label;a;b\r\n0;1;2\r\n",
        "empty": b"",
        "cut off": (tmp_path / "z.npz").read_bytes()[:-100],
        "onnx": b"\x08\x07\x12",
    }
    if kind == "pickled":
        np.savez(tmp_path / "z.npz", logits=np.array([None]))
    else:
        (tmp_path / "z.npz").write_bytes(content[kind])
    with pytest.raises(ValueError, match=r"numpy\.savez"):
        decide.saved(tmp_path / "z.npz")


def test_other_inputs_of_other_classes_are_refused(tmp_path):
    np.savez(tmp_path / "z.npz", logits=Z, ood_far=Z[:, :2])
    with pytest.raises(ValueError, match="'ood_far' must have the members and classes"):
        decide.saved(tmp_path / "z.npz")


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffsentence,label\n" + '"a, b",x\nc,y\n' * 5,
        "sentence,label\r" + '"a, b",x\rc,y\r' * 5,
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path, content):
    (tmp_path / "my texts.csv").write_bytes(content.encode())
    found = data.load(tmp_path / "my texts.csv", "train")
    assert set(found.inputs) == {"a, b", "c"}
    assert found.classes == ("x", "y")


def test_a_network_of_a_module_and_weights_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from torch import nn\nnet = nn.Linear(64, 10)")
    task = data.load("digits", "train", limit=20)
    assert isinstance(bring.model("mine.py:net", task).model, nn.Linear)
    torch.save(nn.Linear(64, 10).state_dict(), "best.pt")
    with pytest.raises(ValueError, match="`weights`"):
        bring.model("best.pt", task)


def test_files_are_named_as_in_a_shell(tmp_path, monkeypatch):
    """With ~, with spaces, behind a link, which stays one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "scratch disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "scratch disk" / "run")
    settings = {"epochs": 1, "lr": 0.1, "progress": False}
    for _ in range(2):
        ensemble = ensembles.deep(network, 2)
        where = "~/run"
        training.fit(ensemble, X, Y, resume=where, **settings)
    assert link.is_symlink()
    assert [file.name for file in link.iterdir()] == ["training.pt"]
    backbone = network()
    ensembles.lora(backbone, 2, 2).save_pretrained("~/two")
    assert ensembles.from_pretrained("~/two", backbone).members == 2
    assert (tmp_path / "two" / "uqlab.json").is_file()


DIGITS = data.load("digits", limit=30)


def measure(**changes):
    given = {"ood": {}, "methods": ["single"], "seeds": [0]} | changes
    return scoreboard.measure(network(), DIGITS, DIGITS, **given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: measure(ood=DIGITS), 'ood must be by name, .*"letters"'),
        (lambda: measure(seeds=2), r"seeds must be several, such as range\(3\)"),
        (lambda: measure(methods="single"), "methods must be several"),
        (lambda: measure(scores="mi"), "scores must be several"),
        (lambda: models.mlp(784, 64), r"widths must be several, such as \(64, 32\)"),
        (lambda: baselines.aurocs(X, X, X), "others must be by name"),
        (lambda: runs.sweep("03", {"seed": 3}), r"seed must be several, as range\(5\)"),
        (
            lambda: training.fit(
                ensembles.deep(network, 2), X, Y, epochs=1, lr=0.1, milestones=1
            ),
            "milestones must be several",
        ),
    ],
)
def test_one_thing_where_several_are_wanted_is_said(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize(
    ("mean", "std", "x"),
    [
        ([0.5], [0.0], X),
        ([0.5], [], X),
        ([0.5], [0.2], X),  # flat: their rows would count as channels
    ],
)
def test_what_has_no_channels_is_not_standardised(mean, std, x):
    with pytest.raises(ValueError, match="channel"):
        models.Standardize(mean, std)(x)


def test_texts_are_told_what_makes_numbers_of_them():
    with pytest.raises(TypeError, match=r"network\.encode\(texts\)"):
        training.predict(network(), ["one", "two"])
