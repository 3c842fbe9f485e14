"""What researchers bring is read, or refused at once in a sentence with a way out."""

import argparse
import itertools
import time

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
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
)
from uqlab.analysis import representations
from uqlab.study import baselines, decide, methods, scores

pytestmark = pytest.mark.usefixtures("unchecked")  # annotations are no refusals
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
PAIRS = TensorDataset(X, Y)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


NETWORK = network()


def fit(inputs=X, labels=Y, ensemble=None, **settings):
    ensemble = ensemble or ensembles.deep(network, 2)
    settings = {"epochs": 1, "lr": 0.1, "progress": False} | settings
    return training.fit(ensemble, inputs, labels, **settings)


class NoEnd(Dataset):
    def __getitem__(self, index):
        return X[0], 0


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
WITH_AN_END = {
    "Dataset": PAIRS,
    "Subset": Subset(PAIRS, range(12)),
    "loader": DataLoader(PAIRS, 5),
    "pair": (X, Y),
}


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
    with pytest.raises(TypeError, match=r"islice|Subset"):
        taker(given, None)
    assert time.process_time() - began < 5  # nothing was read: it has no end


def test_heads_are_asked_by_loaders():
    x, y = torch.randn(9, 1, 8, 8), torch.arange(9) % 3
    net = models.vit(8, 4, width=16, layers=1, heads=2, classes=3)
    loader = DataLoader(TensorDataset(x, y), 4)
    assert_close(heads.taylor_scores(net, loader), heads.taylor_scores(net, x, y))
    found = heads.greedy_circuit(net, loader, None, loader, budget=1, progress=False)
    assert found == heads.greedy_circuit(net, x, y, x, budget=1, progress=False)
    assert_close(heads.head_features(net, loader), heads.head_features(net, x))


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
    "after each sample's loss": lambda z: (z.sum(1), z),
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


def test_a_network_of_several_tensors_by_name_is_refused_and_one_of_logits_trained():
    model = Returns(lambda z: {"features": z + 1, "output": z})
    with pytest.raises(TypeError, match="features, output"):
        training.predict(model, X)
    ensemble = ensembles.deep(lambda: Returns(WRAPS["mapping"]), 2)
    assert fit(ensemble=ensemble).loss.shape == (1, 2)


@pytest.mark.parametrize(
    "labels",
    [
        Y.numpy().astype(np.uint16),
        Y.to(torch.uint64),
        pd.Series(Y, range(12, 0, -1)),
        [*Y],
    ],
)
def test_labels_of_other_kinds_are_read(labels):
    assert metrics.accuracy(nn.functional.one_hot(Y)[None].float(), labels) == 1


def test_inputs_of_other_kinds_are_read():
    model = network()
    expected = training.predict(model, X)
    leaves = [row.clone().requires_grad_() for row in X]
    for given in (pd.DataFrame(X.numpy()), [*X], X.numpy().astype(">f8"), leaves):
        assert_close(training.predict(model, given), expected)


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        (lambda: fit(labels=Y.float()), "astype"),
        (lambda: fit(labels=Y + 1), "labels - 1"),
        (lambda: fit(labels=torch.where(Y == 0, -100, Y)), "keep = labels"),
        (lambda: fit(labels=np.ma.masked_equal(Y.numpy(), 0)), "masked"),
        (lambda: fit(labels=nn.functional.one_hot(Y)), "labels.argmax"),
        (lambda: fit(labels=Y[:, None]), r"labels\[:, 0\]"),
        (lambda: fit(labels=np.array(list("abc") * 4)), "numpy.unique"),
        (lambda: fit(np.zeros((12, 8, 8, 3), np.uint8)), "/ 255"),
        (lambda: fit([X[0], X[0, :3]]), "different lengths"),
        (lambda: fit([*PAIRS]), r"zip\(\*pairs"),
        (lambda: training.predict(network(), ["one", "two"]), "network.encode"),
        (lambda: training.predict("model.pt", X), "load_weights"),
        (lambda: training.predict(nn.Linear, X), "of a class make one"),
        (lambda: ensembles.lora([network()], 2), "from_members"),
        (lambda: ensembles.deep(network(), 2), "lambda"),
        (lambda: fit(ensemble=ensembles.deep(one_logit, 2)), "two classes"),
        (lambda: ensembles.laplace(flat(), X, 2), r"here \[2\].* not squeezed"),
        (lambda: fit(optimizer=ADAM), r"optimizer=torch\.optim\.Adam"),
        (lambda: fit(optimizer=torch.optim.LBFGS), "once a batch"),
        (lambda: fit(scheduler=COSINE), "lambda optimizer"),
        (lambda: fit(labels=X, ensemble=of_tokens()), "movedim"),
        (lambda: ensembles.dropout(nn.Conv2d(1, 3, 3), 2), "from_members"),
        (lambda: training.predict(ensembles.deep(network, 2), X[0]), r"inputs\[None\]"),
        (lambda: models.Standardize([0.5], [0.0])(X), "channel"),
        (lambda: models.Standardize([0.5], [0.2])(X), "channel"),  # rows would count
        (lambda: baselines.aurocs(X, X, X), "others must be by name"),
        (lambda: runs.sweep("03", {"seed": 3}), "seed must be several"),
    ],
)
def test_what_is_not_taken_is_told_a_way_out(call, way_out):
    with pytest.raises((TypeError, ValueError), match=way_out):
        call()


ADAM = torch.optim.Adam(NETWORK.parameters())
COSINE = torch.optim.lr_scheduler.CosineAnnealingLR(ADAM, 5)


def of_tokens():
    return ensembles.deep(
        lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 3)), 2
    )


def test_a_scheduler_s_class_that_needs_more_is_told_a_way_out():
    with pytest.raises(TypeError) as error:
        fit(scheduler=torch.optim.lr_scheduler.CosineAnnealingLR)
    assert "lambda optimizer" in error.value.__notes__[0]


def test_one_callback_is_one():
    seen = []
    fit(callbacks=seen.append)
    assert [state.epoch for state in seen] == [1]


class Spectral(nn.Module):
    """A Fourier layer, whose complex weight is the first parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=6))


def test_a_network_whose_first_weights_are_complex():
    ensemble = ensembles.deep(Spectral, 2)
    fit(ensemble=ensemble)
    apart = torch.stack([ensemble.member(m)(X) for m in range(2)])
    assert_close(training.predict(ensemble, X), apart)


def one_logit():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def flat():
    return nn.Sequential(one_logit(), nn.Flatten(0))


def dropping():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


# Files --------------------------------------------------------------------------------


def prefixed(state, start):
    return {f"{start}{name}": weight for name, weight in state.items()}


KEYS = "state_dict model_state_dict network module weights params model_state model_ema"
CHECKPOINTS = {
    "compiled": lambda s: prefixed(s, "_orig_mod."),
    "parallel": lambda s: prefixed(s, "module."),
    "compiled, parallel": lambda s: prefixed(s, "module._orig_mod."),
    "compiled inside": lambda s: {n.replace("1.", "1._orig_mod."): s[n] for n in s},
    "Lightning": lambda s: {
        "state_dict": prefixed(s, "model.") | {"loss.weight": torch.ones(3)},
        "epoch": 3,
    },
    "averaged": lambda s: prefixed(s, "module.") | {"n_averaged": torch.tensor(3)},
    "model": lambda s: {"model": s, "args": argparse.Namespace(lr=1)},
    "nested": lambda s: {"model": {"state_dict": prefixed(s, "net.")}},
    "average beside": lambda s: {"model_ema": {n: s[n] + 1 for n in s}, "net": s},
    "with a number of NumPy": lambda s: {"model": s, "best": np.float64(0.9)},
} | {key: lambda s, key=key: {key: s, "lr": 0.1} for key in KEYS.split()}


@pytest.mark.filterwarnings("ignore:the format of")
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoints_of_wrapped_networks_are_read(tmp_path, how):
    saved = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    torch.save(CHECKPOINTS[how](saved.state_dict()), tmp_path / "w.pt")
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    models.load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model(X), saved(X))


@pytest.mark.filterwarnings("ignore:the format of")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of jit
def test_weights_of_a_plain_network_go_into_a_compiled_one_and_of_two_into_none(
    tmp_path,
):
    saved, path = network(), tmp_path / "w.pt"
    torch.save(state := saved.state_dict(), path)
    compiled = torch.compile(network())
    models.load_weights(compiled, path)
    assert torch.equal(compiled._orig_mod[0].weight, saved[0].weight)
    torch.save(prefixed(state, "student.") | prefixed(state, "teacher."), path)
    with pytest.raises(ValueError, match=r"student\., teacher\."):
        models.load_weights(network(), path)


def test_tied_weights_are_read_from_a_file_that_holds_them_once(tmp_path):
    def tied():
        made = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        made[1].weight = made[0].weight
        return made

    saved = tied()
    safetensors.torch.save_model(saved, tmp_path / "w.safetensors")
    model = models.load_weights(tied(), tmp_path / "w.safetensors")
    assert torch.equal(model(Y), saved(Y))


def test_a_function_that_makes_networks_is_no_network(tmp_path):
    ensembles.deep(network, 2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="network that is built"):
        ensembles.from_pretrained(tmp_path, network)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.pt").touch()
    for write in (
        ensembles.deep(network, 2).save_pretrained,
        lambda path: fit(resume=path),
    ):
        with pytest.raises(ValueError, match="no folder"):
            write(tmp_path / "model.pt")


Z = np.random.default_rng(0).normal(size=(12, 3))


def test_saved_logits_of_other_kinds_are_told_a_way_out(tmp_path):
    np.save(tmp_path / "z.npy", Z)
    with pytest.raises(ValueError, match=r"numpy\.savez"):
        decide.saved(tmp_path / "z.npy")
    p = 1 / (1 + np.exp(-Z[:, 0]))
    for one in (p, p[:, None]):
        np.savez(tmp_path / "z.npz", probabilities=one)
        with pytest.raises(ValueError, match=r"numpy\.stack\(\[1 - p, p\], -1\)"):
            decide.saved(tmp_path / "z.npz")


@pytest.mark.parametrize(
    "content",
    [
        "sentence;label\r\n" + "a, b;x\r\nc;y\r\n" * 5,
        "\ufeffsentence,label\n" + '"a, b",x\nc,y\n' * 5,
        "sentence,label\r" + '"a, b",x\rc,y\r' * 5,
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path, content):
    (tmp_path / "my texts.csv").write_bytes(content.encode())
    found = data.load(tmp_path / "my texts.csv", "train")
    assert set(found.inputs) == {"a, b", "c"}
    assert found.classes == ("x", "y")


def test_files_are_named_as_in_a_shell(tmp_path, monkeypatch):
    """With ~, with spaces, behind a link, which stays one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "scratch disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "scratch disk" / "run")
    settings = {"epochs": 1, "lr": 0.1, "progress": False}
    for _ in range(2):
        training.fit(ensembles.deep(network, 2), X, Y, resume="~/run", **settings)
    assert link.is_symlink()
    assert [file.name for file in link.iterdir()] == ["training.pt"]
    backbone = network()
    ensembles.lora(backbone, 2, 2).save_pretrained("~/two")
    assert ensembles.from_pretrained("~/two", backbone).members == 2
