"""Checkpoints of transformers as plain networks: images or token ids in, logits out."""

import argparse
import contextlib
import copy
import json
import os
import pickle
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from uqlab.core import files
from uqlab.core.checks import at_least, one_of
from uqlab.core.extras import extra
from uqlab.core.files import StrPath
from uqlab.models.attention import classifier

Model = TypeVar("Model", bound=nn.Module)
# transformers is imported where it is used: that takes a second, which every other
# network would wait for.
COMPILED = "_orig_mod."  # what torch.compile puts into names
# Where files keep a state dict; an average of the weights only if there is no other.
WRAPPERS = (
    *("state_dict", "model_state_dict", "model", "model_state", "net", "network"),
    *("module", "weights", "params", "model_ema"),
)
# What checkpoints hold besides tensors, and torch may read: it runs no code.
NUMBER = np.float64(0).__reduce__()[0]
PLAIN = [argparse.Namespace, NUMBER, (NUMBER, "numpy.core.multiarray.scalar"), np.dtype]
PLAIN += [type(np.dtype(kind)) for kind in ("float64", "float32", "int64")]
CLASSES = {
    "image": "AutoModelForImageClassification",
    "sound": "AutoModelForAudioClassification",
    "text": "AutoModelForSequenceClassification",
}


def from_pretrained(
    name_or_folder: StrPath,
    classes: int,
    task: Literal["image", "sound", "text"] = "image",
) -> nn.Module:
    """Return a pretrained network of transformers that returns logits [batch, classes].

    Dropout is off, because attention would draw it for all members from one generator.
    No code of the checkpoint is run.

    Parameters
    ----------
    name_or_folder
        A name on the Hugging Face hub or a local folder; the network's `name`.
    classes
        The checkpoint's classifier is kept if it has so many outputs; else a new one is
        drawn from torch's global seed.
    task
        "image": any model for image classification (ViT, CLIP's vision half, ...) on
        [batch, channels, height, width], scaled as its pretraining scaled them
        (`Standardize`). "sound": an audio spectrogram transformer on
        [batch, frames, mels] (`LogMel`). "text": an encoder like BERT as
        `TextClassifier`; where the checkpoint has no trained pooler, the classifier
        sees the mean of the tokens, or the first token if `1_Pooling/config.json` says
        so.

    Raises
    ------
    ValueError
        For a checkpoint that does not fit.
    OSError
        For one out of reach.
    """
    at_least("classes", classes, 2)
    one_of("task", task, CLASSES)
    with extra("models"):
        import transformers

    name = os.fspath(name_or_folder)
    with reading(name) as source:
        kind = getattr(transformers, CLASSES[task])
        model, new = loaded(kind, source, num_labels=classes)
        family = model.config.model_type
        head = f"{classifier(model)}."
        new = [key for key in new if not key.startswith(head)]
        if task == "text":
            network = _text_classifier(source, model, new, classes)
        elif task == "sound" and family != "audio-spectrogram-transformer":
            raise ValueError(
                f"{source} takes waves; for sounds give an audio spectrogram "
                "transformer (AST)"
            )
        else:
            check_complete(source, model, new)
            network = plain_logits(model)
    network.name = name
    how = {"name_or_folder": name, "classes": classes, "task": task}
    network.source = {"made_by": "from_pretrained"} | how  # type: ignore[assignment]
    return network


@contextlib.contextmanager
def reading(name: StrPath) -> Iterator[str]:
    """Give where a checkpoint is, and say what to do if it cannot be read.

    transformers' reports of new weights, which are expected, are off, and for a local
    folder its bars.
    """
    with extra("models"):
        from transformers.utils import logging

    folder = os.path.expanduser(name)
    local = os.path.isdir(folder)
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        yield folder if local else os.fspath(name)
    except (OSError, SafetensorError) as error:
        kind = OSError
        what = "is no folder here and did not come from the hub"
        if local:
            kind = ValueError
            what = "cannot be read"
        raise kind(
            f"{str(name)!r} {what}: {_first_line(error)}; check the name and the "
            "network, or give a folder of safetensors that save_pretrained wrote; "
            "pickled weights could run code"
        ) from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class TextClassifier(nn.Module):
    """An encoder of texts and a classifier, on token ids [batch, tokens].

    `encode` makes the ids. Padding changes no logit.

    Parameters
    ----------
    network
        Of transformers, with its own classifier if `classifier` is None.
    tokenizer
        Of transformers.
    classifier
        What sees the pooled hidden states.
    pooling
        "mean" of the last hidden states, or that of the "first" or the "last" token.
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Any,
        classifier: nn.Linear | None = None,
        pooling: str = "mean",
    ):
        super().__init__()
        self.network = network
        self.tokenizer = tokenizer
        self.classifier = classifier
        self.pooling = pooling
        self.name = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextClassifier":
        # The tokenizer never changes and is slow to copy.
        memo[id(self.tokenizer)] = self.tokenizer
        memo[id(self)] = copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def longest(self) -> int:
        """The largest number of tokens that the network takes."""
        config = cast(Any, self.network).config
        positions = getattr(config, "max_position_embeddings", 2**31)
        return min(self.tokenizer.model_max_length, positions)

    def encode(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> Int[Tensor, "samples tokens"]:
        """Return the token ids of texts, padded to the longest.

        Parameters
        ----------
        texts
            At least one.
        max_length
            Where longer texts are cut, at least 3 tokens: the first and the last one
            are special. None, and at most: the network's limit.
        """
        if isinstance(texts, str) or not texts:
            raise TypeError(
                f"encode takes a list of at least one text, got {texts!r}; "
                "for one text give [text]"
            )
        ids = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=min(
                self.longest, at_least("max_length", max_length or self.longest, 3)
            ),
            return_tensors="pt",
        )
        return ids["input_ids"]

    def lose(
        self,
        ids: Int[Tensor, "batch tokens"],
        share: float,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch tokens"]:
        """Return the ids of the same texts with a random share of unknown tokens."""
        drawn = torch.rand(ids.shape, generator=generator) < share
        lost = drawn & (ids != self.tokenizer.pad_token_id)
        return torch.where(lost, self.tokenizer.unk_token_id, ids)

    def forward(
        self, ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch classes"]:
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                "inputs must be token ids [batch, tokens], "
                f"got {list(ids.shape)} {ids.dtype}; use encode"
            )
        mask = ids != self.tokenizer.pad_token_id
        # To the last column that holds a token
        used = int(mask.any(0).long().cumsum(0).argmax()) + 1
        ids = ids[:, :used]
        mask = mask[:, :used]
        output = self.network(input_ids=ids, attention_mask=mask.long())
        if self.classifier is None:
            return output.logits
        return self.classifier(self._pooled(output.last_hidden_state, mask))

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return what the classifier sees of hidden states [batch, tokens, width]."""
        if self.pooling == "first":
            return hidden[:, 0]
        weights = mask.to(hidden.dtype)
        if self.pooling == "last":
            weights = weights * (weights.cumsum(1) == weights.sum(1, True))
        return (hidden * weights[..., None]).sum(1) / weights.sum(1, True).clamp(min=1)


def plain_logits(model: Any) -> Any:
    """Change a network of transformers in place to return its logits alone."""
    model.register_forward_hook(_logits)
    return model


def _logits(model, inputs, output):
    return getattr(output, "logits", output)  # which another hook may have taken out


def _text_classifier(
    source: str, model: Any, new: list[str], classes: int
) -> TextClassifier:
    """Return a model of texts; without a trained pooler, its encoder and a mean."""
    from transformers.utils.hub import cached_file

    encoder = f"{model.base_model_prefix}."
    lacking = [key for key in new if key.startswith(encoder) and ".pooler." not in key]
    check_complete(source, model, lacking)
    tokenizer = tokenizer_of(source)
    pooling = cached_file(
        source, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False
    )
    if pooling is None and not new:
        return TextClassifier(model, tokenizer)
    if getattr(model.base_model, "pooler", None) is not None:
        model.base_model.pooler = None
    how = json.loads(Path(pooling).read_text()) if pooling else {}
    head = nn.Linear(model.config.hidden_size, classes)
    first = "first" if how.get("pooling_mode_cls_token") else "mean"
    return TextClassifier(model.base_model, tokenizer, head, first)


def tokenizer_of(source: str) -> Any:
    """Return a checkpoint's tokenizer; ValueError where there are no files of one.

    transformers makes one then, which knows special tokens alone.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"{source} holds no tokenizer: save the checkpoint's own beside the "
            "weights, tokenizer.save_pretrained(folder)"
        )
    return tokenizer


def loaded(kind: Any, source: str, **settings: Any) -> tuple[Any, list[str]]:
    """Return a checkpoint's model without dropout, and the weights that it lacks."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **settings)
        if not isinstance(config, getattr(kind, "config_class", None) or object):
            raise ValueError(f"its configuration is a {type(config).__name__}")
        _without_dropout(config)
        model, info = kind.from_pretrained(
            source,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except ValueError as error:  # a model of another kind
        raise ValueError(
            f"{source} is no checkpoint for {kind.__name__}: {_first_line(error)}"
        ) from error
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    return model.eval(), sorted(lacking)


def _without_dropout(config):
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):  # CLIP's vision_config
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def check_complete(source: str, model: nn.Module, lacking: list[str]) -> None:
    """Raise ValueError for a checkpoint that lacks weights."""
    if lacking:
        raise ValueError(
            f"{source} lacks {len(lacking)} weights of {type(model).__name__}, or has "
            f"them in another shape: {', '.join(lacking[:3])}"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def load_weights(model: Model, path: StrPath, *, sha256: str | None = None) -> Model:
    """Put the weights of a file into `model` and return it.

    Parameters
    ----------
    model
        The network; it stays unchanged where the weights do not fit.
    path
        A .safetensors file or one of torch.save, of which only tensors are read. A
        state dict under "state_dict", "model", "net", "weights" or another usual name
        is unwrapped, and what wrappers put before names is dropped: "module." of
        nn.DataParallel,
        "_orig_mod." of torch.compile, "model." or another of Lightning modules.
    sha256
        The file's checksum, or its first digits. The formats hold none, so without it a
        damaged file may load as other weights, and a warning says so, unless
        `data.file` gave the path and has compared it.

    Raises
    ------
    ValueError
        For another checksum and for a file that holds anything but the weights of this
        model.
    """
    path = files.existing(path)
    checksum = files.sha256(path)
    if sha256:
        if not checksum.startswith(sha256.lower()):
            raise ValueError(
                f"{path} has the sha256 {checksum}, not {sha256}; fetch it again, "
                "or name another file"
            )
    elif path.absolute() not in files.COMPARED:
        warnings.warn(
            f"the format of {path.name} holds no checksum, so damage may show in "
            f'nothing but the outputs; give sha256="{checksum[:16]}" if that is the '
            "file that you mean",
            stacklevel=2,
        )
    names = {name.replace(COMPILED, ""): name for name in model.state_dict()}
    state = _unprefixed(_read_weights(path), names, path)
    state = {names.get(name, name): weight for name, weight in state.items()}
    try:  # torch says all that does not fit, but loads the rest
        copy.deepcopy(model).load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    model.load_state_dict(state)
    return model


def _unprefixed(
    state: dict[str, Tensor], own: Collection[str], path: Path
) -> dict[str, Tensor]:
    """Return weights by a model's `own` names, which wrappers put something before.

    Raises ValueError where a file holds them several times, as of a student and its
    teacher.
    """
    state = {name.replace(COMPILED, ""): weight for name, weight in state.items()}
    needed = [name for name in own if not name.endswith("num_batches_tracked")]
    starts = {
        name.removesuffix(needed[0]) for name in state if name.endswith(needed[0])
    }
    fits = [s for s in starts if all(s + name in state for name in needed)]
    if len(fits) > 1:
        raise ValueError(
            f"{path} holds these weights {len(fits)} times, under "
            f"{', '.join(sorted(fits))}; save the state dict of one"
        )
    for start in fits:
        of_it = [name for name in state if name.startswith(start)]
        return {name.removeprefix(start): state[name] for name in of_it}
    return state


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return a file's state dict, without the metadata.

    With it torch would miss num_batches_tracked, which old files lack.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(PLAIN):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch makes of other bytes
        code = isinstance(error, pickle.UnpicklingError)  # torch says to run it
        said = "" if code else f"{_first_line(error) or type(error).__name__}; "
        raise ValueError(
            f"{path} cannot be read: {said}it is damaged, or holds Python objects, "
            "which would run code: then save model.state_dict() alone"
        ) from error
    while isinstance(state, dict):
        inside = [state[k] for k in WRAPPERS if isinstance(state.get(k), dict)]
        if not inside:
            break
        state = inside[0]
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor)
        for name, weight in state.items()
    ):
        kind = type(state).__name__
        has = ", ".join(map(str, state)) if isinstance(state, dict) else f"a {kind}"
        raise ValueError(
            f"{path} holds no state dict of tensors, but {has[:200]}; save that "
            "of the network, torch.load(path)[its name] or model.state_dict(); in a "
            "folder name the files that hold weights"
        )
    return dict(state)
