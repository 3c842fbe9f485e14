"""One description of attention: the names of its projections, and the classifier.

A new family of networks is one entry in `FORMS`.
"""

from typing import NamedTuple

from torch import nn


class Form(NamedTuple):
    """How one family of networks names its projections, seen from the attention.

    Where query, key and value are rows of one matrix, the three names are equal.
    """

    query: str
    key: str
    value: str
    output: str


FORMS = (
    Form("q_proj", "k_proj", "v_proj", "o_proj"),  # ViT, DeiT, Swin, AST, Llama
    Form("q_proj", "k_proj", "v_proj", "out_proj"),  # CLIP, Whisper
    Form("query", "key", "value", "output.dense"),  # BERT and its kin
    Form("query", "key", "value", "dense"),  # ALBERT
    Form("query_proj", "key_proj", "value_proj", "output.dense"),  # DeBERTa
    Form("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT
    Form("qkv", "qkv", "qkv", "proj"),  # timm
    Form("Wqkv", "Wqkv", "Wqkv", "Wo"),  # ModernBERT
    Form("c_attn", "c_attn", "c_attn", "c_proj"),  # GPT-2
    Form("in_proj_weight", "in_proj_weight", "in_proj_weight", "out_proj"),  # torch
)
FUSED = "query, key, value"  # the kind of a matrix that holds all three
# Names that other layers have too: they count only inside a module of such a name.
_COMMON = ("output.dense", "dense", "qkv", "proj", "Wqkv", "Wo", "c_attn", "c_proj")
_HOLDERS = r"(attention|attn|self_attn)\."


def _names() -> dict[str, str]:
    """Return a regular expression for each kind of projection, from `FORMS`."""
    kinds: dict[str, list[str]] = {"query": [], "key": [], "value": [], "output": []}
    kinds[FUSED] = []
    for form in FORMS:
        for kind, name in form._asdict().items():
            fused = form.query == form.key and kind != "output"
            kinds[FUSED if fused else kind].append(name)
    patterns = {}
    for kind, names in kinds.items():
        each = []
        for name in dict.fromkeys(names):
            escaped = name.replace(".", r"\.")
            each.append(_HOLDERS + escaped if name in _COMMON else escaped)
        patterns[kind] = rf"(^|\.)({'|'.join(each)})$"
    return patterns


# For "query", "key", "value", "output" and "query, key, value": what matches the names
# of such projections, of modules and, in nn.MultiheadAttention, of parameters.
PROJECTIONS = _names()
ATTENTION = "|".join(PROJECTIONS.values())


def classifier(network: nn.Module) -> str:
    """Find the layer that gives the classes: the last linear layer of a network.

    Parameters
    ----------
    network : nn.Module
        Any network. Layers inside an nn.MultiheadAttention or a parametrization do not
        count.

    Returns
    -------
    str
        The module's name; empty if the network itself is a linear layer.

    Raises
    ------
    ValueError
        If there is no linear layer.

    Examples
    --------
    >>> classifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    '2'
    """
    inside: list[str] = []  # prefixes of names that do not count
    found = None
    for name, part in network.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            inside.append(f"{name}." if name else "")
            continue
        counts = not name.startswith(tuple(inside))
        counts = counts and "parametrizations" not in name.split(".")
        if isinstance(part, nn.Linear) and counts:
            found = name
    if found is None:
        kind = type(network).__name__
        raise ValueError(f"{kind} has no linear layer that could be its classifier")
    return found
