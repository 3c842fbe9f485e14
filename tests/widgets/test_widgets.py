"""Explorers of pictures: what each combination of their controls shows, in the picture and in the line."""

import base64
import io
import itertools
import re

import made_up
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from same import near

from uqlab import plots, uncertainty, widgets


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    plt.close("all")
    yield
    left = plt.get_fignums()
    plt.close("all")
    assert not left


def place(hand: widgets.Hand, **chosen: str) -> int:
    """The place of a combination, by names of values; what is not chosen is as at first."""
    at = 0
    for control in hand.data["controls"]:
        names = control["names"]
        own = chosen.pop(control["name"], names[control["first"]])
        at = at * len(names) + names.index(own)
    assert not chosen
    return at


def line(hand: widgets.Hand, **chosen: str) -> str:
    return hand.data["lines"][place(hand, **chosen)]


def picture(hand: widgets.Hand, **chosen: str) -> bytes:
    source = hand.data["pictures"][hand.data["shown"][place(hand, **chosen)]]
    kind, _, data = source.partition(";base64,")
    assert kind == "data:image/webp"
    return base64.b64decode(data)


def pixels(hand: widgets.Hand, **chosen: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture(hand, **chosen))).convert("RGB"))


def moves(hand: widgets.Hand, name: str, value: str) -> str:
    """The line after a move of a control, which must change the picture."""
    assert picture(hand, **{name: value}) != picture(hand), name
    return line(hand, **{name: value})


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The explorer itself --------------------------------------------------------------------------------------------------
def drawing(**controls) -> tuple[widgets.Hand, list[dict]]:
    """An explorer of these controls, and the values with which it drew."""
    drawn = []
    figure, ax = plots.figure(width=1.0, height=1.0)
    ax.set(xlim=(0, 1), ylim=(0, 5))

    def draw(size, **others):
        drawn.append({"size": size, **others})
        ax.plot([0, size], color="black")

    def seen(**values):
        return f"This is {values}."

    return widgets.explore(draw, controls, seen, figure), drawn


def test_explore_draws_every_combination_and_keeps_equal_pictures_once():
    hand, drawn = drawing(size=[1, 2, 4], color=["red", "blue"])
    every = [
        {"size": s, "color": c}
        for s, c in itertools.product([1, 2, 4], ["red", "blue"])
    ]
    assert drawn[1:] == every
    assert drawn[0] == every[0]  # by which the figure is laid out
    assert hand.data["lines"] == [f"This is {values}." for values in every]
    assert hand.data["shown"] == [0, 0, 1, 1, 2, 2]  # the colour is not drawn
    assert len(hand.data["pictures"]) == 3
    assert hand.text == hand.data["lines"][0]


def test_controls_are_lists_or_have_a_label_and_a_first_value():
    some = [("2 x 2", 2), ("3 x 3", 3)]
    hand, drawn = drawing(
        size=widgets.Control("tiles", some, first=1), listed=[None, 0.5]
    )
    first = {"size": 3, "listed": None}
    assert drawn[0] == first
    assert line(hand) == f"This is {first}."
    size, listed = hand.data["controls"]
    assert (size["label"], size["names"], size["first"]) == (
        "tiles",
        ["2 x 2", "3 x 3"],
        1,
    )
    assert (listed["label"], listed["names"]) == ("listed", ["None", "0.5"])
    for values in (np.array([0.1, 0.2], np.float32), torch.tensor([0.1, 0.2])):
        _, drawn = drawing(size=values)
        assert [given["size"] for given in drawn[1:]] == values.tolist()


def test_too_many_pictures_are_refused_before_one_is_drawn():
    with pytest.raises(ValueError, match=r"at most 300 pictures.* ask for 308"):
        drawing(size=range(77), color=["a", "b", "c", "d"])


def test_what_is_shown_is_whole_in_itself_and_asks_nobody():
    for make in made_up.PICTURES:
        page = make().html()
        assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)", page)
        assert not re.search(r"<(script|img|iframe|link)[^>]*\b(src|href)=", page)
        assert "default-src 'none'" in page


def test_a_bundle_has_the_page_and_its_first_line():
    hand, _ = drawing(size=[1, 2])
    bundle = hand._repr_mimebundle_()[0]
    assert bundle["text/plain"] == line(hand)
    assert hand.data["pictures"][1] in bundle["text/html"]


def staged(*sizes, high=(10,)):
    """An explorer of a line, a bar and an image; its limits follow a control."""
    figure, (left, right) = plots.figure(2, width=4.0, height=2.0, layout="constrained")
    left.axhline(5, color="red")
    left.set(xlim=(0, 1), ylim=(0, high[0]), ylabel="height")
    left.plot([], [], label="named")
    left.legend(loc="upper left")

    def draw(size, high):
        left.plot([0, 1], [0, size], color="black")
        left.bar([0.5], [size], color="blue")
        left.set(ylim=(0, high), title=f"size {size}")
        right.imshow([[0, size]], vmin=0, vmax=4)

    controls = {"size": sizes, "high": high}
    return widgets.explore(draw, controls, "a line and a bar", figure), left


def test_drawing_into_a_figure_leaves_nothing_of_the_picture_before():
    hand, _ = staged(1, 4, 2, 3)
    for size in (1, 4, 2, 3):
        np.testing.assert_array_equal(
            pixels(hand, size=str(size)), pixels(staged(size)[0])
        )


def test_what_is_painted_once_is_what_matplotlib_paints():
    """Up to what crosses the frame: added artists lie above ticks and spines."""
    hand, left = staged(3)
    anew = io.BytesIO()
    left.figure.savefig(anew, dpi=left.figure.dpi)
    whole = np.asarray(Image.open(anew).convert("RGB")).astype(int)
    assert whole.shape == pixels(hand).shape
    assert (np.abs(whole - pixels(hand)).max(-1) > 25).mean() < 0.01
    assert (whole < 128).any(-1).mean() > 0.02  # something is there


def test_changed_limits_are_painted_and_axes_stay_where_they_were():
    """Longer tick labels would push the axes aside: the first picture's places are kept."""
    hand, left = staged(1, high=(10, 10**7))
    place = staged(1)[1].get_position().bounds
    assert left.get_position().bounds == place
    assert staged(1, high=(10**7,))[1].get_position().bounds != place
    moved = pixels(hand, high=str(10**7))
    np.testing.assert_array_equal(moved[:, -200:], pixels(hand)[:, -200:])
    assert (moved[:, :200] != pixels(hand)[:, :200]).any()


# A guess --------------------------------------------------------------------------------------------------------------
def test_a_guess_shows_its_question_where_nothing_can_be_answered():
    hand = widgets.guess("accuracy changes by", 0, 10, unit="points", answer=1.5)
    assert hand._repr_mimebundle_()[0]["text/plain"] == "accuracy changes by"
    assert hand.data["answer"] == 1.5


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "needs choices, or a range"),
        ({"low": 2, "high": 2}, "needs choices, or a range"),
        ({"choices": ["a", "b"], "answer": "c"}, "none of the choices"),
    ],
)
def test_a_guess_that_nobody_could_make_is_refused(asked, words):
    with pytest.raises(ValueError, match=words):
        widgets.guess("How many?", **asked)


# The explorers of results ---------------------------------------------------------------------------------------------
def test_collapse_shows_the_variance_between_sub_ensembles():
    x, single = torch.linspace(0, 1, 5), normal(8, 5)
    predictions = {1: single, 2: single.unflatten(0, (4, 2)).mean(1)}
    explorer = widgets.collapse(x, predictions, background=lambda ax: ax.axvline(0))
    assert "100 % of that between sub-ensembles of 1" in line(explorer)
    ratio = predictions[2].var(0).mean() / single.var(0).mean()
    assert f"{100 * ratio:.0f} % of that" in moves(explorer, "size", "2")


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
    assert explorer.data["controls"][1]["names"] == ["soft", "0.5"]
    assert explorer.data["controls"][1]["first"] == 1
    assert f"keeps {100 * (mask > 0.5).float().mean():.0f} %" in line(explorer)
    assert "Accuracy of the extracted 93.0 %" in line(explorer)
    both = parts[2.0, 0.5]["ood"].epistemic.mean(), trained["ood"].epistemic.mean()
    assert f"{both[0]:.4f} ({both[1]:.4f}) on OOD" in line(explorer)
    assert f"keeps {100 * mask.mean():.0f} %" in moves(explorer, "threshold", "soft")
    moves(explorer, "weight", "0")


def test_spectra_count_intruders_as_the_package_does():
    from uqlab.analysis import spectra

    before = {"q": normal(12, 12), "v": normal(12, 12, seed=1)}
    update = torch.stack([9 * torch.outer(*normal(2, 12, seed=m)) for m in (2, 3)])
    same = {name: w.expand(2, -1, -1) for name, w in before.items()}
    after = {"LoRA": lambda name: before[name] + update, "copies": same.__getitem__}
    hand = widgets.spectra(before, after, k=4, threshold=0.9, layer="v")
    layer = hand.data["first"]
    assert hand.data["layers"][layer] == "v"
    changed, copied = (by_layer[layer] for by_layer in hand.data["after"])
    for member, found in enumerate(changed):
        weight = after["LoRA"]("v")[member].double()
        count, *_ = spectra.intruder_dimensions(before["v"].double(), weight, 4, 0.9)
        largest, cosines = (
            np.array(found["largest"]),
            base64.b64decode(found["cosines"]),
        )
        assert (largest[:4] < 0.9).sum() == count > 0
        rows = np.frombuffer(cosines, np.uint8).reshape(len(largest), 12)
        np.testing.assert_allclose(rows.max(1) / 255, largest, atol=0.002)
        values = torch.linalg.svdvals(weight)
        near(found["values"], values)
        old = torch.linalg.svdvals(before["v"].double())
        near(found["before"], old)
    assert changed[0] != changed[1]
    assert min(copied[0]["largest"]) > 0.999
    assert hand.data["level"][layer] == pytest.approx(spectra.random_level(12))
