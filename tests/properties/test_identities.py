"""What holds for all logits: parts sum to the whole, orders do not matter, chunks and shards do not show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import network
from same import near

from uqlab import ensembles, metrics, training, uncertainty
from uqlab.analysis import diversity
from uqlab.core import modules

MORE = settings(max_examples=8 * settings().max_examples)


@st.composite
def tasks(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [members, inputs, classes], also extreme and equal ones, and labels."""
    shape = [draw(st.integers(low, high)) for low, high in ((1, 6), (1, 9), (2, 7))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e4]))
    logits = scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits, torch.randint(shape[2], shape[1:2], generator=generator)


def near_in_nats(a, b):
    near(a, b, atol=1e-9)  # nats, and those of equal members are 0 up to rounding


@MORE
@given(tasks(), st.sampled_from(["log", "brier", "zero-one"]))
def test_total_is_the_sum_of_parts_that_are_not_negative(task, rule):
    d = uncertainty.decompose_score(task[0], rule)
    near_in_nats(d.total, d.aleatoric + d.epistemic)
    assert min(d.aleatoric.min(), d.epistemic.min()) >= 0
    if rule == "log":
        near_in_nats(d.total, uncertainty.entropy(metrics.log_prediction(task[0])))


@MORE
@given(tasks())
def test_groups_share_the_information_of_their_members(task):
    logits = torch.cat([task[0], task[0].flip(1)])
    groups = uncertainty.group_members(logits, len(task[0]))
    found = uncertainty.decompose_groups(groups)
    near_in_nats(found.total, found.aleatoric + found.within + found.between)
    near_in_nats(found.epistemic, uncertainty.decompose(logits).epistemic)
    inside = [uncertainty.decompose(group).epistemic for group in groups]
    near_in_nats(found.within, torch.stack(inside).mean(0))


@MORE
@given(tasks(), st.randoms(use_true_random=False))
def test_orders_do_not_matter(task, random):
    logits, labels = task
    orders = [torch.tensor(random.sample(range(n), n)) for n in logits.shape]
    members, inputs, classes = orders
    mixed = logits[members][:, inputs][..., classes]
    renamed = classes.argsort()[labels][inputs]
    parts = uncertainty.decompose(logits), uncertainty.decompose(mixed)
    for part, same in zip(*parts, strict=True):
        near_in_nats(part[inputs], same)
    for measure in (metrics.nll, metrics.brier, metrics.fit_temperature):
        near(measure(mixed, renamed), measure(logits, labels))
    pairs = diversity.js_divergence(logits)[members][:, members]
    near_in_nats(pairs, diversity.js_divergence(logits[members]))


@MORE
@given(tasks(), st.integers(1, 40))
def test_chunks_do_not_show(task, size):
    whole = uncertainty.decompose(task[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(modules.TEMPORARY, "cpu", size)
        near_in_nats([*whole], [*uncertainty.decompose(task[0])])


@MORE
@given(tasks())
def test_arrays_and_lists_are_as_good_as_tensors(task):
    logits, labels = task
    for measure in (metrics.accuracy, metrics.nll, metrics.ece, metrics.macro_f1):
        known = measure(logits, labels)
        assert measure(logits.numpy(), labels.numpy()) == known
        assert measure(logits.tolist(), labels.tolist()) == known
    found = uncertainty.decompose(logits.numpy(), weights=[1] * len(logits))
    near_in_nats([*found], [*uncertainty.decompose(logits)])


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
def test_shards_are_parts_of_the_whole(members, cut, seed):
    cut = min(cut, members - 1)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    whole = training.predict(ensembles.deep(network, members, seed), x)
    ranges = range(cut), range(cut, members)
    parts = [ensembles.deep(network, each, seed) for each in ranges]
    near_in_nats(
        whole, torch.cat([training.predict(part, x.numpy()) for part in parts])
    )
    joined = ensembles.concatenate(parts)
    near_in_nats(training.predict(joined, x.tolist(), batch_size=2), whole)
