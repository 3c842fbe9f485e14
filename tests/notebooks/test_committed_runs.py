"""Results of long runs in figures/: of the settings that are said, undamaged, and as the prose quotes them."""

import functools
from pathlib import Path

import evidence
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from small_pages import ran_for, sources

from uqlab.core.files import read_json
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest
from uqlab.study import scoreboard

ROOT = Path(__file__).parents[2]
REAL = ROOT / "figures" / "real"
BOARD = REAL / "13_scoreboard"
RUNS = sorted(path.parent for path in REAL.parent.glob("[pr]*/*/results.json"))
SINCE = {
    "output_dir",
    "dropout_kind",
    "embedding",
    "points",
    "rates",
    "searched",
}  # gone or new
OUT_OF_REACH = {
    "svhn": "data/svhn-1083.npz"
}  # 1,083 of its training images, under the name of the whole


def comparable(given):
    """Parameters by their names of today; paths lose their steps up, because a study lies a folder below its lesson."""

    def plain(value):
        if isinstance(value, list):
            return [plain(each) for each in value]
        value = value.replace("../", "") if isinstance(value, str) else value
        return OUT_OF_REACH.get(value, value) if isinstance(value, str) else value

    today = {"schedule": "scheduler"}
    given = {today.get(name, name): plain(value) for name, value in given.items()}
    return {name: value for name, value in given.items() if name not in SINCE}


def settings(notebook, profile):
    return parameters.defaults(notebook) | parameters.overrides(notebook, profile)


@pytest.mark.parametrize(
    "folder", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_committed_run_is_its_profiles(folder):
    profile, manifest = folder.parent.name, read_json(folder / "manifest.json")
    wanted = settings(ran_for(folder.name), profile)
    assert comparable(manifest["parameters"]) == comparable(wanted)
    assert manifest["profile"] == profile
    assert not any(Path(path).is_absolute() for path in manifest["data"])
    assert Manifest.read(folder).undamaged(folder)


@pytest.mark.parametrize(
    "path", sorted(REAL.glob("*/table.csv")), ids=lambda path: path.parent.name
)
def test_a_committed_table_has_a_row_for_each_seed_and_begins_with_the_run(path):
    table, name = pd.read_csv(path), path.parent.name
    seeds = evidence.plan(REAL)[name]["seeds"].split(":")
    assert [*table["seed"]] == [*range(*map(int, seeds))]
    claims = read_json(path.with_name("results.json"))["claims"]
    first = {f"claim_{key}": claim["holds"] for key, claim in claims.items()}
    assert table.loc[0, [*first]].to_dict() == first


def test_the_summary_is_made_of_what_is_kept():
    assert (REAL / "README.md").read_text() == evidence.readme(REAL)


@pytest.mark.parametrize("name", ["fair", "photographs", "photographs_2000", "voices"])
def test_methods_of_a_board_are_compared_on_the_same_seeds_at_their_best_rates(name):
    table = pd.read_csv(BOARD / f"{name}.csv")
    for _, rows in table.groupby("backbone" if "backbone" in table else "dataset"):
        assert (
            rows.groupby("method")["seed"].apply(lambda s: tuple(sorted(s))).nunique()
            == 1
        )
    search = pd.read_csv(BOARD / f"{name}_search.csv")
    for _, tried in search.groupby(
        [key for key in ("backbone", "method") if key in search]
    ):
        assert tried.query("taken")["nll"].item() == tried["nll"].min()


# What the prose quotes ----------------------------------------------------------------


@functools.cache
def means(name):
    return pd.read_csv(REAL / f"{name}.csv").mean(numeric_only=True)


def flat(path):
    """A text, or a page's prose, in one line."""
    path = ROOT / path
    text = (
        "\n".join(sources(path, "markdown"))
        if path.suffix == ".ipynb"
        else path.read_text()
    )
    return " ".join(text.split())


def of_the_first_screen():
    table = means("03_mlp_width_sweep/table")
    for name in ("accuracy", "mi_ood", "auroc_mi"):
        yield f"{table[f'{name}_1']:.3f} to {table[f'{name}_32']:.3f}"


def of_the_readme():
    groups = pd.read_csv(REAL / "02_ensembles_of_ensembles" / "table.csv")
    share = (groups["between_12"] / groups["between_1"]).mean()
    two, single = groups[["auroc_two_12", "auroc_two_1"]].mean()
    yield f"show {100 * share:.0f} % of the mutual information"
    yield f"{two:.3f}, is that of two single networks, {single:.3f}"
    large = pd.read_csv(
        REAL / "04_mask_extraction" / "paper_size.csv", index_col="what"
    )
    large = large["AUROC, fashion-mnist"]
    yield f"AUROC of {large['trained ensemble, mi']:.3f}"
    yield f"reaches {large['Mahalanobis distance of pixels']:.4f}"
    board = pd.read_csv(BOARD / "fair.csv").query("backbone == 'transformer'")
    nll = board.groupby("method")["nll"].mean()
    yield f"{nll['single']:.3f} to {nll['lora']:.3f} nats"
    yield f"reach {nll['deep']:.3f}"
    board = board[board["method"] != "single_temperature"]
    gaps = scoreboard.differences(board, "nll").loc[
        ["lora", "deep"], ["difference", "p"]
    ]
    assert (gaps < [0, 0.05]).all(axis=None)


def of_lesson_13():
    fair = pd.read_csv(BOARD / "fair.csv")
    tables = [fair[fair["backbone"] == kind] for kind in ("transformer", "text")]
    for name in ("photographs", "photographs_2000", "voices", "sounds", "language"):
        table = pd.read_csv(BOARD / f"{name}.csv")
        tables.append(table.rename(columns={"NLL": "nll"}))
    three = {
        "lora": "LoRA-Ensemble",
        "singular_value": "singular value ensemble",
        "deep": "deep ensemble",
    }
    for table in tables:
        table = table[table["method"] != "single_temperature"]
        nll = table.groupby("method")["nll"].mean()
        gaps = scoreboard.differences(table, "nll").reindex([*three])
        sure = (gaps["difference"] < 0) & (gaps["p"] < 0.05)
        better = ", ".join(three[name] for name in gaps.index[sure]) or "none"
        shown = ", ".join(f"{nll[m]:.3f}" if m in nll else "not run" for m in three)
        yield f"| {nll['single']:.3f}; {shown} | {'all three' if sure.all() else better} |"


@pytest.mark.parametrize(
    ("path", "quotes"),
    [
        ("README.md", of_the_first_screen),
        ("book/index.md", of_the_first_screen),
        ("README.md", of_the_readme),
        ("notebooks/13_scoreboard.ipynb", of_lesson_13),
    ],
)
def test_prose_quotes_the_committed_tables(path, quotes):
    text = flat(path)
    assert [each for each in quotes() if each not in text] == []


@pytest.mark.release
def test_13_compares_the_boards_methods_by_students_t_and_holm(pages):
    """Three are better, and no one is on every backbone."""
    given = parameters.defaults(parameters.find("13_scoreboard_study"))
    tables = {name: given[name] for name in ("board", "older", "long_runs")}
    recorded = read_json(pages("13_scoreboard_study", **tables) / "results.json")
    table = pd.read_csv(BOARD / "fair.csv").query("backbone == 'transformer'")
    wide = table.pivot(index="seed", columns="method", values="nll")
    gaps = (
        wide.drop(columns="single_temperature")
        .sub(wide["single"], axis=0)
        .drop(columns="single")
    )
    p = stats.ttest_1samp(gaps, 0).pvalue
    order = np.argsort(p)
    ended = np.flatnonzero(p[order] * np.arange(len(p), 0, -1) >= 0.05)[0]
    found = gaps.columns[order[:ended]]
    numbers = recorded["numbers"]
    assert {*numbers["better_than_one"]} == {n for n in found if gaps[n].mean() < 0}
    assert {*numbers["worse_than_one"]} == {n for n in found if gaps[n].mean() > 0}
    assert numbers["better_everywhere"] == []
    five = pd.DataFrame(**recorded["tables"]["public_order"]).loc[
        "transformer, nll, cifar10"
    ]
    assert five["p"] == 1  # tau is 0, and every order is as far from it
