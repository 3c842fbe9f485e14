"""Checkpoints of transformers as plain networks: images or token ids in, logits out.

CLIP becomes a classifier that was never trained as one: images against prompts.
"""

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from uqlab.core import files
from uqlab.core.checks import at_least, one_of
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, Values
from uqlab.core.modules import load_plain
from uqlab.models.attention import classifier

Model = TypeVar("Model", bound=nn.Module)
# transformers is imported where it is used: that takes a second, which every other
# network would wait for.
KINDS = {
    "image": "AutoModelForImageClassification",
    "sound": "AutoModelForAudioClassification",
    "text": "AutoModelForSequenceClassification",
}
COMPILED = "_orig_mod."  # what torch.compile puts into names
# Where files keep a state dict; an average of the weights only if there is no other.
WRAPPERS = (
    *("state_dict", "model_state_dict", "model", "model_state", "net", "network"),
    *("module", "weights", "params", "model_ema"),
)

# A folder like any other checkpoint of CLIP
CAPTIONS_CLIP = Path(__file__).parent / "assets" / "captions-clip"
PROMPT = "A photo of a {}."  # Radford et al. 2021
Prompts = Sequence[str] | Int[Tensor, "prompts tokens"]


def from_pretrained(
    name_or_folder: StrPath,
    classes: int,
    task: Literal["image", "sound", "text"] = "image",
) -> nn.Module:
    """Load a pretrained network of transformers that returns logits [batch, classes].

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
        If the checkpoint does not fit.
    OSError
        If the name is neither a folder nor can be fetched.
    """
    at_least("classes", classes, 2)
    one_of("task", task, KINDS)
    with extra("models"):
        import transformers

    name = os.fspath(name_or_folder)
    with reading(name) as source:
        kind = getattr(transformers, KINDS[task])
        model, new = _loaded(kind, source, num_labels=classes)
        head = f"{classifier(model)}."
        new = [key for key in new if not key.startswith(head)]
        if task == "text":
            network: Any = _text_classifier(source, model, new, classes)
        else:
            _check_complete(model, new)
            network = plain_logits(model)
    network.name = name
    how = {"name_or_folder": name, "classes": classes, "task": task}
    network.source = {"made_by": "from_pretrained"} | how
    return network


@contextlib.contextmanager
def reading(name: StrPath) -> Iterator[str]:
    """Yield where a checkpoint is; name it in errors. transformers reports nothing."""
    with extra("models"):
        from transformers.utils import logging

    folder = os.path.expanduser(name)
    local = os.path.isdir(folder)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        yield folder if local else os.fspath(name)
    except (OSError, ValueError, SafetensorError) as error:
        said = str(error).strip().split("\n")[0].rstrip(".")
        raise (ValueError if local else OSError)(
            f"{str(name)!r} cannot be loaded: {said}; give a folder with safetensors, "
            "configuration and tokenizer that save_pretrained wrote, or a name on the "
            "hub if there is a network"
        ) from error
    finally:
        logging.set_verbosity(level)
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
        A layer on the pooled hidden states.
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
        self.network: Any = network
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
        positions = getattr(self.network.config, "max_position_embeddings", 2**31)
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
            Longer texts are cut to so many tokens, at least 3: the first and the last
            one are special. At most, and by default, the network's limit.
        """
        if isinstance(texts, str) or not texts:
            raise TypeError(
                f"encode takes a list of at least one text, got {texts!r}; "
                "for one text give [text]"
            )
        most = at_least("max_length", max_length or self.longest, 3)
        ids = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=min(self.longest, most),
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
        ids, mask = ids[:, :used], mask[:, :used]
        output = self.network(input_ids=ids, attention_mask=mask.long())
        if self.classifier is None:
            return output.logits
        hidden = output.last_hidden_state
        if self.pooling == "first":
            return self.classifier(hidden[:, 0])
        weights = mask.to(hidden.dtype)
        if self.pooling == "last":
            weights = weights * (weights.cumsum(1) == weights.sum(1, True))
        total = weights.sum(1, True).clamp(min=1)
        return self.classifier((hidden * weights[..., None]).sum(1) / total)


def plain_logits(model: Any) -> Any:
    """Change a network of transformers in place to return its logits alone."""
    # which another hook may have taken out
    model.register_forward_hook(lambda _, __, output: getattr(output, "logits", output))
    return model


def _text_classifier(
    source: str, model: Any, new: list[str], classes: int
) -> TextClassifier:
    """Return a model of texts; without a trained pooler, its encoder and a mean."""
    from transformers.utils.hub import cached_file

    encoder = f"{model.base_model_prefix}."
    lacking = [key for key in new if key.startswith(encoder) and ".pooler." not in key]
    _check_complete(model, lacking)
    tokenizer = _tokenizer_of(source)
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


def _tokenizer_of(source: str) -> Any:
    """Return a checkpoint's tokenizer; ValueError where its files are missing.

    transformers makes one then, which knows special tokens alone.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        raise ValueError(f"{source} holds no tokenizer")
    return tokenizer


def _loaded(kind: Any, source: str, **settings: Any) -> tuple[Any, list[str]]:
    """Return a checkpoint's model without dropout, and the weights that it lacks."""
    from transformers import AutoConfig

    made_for = getattr(kind, "config_class", None) or AutoConfig
    config = made_for.from_pretrained(source, trust_remote_code=False, **settings)
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
    lacking = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    return model.eval(), sorted(lacking)


def _without_dropout(config):
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):  # CLIP's vision_config
            _without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _check_complete(model: nn.Module, lacking: list[str]) -> None:
    """Raise ValueError if a checkpoint lacks weights."""
    if lacking:
        raise ValueError(
            f"it lacks {len(lacking)} weights of {type(model).__name__}, or has them "
            f"in another shape: {', '.join(lacking[:3])}"
        )


class _Tower(nn.Module):
    """One tower of a CLIP: images or token ids -> unit vectors [batch, features]."""

    def __init__(self, encoder: nn.Module, projection: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.projection = projection

    def forward(self, x: Tensor) -> Float[Tensor, "batch features"]:
        return F.normalize(self.projection(self.encoder(x).pooler_output), dim=-1)


class ZeroShot(nn.Module):
    """Two towers as a classifier of images [batch, channels, height, width].

    The logits [batch, prompts] are the cosines of the angles between the images'
    features and those of the prompts, times exp(scale).

    Parameters
    ----------
    text, vision
        The towers.
    scale
        The logarithm of the factor.
    prompts
        Token ids [prompts, tokens].
    source
        The checkpoint, whose tokenizer `prompted` reads.
    """

    prompts: Tensor

    def __init__(
        self,
        text: nn.Module,
        vision: nn.Module,
        scale: nn.Parameter,
        prompts: Tensor,
        source: str = "",
    ):
        super().__init__()
        self.text = text
        self.vision = vision
        self.scale = scale
        self.name = source
        self.register_buffer("prompts", prompts)

    def forward(self, images: Tensor) -> Float[Tensor, "batch prompts"]:
        return self.compare(self.vision(images), self.text(self.prompts))

    def compare(self, images: Tensor, prompts: Tensor) -> Tensor:
        """Return the logits [..., batch, prompts] of features [..., n, features]."""
        return self.scale.exp() * images @ prompts.mT

    def prompted(self, prompts: Prompts) -> "ZeroShot":
        """Return the same towers, with their weights, for other prompts."""
        ids = _tokens(self.name, prompts).to(self.prompts.device)
        network = ZeroShot(self.text, self.vision, self.scale, ids, self.name)
        return network.train(self.training)


def clip_zero_shot(folder_or_model: StrPath | nn.Module, prompts: Prompts) -> ZeroShot:
    """Load a CLIP whose classes are prompts; its logits are scaled cosines.

    Parameters
    ----------
    folder_or_model
        A folder of safetensors with a tokenizer, a name on the Hugging Face hub,
        `CAPTIONS_CLIP`, which is in the package, or a CLIPModel, which is shared, not
        copied.
    prompts
        Texts such as "A photo of a red star.", or token ids, each text with its end
        token.

    Returns
    -------
    ZeroShot
        For images as the pretraining scaled them (`Standardize`); those of
        `CAPTIONS_CLIP` are [batch, 3, 32, 32] in [0, 1].

    Raises
    ------
    ValueError
        If the checkpoint is not a CLIP.
    OSError
        If the name is neither a folder nor can be fetched.
    """
    with extra("models"):
        from transformers import CLIPModel

    model: Any = folder_or_model
    if not isinstance(model, nn.Module):
        with reading(model) as source:
            model, lacking = _loaded(CLIPModel, source)
            _check_complete(model, lacking)
        model.name_or_path = source
    if not isinstance(model, CLIPModel):
        raise TypeError(
            "clip_zero_shot takes a CLIPModel or its folder, "
            f"got {type(model).__name__}"
        )
    name = str(model.name_or_path)
    ids = _tokens(name, prompts).to(model.device)
    text = _Tower(model.text_model, model.text_projection)
    vision = _Tower(model.vision_model, model.visual_projection)
    network = ZeroShot(text, vision, model.logit_scale, ids, name)
    return network.train(model.training)


def _tokens(source: str, prompts: Sequence[str] | Tensor) -> Tensor:
    """Return token ids [prompts, tokens]."""
    if isinstance(prompts, Tensor):
        return prompts
    if isinstance(prompts, str) or not prompts:
        raise TypeError(f"prompts must be a list of at least one text, got {prompts!r}")
    if not source:
        raise ValueError(
            "this model came from no folder, so there is no tokenizer: "
            "give token ids as prompts"
        )
    with reading(source) as folder:
        ids = _tokenizer_of(folder)(
            list(prompts), padding=True, padding_side="right", return_tensors="pt"
        )
    return ids["input_ids"]


def load_weights(model: Model, path: StrPath) -> Model:
    """Load the weights of a file into `model` and return it.

    Parameters
    ----------
    model
        The network; it stays unchanged where the weights do not fit.
    path
        A .safetensors file, or one of torch.save, of which only tensors and numbers are
        read. A state dict under "state_dict", "model" or another usual name is taken
        out, and what wrappers put before names is dropped: "module." of
        nn.DataParallel, "_orig_mod." of torch.compile, "model." of Lightning.

    Raises
    ------
    ValueError
        If the file is damaged, or does not hold the weights of this model once.
    """
    path = files.existing(path)
    try:
        state: Any = _state(path)
    except Exception as error:  # whatever torch makes of other bytes
        raise ValueError(
            f"{path} cannot be read: it is damaged, or a link of Git LFS (copy it "
            "anew), or holds Python objects, which would run code: then save "
            "model.state_dict() alone"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(k, str) for k in state):
        raise ValueError(f"{path} holds no state dict, but a {type(state).__name__}")
    own = model.state_dict(keep_vars=True)
    state = _renamed(state, own, path)
    # Of tied weights files of safetensors hold one name.
    held = {id(own[name]): weight for name, weight in state.items() if name in own}
    tied = {name: held[id(t)] for name, t in own.items() if id(t) in held}
    state = tied | state
    try:  # torch says all that does not fit, but loads the rest
        copy.deepcopy(model).load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    model.load_state_dict(state)
    return model


def _renamed(state: Values, own: Iterable[str], path: Path) -> Values:
    """Return weights by a model's `own` names, before which wrappers put something."""
    names = {name.replace(COMPILED, ""): name for name in own}
    state = {name.replace(COMPILED, ""): weight for name, weight in state.items()}
    # Old files lack these counts.
    needed = [name for name in names if not name.endswith("num_batches_tracked")]
    starts = {n.removesuffix(needed[0]) for n in state if n.endswith(needed[0])}
    fits = [s for s in starts if all(s + name in state for name in needed)]
    if len(fits) > 1:
        raise ValueError(
            f"{path} holds these weights {len(fits)} times, under "
            f"{', '.join(sorted(fits))}; save the state dict of one"
        )
    for start in filter(None, fits):
        ours = [name for name in state if name.startswith(start)]
        state = {name.removeprefix(start): state[name] for name in ours}
    return {names.get(name, name): weight for name, weight in state.items()}


def _state(path: Path) -> Any:
    """Return what a file holds as a state dict.

    A plain dict has no metadata; with it torch would miss num_batches_tracked, which
    old files lack.
    """
    if path.suffix == ".safetensors":
        return load_file(path)
    state = load_plain(path)
    inside = [state]
    while inside:
        state = inside[0]
        named = [state.get(k) for k in WRAPPERS] if isinstance(state, dict) else []
        inside = [each for each in named if isinstance(each, dict)]
    return dict(state) if isinstance(state, dict) else state
