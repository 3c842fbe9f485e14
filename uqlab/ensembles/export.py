"""Ensembles as one file that runs without uqlab: ONNX, or a program of torch."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uqlab.core.checks import as_inputs, one_ensemble, one_of
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, writing
from uqlab.core.modules import (
    call,
    evaluating,
    like_parameters,
    logits_of,
    map_tensors,
)
from uqlab.ensembles.base import Ensemble

_TOLERANCE = 1e-4  # for rounding; of the largest logit where that is above 1


@torch.no_grad()
def export(ensemble: Ensemble, path: StrPath, inputs: Any) -> None:
    """Write an ensemble as one file that runs without uqlab.

    Parameters
    ----------
    ensemble : Ensemble
        Of any method, in any mode; prediction is what is written.
    path : str or path
        "name.onnx" for onnxruntime, which needs no torch, or "name.pt2" for
        `torch.export.load`. It appears whole or not at all.
    inputs : Tensor or mapping of str to Tensor
        An example batch [batch, ...]; the file takes other batches of this shape. One
        row is taken twice. The batch axis is free, unless the network reads its size as
        a number (`len(x)`); then it is that of the example.

    Raises
    ------
    TypeError
        Unless it is an ensemble.
    ValueError
        For another suffix, and logits that are not those of the ensemble. A network
        that torch cannot export raises what torch says.
    ImportError
        For ONNX without the extra `onnx`.

    Notes
    -----
    The file holds every member as a plain network, `ensemble.member(m)`: LoRA's
    matrices are added to the weights, preprocessing inside the network stays there. A
    frozen weight that members share is stored once, other weights once a member, and
    the graph once a member. Before the file appears it is run on `inputs`, and its
    logits are compared with the ensemble's.

    In ONNX the input is called "inputs", or by the names that are given, and the output
    "logits" [members, batch, classes], float32.

    Examples
    --------
    >>> import tempfile
    >>> from uqlab import ensembles
    >>> ensemble = ensembles.from_members([nn.Linear(4, 3), nn.Linear(4, 3)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(ensemble, f"{folder}/two.pt2", torch.rand(5, 4))
    ...     program = torch.export.load(f"{folder}/two.pt2").module()
    >>> program(torch.rand(7, 4)).shape
    torch.Size([2, 7, 3])
    """
    one_ensemble(ensemble, "export")
    suffix = Path(path).suffix
    one_of("the suffix of path", suffix, _WRITERS)
    x = like_parameters(ensemble, as_inputs(inputs))
    # torch would not leave an axis of length one free.
    x = map_tensors(lambda t: t if len(t) > 1 else torch.cat([t, t]), x)
    with evaluating(ensemble):
        expected = ensemble(x).float().cpu()
        network = _Members(ensemble).eval()
    x = map_tensors(Tensor.cpu, x)
    with writing(path) as temporary, warnings.catch_warnings(action="ignore"):
        logits = _WRITERS[suffix](_program(network, x), temporary, x)
        tolerance = _TOLERANCE * max(1.0, float(expected.abs().max()))
        if not torch.allclose(logits, expected, 0, tolerance):
            raise ValueError(
                "the file would give other logits than the ensemble: its members are "
                "random, or torch exports a part of them wrongly"
            )


class _Members(nn.Module):
    """The members as plain networks on the CPU; what they share is one parameter."""

    def __init__(self, ensemble: Ensemble):
        super().__init__()
        plain = nn.ModuleList(ensemble.member(m) for m in range(ensemble.members))
        # Members share memory, and torch writes once what is one object.
        shared, memo = {}, {}
        for p in plain.parameters():
            fixed = nn.Parameter(p.detach(), requires_grad=False)
            memo[id(p)] = shared.setdefault((p.data_ptr(), p.shape, p.stride()), fixed)
        self.models = copy.deepcopy(plain, memo).cpu()

    def forward(self, inputs):
        return torch.stack([logits_of(call(m, inputs)).float() for m in self.models])


def _program(network, x):
    """Return torch's program of a network for inputs like x."""
    network(x)  # what a network makes on its first call is there then
    for axis in (torch.export.Dim.AUTO, torch.export.Dim.STATIC):
        axes = map_tensors(lambda t, axis=axis: {0: axis}, x)
        program = torch.export.export(
            network, (x,), strict=False, dynamic_shapes=(axes,)
        )
        if program.range_constraints:
            break  # the axis is free; else ONNX would say so and be wrong
    program.example_inputs = None  # the file holds no data
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # and no paths
    return program


def _write_program(program, path, x):
    with open(path, "wb") as file:
        torch.export.save(program, file)
    return program.module()(x)


def _write_onnx(program, path, x):
    with extra("onnx"):
        import onnx
        import onnxruntime

    named = {"inputs": x} if isinstance(x, Tensor) else x
    exported: Any = torch.onnx.export(
        program,
        dynamo=True,
        verbose=False,
        input_names=list(named),
        output_names=["logits"],
    )
    onnx.save(exported.model_proto, path)
    arrays = {name: t.numpy() for name, t in named.items()}
    logits = onnxruntime.InferenceSession(path).run(None, arrays)[0]
    return torch.as_tensor(logits)


_WRITERS = {".onnx": _write_onnx, ".pt2": _write_program}
