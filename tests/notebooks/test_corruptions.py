"""The corruptions of the rows of photographs have the laws that their definitions give them."""

import colorsys
import json
from pathlib import Path

import pytest
import torch
from same import near

import uqlab

BOARD = Path(uqlab.__file__).parents[1] / "notebooks/rows/board.ipynb"
CELLS = {c["id"]: c["source"] for c in json.loads(BOARD.read_text())["cells"]}
CODE = {"torch": torch}
exec("".join(CELLS["corruptions"]), CODE)
CORRUPTIONS, corrupted = CODE["CORRUPTIONS"], CODE["corrupted"]


@pytest.fixture
def photographs():
    """Images of large and small structure, of every colour."""
    generator = torch.Generator().manual_seed(1)
    coarse, fine = (torch.rand(20, 3, n, n, generator=generator) for n in (4, 32))
    large = torch.nn.functional.interpolate(coarse, size=32, mode="bilinear")
    return (0.7 * large + 0.3 * fine).clamp(0, 1)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_more_severe_is_farther_and_a_seed_repeats_it(kind, photographs):
    made = [corrupted(photographs, kind, level) for level in range(1, 6)]
    far = [(one - photographs).square().mean().item() for one in made]
    assert far == sorted(far)
    assert far[0] > 0
    for one in made:
        assert one.shape == photographs.shape
        assert one.dtype == photographs.dtype
        assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(made[2], corrupted(photographs, kind, 3, seed=0))
    noisy = not torch.equal(made[2], corrupted(photographs, kind, 3, seed=1))
    assert noisy == kind.endswith("noise")


def test_noise_has_its_variance():
    grey = torch.full((100, 3, 32, 32), 0.5)
    noise = corrupted(grey, "gaussian_noise", 5) - 0.5
    assert noise.std() == pytest.approx(0.1, rel=0.02)
    shots = corrupted(grey, "shot_noise", 5)  # Poisson: the variance is the mean
    assert (shots.std() ** 2 * 50).item() == pytest.approx(0.5, rel=0.03)
    made = corrupted(grey, "impulse_noise", 5)
    for extreme in (0, 1):
        share = (made == extreme).double().mean().item()
        assert share == pytest.approx(0.035, rel=0.05)


def test_brightness_and_contrast_by_their_definitions(photographs):
    made = corrupted(photographs, "brightness", 3)
    for x, y in zip(photographs[0].flatten(1).T, made[0].flatten(1).T, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*x.tolist())
        near(y, colorsys.hsv_to_rgb(h, s, min(v + 0.15, 1)))
    made = corrupted(photographs, "contrast", 4)
    near(made.mean((2, 3)), photographs.mean((2, 3)))
    near(made.std((2, 3)), 0.3 * photographs.std((2, 3)))
