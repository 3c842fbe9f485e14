"""Small networks as people have them, on which every method is held.

Transformers' families, torch's own encoder, timm's form of attention, convolutions of
an own class, recurrent layers, and networks that read weights in unusual ways. Each has
three classes and a few thousand parameters, and is quick on a CPU.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

CLASSES, VOCABULARY, LENGTH, WIDTH, HEADS = 3, 50, 7, 16, 2
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
}
PIXELS = {"image_size": 8, "patch_size": 4, "num_channels": 3}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}

Inputs = Tensor | dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Network:
    """How a network is made and what it takes."""

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Inputs]
    attention: bool = False  # whether it has heads of attention
    tokens: bool = False  # whether its inputs are token ids

    def make(self) -> nn.Module:
        """Return a new network in evaluation mode, always with the same weights."""
        torch.manual_seed(0)
        return lively(self.build()).eval()

    def inputs(self, count: int, seed: int = 1) -> Inputs:
        """Return `count` inputs: a tensor, or tensors by name."""
        return self.draw(count, torch.Generator().manual_seed(seed))


def logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits [count, 3] of a network, whatever it takes and returns."""
    output = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    return getattr(output, "logits", output)


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Draw anew what starts at zeros, ones or near them, so that signals survive.

    Transformers draws weights with a deviation of 0.02, for which the logits of a
    network of width 16 hardly depend on its inputs.
    """
    for p in model.parameters():
        fan_in = p[0].numel()
        if not p.requires_grad:  # Whisper's positions, which are sines
            continue
        if p.ndim == 1:  # biases, scales of norms
            p.add_(0.2 * torch.randn(p.shape))
        elif fan_in > 1 and p.std() < 0.9 / math.sqrt(fan_in):
            p.copy_(torch.randn(p.shape) / math.sqrt(fan_in))
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_(0, 0.2)
            part.running_var.uniform_(0.5, 1.5)
    return model


# --- inputs --------------------------------------------------------------------------


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    """Standardised images, sequences or features of this shape, which differ in level."""

    def draw(count: int, generator: torch.Generator) -> Tensor:
        level = torch.randn(count, *[1] * len(shape), generator=generator)
        return level + torch.randn(count, *shape, generator=generator)

    return draw


def ids(count: int, generator: torch.Generator) -> Tensor:
    """Token ids [count, 7] of texts of three to seven tokens, filled up with 0."""
    drawn = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    return drawn * (torch.arange(LENGTH) < lengths)


def tokenized(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Token ids and their mask, as a tokenizer returns them."""
    drawn = ids(count, generator)
    return {"input_ids": drawn, "attention_mask": (drawn != 0).long()}


IMAGE = floats(3, 8, 8)
LARGER = floats(3, 16, 16)
SEQUENCE = floats(LENGTH, 5)


# --- transformers ----------------------------------------------------------------------


def of_transformers(family: str, task: str, **config) -> Callable[[], nn.Module]:
    """Return what makes `transformers.{family}For{task}`, with three classes."""

    def build() -> nn.Module:
        made = getattr(transformers, f"{family}Config")(num_labels=CLASSES, **config)
        return getattr(transformers, f"{family}For{task}")(made)

    return build


IMAGES, SEQUENCES = "ImageClassification", "SequenceClassification"
SOUNDS = "AudioClassification"
MARKS = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
TRANSFORMERS = {
    "vit": of_transformers("ViT", IMAGES, **SIZES, **PIXELS),
    "deit": of_transformers("DeiT", IMAGES, **SIZES, **PIXELS),
    # Windows of 4 x 4 patches; those of the second layer are shifted.
    "swin": of_transformers("Swin", IMAGES, image_size=16, patch_size=2, embed_dim=8, depths=[2, 1],
                            num_heads=[2, 4], window_size=4, mlp_ratio=2.0),
    "convnext": of_transformers("ConvNext", IMAGES, num_stages=2, patch_size=2, hidden_sizes=[8, 16], depths=[1, 1]),
    "resnet": of_transformers("ResNet", IMAGES, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
                              layer_type="basic"),
    "bert": of_transformers("Bert", SEQUENCES, **SIZES, **TEXT),
    "distilbert": of_transformers("DistilBert", SEQUENCES, **TEXT, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=24),
    # Its two layers are one module, called twice.
    "albert": of_transformers("Albert", SEQUENCES, **SIZES, **TEXT, embedding_size=8),
    # Its second layer attends to neighbours alone; query, key and value are fused.
    "modernbert": of_transformers("ModernBert", SEQUENCES, **SIZES, **TEXT, **MARKS, cls_token_id=1, sep_token_id=2,
                                  local_attention=4, global_attn_every_n_layers=2, attn_implementation="sdpa"),
    # Its linear layers are transformers' Conv1D; the last token is classified.
    "gpt2": of_transformers("GPT2", SEQUENCES, **MARKS, vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH,
                            n_layer=2, n_head=HEADS, pad_token_id=0),
    # Two heads share each of two key-value heads.
    "llama": of_transformers("Llama", SEQUENCES, **SIZES | GROUPED, **TEXT),
    "whisper": of_transformers("Whisper", SOUNDS, **MARKS, num_mel_bins=8, max_source_positions=10, d_model=WIDTH,
                               encoder_layers=2, encoder_attention_heads=HEADS, encoder_ffn_dim=24, vocab_size=VOCABULARY,
                               classifier_proj_size=12, pad_token_id=0, decoder_start_token_id=3),
    "ast": of_transformers("AST", SOUNDS, **SIZES, frequency_stride=4, time_stride=4, patch_size=4, max_length=12,
                           num_mel_bins=8),
}  # fmt: skip


# --- torch's own attention ---------------------------------------------------------------


class Encoder(nn.Module):
    """A text classifier on torch's encoder; padding is masked."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.batch_first = batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        empty = tokens == 0
        x = self.embed(tokens) + self.position  # [batch, tokens, width]
        if self.batch_first:
            x = self.encoder(x, src_key_padding_mask=empty)
        else:
            x = self.encoder(x.transpose(0, 1), src_key_padding_mask=empty)
            x = x.transpose(0, 1)
        used = (~empty).unsqueeze(2)
        return self.head((x * used).sum(1) / used.sum(1))


class OneEncoder(nn.Module):
    """Sequences through a whole torch encoder with its defaults, without a mask."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        how = {"activation": "gelu", "norm_first": True, "batch_first": True}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, **how)
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 1, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class Attention(nn.Module):
    """One nn.MultiheadAttention, with a mask made of the token ids."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        empty = tokens == 0
        mixed, _ = self.attention(x, x, x, key_padding_mask=empty, need_weights=False)
        x = self.norm(x + mixed)
        return self.head(x[:, 0])


class Pooling(nn.Module):
    """One learned query reads a sequence through torch's decoder."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.query = nn.Parameter(torch.zeros(1, 1, WIDTH))
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(len(x), -1, -1)
        return self.head(self.decoder(query, self.embed(x))[:, 0])


# --- timm's form, and attention of one's own -----------------------------------------------


class DropPath(nn.Module):
    """Leave out a block for some inputs of a batch (timm's stochastic depth)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = 1 - self.rate
        mask = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(kept)
        return x * mask / kept


class FusedAttention(nn.Module):
    """Query, key and value are one linear layer."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.head_dim = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(batch, tokens, width)
        return self.proj_drop(self.proj(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 24)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = FusedAttention()
        self.drop_path1 = DropPath(0.1)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = Mlp()
        self.drop_path2 = DropPath(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimmViT(nn.Module):
    """A vision transformer with the names and the form of timm's."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class OwnMatrices(nn.Module):
    """Attention written with bare matrices, without a layer to replace."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.w_q = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.w_k = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.w_v = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scores = (x @ self.w_q) @ (x @ self.w_k).mT / math.sqrt(WIDTH)
        x = x + scores.softmax(-1) @ (x @ self.w_v)
        return self.head(x.mean(1))


# --- convolutions ----------------------------------------------------------------------------


class Conv2dStaticSamePadding(nn.Conv2d):
    """A convolution that pads first, as EfficientNet's code has it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, groups=1):
        super().__init__(before, after, kernel, stride, groups=groups, bias=False)
        # The side that TensorFlow pads less comes first.
        low, high = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self.static_padding = nn.ZeroPad2d((low, high, low, high))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.static_padding(x))


def pooled(width: int) -> list[nn.Module]:
    """The end of a convolutional classifier."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


def padded_convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for make in (
        lambda: Conv2dStaticSamePadding(3, 8, 3, 2),
        lambda: Conv2dStaticSamePadding(8, 8, 5, 2, groups=8),
    ):
        layers += [make(), nn.BatchNorm2d(8, momentum=0.01, eps=1e-3), nn.ReLU6()]
    last = nn.Conv2d(8, 16, 1, bias=False)
    norm = nn.BatchNorm2d(16, momentum=0.01, eps=1e-3)
    return nn.Sequential(*layers, last, norm, *pooled(16))


def wrapped_convolutions() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
    second = nn.Conv2d(8, 16, 3, stride=2, padding=1, padding_mode="reflect")
    third = nn.Conv2d(16, 16, 3, padding="same", dilation=2, groups=2)
    layers = first, nn.ReLU(), second, nn.ReLU(), third, nn.ReLU()
    return nn.Sequential(*layers, *pooled(16))


def separable(before: int, after: int, stride: int) -> list[nn.Module]:
    """MobileNet's pair: one filter a channel, then a mixture of the channels."""
    depth = nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False)
    first = [depth, nn.BatchNorm2d(before), nn.ReLU6(inplace=True)]
    point = nn.Conv2d(before, after, 1, bias=False)
    return [*first, point, nn.BatchNorm2d(after), nn.ReLU6(inplace=True)]


def depthwise() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(True)]
    blocks = separable(8, 16, 1) + separable(16, 16, 2)
    return nn.Sequential(*first, *blocks, nn.Dropout(0.1), *pooled(16))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))


def own_resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Residual(8, 8, 1), Residual(8, 16, 2), *pooled(16))


class BatchNormAct2d(nn.BatchNorm2d):
    """A norm with its activation, as timm has it."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def batch_norm_act() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, 2, 1, bias=False), BatchNormAct2d(8)
    second = nn.Conv2d(8, 16, 3, 1, 1, bias=False), BatchNormAct2d(16)
    return nn.Sequential(*first, *second, *pooled(16))


def conv1d() -> nn.Module:
    first = nn.Conv1d(5, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU()
    second = nn.Conv1d(12, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.ReLU()
    end = nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(12, CLASSES)
    return nn.Sequential(*first, *second, *end)


def conv3d() -> nn.Module:
    first = nn.Conv3d(1, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU()
    second = nn.MaxPool3d(2), nn.Conv3d(6, 8, 3, padding=1), nn.ReLU()
    end = nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    return nn.Sequential(*first, *second, *end)


# --- recurrent, linear and unusual -------------------------------------------------------------


class Gru(nn.Module):
    """The last state of two layers, batch first."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.gru(x)
        return self.head(outputs[:, -1])


class Lstm(nn.Module):
    """Both directions' states of a layer that takes time first, as torch's default."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, bidirectional=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.T)  # [tokens, batch, width]
        _, (state, _) = self.lstm(x)
        return self.head(torch.cat([state[0], state[1]], 1))


class Mixer(nn.Module):
    """One layer mixes tokens, with tokens and channels swapped, one mixes channels."""

    def __init__(self):
        super().__init__()
        self.patches = PatchEmbed()  # 4 tokens
        self.norm1 = nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.norm2 = nn.LayerNorm(WIDTH)
        self.channels = Mlp()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


def weight_norm() -> nn.Module:
    sizes = ((10, 16), (16, 16), (16, CLASSES))
    first, second, last = (
        nn.utils.parametrizations.weight_norm(nn.Linear(*size)) for size in sizes
    )
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in ((3 * 8 * 8, 16), (16, 12)):
        norm = nn.BatchNorm1d(after)
        layers += [nn.Linear(before, after), norm, nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES))


def logistic_regression() -> nn.Module:
    return nn.Linear(10, CLASSES)


class ReadsWeights(nn.Module):
    """The layer `fc` is never called: its weight is read by the module around it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.fc.weight, self.fc.bias).relu())


class TiedWeights(nn.Module):
    """The layer `code` is called, and its weight is read again to undo it."""

    def __init__(self):
        super().__init__()
        self.code = nn.Linear(10, 8)
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code(x).tanh()
        missed = x - F.linear(code, self.code.weight.T)
        return self.head(torch.cat([code, missed], 1))


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 12, mode="mean", padding_idx=0)
        self.hidden = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.bag(tokens)).relu())


class OwnRMSNorm(nn.Module):
    """As language models define it again and again: known by its weight and eps."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True) + self.eps
        return self.weight * (x * scale.rsqrt())


def own_rms_norm() -> nn.Module:
    first = [nn.Linear(10, 16), OwnRMSNorm(16), nn.SiLU()]
    second = [nn.Linear(16, 16), OwnRMSNorm(16)]
    return nn.Sequential(*first, *second, nn.Linear(16, CLASSES))


FEATURES = floats(10)
DRAWS = {  # of the networks of transformers
    **dict.fromkeys(("vit", "deit"), IMAGE),
    **dict.fromkeys(("swin", "convnext", "resnet"), LARGER),
    "whisper": floats(8, 20),
    "ast": floats(12, 8),
}
NETWORKS = {
    name: Network(
        build,
        DRAWS.get(name, tokenized),
        attention=name not in ("convnext", "resnet"),
        tokens=name not in DRAWS,
    )
    for name, build in TRANSFORMERS.items()
} | {
    "torch encoder": Network(lambda: Encoder(True), ids, True, True),
    "torch encoder, tokens first": Network(lambda: Encoder(False), ids, True, True),
    "torch encoder, no mask": Network(OneEncoder, SEQUENCE, attention=True),
    "torch attention": Network(Attention, ids, True, True),
    "torch decoder": Network(Pooling, SEQUENCE, attention=True),
    "timm vit": Network(TimmViT, IMAGE, attention=True),
    "own matrices": Network(OwnMatrices, SEQUENCE, attention=True),
    "padded convolutions": Network(padded_convolutions, LARGER),
    "wrapped convolutions": Network(wrapped_convolutions, IMAGE),
    "depthwise": Network(depthwise, IMAGE),
    "own resnet": Network(own_resnet, IMAGE),
    "batch norm act": Network(batch_norm_act, IMAGE),
    "conv1d": Network(conv1d, floats(5, 8)),
    "conv3d": Network(conv3d, floats(1, 4, 6, 6)),
    "gru": Network(Gru, SEQUENCE),
    "lstm": Network(Lstm, ids, tokens=True),
    "mixer": Network(Mixer, IMAGE),
    "weight norm": Network(weight_norm, FEATURES),
    "mlp": Network(mlp, IMAGE),
    "logistic regression": Network(logistic_regression, FEATURES),
    "reads weights": Network(ReadsWeights, FEATURES),
    "tied weights": Network(TiedWeights, FEATURES),
    "embedding bag": Network(BagOfWords, ids, tokens=True),
    "own rms norm": Network(own_rms_norm, FEATURES),
}
