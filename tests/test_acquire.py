"""BatchBALD against its definition: a sum over all labels, bounds of information, copies of one input."""

import itertools
import math

import pytest
import torch
from same import near

from uqlab import uncertainty
from uqlab.study import acquire


def logits(members=4, samples=5, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(members, samples, classes, generator=generator).double()


def bald(z):
    return uncertainty.decompose(z).epistemic


def enumerated(z):
    """I[y_1 .. y_n; member] by the sum over all labels of all inputs."""
    p = z.softmax(2)
    _, samples, classes = p.shape
    joint = own = 0.0
    for labels in itertools.product(range(classes), repeat=samples):
        each = p[:, torch.arange(samples), torch.tensor(labels)].prod(1)
        joint -= torch.special.xlogy(each.mean(), each.mean()).item()
        own -= torch.special.xlogy(each, each).mean().item()
    return joint - own


def test_of_one_input_it_is_bald():
    z = logits(samples=20)
    rows, information = acquire.batch_bald(z, 1)
    assert rows.item() == bald(z).argmax()
    near(information[0], bald(z).max())


def test_each_choice_and_its_information_are_those_of_a_sum_over_all_labels():
    z = logits(samples=6)
    rows, information = acquire.batch_bald(z, 4)
    taken = []
    for row, value in zip(rows.tolist(), information.tolist(), strict=True):
        others = [other for other in range(6) if other not in taken]
        found = {other: enumerated(z[:, [*taken, other]]) for other in others}
        assert row == max(found, key=found.get)
        assert value == pytest.approx(found[row], abs=1e-10)
        taken.append(row)


@pytest.mark.parametrize("seed", range(5))
def test_information_of_all_lies_between_the_largest_and_the_sum(seed):
    z = logits(seed=seed)
    _, information = acquire.batch_bald(z, 5)
    assert (information.diff() > 0).all()
    assert information[0] <= information[-1] <= bald(z).sum()
    assert information[-1] <= math.log(4)


def test_a_copy_is_worth_less_than_another_input_of_the_same_bald():
    one = torch.tensor([[3.0, 0, 0], [0, 3, 0], [0, 0, 3]]).double()
    other = one[[1, 0, 2]].flip(1)
    near(bald(one[:, None]), bald(other[:, None]))
    twice = acquire.batch_bald(torch.stack([one, one], 1), 2)[1][-1]
    both = acquire.batch_bald(torch.stack([one, other], 1), 2)[1][-1]
    assert bald(one[:, None]).item() < twice < both


def test_copies_are_chosen_by_bald_and_left_out_by_batchbald():
    """Two undecided inputs, of which the one with the larger BALD is in the pool three times."""
    first = torch.tensor([[4.0, 0, 0], [0, 4, 0], [0, 4, 0], [4, 0, 0]]).double()
    second = torch.tensor([[0, 3.0, 0], [0, 3, 0], [0, 0, 3], [0, 0, 3]]).double()
    z = torch.stack([first, first, first, second], 1)
    assert 3 not in acquire.choose(bald(z), 3)
    assert acquire.batch_bald(z, 2)[0][1] == 3


def test_a_sample_of_labelings_agrees_with_all_within_its_error():
    z = logits(members=6, samples=6)
    rows, exact = acquire.batch_bald(z, 6)
    draws = [
        acquire.batch_bald(z[:, rows], 6, labelings=81, seed=s)[1] for s in range(100)
    ]
    found = torch.stack(draws)
    near(found[:, :5].mean(0), exact[:5])  # up to 3^4 labelings
    error = found.std(0) / math.sqrt(len(found))
    assert error[5] > 0
    assert abs(found[:, 5].mean() - exact[5]) < 3 * error[5]


def test_once_the_member_is_known_nothing_is_added():
    z = 60 * torch.eye(3).double()[:, None].expand(3, 7, 3)
    _, information = acquire.batch_bald(z, 7, labelings=10)
    near(information, torch.full_like(information, math.log(3)))


def test_the_largest_are_chosen_and_ties_are_drawn():
    scores = torch.tensor([0.0, 2, 1, 1, 1, 1, 3])
    found = [acquire.choose(scores, 3, seed=seed).tolist() for seed in range(40)]
    assert {tuple(rows[:2]) for rows in found} == {(6, 1)}
    assert {rows[2] for rows in found} == {2, 3, 4, 5}
    assert found[0] == acquire.choose(scores, 3).tolist()
    assert sorted(acquire.choose(scores, 7).tolist()) == list(range(7))


def test_more_than_there_are_is_refused():
    for wrong in (
        lambda: acquire.choose(torch.rand(3), 4),
        lambda: acquire.batch_bald(logits(), 6),
        lambda: acquire.batch_bald(logits(), 2, labelings=0),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            wrong()
