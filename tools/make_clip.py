"""Train the CLIP of `models.CAPTIONS_CLIP`: `python tools/make_clip.py CHECKPOINT`.

Pictures and captions are drawn anew for every step, from the step's number. CHECKPOINT is written every hundred steps
and resumed from: stop and start as you like. No caption holds a pair of colour and shape that is kept for testing.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from make_backbone import made_by
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

from uqlab import data
from uqlab.core.files import writing
from uqlab.data import captions
from uqlab.models import CAPTIONS_CLIP, PROMPT, clip_zero_shot
from uqlab.training import predict

STEPS, LR, WARMUP, SHARE = (
    1800,
    1e-3,
    200,
    2,
)  # a step sees one picture of every second caption
EVERY = 100  # steps between two checkpoints
SPECIAL = ["<padding>", "<start>", "<unknown>", "<end>"]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Words are tokens: those of `texts`, in lower case."""
    words = sorted(
        {word for text in texts for word in text.lower().replace(".", " .").split()}
    )
    made = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(SPECIAL + words)}, "<unknown>"
        )
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\."), "removed", invert=True)
    ends = [("<start>", SPECIAL.index("<start>")), ("<end>", SPECIAL.index("<end>"))]
    made.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=16, pad_token="<padding>", bos_token="<start>", eos_token="<end>",
        unk_token="<unknown>",
    )  # fmt: skip


def network(words: int) -> CLIPModel:
    """An untrained CLIP: 4 layers of 8 heads for pictures of 32 x 32, 4 layers of 4 heads for captions."""
    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": words, "hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 3, "projection_dim": 64,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "image_size": 32, "patch_size": 8, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "projection_dim": 64,
    }  # fmt: skip
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    )


def batch(ids: Tensor, labels: tuple[str, ...], step: int) -> dict[str, Tensor]:
    """Captions, of which no two are the same, and a picture of each."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[
        : len(labels) // SHARE
    ]
    shown = captions.pictures([labels[i] for i in order.tolist()], seed=step)
    return {"input_ids": ids[order], "pixel_values": shown}


def train(
    clip: CLIPModel, ids: Tensor, labels: tuple[str, ...], checkpoint: Path, steps: int
) -> float:
    """Minimise the symmetric cross-entropy (InfoNCE) in place; returns the seconds that it took in all."""
    optimizer = torch.optim.AdamW(clip.parameters(), LR, (0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: (
            min(1.0, (k + 1) / WARMUP)
            * (1 + math.cos(math.pi * min(1.0, k / steps)))
            / 2
        ),
    )
    done, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        clip.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done, seconds = state["done"], state["seconds"]
    start = time.perf_counter() - seconds
    for step in range(done, steps):
        loss = clip(**batch(ids, labels, step), return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(max=math.log(100))
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            seconds = time.perf_counter() - start
            parts = {"weights": clip, "optimizer": optimizer, "schedule": schedule}
            state = {name: part.state_dict() for name, part in parts.items()}
            with writing(checkpoint) as temporary:
                torch.save(state | {"done": step + 1, "seconds": seconds}, temporary)
            print(
                f"step {step + 1} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return seconds


def main(
    checkpoint: str, target: str | Path = CAPTIONS_CLIP, *, steps: int = STEPS
) -> None:
    """Train, test on captions that were held out, and write a folder of transformers in half precision."""
    seen, unseen = (data.load("captions", split) for split in ("train", "test"))
    texts = [PROMPT.format(label) for label in seen.classes]
    words = tokenizer(texts)
    clip = network(len(words))
    ids = words(texts, padding=True, return_tensors="pt")["input_ids"]
    seconds = train(clip, ids, seen.classes, Path(checkpoint), steps)
    clip.half().float().eval()  # what is measured is what is written
    clip.half().save_pretrained(target)
    words.save_pretrained(target)
    right = {}
    for name, part in (("seen", seen), ("unseen", unseen)):
        prompts = [PROMPT.format(label) for label in part.classes]
        logits = predict(clip_zero_shot(target, prompts), torch.as_tensor(part.inputs))[
            0
        ]
        right[name] = (logits.argmax(1) == part.labels).double().mean().item()
    about = {
        "seen": f"pictures of {len(seen.classes)} captions, drawn anew for each of {steps} steps",
        "never seen": f"the pairs of colour and shape in {len(unseen.classes)} captions kept for testing; new-shapes",
        "pictures": steps * (len(seen.classes) // SHARE),
        "seconds": round(seconds),
        "accuracy": right["unseen"],
        "tested on": f"{len(unseen)} pictures of {len(unseen.classes)} captions that it has never seen",
        "accuracy on captions seen": right["seen"],
        **made_by(),
    }
    file = Path(target) / "model.safetensors"
    weights = load_file(file)
    with writing(file) as temporary:
        save_file(weights, temporary, {"format": "pt", "provenance": json.dumps(about)})
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
