"""Members of a LoRA-Ensemble as adapters: PEFT loads them, and gives the member's logits."""

import json
import warnings

import peft
import pytest
import torch
from networks import NETWORKS
from same import near
from small_networks import bert, cnn, images, moved, resnet, vit
from torch import nn

from uqlab import ensembles

X, _ = images()
TOKENS = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(0))
CASES = {
    "vit": (vit, X, {"scale": 0.3}),
    "vit, all matrices, ranks cut": (vit, X, {"rank": 20, "target": "dense|fc|q_proj|layers"}),
    "shared classifier": (vit, X, {"classifiers": "shared"}),
    "bert": (bert, TOKENS, {}),
    "gpt2": (NETWORKS["gpt2"].make, NETWORKS["gpt2"].inputs(4), {}),
    "float64": (lambda: vit().double(), X.double(), {}),
}  # fmt: skip


def loaded(backbone, folder):
    with warnings.catch_warnings(action="ignore"):  # of transformers, in PEFT's code
        return peft.PeftModel.from_pretrained(backbone, folder).eval()


@pytest.mark.filterwarnings("ignore:rank|fan_in_fan_out")
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_each_member(case, tmp_path):
    make, x, settings = CASES[case]
    ensemble = moved(ensembles.lora(make(), 3, **{"rank": 2} | settings))
    together = ensemble(x)
    for m in (0, 2):
        ensembles.to_peft(ensemble, m, tmp_path)
        model = loaded(make(), tmp_path)
        output = model(x) if isinstance(x, torch.Tensor) else model(**x)
        near(getattr(output, "logits", output), together[m])
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == files


def test_samples_of_laplace_are_adapters_too(tmp_path):
    one = moved(ensembles.lora(vit(), 1, 2))
    ensemble = ensembles.laplace_lora(one, X, 2, linearised=False)
    ensembles.to_peft(ensemble, 1, tmp_path)
    model = loaded(vit(), tmp_path)
    near(model(X).logits, ensemble(X)[1])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier"]


def refused():
    named = nn.Sequential()
    named.add_module("flat", nn.Flatten())
    named.add_module("xhead", nn.Linear(64, 8))
    named.add_module("head", nn.Linear(8, 3))
    one = moved(ensembles.lora(vit(), 1, 2))
    return {
        "frozen": ensembles.lora(resnet(), 2, 2, train_backbone=True),
        "singular_value": ensembles.singular_value(vit(), 2),
        "laplace_lora": ensembles.laplace_lora(one, X, 2),
        "GRU": ensembles.lora(NETWORKS["gru"].make(), 2, 2),
        "MultiheadAttention": ensembles.lora(NETWORKS["torch attention"].make(), 2, 2),
        "that are called": ensembles.lora(
            NETWORKS["torch encoder, no mask"].make(), 2, 2, target="linear1"
        ),
        "Conv2d": ensembles.lora(cnn(), 2, 2),
        "xhead": ensembles.lora(named, 2, 2),
    }


@pytest.mark.parametrize("word", refused())
def test_what_peft_would_change_is_refused(word, tmp_path):
    with pytest.raises(ValueError, match=word):
        ensembles.to_peft(refused()[word], 0, tmp_path)
    assert not list(tmp_path.iterdir())
