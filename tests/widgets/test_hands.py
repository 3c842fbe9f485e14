"""What the explorers in the browser are given; how they behave: tests/browser."""

import base64
import json
import re
from importlib import resources

import made_up
import numpy as np
import pytest
import torch
from same import near
from torch import nn

from uqlab import data, ensembles, extraction, heads, models, training, widgets

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
    near(torch.tensor(hand.data["members"], dtype=torch.float64), logits.softmax(-1))
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
        others=["far"], removed=(0, 2), path={"score": [0.5, 0.4]},
        alone={(i, j): {"score": i + j / 2} for i in range(2) for j in range(2)}, shown=20,
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
    assert hand.data["alone"] == {"score": [[0, 0.5], [1, 1.5]]}


def in_page(layers, x):
    """What a page computes from the layers that it carries."""
    for i, layer in enumerate(layers):
        whole = np.frombuffer(base64.b64decode(layer["weights"]), np.int8)
        weight = (
            whole.reshape(len(layer["bias"]), -1) * np.array(layer["scale"])[:, None]
        )
        x = (np.maximum(x, 0) if i else x) @ weight.T + np.array(layer["bias"])
    return torch.tensor(x).softmax(-1)


def test_draw_carries_networks_that_predict_as_the_members_do():
    trained, train = made_up.networks()
    narrow = trained["narrow"]
    training.fit(narrow, train.inputs, train.labels, epochs=20, lr=0.1, progress=False)
    hidden = extraction.masks(models.mlp(64, (12, 8)), 3, seed=0).harden()
    shown = {"masked": hidden, "narrow": narrow, "one": narrow.member(1)}
    hand = widgets.draw(shown, train, {"first": train.inputs[0]})
    for name, members in hand.data["models"].items():
        expected = training.predict(shown[name], train.inputs).softmax(-1)
        flat = train.inputs.flatten(1).double().numpy()
        found = torch.stack([in_page(layers, flat) for layers in members])
        expected = expected if expected.ndim == 3 else expected[None]
        assert torch.allclose(found, expected.double(), atol=0.02)
    assert hand.data["examples"][0] == hand.data["images"][0]
    assert hand.data["labels"] == train.labels.tolist()


def test_draw_carries_equally_many_members_that_fit_in_3_megabytes():
    train = data.load("mnist-mini", "train", limit=20)
    wide, narrow = (
        ensembles.deep(lambda h=h: models.mlp(784, (h,)), 5) for h in (1000, 8)
    )
    hand = widgets.draw({"wide": wide, "narrow": narrow}, train, {})
    assert list(map(len, hand.data["models"].values())) == [2, 2]
    assert 2e6 < len(json.dumps(hand.data)) < 3.1e6


@pytest.mark.parametrize(
    "network",
    [
        models.small_cnn(),
        nn.Sequential(nn.Flatten(), nn.Linear(784, 9), nn.Tanh(), nn.Linear(9, 10)),
        nn.Sequential(nn.Linear(28, 28), nn.Flatten(), nn.Linear(784, 10)),
    ],
)
def test_draw_refuses_networks_that_are_no_perceptron(network):
    train = data.load("mnist-mini", "train", limit=20)
    with pytest.raises(ValueError, match="linear layers with ReLU"):
        widgets.draw({"one": network}, train, {})


def test_front_needs_numbers():
    board = made_up.board()
    board.loc[0, "nll"] = float("nan")
    with pytest.raises(ValueError, match=r"nll\[\d+\]\[\d+\] is nan"):
        widgets.front({"made up": board}, "nll", ["nll"], ["stored"])
    one = made_up.board().query("seed == seed.min()")
    with pytest.raises(
        ValueError, match="number of seeds of a board must be at least 2"
    ):
        widgets.front({"made up": one}, "nll", ["nll"], ["stored"])


def test_images_of_bytes_and_of_numbers_are_drawn_alike():
    images = torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8)
    values = {1: {"id": torch.rand(5), "far": torch.rand(4)}}
    shown = [
        widgets.alarm(values, {"far": x}).data["outside"][0]["images"]
        for x in (images, images / 255)
    ]
    assert shown[0] == shown[1]
    assert len(set(shown[0])) == 4


def test_explorers_refuse_what_they_cannot_draw(unchecked):
    with pytest.raises(ValueError, match="number of classes"):
        widgets.cloud(torch.randn(5, 4))
    values = {1: {"id": torch.rand(5), "far": torch.rand(4)}}
    with pytest.raises(ValueError, match=r"image must be \[channels, height, width\]"):
        widgets.alarm(values, {"far": torch.rand(4, 8, 6)})
    trained, train = made_up.networks()
    for example in (train.inputs[0, 0], torch.rand(1, 28, 28)):
        with pytest.raises(ValueError, match="shape of an example"):
            widgets.draw(trained, train, {"other": example})
    with pytest.raises(TypeError, match="models must be by name"):
        widgets.draw([*trained.values()], train, {})


def test_numbers_of_torch_and_numpy_are_those_of_python():
    for five in (torch.tensor(5), np.int64(5), np.float32(5)):
        asked = widgets.guess("How many?", np.int64(0), five, answer=five)
        assert asked.data["range"][:2] == [0, 5]
        assert asked.data["answer"] == 5
    for groups in (torch.tensor([0, 1]), np.array([0, 1])):
        assert widgets.cloud(torch.zeros(2, 3), groups).data["groups"] == [0, 1]
    assert widgets.guess("Which?", choices=np.array(["a", "b"])).data["choices"] == ["a", "b"]  # fmt: skip


def test_draw_carries_a_network_in_half_precision():
    trained, train = made_up.networks()
    one = trained["narrow"].member(0).bfloat16()
    carried, exact = (
        widgets.draw({"one": net}, train, {}).data["models"]["one"]
        for net in (one, one.float())
    )
    assert carried == exact
