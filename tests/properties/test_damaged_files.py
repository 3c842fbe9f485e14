"""Files with bytes flipped, cut or inserted are refused, or read as what they were: never as something else."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from net import bug, content
from small_networks import images, vit

from uqlab import data, ensembles, training
from uqlab.core.files import sha256, write
from uqlab.runs.manifest import Manifest

ONCE = {"lr": 0.1, "progress": False}


def saved_ensemble(folder, file):
    (x, y), ensemble = images(6), ensembles.lora(vit(), 2, 2)
    training.fit(ensemble, x, y, epochs=1, **ONCE)
    ensemble.save_pretrained(folder)
    return folder / file, lambda: ensembles.from_pretrained(folder, vit())(x)


def checkpoint(folder):
    x, y = images(6)

    def train():
        ensemble = ensembles.lora(vit(), 2, 2)
        training.fit(ensemble, x, y, epochs=2, resume=folder, **ONCE)
        return ensemble.state_dict()

    return folder / "training.pt", train


def own_images(folder):
    x, y = images(6)
    np.savez(folder / "own.npz", x=(255 * x.numpy()).astype(np.uint8), y=y.numpy())
    return folder / "own.npz", lambda: data.load(folder / "own.npz").inputs


def finished_run(folder, file):
    write(folder / "results.json", json.dumps({"numbers": {"a": 7**99}}))
    files = {"results.json": sha256(folder / "results.json")}
    Manifest(files=files, parameters={"seed": 0}, seconds=1.5).save(folder)

    def read():
        if not Manifest.read(folder).undamaged(folder):
            raise ValueError("the run is computed anew")
        both = ("manifest.json", "results.json")
        return [json.loads((folder / name).read_text()) for name in both]

    return folder / file, read


KINDS = {
    "weights": lambda f: saved_ensemble(f, "ensemble.safetensors"),
    "description": lambda f: saved_ensemble(f, "uqlab.json"),
    "checkpoint": checkpoint,
    "images": own_images,
    "manifest": lambda f: finished_run(f, "manifest.json"),
    "results": lambda f: finished_run(f, "results.json"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_or_read_as_it_was(kind, tmp_path):
    path, read = KINDS[kind](tmp_path)
    first = content(read())
    whole = path.read_bytes()

    @settings(max_examples=8 * settings().max_examples)
    @given(st.data())
    def damage(draw):
        at = draw.draw(st.integers(0, len(whole) - 1))
        flipped = st.just(bytes([whole[at] ^ 1]))
        more = draw.draw(flipped | st.binary(max_size=9))
        cut = draw.draw(st.sampled_from([0, 1, 64, len(whole)]))
        path.write_bytes(whole[:at] + more + whole[at + cut :])
        try:
            wrong = [] if content(read()) == first else ["read as something else"]
        except Exception as error:
            wrong = bug(error, read, {})  # refused in words, or a library's own
        assert wrong == []

    damage()
