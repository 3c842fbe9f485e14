"""Networks: those of the notebooks, and pretrained ones."""

from uqlab.core.modules import classifier_of
from uqlab.models.attention import (
    ATTENTION,
    COUNTS,
    FORMS,
    FUSED,
    PROJECTIONS,
    Attention,
    Projection,
    attentions,
    check_classifier,
    classifier,
)
from uqlab.models.backbones import (
    PRETRAINED,
    SpeechClassifier,
    minilm,
    pretrained,
)
from uqlab.models.checkpoints import (
    CAPTIONS_CLIP,
    PROMPT,
    TextClassifier,
    ZeroShot,
    clip_zero_shot,
    from_pretrained,
    load_weights,
)
from uqlab.models.networks import (
    LogMel,
    Standardize,
    cifar_resnet,
    embedded,
    mlp,
    small_cnn,
    vit,
    wide_resnet,
)

__all__ = [
    "ATTENTION", "CAPTIONS_CLIP", "COUNTS", "FORMS", "FUSED", "PRETRAINED",
    "PROJECTIONS", "PROMPT", "Attention", "LogMel", "Projection",
    "SpeechClassifier", "Standardize", "TextClassifier", "ZeroShot",
    "attentions", "check_classifier", "cifar_resnet", "classifier", "classifier_of",
    "clip_zero_shot", "embedded", "from_pretrained", "load_weights", "minilm", "mlp",
    "pretrained", "small_cnn", "vit", "wide_resnet",
]  # fmt: skip
