"""Plots draw what the data say, saved figures describe themselves, explorers redraw."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba

mpl.use("Agg")

from uqlab import metrics, plots, runs
from uqlab.core.files import read_json

PNG, PDF = b"\x89PNG", b"%PDF"


@pytest.fixture(autouse=True)
def ax():
    """New axes in the notebooks' style; whatever a test leaves open is closed, and the style with it."""
    with mpl.rc_context():
        plots.use_style()
        yield plt.subplots()[1]
    plt.close("all")


def points(ax) -> list[np.ndarray]:
    """The positions of all scatter plots."""
    return [
        np.asarray(c.get_offsets())
        for c in ax.collections
        if isinstance(c, PathCollection)
    ]


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


# Colours and layout ---------------------------------------------------------------------------------------------------
def test_every_plot_draws_into_the_given_axes_or_else_the_current_ones():
    calls = {
        "curve": ([1, 2], [3, 4]),
        "reference": (0.5, "chance"),
        "simplex": (torch.zeros(2, 3),),
        "decomposition_bars": ({"a": (0.1, 0.2)},),
        "areas": ([0, 1, 2], [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]),
        "ecdf": ([0.3, 0.1],),
        "roc": ([0.1, 0.2], [0.3, 0.4]),
        "dots": ({"a": (0.2, 0.1, 0.3)}, [("red", "o")]),
        "reliability": (torch.randn(2, 9, 3), torch.arange(9) % 3),
        "heatmap": (torch.tensor([[1.0, 2.0]]), ["row"], ["a", "b"]),
        "votes": (torch.rand(3, 4, 4), torch.zeros(4, 2)),
    }
    for name, data in calls.items():
        fig, (given, current) = plots.figure(2)
        plt.sca(current)
        assert getattr(plots, name)(*data, ax=given) is given, name
        assert given.has_data(), name
        assert not current.has_data(), name
        assert getattr(plots, name)(*data) is current, name
        plt.close(fig)


# One function each ----------------------------------------------------------------------------------------------------
def test_reliability_shows_the_gaps_of_the_ece_in_bars_as_wide_as_they_are_full(ax):
    logits, labels = 3 * torch.randn(2, 200, 4), torch.arange(200) % 4
    plots.reliability(logits, labels, ax=ax)
    _, gaps = ax.containers
    height = np.array([bar.get_height() for bar in gaps])
    width = np.array([bar.get_width() for bar in gaps])
    confidence = metrics.log_prediction(logits).exp().amax(1).numpy()
    count, _ = np.histogram(-confidence, np.arange(-15, 1) / 15)  # bins (lo, hi]
    count = count[::-1][count[::-1] > 0]
    expected = metrics.ece(logits, labels)
    assert (count * abs(height)).sum() / 200 == pytest.approx(expected)
    np.testing.assert_allclose(width, np.sqrt(count / count.max()) / 15)


def test_dots_are_rows_from_top_to_bottom(ax):
    plots.dots(
        {"a": (0.2, 0.1, 0.3), "b": (0.5, 0.5, 0.6)},
        [("red", "o"), ("blue", "s")],
        ax=ax,
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()
    assert [line.get_xdata()[0] for line in ax.lines] == [0.1, 0.2, 0.5, 0.5]


def test_curve_draws_its_points_and_its_band(ax):
    x, y = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.3, 0.2, 0.1])
    plots.curve(x, y, y - 0.05, y + 0.05, label="a", color="red", ax=ax)
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), np.stack([x, y], 1))
    (band,) = ax.collections
    low, high = band.get_datalim(ax.transData).get_points()[:, 1]
    assert (low, high) == pytest.approx((0.05, 0.35))
    assert to_rgba(band.get_facecolor()[0], 1) == to_rgba("red")


@pytest.mark.parametrize(("axis", "data"), [("y", "get_ydata"), ("x", "get_xdata")])
def test_reference_lies_at_its_value_and_is_labelled(ax, axis, data):
    plots.reference(0.25, "chance", axis=axis, ax=ax)
    assert set(getattr(ax.lines[0], data)()) == {0.25}
    assert texts(ax) == ["chance"]


def test_label_lines_writes_each_label_at_the_end_of_its_line_and_apart_from_the_others(
    ax,
):
    for label, end in {"low": 1.0, "high": 1.001, "far": 3.0}.items():
        ax.plot([0, 1], [0, end], label=label)
    ax.plot([0, 1], [0, 2])  # has no label, gets none
    plots.label_lines(ax)
    ax.figure.draw_without_rendering()
    assert texts(ax) == ["low", "high", "far"]
    assert [text.get_color() for text in ax.texts] == [
        line.get_color() for line in ax.lines[:3]
    ]
    at = [
        text.get_window_extent().get_points()[:, 1].mean() * 72 / ax.figure.dpi
        for text in ax.texts
    ]
    ends = [
        ax.transData.transform((1, y))[1] * 72 / ax.figure.dpi
        for y in (1.0, 1.001, 3.0)
    ]
    assert at[1] - at[0] >= 8.5  # 9 points between their anchors
    assert at[0] < ends[0] < ends[1] < at[1]  # moved apart, in both directions
    assert at[2] == pytest.approx(ends[2], abs=1)  # had room, stays


def test_a_label_stands_at_the_last_point_that_is_drawn(ax):
    assert plots.label_lines(ax) is ax  # no line
    for label, ys in {"ends": [1, 2, np.nan], "no": [np.nan] * 3, "inf": [3, 4, np.inf]}.items():  # fmt: skip
        ax.plot([0, 1, 2], ys, label=label)
    plots.label_lines(ax)
    assert {text.get_text(): text.xy for text in ax.texts} == {"ends": (1, 2), "inf": (1, 4)}  # fmt: skip


def test_simplex_puts_certain_members_in_the_corners_and_the_mean_between_them(ax):
    plots.simplex(50 * torch.eye(3), ax=ax)
    (members,) = points(ax)
    np.testing.assert_allclose(members, [[0, 0], [1, 0], [0.5, 3**0.5 / 2]], atol=1e-9)
    mean = ax.lines[-1].get_xydata()
    np.testing.assert_allclose(mean, [[0.5, 3**0.5 / 6]], atol=1e-9)
    assert texts(ax) == ["A", "B", "C"]
    contours = next(c for c in ax.collections if not isinstance(c, PathCollection))
    assert contours.levels[0] == 0
    assert contours.levels[-1] == pytest.approx(np.log(3))


def test_decomposition_bars_add_up_to_the_total(ax):
    plots.decomposition_bars(
        {"agree": (0.7, 0.1), "disagree": (0.1, 0.9)}, limit=1.5, ax=ax
    )
    aleatoric, epistemic, total = (
        [bar.get_width() for bar in bars] for bars in ax.containers
    )
    np.testing.assert_allclose([aleatoric, epistemic], [[0.7, 0.1], [0.1, 0.9]])
    np.testing.assert_allclose(total, np.add(aleatoric, epistemic))
    assert [bar.get_x() for bar in ax.containers[1]] == aleatoric  # stacked
    assert [label.get_text() for label in ax.get_yticklabels()] == ["agree", "disagree"]
    assert ax.yaxis_inverted()  # the first name on top


def test_areas_reach_the_total(ax):
    x = np.linspace(0, 1, 11)
    plots.areas(x, 1 - x, x, ax=ax)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), 1)
    low, high = ax.collections
    assert low.get_label() == "aleatoric"
    np.testing.assert_allclose(low.get_datalim(ax.transData).ymax, 1)
    np.testing.assert_allclose(
        high.get_datalim(ax.transData).get_points(), [[0, 0], [1, 1]]
    )


def test_ecdf_is_the_fraction_at_most_x_and_reaches_one(ax):
    scores = torch.tensor([0.4, 0.1, 0.2, 0.2])
    plots.ecdf(scores, ax=ax)
    x, y = ax.lines[0].get_xdata(), ax.lines[0].get_ydata()
    assert y[-1] == 1
    for at in (0.1, 0.2, 0.4):
        assert (
            y[np.searchsorted(x, np.float32(at), side="right") - 1]
            == (scores <= at).float().mean()
        )


def test_roc_label_is_the_auroc_and_the_curve_encloses_it(ax):
    generator = np.random.default_rng(0)
    inside, outside = (
        generator.normal(0, 1, 50).round(1),
        generator.normal(1, 1, 60).round(1),
    )  # rounded: with ties
    plots.roc(inside, outside, label="MI", ax=ax)
    auroc = metrics.ood_detection(inside, outside).auroc
    curve = ax.lines[0]
    assert curve.get_label() == f"MI {auroc:.3f}"
    assert np.trapezoid(curve.get_ydata(), curve.get_xdata()) == pytest.approx(
        auroc, abs=1e-12
    )
    np.testing.assert_allclose(curve.get_xydata()[[0, -1]], [[0, 0], [1, 1]])


@pytest.mark.parametrize("channels", [1, 3])
def test_images_fill_the_axes_in_order(channels):
    inputs = torch.rand(3, channels, 4, 4)
    _, axes = plots.figure(4)
    plots.images(inputs, count=4, title="digits", axes=axes)
    assert not axes[3].images
    for ax, image in zip(axes[:3], inputs, strict=True):
        np.testing.assert_array_equal(
            ax.images[0].get_array(), image.movedim(0, -1).squeeze(-1)
        )
    assert texts(axes[0]) == ["digits"]


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_halves_and_lists_are_the_same_picture(channels, ax):
    pixels = torch.arange(12 * channels, dtype=torch.uint8).view(1, channels, 3, 4)
    x = pixels / 255
    for given in (x, pixels, [*x], x.bfloat16(), x.numpy()):
        plots.images(given, axes=[ax])
        expected = x[0].movedim(0, -1).squeeze(-1)
        np.testing.assert_allclose(ax.images[-1].get_array(), expected, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 4, 3), (2, 2, 3, 4)])
def test_what_is_no_image_is_not_drawn(shape, ax):
    with pytest.raises(ValueError, match="image"):
        plots.images(torch.rand(shape), axes=[ax])


def test_texts_run_over_the_axes_or_break_into_lines():
    sentences = ["It cost $5, then $9 .", *("more " * 40,) * 3]
    _, axes = plots.figure(3)
    plots.images(sentences, count=3, title="films", axes=axes)
    (written,) = {*texts(axes[0])} - {"films"}
    first, second, third = written.split("\n")
    assert (first, len(second), second) == (sentences[0], 130, third)
    assert not texts(axes[1])
    (alone,) = plots.images(sentences[1:2], count=1, axes=[axes[2]])
    assert {len(line) for line in texts(alone)[0].split("\n")[:-1]} == {24}


def test_votes_name_the_class_of_each_tile_and_mark_those_against_the_mean(ax):
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    plots.votes(torch.rand(1, 8, 8), p.log(), ("left", "right hand"), ax=ax)
    assert texts(ax) == ["left", "left", "right", "left"]
    signed = ax.collections[0].get_array().ravel()
    np.testing.assert_allclose(signed, [-0.9, -0.8, 0.7, -0.6], rtol=1e-6)
    with pytest.raises(ValueError, match=r"s x s tiles, got \[3, 2\]"):
        plots.votes(torch.rand(1, 8, 8), p[:3].log(), ax=ax)
    plots.votes(torch.rand(1, 8, 8), p.log(), np.array(["a", "b"]), ax=ax)
    with pytest.raises(ValueError, match="number of names must be one of 2; got 1"):
        plots.votes(torch.rand(1, 8, 8), p.log(), ["a"], ax=ax)


def test_table_marks_the_best_and_the_second_and_greys_the_paper():
    frame = pd.DataFrame(
        {
            "auroc": [0.9, 0.7, 0.8],
            "ece": [0.3, 0.2, 0.1],
            "paper": [0.91, 0.72, np.nan],
        }
    )
    html = plots.table(
        frame, best={"auroc": "max", "ece": "min"}, paper=["paper"], digits=2
    ).to_html()
    styles = {
        cell.strip(): rule
        for block in html.split("</style>")[0].split("}")
        if "{" in block
        for cells, rule in [block.split("{")]
        for cell in cells.replace('<style type="text/css">', "").split(",")
    }
    found = {
        cell.split("_", 2)[2]: rule.split(":")[1].strip(" ;\n")
        for cell, rule in styles.items()
    }
    assert found["row0_col0"] == found["row2_col1"] == "bold"
    assert found["row2_col0"] == found["row1_col1"] == "underline"
    assert {found[f"row{i}_col2"] for i in range(3)} == {plots.PAPER}
    assert ">0.90<" in html
    assert ">–<" in html
    assert ">not run<" in plots.table(frame).to_html()


# Saving ---------------------------------------------------------------------------------------------------------------
def test_save_writes_png_and_pdf_and_describes_the_figure(tmp_path, ax):
    runs.begin(tmp_path, "00_test")
    ax.plot([0, 1])
    plots.save(ax.figure, "line", "A line rises.", paper="Kirsch 2024, Fig. 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "line.pdf",
        "line.png",
        "results.json",
    ]
    assert (tmp_path / "line.png").read_bytes()[:4] == PNG
    assert (tmp_path / "line.pdf").read_bytes()[:4] == PDF
    assert read_json(tmp_path / "results.json")["figures"] == {
        "line": {"caption": "A line rises.", "paper": "Kirsch 2024, Fig. 1"}
    }


def test_save_shows_in_a_notebook_what_it_saved(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    runs.begin(tmp_path, "00_test")
    fig, _ = plots.figure(width=4.0, height=2.0)
    plots.save(fig, "elsewhere")
    assert plt.fignum_exists(fig.number)
    monkeypatch.setattr(
        plots.mpl, "get_backend", lambda: "module://matplotlib_inline.backend_inline"
    )
    plots.save(fig, "figure")
    assert not plt.fignum_exists(fig.number)  # or the notebook would show it again
    (picture,) = shown
    assert picture.data == (tmp_path / "figure.png").read_bytes()
    assert picture.width == pytest.approx(4 * fig.dpi, rel=0.1)


def test_arrays_and_lists_are_drawn_as_tensors_are(ax):
    z, p = np.random.default_rng(0).normal(size=(4, 3)), np.full((2, 3, 4), 0.5)
    assert plots.simplex(z.tolist(), ax=ax) is plots.votes(p[:1, 0, None], z, ax=ax)
    assert plots.mask_map(p[0], ax=ax) is plots.reliability(
        z[None], [0, 1, 2, 0], ax=ax
    )
    parts = torch.tensor([0.25, 0.5])
    plots.decomposition_bars({"a": (parts[0], parts[1])}, ax=ax)
    assert [bar.get_width() for bar in ax.containers[-1]] == [0.75]
    drawn = plots.curve([0, 1], parts.bfloat16(), ax=ax).lines[-1]
    assert drawn.get_ydata().tolist() == [0.25, 0.5]


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda z: plots.reliability(z[None], [1, 2, 3]), "labels must be 0 to 2"),
        (lambda z: plots.ecdf(z[:0, 0]), "one or more"),
        (lambda z: plots.simplex(z[:, :2]), "number of classes"),
    ],
)
def test_numbers_that_make_no_picture_are_refused(draw, words):
    with pytest.raises(ValueError, match=words):
        draw(torch.randn(3, 3))
