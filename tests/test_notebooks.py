"""The notebooks run headless at the `tiny` profile, and show what they claim to show."""

import json
import math

import pytest

from uqlab import parameters, runs

NOTEBOOKS = [path.stem for path in parameters.all_notebooks()]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """name -> recorded numbers; each notebook runs once, when first asked for."""
    done = {}

    def run(name, **changes):
        key = name, str(changes)
        if key not in done:
            folder = tmp_path_factory.mktemp("run") / name
            done[key] = runs.run_one(name, changes, profile="tiny", folder=folder)
        return json.loads((done[key] / "results.json").read_text()), done[key]

    return run


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_describes_what_it_wrote(results, name):
    recorded, folder = results(name)
    assert recorded["numbers"]
    assert recorded["figures"]
    for figure, about in recorded["figures"].items():
        assert len(about["caption"]) > 20, figure
        assert {(folder / file).suffix for file in about["files"]} == {".png", ".pdf"}
    assert (folder / "manifest.json").exists()


def test_00_same_mean_opposite_splits_and_the_bias_of_few_members(results):
    numbers = results("00_uncertainty_decomposition")[0]["numbers"]
    assert numbers["mi_agree"] < 0.1
    assert numbers["mi_disagree"] > 10 * numbers["mi_agree"]
    assert abs(numbers["bias_jackknife_5"]) < abs(numbers["bias_plugin_5"])


def test_01_uncertainty_falls_like_one_over_the_group_size(results):
    numbers = results("01_toy_regression_collapse")[0]["numbers"]
    assert -1.4 <= numbers["slope"] <= -0.6
    assert numbers["slope_low"] <= numbers["slope"] <= numbers["slope_high"]
    assert numbers["eu_32"] < numbers["eu_1"] / 5
    assert numbers["gap_over_data"] > 5


def test_01_resamples_few_sub_ensembles(results):
    numbers = results("01_toy_regression_collapse", groups=3)[0]["numbers"]
    assert math.isfinite(numbers["slope"])
    assert numbers["slope_low"] <= numbers["slope_high"]


def test_02_grouping_moves_information_and_loses_none(results):
    numbers = results("02_ensembles_of_ensembles")[0]["numbers"]
    sizes = [1, 2, 3, 6]
    total = [numbers[f"between_{m}"] + numbers[f"within_{m}"] for m in sizes]
    assert all(math.isclose(value, total[0], rel_tol=1e-5) for value in total)
    between = [numbers[f"between_{m}"] for m in sizes]
    assert between == sorted(between, reverse=True)
    assert numbers["within_1"] == pytest.approx(0, abs=1e-7)
    assert numbers["collapse_ratio"] < numbers["collapse_ratio_corrected"] < 0.5
    assert -1.4 < numbers["slope_jackknife"] < -0.6
    assert min(numbers[f"auroc_{m}"] for m in sizes) > 0.8


def test_02_trains_convolutional_networks_by_parameters_alone(results):
    changes = {"model": "wide-resnet-28", "members": 4, "sizes": [1, 2], "epochs": 1, "limit": 48, "augment": True}
    numbers = results("02_ensembles_of_ensembles", **changes)[0]["numbers"]
    assert numbers["between_1"] > numbers["between_2"] > 0


def test_03_wider_networks_disagree_less_at_the_same_accuracy(results):
    numbers = results("03_mlp_width_sweep")[0]["numbers"]
    assert min(numbers["accuracy_0.5"], numbers["accuracy_8"]) > 0.95
    for kind in ("id", "ambiguous", "ood"):
        assert numbers[f"mi_{kind}_8"] < 0.5 * numbers[f"mi_{kind}_0.5"]
    assert min(numbers["auroc_mi_0.5"], numbers["auroc_mi_8"]) > 0.85
