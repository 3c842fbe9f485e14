"""The board's arithmetic by hand on tiny tables, and a tiny board against its parts."""

import contextlib

import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn

from uqlab import data, ensembles, metrics, models, training, uncertainty
from uqlab.study import methods, scoreboard, scores
from uqlab.study.methods import METHODS, Method


def board(**columns):
    """Rows of methods a, b, c with one value a seed; columns: {method: [value a seed]}."""
    rows = {}
    for column, values in columns.items():
        for method, each in values.items():
            for seed, value in enumerate(each):
                rows.setdefault((method, seed), {"method": method, "seed": seed})[
                    column
                ] = value
    return pd.DataFrame(rows.values())


# Comparisons ----------------------------------------------------------------------------------------------------------
def test_differences_are_paired_and_their_p_values_holms():
    seeds = [0.1, 0.5, 0.9]  # which differ far more than the methods
    table = board(
        accuracy={"a": seeds, "b": [value + 0.01 for value in seeds], "c": seeds}
    )
    found = scoreboard.differences(table, "accuracy", "a")
    columns = ["difference", "low", "high", "p"]
    assert found.loc["b", columns].tolist() == pytest.approx([0.01, 0.01, 0.01, 0])
    assert found.loc["c", columns].tolist() == [0, 0, 0, 1]
    table = board(nll={"a": [0, 0, 0], "b": [1, 2, 3], "c": [1, 1.1, 1.2]})
    found = scoreboard.differences(table, "nll", "a")
    assert found.loc["b", columns[:3]].tolist() == pytest.approx(
        metrics.paired_t([1, 2, 3])
    )
    single = [stats.ttest_1samp(each, 0).pvalue for each in ([1, 2, 3], [1, 1.1, 1.2])]
    assert found["p"].tolist() == pytest.approx([single[0], 2 * single[1]])


def test_the_front_holds_what_nothing_dominates():
    names = ("cheap", "worse", "dear", "twin", "unsure")
    quality = dict(
        zip(names, [[1, 1], [0.9, 0.9], [3, 3], [1, 1], [0.8, 1.4]], strict=True)
    )
    cost = dict(zip(names, [[1, 1], [2, 2], [9, 9], [1, 1], [2, 2]], strict=True))
    table = board(accuracy=quality, trained=cost)
    found = scoreboard.pareto(table, "accuracy", "trained")
    assert list(found.index) == ["cheap", "twin", "unsure", "dear"]
    assert found["trained"].tolist() == [1, 1, 2, 9]
    one = scoreboard.pareto(table[table.seed == 0], "accuracy", "trained")
    assert list(one.index) == ["cheap", "twin", "dear"]


def test_no_comparison_without_a_pair():
    table = board(
        accuracy={"a": [0.5, 0.7], "b": [0.9, 0.9]},
        mi={"a": [float("nan")] * 2, "b": [1.0, 2.0]},
    )
    assert list(scoreboard.pareto(table, "mi", "accuracy").index) == ["b"]
    with pytest.raises(ValueError, match="at least 2"):
        scoreboard.differences(table[table.seed == 0], "accuracy", "a")
    with pytest.raises(ValueError, match="every method needs every seed"):
        scoreboard.differences(table[:3], "accuracy", "a")
    with pytest.raises(ValueError, match="no column acuracy"):
        scoreboard.differences(table, "acuracy", "a")
    with pytest.raises(ValueError, match="`baseline` must be one of 'a', 'b'"):
        scoreboard.differences(table, "accuracy")


def test_a_recommendation_by_hand():
    # two seeds choose, the others judge
    nll = {"single": [0.5] * 4, "lora": [0.2, 0.4, 0.2, 0.3], "deep": [0.25] * 4}
    nll["mine"] = [0.9] * 4
    stored = {"single": [10] * 4, "lora": [12] * 4, "deep": [40] * 4, "mine": [5] * 4}
    table = board(
        nll=nll,
        stored=stored,
        accuracy={name: [1 - v for v in values] for name, values in nll.items()},
    )
    thirds = board(
        nll={"a": [1.0] * 3}, latency={"a": [0.1, 0.2, 0.3]}
    )  # their mean is a little more than a fifth
    assert scoreboard.recommend(thirds, "nll", {"latency": 0.2})[0] == "a"
    all_in = scoreboard.recommend(table, "nll", {"stored": 40})
    assert all_in[:2] == ("deep", "lora")  # though all four seeds say neither
    half = stats.t.ppf(0.975, 1) * 0.05  # the judging differences are -0.05 and 0.05
    assert (all_in.margin, all_in.low, all_in.high) == pytest.approx((0, -half, half))
    assert all_in.refused == {}
    assert f"{all_in.low:.3g} to {all_in.high:.3g}" in all_in.reason
    cheaper = scoreboard.recommend(table, "accuracy", {"stored": 39})  # more is better
    assert cheaper[:2] == ("lora", "single")
    assert (cheaper.margin, cheaper.low, cheaper.high) == pytest.approx(
        (0.25, 0.25 - half, 0.25 + half)
    )
    assert cheaper.refused == {"deep": "stored"}
    assert "not significant" in cheaper.reason
    sure = table[table["method"] != "lora"]
    assert "it is ahead" in scoreboard.recommend(sure, "nll", {}).reason
    least = scoreboard.recommend(
        table, "stored", {"accuracy": 0.6, "nll": 0.45}
    )  # a limit from below, and two limits
    assert least[:2] == ("lora", "deep")
    assert least.refused == {"single": "accuracy", "mine": "accuracy"}
    few = scoreboard.recommend(table[table["seed"] < 2], "nll", {})
    assert few[:2] == ("lora", "deep")
    assert few.low != few.low  # NaN


def test_one_network_with_a_temperature_is_a_row_of_its_own():
    nll = {"single": [0.5, 0.6], "lora": [0.4, 0.4]}
    table = board(
        nll=nll,
        ece={name: [0.1, 0.1] for name in nll},
        nll_scaled={name: [0.3, 0.2] for name in nll},
        ece_scaled={name: [0.01, 0.02] for name in nll},
        accuracy={name: [0.9, 0.8] for name in nll},
        nll_blurred={name: [2.0, 2.0] for name in nll},
        trained={name: [10, 10] for name in nll},
        stored={name: [10, 10] for name in nll},
    )
    found = scoreboard.with_temperature(table)
    pd.testing.assert_frame_equal(found[:4], table)
    scaled = found[4:].set_index("method").loc["single_temperature"]
    assert scaled["nll"].tolist() == [0.3, 0.2]
    assert scaled["ece"].tolist() == [0.01, 0.02]
    assert scaled["accuracy"].tolist() == [0.9, 0.8]
    assert scaled["stored"].tolist() == [11, 11]
    assert scaled["nll_blurred"].isna().all()
    with pytest.raises(ValueError, match="nll_scaled"):
        scoreboard.with_temperature(table.drop(columns="nll_scaled"))
    assert scoreboard.label("mine") == "mine"
    assert scoreboard.label("lora_temperature") == "LoRA-Ensemble + temperature"


# Measures -------------------------------------------------------------------------------------------------------------
SCORED = ("entropy", "mi", "knn")


@pytest.fixture(scope="module")
def sets():
    train, test = (data.load("digits", split, limit=90) for split in ("train", "test"))
    return train, test, {"letters": data.load("letters", limit=40)}


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return models.mlp(64, (16,), dropout=0.0)


@pytest.fixture(scope="module")
def deep(backbone, sets):
    """The members that `measured` trains."""
    inputs, labels = sets[0].inputs, sets[0].labels
    how = {"members": 3, "seed": 4, "epochs": 2, "lr": 0.01}
    return methods.train("deep", backbone, inputs, labels, **how)


def measured(backbone, sets, **more):
    fixed = {"scores": SCORED, "members": 3, "seeds": [4], "repeats": 2}
    fixed |= {"epochs": 2, "lr": 0.01}
    return scoreboard.measure(backbone, *sets, **(fixed | more))


def test_a_board_and_a_method_of_ones_own_by_one_entry(
    sets, backbone, deep, monkeypatch
):
    def pair(net, members, seed):
        return ensembles.deep(lambda: methods.fresh(net), 2, seed)

    monkeypatch.setitem(METHODS, "mine", Method("two networks", "#123456", "*", pair))
    _, test, ood = sets
    table = measured(
        backbone,
        sets,
        methods=["single", "deep", "mine"],
        method_kwargs={"mine": {"epochs": 1}},
    )
    assert table[["method", "seed", "members"]].to_numpy().tolist() == [
        ["single", 4, 1],
        ["deep", 4, 3],
        ["mine", 4, 2],
    ]
    row = table.iloc[1]
    z = training.predict(deep, test.inputs)
    for name in ("accuracy", "nll", "ece", "brier"):
        expected = getattr(metrics, name)(z, test.labels)
        assert row[name] == pytest.approx(expected, abs=1e-5)
    mi = [scores.SCORES["mi"](deep, each.inputs) for each in (test, ood["letters"])]
    assert row["auroc_mi_letters"] == pytest.approx(
        metrics.ood_detection(*mi).auroc, abs=1e-3
    )
    assert row["aurc"] == pytest.approx(
        metrics.aurc(z, test.labels, -metrics.log_prediction(z).amax(1)), abs=1e-4
    )
    assert table.columns[table.isna().any()].tolist() == ["auroc_mi_letters"]
    size = sum(p.numel() for p in backbone.parameters())
    assert (
        table["trained"].tolist()
        == table["stored"].tolist()
        == [size, 3 * size, 2 * size]
    )
    assert (table[["train_seconds", "latency_1", "latency_64"]] > 0).all(axis=None)


def test_singular_vectors_are_held_but_not_stored(sets):
    """A singular value ensemble stores W and the values; the vectors follow from W."""
    net = models.mlp(64, (16, 8), classes=10, dropout=0.0)
    row = measured(net, sets, methods=["singular_value"], scores=["mi"]).iloc[0]
    weights, values, biases = 64 * 16 + 16 * 8, 16 + 8, 16 + 8
    assert row["trained"] == 3 * (values + biases + 8 * 10 + 10)
    assert row["stored"] == weights + row["trained"]


@pytest.mark.parametrize("name", ["masks", "laplace", "tiles"])
def test_trained_counts_the_network_that_members_are_found_in(name, sets):
    """Whoever has the backbone must get all of it; a frozen layer is theirs already."""
    net = models.vit(8, 4, width=16, layers=2, classes=10)
    first = net.vit.embeddings if hasattr(net, "vit") else net.embeddings
    first.requires_grad_(False)
    frozen = sum(p.numel() for p in first.parameters())
    how = {"methods": [name], "scores": ["msp"], "members": 4, "epochs": 1}
    how |= {"repeats": 1, **({"steps": 2} if name == "masks" else {})}
    row = measured(net, sets, **how).iloc[0]
    assert row["trained"] == row["stored"] - frozen


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_every_score(name, sets):
    few = (sets[0][:40], sets[1][:8], {"letters": sets[2]["letters"][:4]})
    net = models.vit(8, 4, width=8, layers=2, heads=2)
    members = 4 if name == "tiles" else 2  # tiles lie in a square
    small = {
        "members": members,
        "epochs": 1,
        "repeats": 1,
        "method_kwargs": {"lora_single": {"rank": 2}},
    }
    # The logits of linearised members are no layer's.
    linearised = name == "laplace_lora"
    gone = pytest.warns(UserWarning, match="gradnorm is left out")
    with gone if linearised else contextlib.nullcontext():
        table = measured(net, few, methods=[name], scores=scores.SCORES, **small)
    missing = (
        ({"gradnorm"} if linearised else set())
        if table["members"].item() > 1
        else {n for n, score in scores.SCORES.items() if score.needs_members}
    )
    columns = {f"auroc_{score}_letters" for score in set(scores.SCORES) - missing}
    assert columns == {name for name in table if name.startswith("auroc")}
    assert not table.isna().any(axis=None)


def test_what_a_backbone_cannot_carry_is_left_out_or_an_error(
    sets, backbone, monkeypatch
):
    def fails(net, members, seed):
        raise ValueError("needs attention; this network has none")

    kept = {
        "single": METHODS["single"],
        "mine": Method("mine", "#123456", "*", fails),
    }
    monkeypatch.setattr(methods, "METHODS", kept)
    with pytest.warns(UserWarning, match="mine is left out: needs attention"):
        assert measured(backbone, sets)["method"].tolist() == ["single"]
    with pytest.raises(ValueError, match="this network has none"):
        measured(backbone, sets, methods=["mine"])
    del kept["single"]
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="no method could be trained"),
    ):
        measured(backbone, sets)


def test_soft_labels_temperature_and_shifts(sets, backbone, deep):
    soft = data.load("ambiguous-digits", limit=50)
    how = {"methods": ["deep"], "validation": sets[0], "shifted": {"clean": sets[1]}}
    row = measured(backbone, (sets[0], soft, {}), **how).iloc[0]
    z = training.predict(deep, soft.inputs)
    q, aleatoric = metrics.log_prediction(z).exp(), uncertainty.decompose(z).aleatoric
    assert row["soft_kl"] == pytest.approx(
        stats.entropy(soft.label_probs, q, axis=1).mean(), rel=1e-5
    )
    ambiguity = stats.entropy(soft.label_probs, axis=1)
    assert row["soft_correlation"] == pytest.approx(
        stats.spearmanr(ambiguity, aleatoric).statistic, abs=1e-3
    )
    t = metrics.fit_temperature(training.predict(deep, sets[0].inputs), sets[0].labels)
    assert row["temperature"] == t
    assert row["nll_scaled"] == pytest.approx(
        metrics.nll(q.log()[None] / t, soft.labels)
    )
    clean = metrics.nll(training.predict(deep, sets[1].inputs), sets[1].labels)
    assert row["nll_clean"] == pytest.approx(clean)


def test_a_score_that_cannot_be_fitted_is_left_out_and_the_others_stay(sets):
    constant = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Threshold(1e9, 1.0), nn.Linear(8, 10)
    )
    how = {"methods": ["single"], "scores": ["mahalanobis", "entropy"]}
    with pytest.warns(UserWarning, match="mahalanobis is left out"):
        table = measured(constant, sets, **how)
    assert "auroc_entropy_letters" in table
    assert "auroc_mahalanobis_letters" not in table
