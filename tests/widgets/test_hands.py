"""What the explorers in the browser are given and what the kernel answers them; how they behave: tests/browser."""

import json
import re
from importlib import resources

import made_up
import pytest
import torch

from uqlab import heads, plots, training, widgets

STATIC = [
    path
    for path in (resources.files("uqlab.widgets") / "static").iterdir()
    if path.is_file()
]


@pytest.mark.parametrize("path", STATIC, ids=lambda path: path.name)
def test_nothing_is_loaded_and_no_text_becomes_code(path):
    text = path.read_text().replace(
        '"http://www.w3.org/2000/svg"', ""
    )  # the name that SVG has, never asked for
    assert re.findall(r"\w+:\s?//|url\(|@import|\bimport\b|\bfetch\b|eval|Function\(|(?:inner|outer)HTML|"
                      r"insertAdjacent|document\.write|XMLHttp|WebSocket", text) == []  # fmt: skip


def test_colours_are_those_of_the_plots():
    colors = made_up.cloud().data["colors"]
    assert (colors["aleatoric"], colors["epistemic"]) == (
        plots.ALEATORIC,
        plots.EPISTEMIC,
    )
    assert (colors["neutral"], colors["mark"]) == (plots.NEUTRAL, plots.MARK)


def test_a_page_alone_holds_data_as_json_and_no_tag_of_them():
    evil = "</script><script>alert(1)</script>"
    values = {1: {"id": torch.rand(9), evil: torch.rand(9)}}
    hand = widgets.alarm(values, {evil: torch.rand(9, 1, 4, 4)})
    page = hand.html()
    assert evil not in page
    assert "default-src 'none'" in page
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.+?)</script>', page
    )
    assert json.loads(text) == hand.data
    assert hand.data["outside"][0]["name"] == evil


def test_cloud_has_the_members_and_refuses_other_groups():
    logits = torch.randn(4, 3, dtype=torch.float64)
    hand = widgets.cloud(logits, [0, 1, 0, 3])
    torch.testing.assert_close(
        torch.tensor(hand.data["members"], dtype=torch.float64), logits.softmax(-1)
    )
    for groups in ([0, 1], [0, 1, 2, 4]):
        with pytest.raises(
            ValueError, match="groups must be 0 to 3, one for each of the 4 members"
        ):
            widgets.cloud(logits, groups)


def test_alarm_shows_the_images_whose_values_it_has():
    hand = made_up.alarm()
    assert hand.data["settings"] == ["0.5", "8"]
    for other in hand.data["outside"]:
        assert len(other["shown"]) == len(other["images"])
        assert {len(row) for row in other["values"]} == {30}
        assert all(
            source.startswith("data:image/png;base64,") for source in other["images"]
        )


def test_head_map_has_the_separations_of_the_package_and_points_of_all_sets():
    clouds = {
        name: torch.randn(2, 2, 3, 30, 5) + shift
        for shift, name in enumerate(("test", "far"))
    }
    values = torch.tensor([[0.5, -0.2], [0.0, 1.0]])
    hand = widgets.head_map(
        values, [(1, 0), (0, 1)], lambda gone, layer, head, name: clouds[name][layer, head, gone], known="test",
        others=["far"], removed=(0, 2), shown=20,
    )  # fmt: skip
    found = hand.data["clouds"][1][0][1]
    expected = heads.separation(*(cloud[0, 1, 2][:, None] for cloud in clouds.values()))
    assert found["apart"] == [pytest.approx([distance.item() for distance in expected])]
    assert [len(points) for points in found["points"]] == [
        40,
        40,
    ]  # of each point both places
    assert max(abs(place) for points in found["points"] for place in points) <= 99
    cells = hand.data["cells"]
    assert [[cell["value"] for cell in row] for row in cells] == values.tolist()
    assert cells[0][0]["color"] != cells[0][1]["color"]
    assert (hand.data["path"], hand.data["alone"]) == ({}, {})


def test_draw_answers_what_the_members_predict_and_the_nearest_images():
    models, train = made_up.networks()
    hand = widgets.draw(models, train, {"first": train.inputs[0]})
    x = (train.inputs[:1] * 255).round() / 255
    said = hand.answer({"model": "narrow", "pixels": hand.data["examples"][0]})
    expected = training.predict(models["narrow"], x)[:, 0].double().softmax(-1)
    torch.testing.assert_close(
        torch.tensor(said["members"], dtype=torch.float64), expected
    )
    assert len(said["near"]) == 4
    assert said["near"][0][0] == train.classes[int(train.labels[0])]  # itself


def test_draw_says_and_raises_what_went_wrong(monkeypatch):
    models, train = made_up.networks()
    hand, sent = widgets.draw(models, train, {"first": train.inputs[0]}), []
    monkeypatch.setattr(hand, "send", sent.append)
    with pytest.raises(KeyError):
        hand._reply(
            hand, {"ask": 7, "model": "no such", "pixels": hand.data["examples"][0]}, []
        )
    assert sent == [{"ask": 7, "error": "No answer: KeyError: 'no such'."}]


def test_draw_says_that_it_was_interrupted(monkeypatch):
    models, train = made_up.networks()
    hand, sent = widgets.draw(models, train, {"first": train.inputs[0]}), []
    monkeypatch.setattr(hand, "send", sent.append)

    def interrupted(message):
        raise KeyboardInterrupt

    hand.answer = interrupted
    with pytest.raises(KeyboardInterrupt):
        hand._reply(hand, {"ask": 8}, [])
    assert sent == [
        {
            "ask": 8,
            "error": "No answer: the kernel was interrupted. The next move asks it again.",
        }
    ]


def test_front_needs_numbers():
    board = made_up.board()
    board.loc[0, "nll"] = float("nan")
    with pytest.raises(ValueError, match=r"not JSON compliant"):
        widgets.front({"made up": board}, "nll", ["nll"], ["stored"])
