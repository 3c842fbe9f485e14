"""Files appear whole or not at all; fingerprints tell apart what results depend on."""

import copy
import functools
import hashlib
import os
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch import nn

from uqlab import data
from uqlab.core.files import fingerprint, read_json, sha256, write, writing


def test_writing_replaces_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "new" / "some.txt"
    write(path, "first")
    with writing(path) as temporary:
        temporary.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_writing_that_fails_keeps_the_earlier_file_and_leaves_nothing_behind(
    tmp_path, error
):
    path = tmp_path / "some.txt"
    write(path, "first")

    def fail():
        with writing(path) as temporary:
            temporary.write_text("sec")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"a": [1]}', {"a": [1]}),
        (b"[1]", {}),
        (b'{"a": ', {}),
        (b"\xff", {}),
        (None, {}),
    ],
)
def test_read_json_of_a_broken_or_absent_file_is_empty(tmp_path, content, value):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    assert read_json(path) == value


def test_sha256(tmp_path):
    (tmp_path / "some").write_bytes(b"abc")
    assert sha256(tmp_path / "some") == hashlib.sha256(b"abc").hexdigest()


x = torch.arange(4096.0)
changed = x.clone()
changed[2000] += 1e-3
layer = nn.Linear(2, 2)


@dataclass(repr=False)
class Told:
    values: torch.Tensor

    def __repr__(self):
        return "Told"


class Untold:
    def __init__(self, number):
        self.number, self.around = number, self


@dataclass(slots=True)
class Slots:
    value: int


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


Doubled = type("Halved", (nn.Module,), {"forward": lambda self, x: 2 * x})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((x,), (changed,)),
        ((x.numpy(),), (changed.numpy(),)),  # their text leaves out the middle
        ((x,), (x.flip(0),)),
        ((x,), (x.view(64, 64),)),
        ((x,), (x.double(),)),
        ((torch.zeros(3),), (torch.zeros(3, dtype=torch.int32),)),
        ((torch.tensor(0.0),), (torch.tensor(-0.0),)),
        ((x, changed), (changed, x)),
        (([x], changed), ([x, changed],)),
        (({"a": x, "b": 1},), ({"a": x, "b": 2},)),
        (({"a": 1}, "b", 2), ({"a": 1, "b": 2},)),
        ((UserDict(a=x),), (UserDict(a=changed),)),  # as tokenizers make them
        ((1, 23), (12, 3)),
        (([1, 23],), ([12, 3],)),
        ((1,), (1.0,)),
        ((1,), ("1",)),
        ((None,), ()),
        ((Told(x),), (Told(changed),)),  # their text is the same
        ((Untold(1),), (Untold(2),)),
        ((Slots(1),), (Slots(2),)),
        ((sparse.csr_matrix([[1.0]]),), (sparse.csr_matrix([[2.0]]),)),
        ((torch.Generator().manual_seed(1),), (torch.Generator().manual_seed(2),)),
        (({"a", "b"},), ({"a", "c"},)),
        ((Scaled(1),), (Scaled(2),)),
        ((data.load("digits", limit=9),), (data.load("digits", limit=9, seed=1),)),
        ((pd.Series(x),), (pd.Series(changed),)),
        ((np.array([1, None]),), (np.array([2, None]),)),
        ((lambda z: z,), (lambda z: -z,)),
        ((functools.partial(sum, start=1),), (functools.partial(sum, start=2),)),
        ((nn.Dropout(0.1),), (nn.Dropout(0.5),)),
        ((nn.Sequential(nn.ReLU()),), (nn.Sequential(nn.Tanh()),)),
        ((layer,), (copy.deepcopy(layer).requires_grad_(False),)),
        ((Halved(),), (Doubled(),)),
    ],
)
def test_fingerprints_differ(first, second):
    assert fingerprint(*first) != fingerprint(*second)


def test_a_sparse_tensor_is_told_by_its_values():
    dense = torch.eye(3)
    other = dense.clone()
    other[0, 0] = 2
    assert fingerprint(dense.to_sparse()) == fingerprint(dense.to_sparse())
    assert fingerprint(dense.to_sparse()) != fingerprint(other.to_sparse())


def test_fingerprints_agree_on_equal_things():
    assert fingerprint(x, [1, "a"]) == fingerprint(x.clone(), [1, "a"])
    assert fingerprint(x.view(64, 64).T) == fingerprint(
        x.view(64, 64).T.contiguous()
    )  # values, not their layout
    for tensor in (
        torch.zeros(0, 3),
        torch.tensor(True),
        x.bfloat16(),
        x.to(torch.complex64),
        x.requires_grad_(),
    ):
        assert fingerprint(tensor) == fingerprint(tensor.detach().clone())


def test_places_in_memory_do_not_count():
    def loss(z):
        return z

    same = [(Untold(1), loss, np.array([None]), nn.Dropout(0.1)) for _ in range(2)]
    assert fingerprint(same[0]) == fingerprint(same[1])
    first = fingerprint(Untold(1))
    kept = [Untold(k) for k in range(100)]  # each has another place
    assert {fingerprint(Untold(1)) for _ in kept} == {first}


def test_fingerprints_are_those_of_another_session():
    """Whatever the order of a set, or the place of an object, in it."""
    code = (
        "from uqlab import data, training, ensembles\n"
        "from torch import nn; import torch, functools\n"
        "from uqlab.core.files import fingerprint\n"
        "torch.manual_seed(0)\n"
        "class Some: pass\n"
        "some = Some(); some.set, some.itself = {'a', 'b', 'c'}, some\n"
        "loss = functools.partial(training.cross_entropy, smoothing=0.1)\n"
        "net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))\n"
        "print(fingerprint(some, loss, net, data.load('digits', limit=5), {'x', 'y'}))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(said) == 1


def test_a_class_is_fingerprinted_by_its_name():
    """Settings of a layer may hold the class that it stands for, whose `state_dict` is no state."""
    assert fingerprint({"kind": nn.BatchNorm2d}) == fingerprint(
        {"kind": nn.BatchNorm2d}
    )
    assert (
        len(
            {
                fingerprint(kind)
                for kind in (nn.BatchNorm2d, nn.LayerNorm, torch.Tensor, np.ndarray)
            }
        )
        == 4
    )


def test_a_module_s_fingerprint_is_of_its_state():
    network = nn.BatchNorm1d(2)
    before = fingerprint(network)
    assert fingerprint(nn.BatchNorm1d(2)) == before
    network(torch.randn(8, 2))  # the running statistics move
    assert fingerprint(network) != before


def test_lambdas_of_one_line_differ_by_their_numbers():
    one, other = (lambda x: 0.1 * x), (lambda x: 0.2 * x)
    assert fingerprint(one) != fingerprint(other)
