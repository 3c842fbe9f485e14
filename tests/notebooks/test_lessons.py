"""Lessons and studies at the `tiny` profile: they run, show what they claim to show, and take other parameters."""

import json
import math

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbconvert import HTMLExporter

from uqlab import runs
from uqlab.core.files import read_json
from uqlab.runs import parameters

LESSONS = [path.stem for path in parameters.all_notebooks()]
STUDIES = [path.stem for path in parameters.all_notebooks("studies")]
PAGES = [*LESSONS, *(name for name in STUDIES if name.endswith("_study"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_and_describes_what_it_wrote(results, name):
    """Whether claims hold is a matter of `quick` and of other seeds: figures/seeds."""
    recorded, folder = results(name)
    assert recorded["numbers"]
    assert recorded["figures"]
    for figure, about in recorded["figures"].items():
        assert len(about["caption"]) > 20, figure
        written = {path.suffix for path in folder.glob(f"{figure}.*")}
        assert written == {".png", ".pdf"}
    asked = [claim for claim in recorded["claims"].values() if not claim["algebra"]]
    assert len(asked) >= 2
    assert [claim for claim in asked if claim["margin"] is None] == []


@pytest.mark.parametrize("name", LESSONS)
def test_its_explorer_moves_and_its_exercises_solutions_run(pages, name):
    """As two cells more do, of tests/small_pages.py."""
    moved = json.loads((pages(name) / "moved.json").read_text())
    assert moved
    assert [control for control, changed in moved.items() if not changed] == []
    assert "".join(json.loads((pages(name) / "solved.json").read_text())) == ""


def test_a_page_as_html_has_every_figure(results):
    recorded, folder = results("01_toy_regression_collapse")
    path = folder / "01_toy_regression_collapse.ipynb"
    page, _ = HTMLExporter().from_filename(path)
    outputs = [o for c in nbformat.read(path, 4).cells for o in c.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", ())]
    assert len(pictures) >= len(recorded["figures"]) > 2
    assert page.count('src="data:image/png;base64,') >= len(pictures)
    assert "uqlab-hand" in page  # the explorer answers without a kernel


# What pages find, `n` their numbers and `t` their tables; with the changes of their parameters, if any.
FOUND = {
    ("00_uncertainty_decomposition", ""): """
        n["epistemic_share"]["t = 0.2"] < 0.1 < 0.5 < n["epistemic_share"]["t = 1"]
        max(n["seen_by_two"]["plug-in"]) < min(n["seen_by_two"]["jackknife"])
        n["shown_by_groups"]["mixed"] < 1e-3 < 0.9 < n["shown_by_groups"]["camps"]
        n["shown_by_groups"]["networks"] == approx(0.25, abs=0.1)""",
    ("00_uncertainty_decomposition_study", "ambiguous='', stages=[1, 2], members=3, repeats=50"): """
        abs(n["bias_jackknife_5"]) < abs(n["bias_plugin_5"])
        n["relative_error"]["divergences"] < 1e-3
        n["epistemic_share"].keys() == {"1", "2"}""",
    ("01_toy_regression_collapse", ""): """
        -1.4 <= n["slope"] <= -0.6
        n["eu_32"] < n["eu_1"] / 5
        n["left_at_largest"]["gap"] < n["left_at_largest"]["data"] <= 1""",
    ("01_toy_regression_collapse_study", "groups=3, epochs=30, splits=2"): """
        n["slope_low"] <= n["slope"] <= n["slope_high"]""",
    ("02_ensembles_of_ensembles", ""): """
        n["between_1"] > n["between_2"] > n["between_3"] > n["between_6"]
        n["between_6"] + n["within_6"] == approx(n["between_1"] + n["within_1"], rel=1e-5)
        n["within_1"] == approx(0, abs=1e-7)
        n["caught"]["6"] < n["caught"]["1"] / 2
        min(n[f"auroc_{m}"] for m in (1, 2, 3, 6)) > 0.8""",
    ("02_ensembles_of_ensembles_study", ""): """
        n["collapse_ratio"] < n["collapse_ratio_corrected"] < 0.5
        -1.4 < n["slope_jackknife"] < -0.6""",
    ("02_ensembles_of_ensembles_study", "model='wide-resnet-28', members=4, sizes=[1, 2], counts=[2], epochs=1, limit=24, augment=True"): """
        n["between_1"] > n["between_2"] > 0""",
    ("03_mlp_width_sweep", ""): """
        n["aleatoric_share_lost"] > 0
        n["fall_at_equal_total"] > 1.5""",
    ("03_mlp_width_sweep_study", ""): """
        min(n["accuracy_0.5"], n["accuracy_8"]) > 0.95
        all(n[f"mi_{kind}_8"] < 0.5 * n[f"mi_{kind}_0.5"] for kind in ("id", "ambiguous", "ood"))
        min(n["auroc_mi_0.5"], n["auroc_mi_8"]) > 0.85""",
    ("03_mlp_width_sweep_study", "ood=['textures', 'letters'], epochs=10, repeats=5, grid_samples=[100], grid_steps=5, ambiguous=''"): """
        not [name for name in n if "ambiguous" in name]
        min(n["mi_ood_0.5"], n["mi_letters_0.5"]) > n["mi_id_0.5"]
        n["auroc_mi_8"] != n["auroc_mi_letters_8"] > 0.7""",
    ("04_mask_extraction", ""): """
        n["share_of_deep"]["ood"] > 0.5
        np.min(t["sweep"]["data"]) > 0.5""",
    ("04_mask_extraction_study", ""): """
        n["mi_ood_single"] == 0
        abs(n["accuracy_extracted"] - n["accuracy_single"]) <= 0.01
        0.7 < n["mi_ood_extracted_hard"] / n["mi_ood_deep"] < 3
        n["mi_ood_weight_0"] < min(1e-3, n["mi_ood_weight_2"]) <= n["mi_ood_weight_2"] < n["mi_ood_weight_10"]
        0.2 < n["mask_diversity"] < math.log(2)
        max(n[f"parameters_{m}"] for m in range(10)) < 0.6 * n["parameters_single"]""",
    ("05_tile_extraction_study", ""): """
        n["tile_mean_error"] < 1e-4
        all(abs(n[f"accuracy_{s}"] - n["accuracy_original"]) < 0.1 for s in (2, 4, 8))
        all(n[f"nll_{s}"] > n["nll_original"] > n["nll_ensemble"] for s in (2, 4, 8))
        all(n["auroc_mi_ensemble"] > n[f"auroc_mi_{s}"] > 0.55 for s in (2, 4, 8))""",
    ("06_lora_ensemble_study", ""): """
        n["params_one_lora"] == 4 * 4 * 2 * 8 * 128 + 128 * 10 + 10  # blocks, matrices, A and B; classifier
        n["params_lora"] == 2 * n["params_one_lora"]
        n["params_deep"] == 2 * n["params_single"] > 10 * n["params_lora"]""",
    ("07_intruder_dimensions", ""): """
        n["intruders_value_lora"] > n["intruders_value_deep"]
        n["strong_full"] < n["strong_low"]
        n["strong_lora"] <= 8  # its rank""",
    ("07_intruder_dimensions_study", ""): """
        n["intruders_singular_value"] == n["energy_singular_value"] == 0
        n["member_cosine_lora"] < 0.7 * n["member_cosine_deep"]
        n["intruders_equal_size_low"] > n["intruders_equal_size_full"]""",
    ("08_singular_value_ensemble_study", ""): """
        n["params_singular_value"] < 0.5 * n["params_lora"] < n["params_deep"] / 4
        n["max_cosine_singular_value"] > 0.99 > n["max_cosine_lora"]
        n["mi_ood_gentle"] < n["mi_ood_singular_value"]
        n["weight_apart_gentle"] < n["weight_apart_singular_value"] < n["weight_apart_lora"]""",
    ("09_hydra_head_pruning_study", ""): """
        n["overlap_taylor_circuit"] == table("overlap").loc["Taylor, all layers", "CircAvg"] >= 0
        table("cost").loc["deep ensemble, M = 2", "parameters"] == approx(2)
        table("cost").loc["Hydra, M = 2", "parameters"] < 1.3
        1.8 < table("cost").loc["Hydra, M = 2", "multiply-adds"] < 2  # without an eighth of the heads, one MLP for both
        table("diversity").loc["Hydra (Taylor), separate", "MI, OOD"] > 0""",
    ("10_head_similarity_study", ""): """
        (table("similarity")["without the class"] < table("similarity")["matched CKA"])[:3].all()
        table("similarity")["matched CKA"].iloc[-1] < 0.5 * table("similarity")["matched CKA"][:3].min()  # shuffled
        (table("function_space")["JSD aggregated"] < table("function_space")["JSD by input"]).all()
        table("function_space")["JSD by input"].max() < math.log(2)""",
    ("11_gradient_uncertainty_study", ""): """
        n["error_naive"] < 1e-4
        all(abs(n[f"auroc_{s}"] - n["auroc_entropy"]) < 0.05 for s in ("exgrad", "reading_a", "reading_b", "regrad_style"))
        n["auroc_uniform_weights"] < 0.5 < n["auroc_gradnorm"]
        abs(n["auroc_random_order"] - 0.5) < 0.15
        n["diff_low"] <= n["auroc_regrad_style"] - n["auroc_exgrad"] <= n["diff_high"]""",
    ("11_gradient_uncertainty_study", "model='small-cnn', width=0.25, members=2, epochs=2, evaluated=40"): """
        n["error_naive"] < 1e-4
        0 < n["share_last_layer"] < 1""",
    ("12_sweep_results", ""): """
        table("standard_errors")["ratio"].iloc[0] > table("standard_errors")["ratio"].iloc[1:].max()
        n["difference"]["mean"] == approx(np.mean([-a + b for a, b in t["auroc"]["data"]]))
        n["difference"]["low"] < n["difference"]["mean"] < n["difference"]["high"]""",
    ("12_sweep_results_study", ""): """
        n["finding_holds_fraction"] == 1
        table("verdicts").loc["fall", "t low"] < table("verdicts").loc["fall", "mean"] < math.log(0.6)
        table("verdicts").loc["fall", "p (sign flip)"] == 2 / 2**3
        (table("verdicts")["p (Holm)"] >= table("verdicts")["p (Student)"]).all()
        table("coverage").loc["normal, 5 runs"].tolist() == approx([0.83, 0.95], abs=0.03)""",
    ("13_scoreboard", ""): """
        {*n["better"]} == {"lora", "singular_value", "deep"}
        {"packed", "masks", "tiles"} <= {*n["worse"]}
        {*n["front"]} == {"lora", "singular_value"}""",
    ("13_scoreboard_study", ""): """
        n["trained_lora"] < n["trained_single"] < n["trained_deep"] == n["stored_deep"]
        n["stored_single"] < n["stored_lora"] < 1.2 * n["stored_single"]
        n["nll_" + t["order"]["index"][0]] == min(n["nll_single"], n["nll_single_temperature"], n["nll_lora"], n["nll_deep"])
        all(t["order"]["index"][0] in front.split(", ") for front in n["fronts"].values())""",
    ("14_zero_shot_hydra", ""): """
        n["accuracy"] > 0.8
        n["auroc"]["largest cosine, new-shapes"] > n["auroc"]["entropy, new-shapes"]
        n["auroc"]["entropy, wrong answers"] > n["auroc"]["largest cosine, wrong answers"]""",
    ("14_zero_shot_hydra_study", ""): """
        table("paper_and_this_run").iloc[:, 0]["temperature"] == table("paper_and_this_run").iloc[:, 0]["single"] > 0.8
        0 <= n["heads_in_two_searches"] <= 4""",
    ("15_sound_ensemble", ""): """
        n["accuracy_heard"] > n["accuracy_unheard"] > 10  # chance
        (table("uncertainty")["aleatoric"] + table("uncertainty")["epistemic"]).tolist() == approx(table("uncertainty")["total"].tolist())""",
    ("16_bring_your_model", ""): """
        [line for line in n["next"] if "page 13" in line and "by NLL: no method" in line]  # on a convolutional network""",
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), FOUND)
def test_what_a_page_finds(results, name, changes):
    recorded, _ = results(name, **eval(f"dict({changes})"))
    names = {"n": recorded["numbers"], "t": recorded["tables"], "math": math, "np": np}
    names |= {"table": lambda key: frame(recorded["tables"][key])}
    names |= {"approx": pytest.approx}
    for line in FOUND[name, changes].strip().splitlines():
        assert eval(line.strip(), names), line


def frame(table):
    return pd.DataFrame(table["data"], table["index"], table["columns"])


NETWORKS = """import torch
from uqlab import models

def trained():
    torch.manual_seed(0)
    return models.small_cnn(10, 1, 4)
"""


def test_05_study_takes_apart_what_a_function_of_the_users_returns(
    results, monkeypatch, tmp_path
):
    (tmp_path / "my_networks.py").write_text(NETWORKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = {"model": "my_networks:trained", "ood": ["letters"], "repeats": 5}
    numbers = results("05_tile_extraction_study", **given)[0]["numbers"]
    assert numbers["tile_mean_error"] < 1e-4
    assert "accuracy_ensemble" not in numbers


def test_07_study_loads_trained_ensembles_from_a_folder(results, tmp_path):
    small = {"trained": str(tmp_path), "epochs": 1, "train_limit": 48, "limit": 40}
    small |= {"ranks": [8], "gains": [4.0]}
    first, again = (
        results("07_intruder_dimensions_study", **small, k=k)[0]["numbers"]
        for k in (10, 11)
    )
    times = [path.stat().st_mtime for path in tmp_path.iterdir()]
    results("07_intruder_dimensions_study", **small, k=12)
    assert [path.stat().st_mtime for path in tmp_path.iterdir()] == times
    assert again["member_cosine_lora"] == first["member_cosine_lora"]


def test_13_study_takes_images_of_your_own_and_a_larger_board(results, shared):
    board = results("13_scoreboard_study")[0]["tables"]["board"]
    file, table = shared / "your.npz", shared / "board.csv"
    labels = np.arange(90) % 3
    images = np.random.default_rng(0).integers(0, 100, (90, 12, 12, 3))
    images += 70 * labels[:, None, None, None]
    np.savez(file, x=images.astype(np.uint8), y=labels)
    rows = pd.DataFrame(board["data"], columns=board["columns"])
    rows = rows.assign(backbone="transformer")
    other = rows.assign(backbone="convolutional", nll=-rows["nll"])
    pd.concat([rows, other]).to_csv(table, index=False)
    own = {"dataset": str(file), "board": str(table), "ood": ["textures"]}
    small = {"methods": ["single", "lora"], "limit": 20, "held_out": 6}
    recorded = results("13_scoreboard_study", **own, **small, settings={"epochs": 1})[0]
    assert {*recorded["tables"]["order"]["index"]} == {"single", "lora", "deep"}
    (found,) = recorded["tables"]["backbones"]["data"]
    assert found[0] == pytest.approx(-1)  # the other board has the opposite order
    assert str(file) not in json.dumps([recorded["tables"], recorded["claims"]])


def test_a_study_reads_the_committed_rows(tmp_path):
    study = parameters.PAGES / "studies" / "active_learning.ipynb"
    done = runs.execute(study, folder=tmp_path / "run")
    claims = read_json(done / "results.json")["claims"].values()
    assert len(claims) >= 5
    assert all(claim["holds"] and claim["margin"] is not None for claim in claims)
