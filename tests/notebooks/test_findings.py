"""What single pages find at the `tiny` profile, and with other parameters."""

import json
import math
import os

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbconvert import HTMLExporter


def test_01_as_html_has_every_figure(results):
    recorded, folder = results("01_toy_regression_collapse")
    page, _ = HTMLExporter().from_filename(folder / "01_toy_regression_collapse.ipynb")
    shown = nbformat.read(folder / "01_toy_regression_collapse.ipynb", 4).cells
    pictures = [
        output
        for cell in shown
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    ]
    assert len(pictures) >= len(recorded["figures"]) > 2
    assert page.count('src="data:image/png;base64,') >= len(pictures)
    assert "uqlab-hand" in page  # the explorer answers without a kernel
    assert "Traceback" not in page


def test_00_same_mean_opposite_splits_few_members_and_groups(results):
    numbers = results("00_uncertainty_decomposition")[0]["numbers"]
    assert numbers["epistemic_share"]["t = 0.2"] < 0.1
    assert numbers["epistemic_share"]["t = 1"] > 0.5
    seen = numbers["seen_by_two"]  # of simulated members, of trained networks
    assert max(seen["plug-in"]) < min(seen["jackknife"])
    assert seen["plug-in"] == pytest.approx([0.5, 0.5], abs=0.1)
    groups = numbers["shown_by_groups"]
    assert groups["mixed"] < 1e-3
    assert groups["camps"] > 0.9
    assert groups["networks"] == pytest.approx(0.25, abs=0.1)


@pytest.mark.release
def test_00_has_three_groups_of_two_networks(results):
    found = results("00_uncertainty_decomposition", members=6, epochs=2)[0]
    assert found["claims"].keys() >= {"groups", "networks_have_no_camps"}


def test_00_measures_the_split_at_every_stage_and_needs_no_ambiguous_inputs(results):
    numbers = results(
        "00_uncertainty_decomposition_study",
        ambiguous="",
        stages=[1, 2],
        members=3,
        repeats=50,
    )[0]["numbers"]
    assert abs(numbers["bias_jackknife_5"]) < abs(numbers["bias_plugin_5"])
    assert numbers["relative_error"]["divergences"] < 1e-3
    assert numbers["epistemic_share"].keys() == {"1", "2"}  # then of the OOD inputs


def test_01_uncertainty_falls_like_one_over_the_group_size(results):
    numbers = results("01_toy_regression_collapse")[0]["numbers"]
    assert -1.4 <= numbers["slope"] <= -0.6
    assert numbers["eu_32"] < numbers["eu_1"] / 5
    assert numbers["gap_over_data"] > 5
    left = numbers["left_at_largest"]  # of groups of 8 that share a sample
    assert 1 / 8 < left["data"] <= 1
    assert left["gap"] < left["data"]


def test_01_regroups_few_sub_ensembles(results):
    study = "01_toy_regression_collapse_study"
    numbers = results(study, groups=3, epochs=30, splits=2)[0]["numbers"]
    assert math.isfinite(numbers["slope"])
    assert numbers["slope_low"] <= numbers["slope_high"]
    numbers = results(study)[0]["numbers"]
    assert numbers["slope_low"] <= numbers["slope"] <= numbers["slope_high"]


def test_02_grouping_moves_information_and_silences_an_alarm(results):
    numbers = results("02_ensembles_of_ensembles")[0]["numbers"]
    sizes = [1, 2, 3, 6]
    total = [numbers[f"between_{m}"] + numbers[f"within_{m}"] for m in sizes]
    assert all(math.isclose(value, total[0], rel_tol=1e-5) for value in total)
    between = [numbers[f"between_{m}"] for m in sizes]
    assert between == sorted(between, reverse=True)
    assert numbers["within_1"] == pytest.approx(0, abs=1e-7)
    assert numbers["caught"]["6"] < numbers["caught"]["1"] / 2
    assert min(numbers[f"auroc_{m}"] for m in sizes) > 0.8


def test_02_takes_number_and_size_of_groups_apart(results):
    recorded = results("02_ensembles_of_ensembles_study")[0]
    numbers = recorded["numbers"]
    assert numbers["collapse_ratio"] < numbers["collapse_ratio_corrected"] < 0.5
    assert -1.4 < numbers["slope_jackknife"] < -0.6
    effects = pd.DataFrame(
        **{k: recorded["tables"]["all_pairs"][k] for k in ("data", "columns")}
    )
    steps = effects.pivot(index="K", columns="step", values="mean")
    whole = numbers["auroc_two_6"] - numbers["auroc_two_1"]
    assert steps.loc[2, "size"] == pytest.approx(whole, abs=1e-6)
    assert (steps["number"] < 0).all()


def test_02_trains_convolutional_networks_by_parameters_alone(results):
    changes = {
        "model": "wide-resnet-28",
        "members": 4,
        "sizes": [1, 2],
        "counts": [2],
        "epochs": 1,
        "limit": 24,
        "augment": True,
    }
    numbers = results("02_ensembles_of_ensembles_study", **changes)[0]["numbers"]
    assert numbers["between_1"] > numbers["between_2"] > 0


def test_03_wider_networks_disagree_less_at_the_same_accuracy(results):
    numbers = results("03_mlp_width_sweep_study")[0]["numbers"]
    assert min(numbers["accuracy_0.5"], numbers["accuracy_8"]) > 0.95
    for kind in ("id", "ambiguous", "ood"):
        assert numbers[f"mi_{kind}_8"] < 0.5 * numbers[f"mi_{kind}_0.5"]
    assert min(numbers["auroc_mi_0.5"], numbers["auroc_mi_8"]) > 0.85


def test_03_measures_and_shows_every_ood_set_and_needs_no_ambiguous_one(results):
    fast = {
        "epochs": 10,
        "repeats": 5,
        "grid_samples": [100],
        "grid_steps": 5,
        "ambiguous": "",
    }
    numbers = results("03_mlp_width_sweep_study", ood=["textures", "letters"], **fast)[
        0
    ]["numbers"]
    assert not [name for name in numbers if "ambiguous" in name]
    for key in ("ood", "letters"):
        assert numbers[f"mi_{key}_0.5"] > numbers["mi_id_0.5"]
    assert numbers["auroc_mi_letters_8"] > 0.7
    assert numbers["auroc_mi_letters_8"] != numbers["auroc_mi_8"]


def test_03_groups_keep_the_total_and_width_does_not(results):
    recorded = results("03_mlp_width_sweep")[0]
    assert recorded["numbers"]["aleatoric_share_lost"] > 0
    assert recorded["numbers"]["effective_members"] > 1.5
    assert recorded["numbers"]["fall_at_equal_total"] > 1.5
    spread = recorded["tables"]["spread"]
    assert spread["data"][0][spread["columns"].index("T")] == pytest.approx(1)


def test_04_masks_find_an_ensemble_in_one_network_when_asked_to_differ(results):
    numbers = results("04_mask_extraction_study")[0]["numbers"]
    assert numbers["mi_ood_single"] == 0
    for kind in ("accuracy_extracted", "accuracy_extracted_soft"):
        assert abs(numbers[kind] - numbers["accuracy_single"]) <= 0.01
    assert 0.7 < numbers["mi_ood_extracted_hard"] / numbers["mi_ood_deep"] < 3
    assert max(numbers["mi_ood_weight_0"], numbers["mi_ood_soft_weight_0"]) < 1e-3
    assert (
        numbers["mi_ood_weight_0"]
        < numbers["mi_ood_weight_2"]
        < numbers["mi_ood_weight_10"]
    )
    assert 0.2 < numbers["mask_diversity"] < math.log(2)
    assert (
        numbers["member_accuracy_shuffled"] < numbers["member_accuracy_weight_2"] - 0.05
    )
    assert (
        max(numbers[f"parameters_{m}"] for m in range(10))
        < 0.6 * numbers["parameters_single"]
    )


def test_04_the_amount_follows_the_weight(results):
    found = results("04_mask_extraction")[0]
    assert found["numbers"]["share_of_deep"]["ood"] > 0.5
    sweep, ranks = (found["tables"][name] for name in ("sweep", "ranks"))
    assert sweep["index"] == [0, 2, 8]
    assert np.min(sweep["data"]) > 0.5
    assert len(ranks["index"]) == 2 + len(sweep["index"])
    assert np.abs(ranks["data"]).max() <= 1


def test_05_tiles_average_to_the_network_and_know_less_than_an_ensemble(results):
    found = results("05_tile_extraction_study")[0]
    numbers = found["numbers"]
    assert numbers["tile_mean_error"] < 1e-4
    steep, deep = (
        pd.DataFrame(**found["tables"][name])
        for name in ("paper_and_this_run", "deep_head_covariances")
    )
    assert list(deep.index) == list(steep.index)
    assert deep["paper, maxvit: acceptance, NLL"]["weighted MI, 8 x 8"] == -0.238
    assert np.isfinite(deep.filter(like="by ").to_numpy()).all()
    for s in (2, 4, 8):
        assert abs(numbers[f"accuracy_{s}"] - numbers["accuracy_original"]) < 0.1
        assert numbers[f"nll_{s}"] > numbers["nll_original"] > numbers["nll_ensemble"]
        assert (
            numbers[f"auc_accuracy_{s}"] > numbers[f"accuracy_{s}"] + 0.01
        )  # a random order gives the accuracy
        assert (
            steep["by score: acceptance, NLL"][f"MI, {s} x {s}"] < 0
        )  # errors grow with uncertainty
        assert numbers["auroc_mi_ensemble"] > numbers[f"auroc_mi_{s}"] > 0.55
        assert (
            numbers[f"spearman_human_total_{s}"]
            < numbers["spearman_human_total_original"]
        )
    assert numbers["spearman_human_total_ensemble"] > 0.3


def test_05_takes_a_network_apart_that_a_function_of_the_users_returns(
    results, monkeypatch, tmp_path
):
    (tmp_path / "my_networks.py").write_text(
        "import torch\nfrom uqlab import models\n\n"
        "def trained():\n    torch.manual_seed(0)\n    return models.small_cnn(10, 1, 4)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    numbers = results(
        "05_tile_extraction_study",
        model="my_networks:trained",
        ood=["letters"],
        repeats=5,
    )[0]["numbers"]
    assert numbers["tile_mean_error"] < 1e-4
    assert "accuracy_ensemble" not in numbers


def test_11_gradients_rank_about_as_well_as_entropy_and_the_sign_matters(results):
    numbers = results("11_gradient_uncertainty_study")[0]["numbers"]
    assert numbers["error_naive"] < 1e-4
    for score in (
        "exgrad",
        "reading_a",
        "reading_b",
        "reading_c",
        "root_of_fisher_trace",
        "regrad_style",
    ):
        assert abs(numbers[f"auroc_{score}"] - numbers["auroc_entropy"]) < 0.05
    assert numbers["auroc_uniform_weights"] < 0.5 < numbers["auroc_gradnorm"]
    assert abs(numbers["auroc_random_order"] - 0.5) < 0.15
    assert numbers["auroc_entropy_ensemble"] > 0.7
    difference = numbers["auroc_regrad_style"] - numbers["auroc_exgrad"]
    assert numbers["diff_regrad_exgrad"] == pytest.approx(difference)
    assert numbers["diff_low"] <= difference <= numbers["diff_high"]
    assert 0 < numbers["share_last_layer"] < 0.5
    assert numbers["chosen"] in ("A", "B", "C")


def test_11_asks_convolutional_networks_by_parameters_alone(results):
    small = {"width": 0.25, "members": 2, "epochs": 2, "evaluated": 40}
    numbers = results("11_gradient_uncertainty_study", model="small-cnn", **small)[0][
        "numbers"
    ]
    assert numbers["error_naive"] < 1e-4
    assert 0 < numbers["share_last_layer"] < 1


def test_06_low_rank_members_make_an_ensemble_for_a_fraction_of_the_weights(results):
    numbers = results("06_lora_ensemble_study")[0]["numbers"]
    assert (
        numbers["params_one_lora"] == 4 * 4 * 2 * 8 * 128 + 128 * 10 + 10
    )  # blocks, matrices, A and B; classifier
    assert numbers["params_lora"] == 2 * numbers["params_one_lora"]
    assert (
        numbers["params_lora"] - numbers["params_lora_single"] == 128 * 10 + 10
    )  # the same ranks, one classifier
    assert (
        numbers["params_deep"]
        == 2 * numbers["params_single"]
        > 10 * numbers["params_lora"]
    )
    assert numbers["impossible_rows"] == ["snapshot"]


def test_07_an_update_makes_no_intruder_unless_long_and_concentrated(results):
    numbers = results("07_intruder_dimensions")[0]["numbers"]
    assert numbers["farther"] > 2
    assert numbers["intruders_value_lora"] > numbers["intruders_value_deep"]
    assert numbers["strong_low"] > numbers["strong_full"]
    assert numbers["strong_lora"] <= 8  # its rank


def test_07_study_low_rank_members_leave_the_old_directions_and_knobs_cannot(results):
    numbers = results("07_intruder_dimensions_study")[0]["numbers"]
    assert numbers["intruders_singular_value"] == numbers["energy_singular_value"] == 0
    assert numbers["member_cosine_lora"] < 0.7 * numbers["member_cosine_deep"]
    assert numbers["update_cosine_lora"] < 0.3
    assert 0 <= numbers["diversity_gain_1"] < 0.5 * numbers["diversity_gain_4"]
    assert numbers["intruders_equal_size_low"] > numbers["intruders_equal_size_full"]


def test_07_study_loads_trained_ensembles_from_a_folder(results, tmp_path):
    small = {
        "trained": str(tmp_path),
        "epochs": 1,
        "train_limit": 48,
        "limit": 40,
        "ranks": [8],
        "gains": [4.0],
    }
    first = results("07_intruder_dimensions_study", **small)[0]["numbers"]
    assert (
        len(written := {path: path.stat().st_mtime for path in tmp_path.iterdir()}) == 4
    )
    again = results("07_intruder_dimensions_study", **small, k=10)[0]["numbers"]
    assert again["intruders_lora"] == first["intruders_lora"]
    assert {path: path.stat().st_mtime for path in tmp_path.iterdir()} == written


def test_08_knobs_keep_the_directions_and_need_good_ones(results):
    numbers = results("08_singular_value_ensemble_study")[0]["numbers"]
    assert (
        numbers["params_singular_value"]
        < 0.5 * numbers["params_lora"]
        < numbers["params_deep"] / 4
    )
    assert numbers["intruders_singular_value"] == 0
    assert numbers["max_cosine_singular_value"] > 0.99 > numbers["max_cosine_lora"]
    assert numbers["mi_ood_gentle"] < numbers["mi_ood_singular_value"]
    assert (
        numbers["moved_0.attention.q_proj_singular_value"]
        > numbers["moved_0.attention.q_proj_gentle"]
        > 0
    )
    assert (
        numbers["weight_apart_gentle"]
        < numbers["weight_apart_singular_value"]
        < numbers["weight_apart_lora"]
    )


def test_12_pairs_that_share_more_have_the_smaller_error(results):
    recorded = results("12_sweep_results")[0]
    table = recorded["tables"]["standard_errors"]
    errors = pd.DataFrame(table["data"], table["index"], table["columns"])
    scores, ensembles, runs = errors["ratio"]
    assert scores > max(ensembles, runs)
    sides = recorded["tables"]["auroc"]["data"]
    assert len(sides) == 8
    mean = np.mean([by_entropy - by_msp for by_msp, by_entropy in sides])
    difference = recorded["numbers"]["difference"]
    assert difference["mean"] == pytest.approx(mean)
    assert difference["low"] < mean < difference["high"]
    found = recorded["numbers"]["tables_with_one"]
    assert found["holm"] < 0.2 < found["plain"] < 1


def test_12_the_fall_of_page_03_holds_in_every_run(results):
    recorded = results("12_sweep_results_study")[0]
    numbers, table = recorded["numbers"], recorded["tables"]["verdicts"]
    verdicts = pd.DataFrame(table["data"], table["index"], table["columns"])
    assert numbers["runs"] == 3
    assert numbers["finding_holds_fraction"] == 1
    fall = verdicts.loc["fall"]
    assert fall["t low"] < fall["mean"] < math.log(0.6)
    assert fall["mean"] < fall["t high"]
    assert fall["p (sign flip)"] == 2 / 2**3
    assert fall["runs of that sign"] == 1
    assert (verdicts["p (Holm)"] >= verdicts["p (Student)"]).all()
    assert numbers["gain_better_score_last"] > 1
    claims = results("03_mlp_width_sweep_study")[0]["claims"]
    assert len(recorded["tables"]["claims_of_the_page"]["data"]) == len(claims)
    coverage = recorded["tables"]["coverage"]
    of_five = dict(zip(coverage["index"], coverage["data"], strict=True))[
        "normal, 5 runs"
    ]
    assert of_five == pytest.approx([0.83, 0.95], abs=0.03)


def test_10_copies_keep_their_heads_and_the_class_is_part_of_what_heads_share(results):
    recorded = results("10_head_similarity_study")[0]
    tables = {name: pd.DataFrame(**table) for name, table in recorded["tables"].items()}
    shared = tables["similarity"]
    copies, lora, own, _, shuffled = shared.index
    assert (
        shared.loc[[copies, lora], "same number"].min() > shared.loc[own, "same number"]
    )
    assert (shared["without the class"] < shared["matched CKA"])[:3].all()
    assert (
        shared.loc[shuffled, "matched CKA"] < 0.5 * shared["matched CKA"][:3].min()
    )  # the best of many pairs: not 0
    said = tables["function_space"]
    assert (said["JSD aggregated"] > 0).all()
    assert (said["JSD aggregated"] < said["JSD by input"]).all()
    assert said["JSD by input"].max() < math.log(2)
    assert len(tables["alone"]) == 32  # of 4 layers of 8 heads
    assert tables["alone"].stack().between(0, 1).all()
    assert (tables["separation"] > 0).all(axis=None)


def test_09_prunings_fuse_and_save_parameters_but_no_arithmetic(results):
    recorded = results("09_hydra_head_pruning_study")[0]
    tables = {
        name: pd.DataFrame(**recorded["tables"][name])
        for name in ("overlap", "cost", "diversity")
    }
    assert (
        0
        <= recorded["numbers"]["overlap_taylor_circuit"]
        == tables["overlap"].loc["Taylor, all layers", "CircAvg"]
    )
    assert ((tables["overlap"] == tables["overlap"].T) & (tables["overlap"] <= 1)).all(
        axis=None
    )
    deep, hydra = (
        tables["cost"].loc[f"{name}, M = 2"] for name in ("deep ensemble", "Hydra")
    )
    assert deep["parameters"] == pytest.approx(2) == deep["multiply-adds"]
    assert hydra["parameters"] < 1.3
    assert (
        1.8 < hydra["multiply-adds"] < 2
    )  # two networks without an eighth of their heads, and one MLP for both
    assert tables["diversity"].loc["Hydra (Taylor), separate", "MI, OOD"] > 0
    assert ((tables["diversity"] >= 0) & (tables["diversity"] <= 1)).all(axis=None)


def test_13_the_best_is_on_every_front_and_costs_are_measured(results):
    recorded = results("13_scoreboard_study")[0]
    numbers, order = recorded["numbers"], recorded["tables"]["order"]
    assert 0.5 <= numbers["order_holds_fraction"] <= 1
    names = ("single", "single_temperature", "lora", "deep")
    losses = {name: numbers[f"nll_{name}"] for name in names}
    best = min(losses, key=losses.get)
    costs = {"trained", "stored", "latency_64"}
    assert set(numbers["fronts"]) == costs
    assert all(best in names.split(", ") for names in numbers["fronts"].values())
    assert order["index"][0] == best
    assert (
        numbers["trained_lora"]
        < numbers["trained_single"]
        < numbers["trained_deep"]
        == numbers["stored_deep"]
    )
    assert (
        numbers["stored_single"]
        < numbers["stored_lora"]
        < 1.2 * numbers["stored_single"]
    )


def test_13_takes_images_of_your_own_and_shows_a_larger_board(results, shared):
    rng, board = (
        np.random.default_rng(0),
        results("13_scoreboard_study")[0]["tables"]["board"],
    )
    file, table = shared / "your.npz", shared / "board.csv"
    labels = np.arange(90) % 3
    images = rng.integers(0, 100, (90, 12, 12, 3)) + 70 * labels[:, None, None, None]
    np.savez(file, x=images.astype(np.uint8), y=labels)
    rows = pd.DataFrame(board["data"], columns=board["columns"]).assign(
        backbone="transformer"
    )
    other = rows.assign(backbone="convolutional", nll=-rows["nll"])
    pd.concat([rows, other]).to_csv(table, index=False)
    own = {
        "dataset": str(file),
        "board": str(table),
        "ood": ["textures"],
        "methods": ["single", "lora"],
    }
    recorded = results(
        "13_scoreboard_study", **own, limit=20, held_out=6, settings={"epochs": 1}
    )[0]
    assert recorded["numbers"]["nll_lora"] > 0
    assert (
        "pixels" not in recorded["claims"]
    )  # no method is better than the simple baselines
    assert "everywhere" in recorded["claims"]
    assert set(recorded["tables"]["order"]["index"]) == {"single", "lora", "deep"}
    assert "backbones" in recorded["figures"]
    (found,) = recorded["tables"]["backbones"]["data"]
    assert found[0] == pytest.approx(-1)
    assert -1 <= found[1] <= found[2] < 1


@pytest.mark.release
def test_a_file_of_your_own_is_shown_by_its_name_alone(results, tmp_path):
    np.savez(
        tmp_path / "mine.npz",
        x=np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8),
    )
    recorded, _ = results(
        "02_ensembles_of_ensembles_study",
        ood=[str(tmp_path / "mine.npz")],
        epochs=1,
    )
    assert "mine" in recorded["tables"]["detection"]["columns"]
    assert str(tmp_path) not in json.dumps(
        [recorded[part] for part in ("tables", "figures", "claims")]
    )
