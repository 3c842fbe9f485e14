"""What a user of PyTorch brings goes in: datasets, loaders, mappings, optimisers, schedulers, callbacks, a folder."""

import copy
import functools

import pytest
import torch
from same import near
from small_training import INPUTS, LABELS, small_mlp, weights
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
)
from transformers import BertConfig, BertForSequenceClassification

from uqlab import ensembles, training, uncertainty

X, Y = INPUTS[:101], LABELS[:101]
PAIRS = TensorDataset(X, Y)
HOW = {"epochs": 3, "lr": 0.1, "batch_size": 16, "seed": 5, "progress": False}


def normed():
    """Without a bias before the norm: its gradient is rounding, whose sign Adam would follow."""
    first = nn.Linear(16, 9, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4))


def plain():
    return nn.Sequential(nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 4))


def backbone():
    torch.manual_seed(0)
    return plain()


MAKE = {
    "perceptrons": lambda members=3: ensembles.deep(small_mlp, members, seed=5),
    "batch norm": lambda members=3: ensembles.deep(normed, members, seed=5),
    "lora": lambda members=3: ensembles.lora(backbone(), members, 2),
    "shared weights": lambda members=3: ensembles.batch(backbone(), members, std=0.5),
    "apart": lambda members=3: ensembles.from_members([plain() for _ in range(members)]),
    "mimo": lambda members=3: ensembles.mimo(backbone(), members),
}  # fmt: skip


def shuffled(seed=3, **how):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(PAIRS, 16, shuffle=True, generator=generator, **how)


def equal(one, other):
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", [*MAKE])
def test_a_dataset_trains_as_its_tensors_do_bit_for_bit(name, workers):
    if workers and name != "batch norm":
        pytest.skip("one is enough: processes cost seconds")
    ours = MAKE[name]()
    theirs = copy.deepcopy(ours)
    training.fit(ours, X, Y, **HOW, momentum=0.9)
    training.fit(theirs, PAIRS, **HOW, momentum=0.9, num_workers=workers)
    equal(ours, theirs)


@pytest.mark.parametrize("name", ["perceptrons", "batch norm"])
def test_of_a_shared_order_all_members_see_the_same_batch(name):
    """Also members that are trained apart, and it is not their own order."""
    how = HOW | {"order": "shared"}
    both, second = MAKE[name](2), MAKE[name](range(1, 2))
    training.fit(both, X, Y, **how)
    training.fit(second, X, Y, **how)
    near(weights(both)[1], weights(second)[0])
    own = MAKE[name](range(1, 2))
    training.fit(own, X, Y, **HOW)
    assert not torch.allclose(weights(own)[0], weights(second)[0])
    seen = []
    note = lambda x, generators: seen.append((x.clone(), len(generators))) or x  # noqa: E731
    training.fit(MAKE[name](2), X, Y, **how | {"epochs": 1}, augment=note)
    assert all(len(x) == count == 1 for x, count in seen)
    assert sorted(torch.cat([x[0, :, 0] for x, _ in seen])) == sorted(X[:, 0])


class Numbers(IterableDataset):
    def __iter__(self):
        return ({"x": x, "label": y} for x, y in zip(X, Y, strict=True))


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        return {"logits": self.inner(x)}


def test_a_stream_is_read_in_its_order():
    ours = ensembles.deep(ByName, 2, seed=1)
    theirs = copy.deepcopy(ours)
    how = HOW | {"optimizer": "adam", "lr": 0.01}
    history = training.fit(ours, Numbers(), **how, drop_last=True)
    rows = DataLoader(TensorDataset(X[:96], Y[:96]), 16)
    training.fit(theirs, Batches([({"x": x}, y) for x, y in rows]), **how)
    equal(ours, theirs)
    assert history.steps == 3 * 6
    near(training.predict(ours, Numbers(), batch_size=7), ours({"x": X}))
    with pytest.raises(ValueError, match="needs the number of batches"):
        training.fit(ours, Numbers(), **HOW, scheduler="cosine", warmup=2)
    equal(ours, theirs)  # not a step was taken


class Batches:
    """What only yields batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class HuggingFace(Dataset):
    """As `datasets` gives rows: lists, until it is told that torch wants tensors."""

    def __init__(self, torch_wants=False):
        self.torch_wants = torch_wants

    def with_format(self, kind):
        return HuggingFace(kind == "torch")

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        change = torch.tensor if self.torch_wants else list
        return {"x": change(X[i].tolist()), "label": Y[i].item()}


def test_a_dataset_of_hugging_face():
    ours = ensembles.deep(ByName, 2, seed=1)
    theirs = copy.deepcopy(ours)
    training.fit(ours, HuggingFace(), **HOW)
    training.fit(theirs, {"x": X, "labels": Y}, **HOW)
    equal(ours, theirs)
    near(training.predict(ours, HuggingFace()), ours({"x": X}))


def bert():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 12}
    config = BertConfig(**sizes, **more, num_labels=3, attn_implementation="eager")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def texts(filler=0):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (20, 9), generator=generator)
    mask = (torch.arange(9) < torch.randint(3, 10, (20, 1), generator=generator)).long()
    inputs = {"input_ids": torch.where(mask > 0, ids, filler), "attention_mask": mask}
    return inputs, torch.arange(20) % 3


@pytest.mark.parametrize("order", ["own", "shared"])
def test_texts_with_masks_train_and_what_is_masked_does_not_count(order):
    how = {
        "epochs": 2,
        "lr": 0.01,
        "batch_size": 8,
        "optimizer": "adamw",
        "order": order,
        "progress": False,
    }
    trained = []
    for filler in (0, 7):
        inputs, labels = texts(filler)
        ensemble = ensembles.lora(bert(), 3, 2)
        history = training.fit(ensemble, inputs | {"labels": labels}, **how)
        trained.append(training.predict(ensemble, inputs, batch_size=6))
        assert (history.loss[1] < history.loss[0]).all()
    near(*trained, atol=1e-4)
    inputs, labels = texts()
    loop = torch.stack([ensemble.member(m).eval()(**inputs).logits for m in range(3)])
    near(trained[1], loop, atol=1e-4)
    rows = [
        {k: t[i] for k, t in inputs.items()} | {"labels": labels[i]} for i in range(20)
    ]
    near(training.predict(ensemble, DataLoader(rows, 6)), loop, atol=1e-4)
    loaded = training.fit(ensembles.lora(bert(), 3, 2), DataLoader(rows, 8), **how)
    assert loaded.loss.isfinite().all()


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.02, weight_decay=0.1)


SCHEDULERS = {
    "step": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.3),
    "plateau": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=9.0),
    "none": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("batch norm", each) for each in SCHEDULERS] + [("shared weights", "none"), ("apart", "step")],
)  # fmt: skip
def test_an_optimiser_and_a_scheduler_move_as_in_a_loop_of_ones_own(name, scheduler):
    make, ours = SCHEDULERS[scheduler], MAKE[name]()
    theirs = copy.deepcopy(ours)
    loader = DataLoader(PAIRS, 16)
    how = {"optimizer": adamw, "scheduler": make, "progress": False}
    history = training.fit(ours, loader, epochs=4, **how)
    optimizer = adamw(theirs.parameters())
    schedule = make(optimizer) if make else None
    for _ in range(4):
        total = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = training.member_mean(theirs.train()(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y) / len(Y) / 3
        if schedule:
            schedule.step(*[total] * (scheduler == "plateau"))
    near(torch.cat(weights(ours)), torch.cat(weights(theirs)), rtol=1e-3)
    assert history.steps == 4 * 7
    assert history.loss[-1].mean().item() == pytest.approx(total, rel=1e-4)


class Stop(Exception):
    pass


RESUMED = {
    "loader that shuffles": (lambda: DataLoader(PAIRS, 16, shuffle=True), {"lr": 0.1, "momentum": 0.9}),
    "loader's own generator": (shuffled, {"lr": 0.01, "optimizer": "adam"}),
    "dataset, torch's objects": (lambda: PAIRS, {"optimizer": adamw, "scheduler": SCHEDULERS["step"]}),
    "cosine": (lambda: PAIRS, {"lr": 0.1, "scheduler": "cosine", "warmup": 3, "max_grad_norm": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize(("data", "how"), RESUMED.values(), ids=RESUMED)
def test_a_stopped_training_goes_on_as_if_nothing_had_happened(data, how, tmp_path):
    how = {"epochs": 4, "seed": 5, "progress": False, **how}
    whole = MAKE["batch norm"]()
    training.fit(whole, data(), **how)

    def stop(state):
        if state.epoch == 3:
            raise Stop

    resumed = MAKE["batch norm"]()
    with pytest.raises(Stop):
        training.fit(resumed, data(), **how, resume=tmp_path / "run", callbacks=[stop])
    again = MAKE["batch norm"]()
    history = training.fit(again, data(), **how, resume=tmp_path / "run")
    equal(whole, again)
    assert history.loss.shape == (4, 3)
    assert 0 < history.steps < 4 * 7
    with pytest.raises(ValueError, match="another run, with other"):
        training.fit(
            MAKE["batch norm"](), data(), **how | {"seed": 6}, resume=tmp_path / "run"
        )


def test_a_callback_sees_every_epoch_and_ends_the_training(tmp_path):
    seen = []

    def two(state):
        assert not state.ensemble.training
        seen.append((state.epoch, state.losses.tolist()))
        if state.epoch == 2:
            state.stop()

    ensemble = MAKE["perceptrons"]()
    how = HOW | {"callbacks": [two], "resume": tmp_path}
    history = training.fit(ensemble, X, Y, **how)
    assert [epoch for epoch, _ in seen] == [1, 2]
    assert [losses for _, losses in seen] == history.loss.tolist()
    assert training.fit(MAKE["perceptrons"](), X, Y, **how).steps == 0  # it has ended
    assert len(seen) == 2
    whole, resumed = MAKE["perceptrons"](), MAKE["perceptrons"]()
    training.fit(whole, X, Y, **HOW)
    training.fit(resumed, X, Y, **how | {"callbacks": []})  # nothing ends it now
    equal(whole, resumed)


def test_a_history_is_a_table_and_a_plot():
    history = training.fit(MAKE["perceptrons"](), X, Y, **HOW)
    frame = history.frame()
    assert frame.index.tolist() == [1, 2, 3]
    assert frame.to_numpy() == pytest.approx(history.loss.numpy())
    lines = history.plot().get_lines()
    assert [*lines[1].get_ydata()] == pytest.approx(history.loss[:, 1].tolist())


def test_a_scheduler_by_batch_moves_after_every_batch(tmp_path):
    """At its end the rate is that of the last step that it is made for."""
    ours = ensembles.from_members([plain()])
    theirs, again = copy.deepcopy(ours).member(0).train(), copy.deepcopy(ours)

    def one_cycle(optimizer):
        one_cycle.optimizer = optimizer
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.5, epochs=4, steps_per_epoch=2
        )

    def cycle(optimizer):
        return one_cycle(optimizer)

    how = {"optimizer": torch.optim.SGD, "lr": 0.1, "progress": False}
    how |= {"scheduler": cycle}
    batches = [(X[:50], Y[:50]), (X[50:], Y[50:])]
    training.fit(ours, Batches(batches), epochs=4, **how)
    assert one_cycle.optimizer.param_groups[0]["lr"] < 1e-5
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    scheduler = one_cycle(optimizer)
    for x, y in batches * 4:
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
        scheduler.step()
    near(ours(X)[0], theirs(X))
    for epochs in (2, 4):
        training.fit(again, Batches(batches), epochs=epochs, resume=tmp_path, **how)
    near(again(X), ours(X))


@pytest.mark.parametrize("data", [(X, Y), DataLoader(PAIRS, 20)])
def test_a_last_batch_of_one_sample_is_named_where_batch_norm_is(data):
    how = HOW | {"batch_size": 20}
    with pytest.raises(ValueError, match="drop_last=True of the DataLoader"):
        training.fit(MAKE["batch norm"](), data, **how)
    training.fit(MAKE["perceptrons"](), data, **how)
    training.fit(MAKE["batch norm"](), (X, Y), **how, drop_last=True)


def test_bytes_are_refused_alike():
    images = TensorDataset((X * 9).byte(), Y)
    for call in (
        lambda: training.fit(MAKE["perceptrons"](), images.tensors, **HOW),
        lambda: training.fit(MAKE["perceptrons"](), images, **HOW),
        lambda: training.predict(MAKE["perceptrons"](), (X * 9).byte()),
        lambda: training.predict(MAKE["perceptrons"](), DataLoader(images, 4)),
    ):
        with pytest.raises(ValueError, match=r"uint8.*inputs\.float\(\) / 255"):
            call()


def test_reduce_keeps_something_of_every_input():
    """Members in the place of inputs would join to [2 members, samples / 2]."""
    with pytest.raises(ValueError, match="reduce must return tensors"):
        training.predict(
            MAKE["lora"](), X[:8], batch_size=4, reduce=lambda z: z.argmax(-1)
        )


def test_what_reduce_keeps_is_that_of_all_logits():
    ensemble = MAKE["perceptrons"]().eval()
    expected = uncertainty.decompose(ensemble(X))
    for data in (X, PAIRS, DataLoader(PAIRS, 13)):
        how = {"batch_size": 10, "reduce": uncertainty.decompose}
        found = training.predict(ensemble, data, **how)
        assert isinstance(found, type(expected))
        for ours, theirs in zip(found, expected, strict=True):
            near(ours, theirs)
        hits = training.predict(ensemble, data, reduce=lambda z: z.mean(0).argmax(-1))
        assert torch.equal(hits, ensemble(X).mean(0).argmax(-1))


REFUSED = [
    ({"data": DataLoader(PAIRS, 16), "labels": Y}, "labels come with"),
    ({"data": DataLoader(TensorDataset(X, Y + 9), 16)}, "labels must be 0 to 3"),
    ({"data": TensorDataset(X, Y, Y)}, "several inputs go by name"),
    ({"data": PAIRS, "optimizer": adamw}, "a function of the parameters sets its own"),
    ({"data": PAIRS, "optimizer": torch.optim.SGD, "momentum": 0.9}, "give them to yours"),
    ({"data": PAIRS, "scheduler": SCHEDULERS["step"], "warmup": 2}, "put it into yours"),
    ({"data": PAIRS, "lr": None, "optimizer": lambda p: adamw([*p, torch.ones(1)])}, "and no others"),
    ({"data": PAIRS, "order": "mine"}, "order must be"),
    ({"data": PAIRS, "precision": "float16"}, "is for GPUs"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refused(given, message):
    with pytest.raises(ValueError, match=message):
        training.fit(MAKE["batch norm"](), **HOW | given)


class Endless(Dataset):
    """A dataset by number that does not say how many there are."""

    def __getitem__(self, i):
        return X[i], Y[i]


def test_a_dataset_must_say_how_much_it_holds():
    ensemble = MAKE["perceptrons"]()
    for call in (
        lambda: training.fit(ensemble, Endless(), **HOW),
        lambda: training.predict(ensemble, Endless()),
    ):
        with pytest.raises(TypeError, match=r"Endless must say .*Subset"):
            call()
    some = torch.utils.data.Subset(Endless(), range(50))
    near(training.predict(ensemble, some), training.predict(ensemble, X[:50]))


class Patient:
    """Ends a training after the third epoch whose loss is not the lowest by 0.2."""

    def __init__(self):
        self.best, self.since = float("inf"), 0

    def __call__(self, state):
        loss = state.losses.mean().item()
        self.since = 0 if loss < self.best - 0.2 else self.since + 1
        self.best = min(self.best, loss)
        if self.since == 3:
            state.stop()

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, known):
        vars(self).update(known)


def test_a_callback_that_counts_goes_on_after_an_interruption(tmp_path):
    def stop(state):
        if state.epoch == 2:
            raise Stop

    how = HOW | {"epochs": 20, "lr": 0.01}
    whole, resumed = MAKE["lora"](), MAKE["lora"]()
    straight = training.fit(whole, X, Y, **how, callbacks=[Patient()])
    assert 2 < len(straight.loss) < 20
    with pytest.raises(Stop):
        training.fit(resumed, X, Y, **how, callbacks=[Patient(), stop], resume=tmp_path)
    again = training.fit(resumed, X, Y, **how, callbacks=[Patient()], resume=tmp_path)
    assert len(again.loss) == len(straight.loss)
    equal(whole, resumed)


class Noisy(Dataset):
    """Draws from torch, as augmentation does."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + torch.randn(16), Y[i]


@pytest.mark.parametrize("name", ["perceptrons", "batch norm"])
@pytest.mark.parametrize("data", [Noisy(), DataLoader(Noisy(), 16, shuffle=True)])
def test_what_a_dataset_draws_follows_from_the_seed(name, data):
    ours, theirs = MAKE[name](), MAKE[name]()
    for number, ensemble in enumerate((ours, theirs)):
        torch.manual_seed(number)
        training.fit(ensemble, data, **HOW)
    equal(ours, theirs)
