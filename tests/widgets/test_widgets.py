"""Explorers: what a control's move changes, in the picture, in the line below the controls, and nowhere else."""

import io

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from uqlab import plots, uncertainty, widgets

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    plt.close("all")
    yield
    left = plt.get_fignums()
    plt.close("all")
    assert not left


def line(explorer: widgets.Explorer) -> str:
    return explorer.seen.value


def moves(explorer: widgets.Explorer, name: str, value) -> tuple[bytes, str]:
    """Move a control; returns the picture and the text that follow. The picture must change."""
    before = explorer.picture.value
    explorer.controls[name].value = value
    assert explorer.picture.value[:4] == PNG
    assert explorer.picture.value != before, name
    return explorer.picture.value, line(explorer)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The explorer itself --------------------------------------------------------------------------------------------------
@pytest.fixture
def explorer():
    """An explorer of two sliders, and the values with which its picture was drawn so far."""
    drawn = []
    figure, ax = plots.figure(width=1.0, height=1.0)
    ax.set(xlim=(0, 1), ylim=(0, 5))

    def draw(size, shift):
        if shift == 3:
            raise ValueError("no such <shift>")
        drawn.append((size, shift))
        ax.plot([shift, size], color="black")

    controls = {
        "size": ipywidgets.IntSlider(value=2, min=1, max=4, description="size"),
        "shift": ipywidgets.IntSlider(
            value=0, min=0, max=3, description="a much longer description"
        ),
    }
    return widgets.explore(
        draw, controls, lambda size, shift: f"size {size}, shift {shift}", figure
    ), drawn


def test_explore_shows_controls_reset_line_and_picture(explorer):
    box, drawn = explorer
    size, shift, button, seen, frame = box.children
    assert [size, shift] == list(box.controls.values())
    assert (seen, frame.children) == (box.seen, (box.picture,))
    assert button.description == "reset"
    assert "size 2, shift 0" in line(box)
    assert 'aria-live="polite"' in line(box)
    assert box.picture.value[:4] == PNG
    assert drawn == [(2, 0)]
    assert size.style.description_width == shift.style.description_width


def test_explore_draws_a_picture_once_and_shows_it_again(explorer):
    box, drawn = explorer
    first = box.picture.value
    second, text = moves(box, "size", 4)
    assert "size 4, shift 0" in text
    assert moves(box, "size", 2)[0] == first
    assert moves(box, "size", 4)[0] == second
    assert drawn == [(2, 0), (4, 0)]


def test_reset_restores_all_controls_and_draws_no_step_between(explorer):
    box, drawn = explorer
    first = box.picture.value
    moves(box, "size", 4)
    moves(box, "shift", 1)
    box.children[2].click()
    assert [control.value for control in box.controls.values()] == [2, 0]
    assert box.picture.value == first
    assert "size 2, shift 0" in line(box)
    assert drawn == [(2, 0), (4, 0), (4, 1)]  # neither (2, 1) nor (2, 0) again


def test_sliders_follow_the_hand_until_a_redraw_is_slow(explorer, monkeypatch):
    box, _ = explorer
    moves(box, "size", 4)
    assert all(control.continuous_update for control in box.controls.values())
    monkeypatch.setattr("uqlab.widgets.explorer.SOON", 0)
    moves(box, "size", 3)
    assert not any(control.continuous_update for control in box.controls.values())


def test_an_error_is_shown_and_raised_and_the_next_move_works(explorer):
    box, _ = explorer
    with pytest.raises(ValueError, match="no such <shift>"):
        box.controls["shift"].value = 3
    assert "could not be drawn: ValueError: no such &lt;shift&gt;" in line(box)
    assert "size 2, shift 2" in moves(box, "shift", 2)[1]


def test_an_interrupted_redraw_says_so_and_the_next_move_draws(explorer, monkeypatch):
    box, _ = explorer
    shown = box._shown

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(box, "_shown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        box.controls["size"].value = 3
    assert (
        "could not be drawn: the kernel was interrupted. The next move asks it again."
        in line(box)
    )
    monkeypatch.setattr(box, "_shown", shown)
    assert "size 4" in moves(box, "size", 4)[1]


def pixels(explorer: widgets.Explorer) -> np.ndarray:
    return plt.imread(io.BytesIO(explorer.picture.value))[..., :3]


def staged(size=1, high=10):
    """An explorer that draws into a figure: a line, a bar and an image; its limits follow a control."""
    figure, (left, right) = plots.figure(2, width=4.0, height=2.0, layout="constrained")
    left.axhline(5, color="red")
    left.set(xlim=(0, 1), ylim=(0, high), ylabel="height")
    left.plot([], [], label="named")
    left.legend(loc="upper left")

    def draw(size, high):
        left.plot([0, 1], [0, size], color="black")
        left.bar([0.5], [size], color="blue")
        left.set(ylim=(0, high), title=f"size {size}")
        right.imshow([[0, size]], vmin=0, vmax=4)

    controls = {
        "size": ipywidgets.IntSlider(value=size, min=1, max=4),
        "high": ipywidgets.IntSlider(value=high, min=10, max=10**7),
    }
    return widgets.explore(draw, controls, "a line and a bar", figure), left


def test_drawing_into_a_figure_leaves_nothing_of_the_picture_before():
    explorer, _ = staged()
    for size in (4, 2, 3):
        moves(explorer, "size", size)
        np.testing.assert_array_equal(pixels(explorer), pixels(staged(size)[0]))


def test_what_is_painted_once_is_what_matplotlib_paints():
    """Up to what crosses the frame: added artists lie above ticks and spines."""
    explorer, left = staged(3)
    anew = io.BytesIO()
    left.figure.savefig(anew, dpi=left.figure.dpi)
    anew.seek(0)
    whole = plt.imread(anew)[..., :3]
    assert whole.shape == pixels(explorer).shape
    assert (np.abs(whole - pixels(explorer)).max(-1) > 0.1).mean() < 0.01
    assert (whole < 0.5).any(-1).mean() > 0.02  # something is there


def test_changed_limits_are_painted_and_axes_stay_where_they_were():
    """Longer tick labels would push the axes aside: the first picture's places are kept."""
    explorer, left = staged()
    place = left.get_position().bounds
    moves(explorer, "high", 10**7)
    assert left.get_position().bounds == place
    free = staged(high=10**7)[1]
    assert free.get_position().bounds != place
    np.testing.assert_array_equal(
        pixels(explorer)[:, -200:], pixels(staged()[0])[:, -200:]
    )


@pytest.fixture
def one_remembered(monkeypatch):
    monkeypatch.setattr("uqlab.widgets.explorer.REMEMBERED", 1)


@pytest.mark.usefixtures("one_remembered")
def test_pictures_forgotten_are_drawn_again(explorer):
    box, drawn = explorer
    first = box.picture.value
    moves(box, "size", 4)
    assert moves(box, "size", 2)[0] == first
    assert drawn == [(2, 0), (4, 0), (2, 0)]


# The explorers of results ---------------------------------------------------------------------------------------------
def test_collapse_shows_the_variance_between_sub_ensembles():
    x, single = torch.linspace(0, 1, 5), normal(8, 5)
    predictions = {1: single, 2: single.unflatten(0, (4, 2)).mean(1)}
    explorer = widgets.collapse(x, predictions, background=lambda ax: ax.axvline(0))
    assert "100 % of that between sub-ensembles of 1" in line(explorer)
    ratio = predictions[2].var(0).mean() / single.var(0).mean()
    assert f"{100 * ratio:.0f} % of that" in moves(explorer, "size", 2)[1]


def test_masks_are_rounded_and_compared_with_the_trained_ensemble():
    found = {
        w: {"layer 1, rows": normal(5, 12, seed=int(w)).sigmoid()} for w in (0.0, 2.0)
    }
    views = [(w, cut) for w in found for cut in (None, 0.5)]
    trained = {
        kind: uncertainty.decompose(normal(5, 30, 4, seed=9).double())
        for kind in ("id", "ood")
    }
    parts = {
        view: {
            kind: uncertainty.decompose((1 + i) * normal(5, 30, 4, seed=i).double())
            for kind in trained
        }
        for i, view in enumerate(views)
    }
    accuracy = {view: 0.9 + i / 100 for i, view in enumerate(views)}
    explorer = widgets.masks(found, parts, accuracy, trained, weight=2.0)
    mask = found[2.0]["layer 1, rows"]
    assert explorer.controls["threshold"].value == 0.5
    assert f"keeps {100 * (mask > 0.5).float().mean():.0f} %" in line(explorer)
    assert "Accuracy of the extracted 93.0 %" in line(explorer)
    both = parts[2.0, 0.5]["ood"].epistemic.mean(), trained["ood"].epistemic.mean()
    assert f"{both[0]:.4f} ({both[1]:.4f}) on OOD" in line(explorer)
    assert f"keeps {100 * mask.mean():.0f} %" in moves(explorer, "threshold", None)[1]
    moves(explorer, "weight", 0.0)


def test_spectra_count_intruders_as_the_package_does():
    from uqlab.analysis import spectra

    before = {"q": normal(12, 12), "v": normal(12, 12, seed=1)}
    update = torch.stack([9 * torch.outer(*normal(2, 12, seed=m)) for m in (2, 3)])
    same = {name: w.expand(2, -1, -1) for name, w in before.items()}
    after = {"LoRA": lambda name: before[name] + update, "copies": same.__getitem__}
    explorer = widgets.spectra(before, after, k=4, threshold=0.9, layer="v")
    count, _, energy = spectra.intruder_dimensions(
        before["v"].double(), after["LoRA"]("v")[0].double(), 4, 0.9
    )
    assert count > 0
    said = f"{count} of 4 leading directions are intruders (red), with {100 * energy:.0f} % of the energy"
    assert said in line(explorer)
    assert f"{spectra.random_level(12):.2f} on average" in line(explorer)
    moves(explorer, "member", 1)
    moves(explorer, "k", 12)
    assert "0 of 12 leading directions" in moves(explorer, "method", "copies")[1]
    assert list(explorer.controls["name"].options) == ["q", "v"]


def test_gradients_compare_with_the_entropy_and_tell_the_wrong_sign():
    from uqlab import gradients, metrics, models

    torch.manual_seed(0)
    net = models.mlp(6, (8,), classes=3).eval()
    x = torch.cat([3 * normal(40, 6), 0.3 * normal(40, 6, seed=1)])
    norms = {
        sigma: gradients.gradient_norms(net, x, perturbations=2, sigma=sigma)[::2]
        for sigma in (0.0, 0.5)
    }
    entropy = uncertainty.entropy(norms[0.0][1])
    explorer = widgets.gradients(norms, 40, entropy, depth=1.0)
    score = gradients.reduce_norms(*norms[0.0], depth=1.0)
    shares = gradients.layer_shares(
        *norms[0.0]
    )  # depth 1 weighs the last of two layers e times the first
    last = (shares[1] * torch.e / (shares[0] + shares[1] * torch.e)).mean()
    assert f"The last of 2 layers gives {100 * last:.0f} % of the score" in line(
        explorer
    )
    by_gradients, by_entropy = (
        100 * metrics.ood_detection(s[:40], s[40:]).auroc for s in (score, entropy)
    )
    assert (
        f"in {by_gradients:.1f} % of all pairs by its gradients, in {by_entropy:.1f} %"
        in line(explorer)
    )
    moves(explorer, "depth", 4.0)
    moves(explorer, "sigma", 0.5)
    flipped = widgets.gradients(
        {0.0: tuple(part.flip(-2) for part in norms[0.0])},
        40,
        entropy.flip(0),
        depth=1.0,
    )
    wrong = {
        "sign is wrong" in line(each)
        for each in (widgets.gradients(norms, 40, entropy, depth=1.0), flipped)
    }
    assert wrong == {True, False}  # the roles of ID and OOD are exchanged
    assert f"in {100 - by_gradients:.1f} %" in line(flipped)
