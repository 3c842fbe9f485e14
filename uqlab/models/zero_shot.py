"""CLIP as a classifier that was never trained as one: images against prompts."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.models.pretrained import check_tokenizer, loaded, reading

CAPTIONS_CLIP = (
    Path(__file__).parent / "assets" / "captions-clip"
)  # a folder like any other checkpoint of CLIP
PROMPT = "A photo of a {}."  # Radford et al. 2021


class Tower(nn.Module):
    """One tower of a CLIP: images, or token ids [prompts, tokens] -> unit vectors [batch, features]."""

    def __init__(self, encoder: nn.Module, projection: nn.Module):
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, x: Tensor) -> Float[Tensor, "batch features"]:
        return F.normalize(self.projection(self.encoder(x).pooler_output), dim=-1)


class ZeroShot(nn.Module):
    """Two towers as a classifier: images [batch, channels, height, width] -> logits [batch, prompts].

    The logits are the cosines of the angles between the images' features and those of `prompts`, token ids
    [prompts, tokens], times exp(scale). `source` is the checkpoint, whose tokenizer `prompted` reads.
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
        self.text, self.vision, self.scale, self.name = text, vision, scale, source
        self.register_buffer("prompts", prompts)

    def forward(self, images: Tensor) -> Float[Tensor, "batch prompts"]:
        return self.compare(self.vision(images), self.text(self.prompts))

    def compare(self, images: Tensor, prompts: Tensor) -> Tensor:
        """The logits [..., batch, prompts] of features [..., batch, features] and [..., prompts, features]."""
        return self.scale.exp() * images @ prompts.mT

    def prompted(
        self, prompts: Sequence[str] | Int[Tensor, "prompts tokens"]
    ) -> "ZeroShot":
        """The same towers, with their weights, for other prompts."""
        ids = _tokens(self.name, prompts, cast(Any, self.text).encoder.config).to(
            self.prompts.device
        )
        return ZeroShot(self.text, self.vision, self.scale, ids, self.name).train(
            self.training
        )


def clip_zero_shot(
    folder_or_model: str | os.PathLike | nn.Module,
    prompts: Sequence[str] | Int[Tensor, "prompts tokens"],
) -> ZeroShot:
    """A CLIP whose classes are prompts, such as "A photo of a red star.": what it answers are scaled cosines.

    folder_or_model: a folder of safetensors with a tokenizer, a name on the Hugging Face hub, `CAPTIONS_CLIP`, which is
        in the package, or a CLIPModel, which is shared, not copied.
    prompts: texts, or their token ids, each text with its end token.

    Images come as the pretraining scaled them (`Standardize`); those of `CAPTIONS_CLIP` are [batch, 3, 32, 32] in
    [0, 1]. Raises ValueError for what is no CLIP and for prompts that are too long, OSError for a name out of reach.
    """
    from transformers import CLIPModel

    model: Any = folder_or_model
    if not isinstance(model, nn.Module):
        with reading(model) as (source, local):
            model, missing = loaded(CLIPModel, source, local)
        if missing:
            raise ValueError(
                f"{source} is no whole CLIP: it lacks {', '.join(missing[:3])}"
            )
        model.name_or_path = source
    if not isinstance(model, CLIPModel):
        raise TypeError(
            f"clip_zero_shot takes a CLIPModel or its folder, got {type(model).__name__}"
        )
    name = str(model.name_or_path)
    ids = _tokens(name, prompts, model.config.text_config)
    towers = (
        Tower(model.text_model, model.text_projection),
        Tower(model.vision_model, model.visual_projection),
    )
    return ZeroShot(*towers, model.logit_scale, ids.to(model.device), name).train(
        model.training
    )


def _tokens(source: str, prompts: Sequence[str] | Tensor, config: Any) -> Tensor:
    """Token ids [prompts, tokens], checked."""
    if isinstance(prompts, Tensor):
        ids = prompts
        if ids.ndim != 2 or ids.is_floating_point() or not len(ids):
            raise ValueError(
                f"prompts must be texts or token ids [prompts, tokens], got {list(ids.shape)} {ids.dtype}"
            )
    else:
        if (
            isinstance(prompts, str)
            or not prompts
            or not all(isinstance(text, str) for text in prompts)
        ):
            raise TypeError(
                f"prompts must be a list of at least one text, got {prompts!r}"
            )
        if not source:
            raise ValueError(
                "this model came from no folder, so there is no tokenizer: give token ids as prompts"
            )
        from transformers import AutoTokenizer

        with reading(source) as (where, local):
            tokenizer = AutoTokenizer.from_pretrained(
                where, local_files_only=local, trust_remote_code=False
            )
            check_tokenizer(where, tokenizer, config.vocab_size)
        ids = tokenizer(
            list(prompts), padding=True, padding_side="right", return_tensors="pt"
        )["input_ids"]
    if ids.shape[1] > config.max_position_embeddings:
        longest = config.max_position_embeddings
        raise ValueError(
            f"the longest prompt has {ids.shape[1]} tokens, and this CLIP reads at most {longest}"
        )
    return ids
