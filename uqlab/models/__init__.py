"""Networks: those of the notebooks, and pretrained ones."""

from uqlab.models.networks import LogMel, Standardize, cifar_resnet, embedded, mlp, small_cnn, vit, wide_resnet
from uqlab.models.pretrained import TextClassifier, from_pretrained, load_weights

__all__ = [
    "LogMel", "Standardize", "TextClassifier", "cifar_resnet", "embedded", "from_pretrained", "load_weights", "mlp",
    "small_cnn", "vit", "wide_resnet",
]  # fmt: skip
