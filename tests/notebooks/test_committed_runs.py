"""Results of long runs in figures/: of their profile, of the pages as they are, and as the prose quotes them."""

import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from small_pages import ran_for, sources

from uqlab import data, models
from uqlab.core.files import read_json
from uqlab.runs import parameters
from uqlab.runs.manifest import Manifest
from uqlab.runs.sweeps import axis
from uqlab.study import published, scoreboard
from uqlab.study.methods import METHODS

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import evidence

FIGURES = Path(__file__).parents[2] / "figures"
BOARD = FIGURES / "real" / "13_scoreboard"
FOLDERS = sorted(
    path.parent
    for profile in ("paper", "real")
    for path in FIGURES.glob(f"{profile}/*/results.json")
)
MISFITS = {
    "transformer": set(),
    "convolutional": {
        "dropout",
        "batch_additive",
        "singular_value",
        "hydra",
    },
    "text": {"mimo", "tiles"},  # tests/test_methods.py says why
}
OUT_OF_REACH = {
    "svhn": "../data/svhn-1083.npz"
}  # 1,083 of its training images, under the name of the whole


def read(folder):
    return [
        json.loads((folder / f"{name}.json").read_text())
        for name in ("results", "manifest")
    ]


RENAMED = {"rival": "baseline", "judges": "annotators", "strangers": "far_out"}
GONE = {"output_dir", "dropout_kind", "embedding", "points"}  # of what is gone
FELL = {"errors_ensemble", "near_explicit", "equal", "values_more"}  # on other seeds
NEWER = {"rates", "searched"}  # of a search that study 08 has got since


def settings(notebook, profile):
    """The parameters of a notebook in a profile, of the data that could be reached."""
    values = parameters.defaults(notebook) | parameters.overrides(notebook, profile)
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    reached = {n: [OUT_OF_REACH.get(v, v) for v in value] for n, value in lists.items()}
    return values | reached


OTHER_NAMES = {"schedule": "scheduler"}  # of parameters, since


def without(given, *names):
    given = {OTHER_NAMES.get(name, name): value for name, value in given.items()}
    return {name: value for name, value in given.items() if name not in names}


def of_seeds(table, by, seeds):
    """Whether every row of a table is there once for each seed."""
    found = table.groupby(by)["seed"].apply(sorted)
    return found.map(lambda each: each == seeds).all()


def from_project(given):
    """Parameters; paths lose their steps up, because a study lies a folder below its lesson."""
    given = without(given, *GONE, *NEWER)
    paths = {name: value for name, value in given.items() if str(value)[:3] == "../"}
    return given | {name: path.replace("../", "") for name, path in paths.items()}


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_a_committed_run_is_its_profiles_and_has_the_pages_claims(folder):
    results, manifest = read(folder)
    notebook = ran_for(folder.name)
    given = settings(notebook, folder.parent.name)
    assert from_project(manifest["parameters"]) == from_project(given)
    assert manifest["profile"] == folder.parent.name
    assert not any(Path(path).is_absolute() for path in manifest["data"])
    assert Manifest.read(folder).undamaged(folder)
    assert Manifest.read(folder).commit
    # The lesson of a study has some of the claims.
    pages = {notebook, parameters.find(folder.name)}
    source = "\n".join("\n".join(sources(page, "code")) for page in pages)
    named = {
        re.sub(r"\\{.*?\\}", r"\\w+", re.escape(text))
        for text in re.findall(r'"([a-z][\w{}.()]+)"', source)
    }
    made = re.compile("|".join(named))  # "circuit_{kind}" makes circuit_euclidean
    today = {
        name: functools.reduce(
            lambda text, pair: text.replace(*pair), RENAMED.items(), name
        )
        for name in results["claims"]
    }
    names = [(old, new) for old, new in today.items() if not made.fullmatch(old)]
    lost = [old for old, new in names if not made.fullmatch(new) and old not in FELL]
    assert lost == []
    pictures = {path.stem for path in folder.glob("*.png")} - {
        path.stem for path in folder.glob("*.csv")
    }  # of a study
    assert pictures <= results["figures"].keys()


LATER = {
    "smoothing",
    "taught",
}  # parameters that some notebooks have got since, whose defaults change nothing


def study(page, name, swept):
    """The rows that a notebook beside a page made, with the parameters that it has now, and these parameters."""
    folder = FIGURES / "real" / parameters.find(page).stem
    wanted = settings(parameters.find(f"rows/{name}"), "real")
    given = read_json(folder / f"{name}.json")["parameters"]
    assert given.keys() == wanted.keys() - {"output_dir"} - LATER
    assert {key for key, value in given.items() if value != wanted[key]} <= {swept}
    return pd.read_csv(folder / f"{name}.csv"), given


def test_the_summary_of_the_long_runs_is_made_of_what_is_kept():
    root = FIGURES / "real"
    assert (root / "README.md").read_text() == evidence.readme(root)
    folders = {path.name for path in root.glob("*/") if path.suffix != ".sweep"}
    assert evidence.plan(root).keys() >= folders


@pytest.mark.parametrize(
    "folder",
    sorted(FIGURES.glob("real/*/table.csv")),
    ids=lambda path: path.parent.name,
)
def test_a_committed_table_has_a_row_for_each_seed_of_its_profile(folder):
    table, name = pd.read_csv(folder), folder.parent.name
    entry = evidence.plan(FIGURES / "real")[name]
    assert list(table["seed"]) == axis(entry["seeds"], 0)
    wanted = settings(ran_for(name), "real")
    given = read_json(folder.with_suffix(".json"))["parameters"]
    wanted["seed"] = list(table["seed"]) if len(table) > 1 else table["seed"].item()
    assert from_project(given) == from_project(wanted)
    results = read_json(folder.with_name("results.json"))
    first = {f"claim_{key}": claim["holds"] for key, claim in results["claims"].items()}
    assert table.loc[0, list(first)].to_dict() == first


def test_numbers_that_the_summary_compares_are_those_of_the_paper():
    columns = {
        "mi_id": ("table_2", "MI, ID"),
        "mi_ood": ("table_2", "MI, OOD"),
        "auroc_mi": ("table_1", "AUROC, MI"),
    }
    compared = evidence.plan(FIGURES / "real")["03_mlp_width_sweep"]["compared"]
    assert len(compared) > 3
    for line in compared:
        name, _, width = line["number"].rpartition("_")
        table, column = columns[name]
        printed = getattr(published.kirsch, table).frame("mnist")
        assert line["paper"] == printed[column][int(width)]


def test_02_quotes_its_runs_on_mnist():
    folder = FIGURES / "real" / "02_ensembles_of_ensembles"
    found, table = (pd.read_csv(folder / f"{n}.csv") for n in ("all_pairs", "table"))
    number, size = (found[found["step"] == step] for step in ("number", "size"))
    assert (number["high"] < 0).all()
    assert (size.loc[size["OOD"] == "kmnist", "low"] > 0).all()
    assert table["claim_size_does_not"].sum() == 1
    clothes = size[size["OOD"] == "fashion-mnist"].copy()
    half = clothes["high"] - clothes["mean"]  # of four sets
    clothes["variance"] = (2 * half / stats.t.ppf(0.975, 3)) ** 2
    means = clothes.groupby("K")["mean"]
    squares = 3 * clothes.groupby("K")["variance"].sum() + 8 * means.var()
    half = stats.t.ppf(0.975, 11) * (squares / 11 / 12) ** 0.5  # of all twelve
    low, high = means.mean() - half, means.mean() + half
    assert (low > 0).tolist() == [False, False, True, True, True]
    said = f"{means.mean()[2]:.3f} there (95 %: {low[2]:.3f} to {high[2]:.3f})"
    assert said in flat("studies/02")


def test_02_quotes_nine_networks_of_others():
    frame, given = study("02", "resnets", "seed")
    text = flat("studies/02")
    assert given["seed"] == frame["seed"].unique().tolist()
    assert f"the means of {({3: 'three', 5: 'five'})[len(given['seed'])]} seeds" in text
    mean = frame.groupby(["listened to", "OOD"]).mean()
    singles, groups, few = (
        mean.loc[way] for way in ("nine of one", "three of three", "three of one")
    )
    shown = [
        f"{groups['MI, OOD'][name]:.3f} of {singles['MI, OOD'][name]:.3f}"
        for name in groups.index
    ]
    shown.append(f"{groups['MI, ID'].iloc[0]:.3f} of {singles['MI, ID'].iloc[0]:.3f}")
    assert (
        "The groups show {} nats on CIFAR-100, {} on house numbers and {} on CIFAR-10 itself".format(
            *shown
        )
        in text
    )
    falls = -groups["change of AUROC"]
    assert (
        "falls by {:.3f} on CIFAR-100 and by {:.3f} on house numbers".format(*falls)
        in text
    )
    assert "they lose {:.3f} and {:.3f}".format(*-few["change of AUROC"]) in text
    assert (frame.loc[frame["listened to"] != "nine of one", "high"] < 0).all()
    pairs = frame.pivot(
        index="seed", columns=["listened to", "OOD"], values="change of AUROC"
    )
    ahead = pairs["three of three"] - pairs["three of one"]
    assert (ahead["cifar100"] > 0.005).all()
    assert ahead["svhn-1083"].abs().max() < 0.005


def flat(page):
    """The page's prose in one line."""
    return " ".join(" ".join(sources(parameters.find(page), "markdown")).split())


def test_04_quotes_its_runs_after_24_and_after_six_passes():
    folder = FIGURES / "real" / "04_mask_extraction"
    text = flat("04_mask_extraction_study")
    table, six = (
        pd.read_csv(folder / "table.csv"),
        pd.read_csv(folder / "six_passes.csv"),
    )
    for runs, passes in ((table, 24), (six, 6)):
        assert (runs["epochs"] == passes).all()
        assert "{:.2f}, {:.2f} and {:.2f}".format(*runs["share_of_deep.hard"]) in text
    mean = table.mean(numeric_only=True)
    assert (
        f"{mean['mi_id_extracted_hard']:.3f} nats and the trained ensemble {mean['mi_id_deep']:.3f}"
        in text
    )
    ahead = (
        mean[["auroc_entropy_hard", "auroc_entropy_single_flattened"]]
        - mean["auroc_entropy_single"]
    )
    assert (
        "by {:.3f} on average, where the paper's do not. Two thirds of that, {:.3f},".format(
            *ahead
        )
        in text
    )


def test_04_has_five_seeds_in_which_weight_0_finds_clothes_best_and_letters_worst():
    found, given = study("04", "masks", "seed")
    assert len(given["seed"]) == found["seed"].nunique() == 5
    places = ["set", "seed"]
    single = found[found["ensemble"] == "single"].set_index(places)["rank"]
    cut = found[found["ensemble"] == "sub-models"]
    as_in_the_paper = cut[cut["weight"] == 2].set_index(places)["rank"]
    for ood in ("letters", "fashion-mnist"):
        assert (as_in_the_paper[ood] < single[ood]).all()
    wide = cut.pivot_table(index=places, columns="weight", values="AUROC, MI")
    assert (wide.loc["fashion-mnist"].idxmax(axis=1) == 0).all()
    assert (wide.loc["letters"].idxmin(axis=1) == 0).all()


@pytest.mark.parametrize("text", ["README.md", "book/index.md"])
def test_the_first_screen_quotes_the_runs_of_03(text):
    mean = pd.read_csv(FIGURES / "real" / "03_mlp_width_sweep" / "table.csv").mean(
        numeric_only=True
    )
    said = (FIGURES.parent / text).read_text()
    for name in ("accuracy", "mi_ood", "auroc_mi"):
        assert f"{mean[f'{name}_1']:.3f} to {mean[f'{name}_32']:.3f}" in said


def test_the_readme_quotes_the_runs_of_02_04_and_13():
    said = " ".join((FIGURES.parent / "README.md").read_text().split())
    groups = pd.read_csv(FIGURES / "real" / "02_ensembles_of_ensembles" / "table.csv")
    share = (groups["between_12"] / groups["between_1"]).mean()
    assert f"show {100 * share:.0f} % of the mutual information" in said
    two, single = groups[["auroc_two_12", "auroc_two_1"]].mean()
    assert f"{two:.3f}, is that of two single networks, {single:.3f}" in said
    large = pd.read_csv(
        FIGURES / "real" / "04_mask_extraction" / "paper_size.csv", index_col="what"
    )["AUROC, fashion-mnist"]
    assert f"AUROC of {large['trained ensemble, mi']:.3f}" in said
    assert f"reaches {large['Mahalanobis distance of pixels']:.4f}" in said
    board = pd.read_csv(BOARD / "fair.csv").query("backbone == 'transformer'")
    nll = board.groupby("method")["nll"].mean()
    assert f"{nll['single']:.3f} to {nll['lora']:.3f} nats" in said
    assert f"reach {nll['deep']:.3f}" in said
    gaps = scoreboard.differences(board[board["method"] != "single_temperature"], "nll")
    assert (gaps.loc[["lora", "deep"], ["difference", "p"]] < [0, 0.05]).all(axis=None)
    between = scoreboard.differences(board, "nll", "lora").loc["deep"]
    assert between["low"] < 0 < between["high"]


def test_lesson_13_quotes_seven_data_sets():
    fair, said = pd.read_csv(BOARD / "fair.csv"), flat("13_scoreboard")
    tables = [fair[fair["backbone"] == kind] for kind in ("transformer", "text")]
    for name in ("photographs", "photographs_2000", "voices", "sounds", "language"):
        table = pd.read_csv(BOARD / f"{name}.csv")
        tables.append(table.rename(columns={"NLL": "nll"}))
    three = ["lora", "singular_value", "deep"]
    names = ["LoRA-Ensemble", "singular value ensemble", "deep ensemble"]
    for table in tables:
        table = table[table["method"] != "single_temperature"]
        nll = table.groupby("method")["nll"].mean()
        gaps = scoreboard.differences(table, "nll").reindex(three)
        sure = (gaps["difference"] < 0) & (gaps["p"] < 0.05)
        better = ", ".join(n for n, yes in zip(names, sure, strict=True) if yes)
        verdict = "all three" if sure.all() else better or "none"
        shown = [f"{nll[m]:.3f}" if m in nll else "not run" for m in three]
        assert f"| {nll['single']:.3f}; {', '.join(shown)} | {verdict} |" in said


def test_03_has_the_settings_of_their_notebook():
    found = pd.read_csv(FIGURES / "real" / "03_mlp_width_sweep" / "settings.csv")
    found = found.query("passes == 100").set_index(["setting", "dropout when asked"])
    source = parameters.find("table_2").read_text()
    assert all(f'\\"{setting}\\": (' in source for setting, _ in found.index)
    assert len(found) == 16
    without_dropout = found.xs(False, level=1)
    assert without_dropout["AUROC, MI"].min() > 0.85  # the paper has 0.824
    assert without_dropout["MI, id"].max() < 0.03  # and 0.040


def test_06_has_the_ablations_of_their_profile_with_the_same_seeds():
    found, wanted = study("06", "ablations", "ablations")
    assert of_seeds(found, "ablation", wanted["seeds"])
    source = parameters.find("ablations").read_text()
    assert [
        name
        for name in found["ablation"].unique()
        if f'\\"{name}\\"' not in source and "normal start" not in name
    ] == []
    taught = FIGURES / "real" / "06_lora_ensemble" / "taught.json"
    assert read_json(taught)["parameters"]["taught"] == 3000


def test_09_has_its_study_with_five_seeds():
    found, given = study("09", "hydra", "seed")
    assert given["seed"] == [0, 1, 2, 3, 4]
    assert of_seeds(found, ["row", "trained on", "removed"], given["seed"])
    folder = FIGURES / "real" / "09_hydra_head_pruning"
    unsmoothed = pd.read_csv(folder / "unsmoothed.csv")
    assert read_json(folder / "unsmoothed.json")["parameters"]["smoothing"] == 0
    assert sorted(unsmoothed["seed"].unique()) == given["seed"]


def test_13_has_a_board_of_every_method_with_the_same_seeds_and_searched_rates():
    table, search = (pd.read_csv(BOARD / f"fair{end}.csv") for end in ("", "_search"))
    given = read_json(BOARD / "fair.json")["parameters"]
    apart = ["output_dir", "network", "methods"]
    wanted = parameters.defaults(parameters.find("board"))
    assert without(given, *apart) == without(wanted, *apart)
    assert set(given["network"]) == set(table["backbone"]) == MISFITS.keys()
    assert {name for group in given["methods"] for name in group} == METHODS.keys()
    for kind, rows in table.groupby("backbone"):
        names = METHODS.keys() - MISFITS[kind]
        assert set(rows["method"]) == names | {"single_temperature"}
        assert of_seeds(rows, "method", list(range(10 if kind == "transformer" else 5)))
    for (kind, method), rows in search.groupby(["backbone", "method"]):
        taken = rows.set_index("taken").loc[True]
        assert taken["nll"] == rows["nll"].min(), (kind, method)
    members = table.groupby("method")["members"].agg(
        lambda found: found.unique().item()
    )
    sampled = ["dropout", "laplace", "laplace_lora"]
    assert members["tiles"] == 4
    assert set(members[sampled]) == {wanted["samples"]}
    assert set(members.drop(["tiles", *sampled])) == {1, wanted["members"]}
    by_hand = pd.read_csv(BOARD / "by_hand.csv")
    assert set(by_hand["method"]) <= METHODS.keys()
    assert of_seeds(by_hand, ["backbone", "method"], list(range(5)))


def test_13_has_later_trainings_at_the_rates_of_the_board_with_other_seeds():
    board, search, later = (
        pd.read_csv(BOARD / f"{name}.csv") for name in ("fair", "fair_search", "later")
    )
    given = read_json(BOARD / "later.json")["parameters"]
    rates = search[search["taken"]].set_index(["backbone", "method"])["lr"]
    used = {
        (network, name, how["lr"])
        for network, own in zip(given["network"], given["own"], strict=True)
        for name, how in own.items()
    }
    assert used == {(*key, rates[key]) for key in {key[:2] for key in used}}
    for kind, rows in later.groupby("backbone"):
        assert of_seeds(rows, "method", sorted(set(rows["seed"])))
        assert not {*rows["seed"]} & {*board[board["backbone"] == kind]["seed"]}


# Of seed 2 of the voices is the speaker whose recordings the rates were chosen on.
@pytest.mark.parametrize(
    ("name", "swept", "seeds"),
    [
        ("photographs", {"ood"}, [0, 1, 2, 3, 4]),
        ("photographs_2000", {"ood", "train_limit"}, [0, 1, 2, 3, 4]),
        ("voices", {"seed"}, [0, 1, 3, 4, 5]),
    ],
)
def test_13_has_real_networks_with_the_same_seeds_and_searched_rates(
    name, swept, seeds
):
    table, search = (pd.read_csv(BOARD / f"{name}{end}.csv") for end in ("", "_search"))
    given = read_json(BOARD / f"{name}.json")["parameters"]
    wanted = settings(parameters.find("board"), name.partition("_")[0])
    rates = parameters.defaults(parameters.find("board"))["rates"]
    apart = ["output_dir", "methods", "own", *swept]
    assert without(given, *apart) == without(wanted, *apart)
    assert {"single", "lora", "deep", "singular_value"} <= set(table["method"])
    assert of_seeds(table, "method", seeds)
    assert set(search["method"]) == set(table["method"]) - {"single_temperature"}
    for method, rows in search.groupby("method"):
        assert len(rows) >= len(rates)
        taken = rows.set_index("taken").loc[True]
        assert taken["nll"] == rows["nll"].min(), method
        if method in given["own"]:
            assert given["own"][method]["lr"] == taken["lr"]


@pytest.mark.parametrize("page", ["06", "07", "08", "09", "10"])
def test_sentences_are_learned_in_three_seeds_with_the_profile_text(page):
    study = parameters.find(f"studies/{page}")
    folder = FIGURES / "real" / parameters.find(page).stem
    table = pd.read_csv(folder / "sentences.csv")
    given = read_json(folder / "sentences.json")["parameters"]
    wanted = settings(study, "text") | {"seed": [0, 1, 2]}
    assert without(given, *GONE) == without(wanted, *GONE)
    assert list(table["seed"]) == given["seed"]
    source = "\n".join(sources(study, "code"))
    claims = [name for name in table if name.startswith("claim_")]
    assert claims
    for name in claims:
        made = name.removeprefix("claim_")
        assert f'"{made}"' in source or made.startswith("circuit_")
    if page in ("09", "10"):
        by_method = pd.read_csv(folder / "sentences_by_method.csv")
        assert of_seeds(by_method, by_method.columns[0], given["seed"])


def test_13_has_five_folds_of_sounds_at_the_rates_of_the_voices():
    table = pd.read_csv(BOARD / "sounds.csv")
    given = read_json(BOARD / "sounds.json")["parameters"]
    wanted = settings(parameters.find("board"), "sounds")
    apart = ["output_dir", "methods", "seed"]
    assert without(given, *apart) == without(wanted, *apart)
    assert of_seeds(table, "method", list(range(5)))
    voices = read_json(BOARD / "voices.json")["parameters"]["own"]
    assert given["own"] == voices | {"dropout": voices["single"]}


def test_13_has_five_seeds_of_questions_at_searched_rates():
    table, search = (
        pd.read_csv(BOARD / f"language{end}.csv") for end in ("", "_search")
    )
    given = read_json(BOARD / "language.json")["parameters"]
    apart = ["output_dir", "methods", "seed"]
    assert without(given, *apart) == without(
        parameters.defaults(parameters.find("language")), *apart
    )
    assert of_seeds(table, "method", list(range(5)))
    best = search.loc[search.groupby(["kind", "seed"])["NLL"].idxmin()].set_index(
        ["kind", "seed"]
    )
    for row in table.itertuples():
        kind = "singular_value" if row.method == "singular_value" else "lora"
        assert row.lr == best["lr"][kind, row.seed]


def test_13_has_a_board_with_columns_that_are_measured_now():
    table = pd.read_csv(BOARD / "fair.csv").query("backbone == 'transformer'")
    table = table.dropna(axis=1, how="all")
    train, known = (
        data.load("mnist-mini", split, limit=60) for split in ("train", "test")
    )
    strangers = {
        name: data.load(name, "test", limit=4).resize(28)
        for name in ("fashion-mini", "kmnist-mini", "letters")
    }
    shifted = {
        "blurred": known[:4],
        "ambiguous": data.load("ambiguous-mnist-mini", "test", limit=4),
    }
    scores = scoreboard.CHEAP
    how = {"repeats": 1, "methods": ["film"], "members": 2}
    how |= {"seeds": [0], "validation": known, "shifted": shifted, "epochs": 1}
    found = scoreboard.measure(models.embedded(), train, known[:8], strangers, **how)
    assert set(table) <= {"backbone", "dataset", "peak_memory", *found.columns}
    asked = {f"auroc_{score}_{name}" for score in scores for name in strangers}
    assert asked <= set(table)
    assert not table.query("method == 'film'")[[*asked]].isna().any(axis=None)


@pytest.mark.release
def test_13_compares_the_boards_methods_by_students_t_and_holm(pages):
    """Three are better, and no one is on every backbone."""
    given = parameters.defaults(parameters.find("13_scoreboard_study"))
    tables = {name: given[name] for name in ("board", "older", "long_runs")}
    recorded = read_json(pages("13_scoreboard_study", **tables) / "results.json")
    numbers, order = recorded["numbers"], recorded["tables"]["order"]["index"]
    table = pd.read_csv(BOARD / "fair.csv").query("backbone == 'transformer'")
    table = table[table["method"] != "single_temperature"]
    assert set(order) == set(table["method"])
    wide = table.pivot(index="seed", columns="method", values="nll")
    gaps = wide.drop(columns="single").sub(wide["single"], axis=0)
    p = stats.ttest_1samp(gaps, 0).pvalue
    assert len(p) == len(METHODS) - 1
    order_of_p = np.argsort(p)
    ended = np.flatnonzero(p[order_of_p] * np.arange(len(p), 0, -1) >= 0.05)[0]
    found = gaps.columns[order_of_p[:ended]]
    assert set(numbers["better_than_one"]) == {n for n in found if gaps[n].mean() < 0}
    assert set(numbers["worse_than_one"]) == {n for n in found if gaps[n].mean() > 0}
    assert set(numbers["better_than_one"]) == {"lora", "singular_value", "deep"}
    assert numbers["better_everywhere"] == []
    claims = recorded["claims"]
    held = ("worse", "moves", "winners", "public")
    assert [name for name in held if not claims[name]["holds"]] == []
    public = pd.DataFrame(**recorded["tables"]["public_order"])
    five = public.loc["transformer, nll, cifar10"]
    assert five["Kendall's tau"] == pytest.approx(0)
    assert five["p"] == pytest.approx(0.59, abs=0.01)  # 71 of 120 orders


def test_13_reads_the_board_in_its_lesson(results):
    recorded = results("13_scoreboard")[0]
    numbers = recorded["numbers"]
    assert set(numbers["better"]) == {"lora", "singular_value", "deep"}
    assert {"packed", "masks", "tiles"} <= set(numbers["worse"])
    assert set(numbers["front"]) == {"lora", "singular_value"}
    assert set(numbers["nll_of_three"]) == set(numbers["better"])
    board = {row[0] for row in recorded["tables"]["own"]["data"]}
    assert board == {"single", "single_temperature", "lora"}
