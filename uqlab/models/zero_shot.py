"""CLIP as a classifier that was never trained as one: images against prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from uqlab.core.extras import extra
from uqlab.core.files import StrPath
from uqlab.models.checkpoints import check_complete, loaded, reading, tokenizer_of

# A folder like any other checkpoint of CLIP
CAPTIONS_CLIP = Path(__file__).parent / "assets" / "captions-clip"
PROMPT = "A photo of a {}."  # Radford et al. 2021
Prompts = Sequence[str] | Int[Tensor, "prompts tokens"]


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
            model, lacking = loaded(CLIPModel, source)
            check_complete(model, lacking)
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
        ids = tokenizer_of(folder)(
            list(prompts), padding=True, padding_side="right", return_tensors="pt"
        )
    return ids["input_ids"]
