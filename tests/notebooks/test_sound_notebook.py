"""Page 15: real digits in the lesson; in its study recordings in a local folder, with an audio transformer from another."""

import json

import pandas as pd
import pytest
import small_sounds
import torch
from same import near
from small_networks import SMALL
from transformers import ASTConfig, ASTForAudioClassification


def test_15_asks_each_speaker_in_turn(results):
    recorded, _ = results("15_sound_ensemble")
    numbers = recorded["numbers"]
    assert numbers["accuracy_heard"] > numbers["accuracy_unheard"] > 10  # chance
    assert 10 < numbers["accuracy_baselines"]["nearest neighbour"] < 90
    means = pd.DataFrame(**recorded["tables"]["uncertainty"])
    parts = means["aleatoric"] + means["epistemic"]
    near(parts.tolist(), means["total"].tolist())
    found = pd.DataFrame(**recorded["tables"]["detection"])
    assert found.index.tolist() == ["unheard speakers", "other sounds"]
    assert ((found > 0) & (found <= 1)).all(axis=None)
    assert set(recorded["claims"]) == {"speaker", "baselines", "letters", "far"}


@pytest.mark.release
def test_recordings_and_an_audio_transformer_by_parameter(pages, tmp_path):
    torch.manual_seed(0)
    network = ASTForAudioClassification(ASTConfig(max_length=64, **SMALL))
    network.save_pretrained(tmp_path / "ast")
    small_sounds.esc10(tmp_path)
    sounds = {
        "dataset": "esc10[0,1]",
        "ood": ["esc10[2]"],
        "root": str(tmp_path),
        "backbone": str(tmp_path / "ast"),
    }
    folder = pages("15_sound_ensemble_study", **sounds, epochs=2, warmup=0)
    recorded = json.loads((folder / "results.json").read_text())
    assert (
        recorded["numbers"]["accuracy_nearest_neighbour"] == 1
    )  # tones of 500 and 1000 Hz
    assert set(recorded["claims"]) >= {"parity", "cheap", "rate"}
    assert len(recorded["figures"]) == 6


@pytest.mark.parametrize("profile", ["real", "paper"])
def test_profiles_of_the_study_have_five_folds(profile):
    from uqlab.runs import parameters

    given = parameters.overrides(parameters.find("15_sound_ensemble_study"), profile)
    assert given["folds"] == 5
    assert given["dataset"].startswith("esc")
