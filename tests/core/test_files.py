"""Files appear whole or not at all; fingerprints tell apart what results depend on."""

import contextlib
import copy
import functools
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
from uqlab.core.files import fingerprint, read_json, write, writing


@pytest.mark.parametrize("error", [None, OSError, KeyboardInterrupt])
def test_a_file_appears_whole_or_not_at_all(tmp_path, error):
    path = tmp_path / "new" / "some.txt"
    write(path, "first")
    with pytest.raises(error) if error else contextlib.nullcontext():  # noqa: SIM117
        with writing(path) as temporary:
            temporary.write_text("second")
            assert path.read_text() == "first"
            if error:
                raise error
    assert path.read_text() == ("first" if error else "second")
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("content", [b"[1]", b'{"a": ', b"\xff", None])
def test_read_json_of_a_broken_or_absent_file_is_empty(tmp_path, content):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    assert read_json(path) == {}


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


Same = [type("Same", (), {"__call__": f}) for f in (lambda s, z: z, lambda s, z: -z)]
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
        ((lambda z: z,), (lambda z: -z,)),
        ((lambda z: 0.1 * z,), (lambda z: 0.2 * z,)),
        ((torch.eye(3).to_sparse(),), (2 * torch.eye(3).to_sparse(),)),
        ((functools.partial(sum, start=1),), (functools.partial(sum, start=2),)),
        ((nn.Dropout(0.1),), (nn.Dropout(0.5),)),
        ((nn.Sequential(nn.ReLU()),), (nn.Sequential(nn.Tanh()),)),
        ((layer,), (copy.deepcopy(layer).requires_grad_(False),)),
        ((Halved(),), (Doubled(),)),
        ((Same[0](),), (Same[1](),)),
        ((Told(1).__repr__,), (Told(2).__repr__,)),
    ],
)
def test_fingerprints_differ(first, second):
    assert fingerprint(*first) != fingerprint(*second)


def test_fingerprints_agree_on_equal_things():
    turned = x.view(64, 64).T  # values count, not their layout
    assert fingerprint(turned) == fingerprint(turned.contiguous())
    more = torch.zeros(0, 3), torch.tensor(True), x.to(torch.complex64), x.bfloat16()
    for tensor in (x, *more, torch.eye(3).to_sparse(), x.clone().requires_grad_()):
        assert fingerprint(tensor) == fingerprint(tensor.detach().clone())
    kept = [Untold(1) for _ in range(100)]  # each has another place
    assert len({fingerprint(each) for each in kept}) == 1
    loss = lambda z: z  # noqa: E731
    pair = [(Untold(1), loss, nn.Dropout(0.1)) for _ in range(2)]
    assert fingerprint(pair[0]) == fingerprint(pair[1])


CODE = """
from uqlab import data, training
from torch import nn; import torch, functools
from uqlab.core.files import fingerprint
torch.manual_seed(0)
class Some: pass
some = Some(); some.set, some.itself = {'a', 'b', 'c'}, some
loss = functools.partial(training.cross_entropy, smoothing=0.1)
net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
print(fingerprint(some, loss, net, data.load('digits', limit=5), {'x', 'y'}))
"""


def test_fingerprints_are_those_of_another_session():
    """Whatever the order of a set, or the place of an object, in it."""
    command = [sys.executable, "-c", CODE]
    sessions = [
        subprocess.Popen(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in "12"
    ]
    one, other = (session.communicate()[0] for session in sessions)
    assert one == other
    assert len(one.split()[0]) == 64


def test_a_class_is_fingerprinted_by_its_name():
    """Settings of a layer may hold the class that it stands for, whose `state_dict` is no state."""
    kinds = (nn.BatchNorm2d, nn.LayerNorm, torch.Tensor, np.ndarray)
    assert len({fingerprint(kind) for kind in kinds * 2}) == 4


def test_a_module_s_fingerprint_is_of_its_state():
    network = nn.BatchNorm1d(2)
    before = fingerprint(network)
    assert fingerprint(nn.BatchNorm1d(2)) == before
    network(torch.randn(8, 2))  # the running statistics move
    assert fingerprint(network) != before
