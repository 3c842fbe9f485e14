"""Page 15 on recordings in a local folder, with an audio transformer from another."""

import json

import small_sounds
import torch
from transformers import ASTConfig, ASTForAudioClassification


def test_recordings_and_an_audio_transformer_by_parameter(pages, tmp_path):
    torch.manual_seed(0)
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    ASTForAudioClassification(ASTConfig(max_length=64, **config)).save_pretrained(
        tmp_path / "ast"
    )
    root = small_sounds.esc50(tmp_path)
    sounds = {
        "dataset": "esc50[0,1]",
        "ood": "esc50[2]",
        "root": str(root),
        "backbone": str(tmp_path / "ast"),
    }
    folder = pages("15_sound_ensemble", **sounds, epochs=2, warmup=0)
    recorded = json.loads((folder / "results.json").read_text())
    assert (
        recorded["numbers"]["accuracy_nearest_neighbour"] == 1
    )  # tones of 500 and 1000 Hz
    assert set(recorded["claims"]) >= {"parity", "cheap"}
    assert len(recorded["figures"]) == 6
