"""Corruptions have the laws that their definitions give them."""

import colorsys

import pytest
import torch
from same import near
from scipy.ndimage import gaussian_filter
from torch.testing import assert_close

from uqlab import data
from uqlab.data.corruptions import CORRUPTIONS

LEVELS = (1, 2, 3, 4, 5)


def strength(kind, severity):
    return CORRUPTIONS[kind][severity - 1]


@pytest.fixture
def photographs():
    """Images of large and small structure, of every colour."""
    generator = torch.Generator().manual_seed(1)
    coarse, fine = (torch.rand(20, 3, n, n, generator=generator) for n in (4, 32))
    large = torch.nn.functional.interpolate(coarse, size=32, mode="bilinear")
    return (0.7 * large + 0.3 * fine).clamp(0, 1)


def grey(count=50):
    return torch.full((count, 3, 32, 32), 0.5)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_more_severe_is_farther_and_a_seed_repeats_it(kind, photographs):
    made = [data.corrupted(photographs, kind, level) for level in LEVELS]
    far = [(one - photographs).square().mean().item() for one in made]
    assert far == sorted(far)
    assert far[0] > 0
    for one in made:
        assert one.shape == photographs.shape
        assert one.dtype == photographs.dtype
        assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(made[2], data.corrupted(photographs, kind, 3, seed=0))
    noisy = not torch.equal(made[2], data.corrupted(photographs, kind, 3, seed=1))
    assert noisy == kind.endswith("noise")


@pytest.mark.parametrize("severity", [1, 5])
def test_noise_has_its_variance(severity):
    noise = data.corrupted(grey(), "gaussian_noise", severity) - 0.5
    assert noise.std() == pytest.approx(strength("gaussian_noise", severity), rel=0.02)
    shots = data.corrupted(grey(), "shot_noise", severity)
    assert shots.mean() == pytest.approx(0.5, abs=0.002)
    photons = strength("shot_noise", severity)  # Poisson: the variance is the mean
    assert (shots.std() ** 2 * photons).item() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("severity", [1, 5])
def test_impulses_are_as_often_black_as_white(severity):
    made = data.corrupted(grey(200), "impulse_noise", severity)
    half = strength("impulse_noise", severity) / 2
    for extreme in (0, 1):
        share = (made == extreme).double().mean().item()
        assert share == pytest.approx(half, rel=0.05)
    assert made.unique().tolist() == [0, 0.5, 1]


def test_blur_is_scipys(photographs):
    made = data.corrupted(photographs, "gaussian_blur", 5)
    theirs = gaussian_filter(
        photographs.numpy(), (0, 0, 1, 1), mode="nearest", truncate=4
    )
    near(made, theirs)


def test_brightness_is_the_value_of_hsv(photographs):
    made = data.corrupted(photographs, "brightness", 3)
    for x, y in zip(photographs[0].flatten(1).T, made[0].flatten(1).T, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*x.tolist())
        wanted = colorsys.hsv_to_rgb(h, s, min(v + 0.15, 1))
        near(y, wanted)
    black = torch.zeros(1, 3, 2, 2)
    near(data.corrupted(black, "brightness", 3).unique().item(), 0.15)


def test_contrast_keeps_the_mean_and_a_share_of_the_deviation(photographs):
    made = data.corrupted(photographs, "contrast", 4)
    near(made.mean((2, 3)), photographs.mean((2, 3)))
    near(made.std((2, 3)), 0.3 * photographs.std((2, 3)))


def test_pixels_are_as_many_as_are_left(photographs):
    made = data.corrupted(photographs, "pixelate", 5)
    changes = (made.diff(dim=3).abs().amax((0, 1, 2)) > 0).sum().item()
    assert changes == int(0.65 * 32) - 1
    assert_close(made.mean((2, 3)), photographs.mean((2, 3)), atol=0.02, rtol=0)
