"""Which method, which score, at what cost: every method trained, measured and timed alike, and compared with bands.

`measure` gives a row a (method, seed). What follows from its table, `ranks`, `differences`, `pareto` and `recommend`,
resamples the seeds, alike for all methods. Few seeds tell little: of two, only three resamples differ.
"""

import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from uqlab import ensembles, metrics, training, uncertainty
from uqlab.core import door
from uqlab.core.checks import one_of
from uqlab.core.devices import Held
from uqlab.core.modules import evaluating, like_parameters
from uqlab.data import Dataset
from uqlab.study import methods as recipes
from uqlab.study import scores as rating

Sets = Mapping[str, Dataset]
CHEAP = tuple(
    name for name in rating.SCORES if name != "regrad"
)  # which takes hundreds of times as long
LESS_IS_BETTER = (
    "nll", "ece", "adaptive_ece", "brier", "aurc", "fpr95", "soft_kl",
    "trained", "stored", "peak_memory", "train_seconds", "latency",
)  # fmt: skip


def measure(
    backbone: nn.Module, train: Dataset, test: Dataset, ood: Sets, *, methods: Iterable[str] | None = None,
    scores: Iterable[str] = CHEAP, members: int = 4, seeds: Iterable[int] = range(3),
    validation: Dataset | None = None, shifted: Sets | None = None, own: Mapping[str, Mapping[str, Any]] | None = None,
    few: Mapping[str, int] | None = None, kept: dict[tuple[str, int], nn.Module] | None = None, repeats: int = 10,
    **settings: Any,
) -> pd.DataFrame:  # fmt: skip
    """Train every method with every seed on one backbone: a row a (method, seed). Tables of many runs may be joined.

    ood, shifted: sets by name; strangers, and known classes that look different.
    methods: names in METHODS; None for all that this backbone can carry, with a warning for those that it cannot.
    scores: names in SCORES. Those that compare members are left out (NaN) where there is one member.
    validation: labelled inputs that were not trained on, for the columns after temperature scaling.
    settings: of `methods.train`, for all methods; own: for some, by the method's name.
    few: further scores, which are dear, and how many inputs of each set they see: {"regrad": 20}, always the first.
    kept: takes (method, seed) -> what was trained.
    repeats: rounds of the timing, in each of which the ensemble and the single network take turns.

    Columns: method, seed, members; accuracy, nll, ece, adaptive_ece, brier, aurc (by "msp"); aurc_<score>,
    auroc_<score>_<ood>, fpr95_<score>_<ood>; accuracy_, nll_ and ece_<shifted>; temperature, nll_scaled, ece_scaled;
    correlation, the rank correlation of the aleatoric and the epistemic part on the test set; where that, or a shifted
    set, has soft labels soft_kl, the mean KL from them to the prediction, and soft_correlation, that of their entropy
    and the aleatoric part. Costs: trained numbers; stored numbers, without what follows from them, such as singular
    vectors; peak_memory (bytes: what is held always, and what 64 inputs take at once); train_seconds; and latency_1
    and latency_64, for as many inputs, relative to the single network.
    """
    rows, seeds, scores, few = [], list(seeds), list(scores), few or {}
    names = list(recipes.METHODS if methods is None else methods)
    for kind, wanted, known in (
        ("method", names, recipes.METHODS),
        ("score", [*scores, *few], rating.SCORES),
    ):
        for name in wanted:
            one_of(kind, name, known)
    for data in (train, test, *ood.values(), *(shifted or {}).values()):
        _tensor(data)
    for name in names:
        for seed in seeds:
            histories: list[training.History] = []
            how = {
                **settings,
                **(own or {}).get(name, {}),
                "members": members,
                "seed": seed,
                "histories": histories,
            }
            started = time.perf_counter()
            try:
                ensemble = recipes.train(
                    name, backbone, _tensor(train), train.labels, **how
                )
            except (ValueError, TypeError) as error:
                if methods is not None:
                    raise
                warnings.warn(f"{name} is left out: {error}", stacklevel=2)
                break
            # A training that was read from the cache knows how long it took.
            seconds = max(
                time.perf_counter() - started,
                sum(history.seconds for history in histories),
            )
            if kept is not None:
                kept[name, seed] = ensemble
            row = {
                "method": name,
                "seed": seed,
                "members": ensemble.members,
                "train_seconds": seconds,
            }
            z = training.predict(ensemble, _tensor(test))
            for score, count in few.items():
                some = {where: strangers[:count] for where, strangers in ood.items()}
                row |= detection(ensemble, train, test[:count], some, [score])
            row |= quality(ensemble, test, validation, shifted, z) | detection(
                ensemble, train, test, ood, scores, z
            )
            rows.append(row | cost(ensemble, backbone, _tensor(test), repeats))
    if not rows:
        raise ValueError(
            "no method could be trained on this backbone: the warnings say why"
        )
    return pd.DataFrame(rows)


def quality(
    model: nn.Module, test: Dataset, validation: Dataset | None = None, shifted: Sets | None = None,
    z: Tensor | None = None,
) -> dict[str, float | int]:  # fmt: skip
    """What `measure` says of the predictions of one trained ensemble or network; z: its logits of `test`, if known."""
    basic = {"accuracy": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece}
    more = {"adaptive_ece": metrics.adaptive_ece, "brier": metrics.brier}
    z = training.predict(model, _tensor(test)) if z is None else z
    row = {key: value(z, test.labels) for key, value in (basic | more).items()} | _soft(
        z, test
    )
    for name, other in (shifted or {}).items():
        there = training.predict(model, _tensor(other))
        found = {
            key: value(there, other.labels) for key, value in basic.items()
        } | _soft(there, other)
        row |= {f"{key}_{name}": value for key, value in found.items()}
    log_q, parts = metrics.log_prediction(z), uncertainty.decompose(z.double())
    if validation is not None:
        t = metrics.fit_temperature(
            training.predict(model, _tensor(validation)), validation.labels
        )
        row |= {"temperature": t} | {
            f"{key}_scaled": basic[key](log_q[None] / t, test.labels)
            for key in ("nll", "ece")
        }
    if len(z) > 1:
        row["correlation"] = _rank_correlation(parts.aleatoric, parts.epistemic)
    return row


def _soft(z: Tensor, data: Dataset) -> dict[str, float]:
    """The agreement of logits with soft labels, where there are any."""
    if data.label_probs is None:
        return {}
    truth = data.label_probs.double()
    ambiguity = torch.special.entr(truth).sum(1)
    apart = (-(truth * metrics.log_prediction(z)).sum(1) - ambiguity).mean().item()
    aleatoric = uncertainty.decompose(z.double()).aleatoric
    return {
        "soft_kl": apart,
        "soft_correlation": _rank_correlation(ambiguity, aleatoric),
    }


def detection(
    model: nn.Module,
    train: Dataset,
    test: Dataset,
    ood: Sets,
    scores: Iterable[str] = CHEAP,
    z: Tensor | None = None,
) -> dict[str, float | int]:
    """What `measure` says of each score: of its order of the test set, and against each OOD set; z: as in `quality`."""
    z = training.predict(model, _tensor(test)) if z is None else z
    names = [name for name in scores if len(z) > 1 or not rating.SCORES[name].compares]
    rating.fit(names, model, _tensor(train), train.labels)
    known = rating.values(names, model, _tensor(test), z=z)
    row = {"aurc": metrics.aurc(z, test.labels, -metrics.log_prediction(z).amax(1))}
    row |= {f"aurc_{name}": metrics.aurc(z, test.labels, known[name]) for name in names}
    for where, strangers in ood.items():
        for name, value in rating.values(names, model, _tensor(strangers)).items():
            found = metrics.ood_detection(known[name], value)
            row |= {
                f"auroc_{name}_{where}": found.auroc,
                f"fpr95_{name}_{where}": found.fpr95,
            }
    return row


# Costs ----------------------------------------------------------------------------------------------------------------
def cost(
    ensemble: ensembles.Ensemble, single: nn.Module, inputs: Tensor, repeats: int = 10
) -> dict[str, float | int]:
    """What `measure` says of the costs of a trained ensemble, beside those of the single network."""
    stored = sum(t.numel() for t in held_tensors(ensemble, derived=False))
    row: dict[str, float | int] = {
        "trained": recipes.numbers(ensemble),
        "stored": stored,
    }
    models = {"ensemble": ensemble, "single": ensembles.from_members([single])}
    with torch.no_grad(), evaluating(ensemble), evaluating(single):
        for size in (1, 64):
            x = like_parameters(ensemble, inputs[torch.arange(size) % len(inputs)])
            seconds = {name: [] for name in models}
            for turn in range(1 + repeats):
                for name, model in models.items():
                    started = time.perf_counter()
                    model(x).sum().item()  # waits for a GPU
                    seconds[name] += [time.perf_counter() - started] if turn else []
            row[f"latency_{size}"] = float(
                np.median(seconds["ensemble"]) / np.median(seconds["single"])
            )
        with Held() as held:
            ensemble(x)
    return row | {
        "peak_memory": held.most + sum(t.nbytes for t in held_tensors(ensemble))
    }


def held_tensors(ensemble: ensembles.Ensemble, derived: bool = True) -> list[Tensor]:
    """Return the tensors of an ensemble, those that share memory once.

    Parameters
    ----------
    ensemble : Ensemble
    derived : bool
        Whether to count the buffers that members share and that follow from the shared
        weight, such as its singular vectors: they are held in memory, but not stored.
    """
    left_out = set()
    for part in ensemble.modules():
        if isinstance(part, ensembles.MemberParameter) and not derived:
            for name, buffer in part.named_buffers(recurse=False):
                if name not in part.member_buffers:
                    left_out.add(id(buffer))
    tensors = [*ensemble.parameters(), *ensemble.buffers()]
    kept = [t for t in tensors if t.numel() and id(t) not in left_out]
    return list({t.data_ptr(): t for t in kept}.values())


# Comparisons ----------------------------------------------------------------------------------------------------------
def sign(column: str) -> int:
    """1 where more is better, -1 where less is."""
    return (
        -1
        if any(
            column == each or column.startswith(f"{each}_") for each in LESS_IS_BETTER
        )
        else 1
    )


def ranks(
    table: pd.DataFrame,
    column: str,
    *,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> pd.DataFrame:
    """The methods from the best to the worst by their mean over seeds, with what resampled seeds make of it.

    mean, low, high; rank, rank_low, rank_high; ahead: the share of resamples in which the order holds between a method
    and the next one, ties counting one half (NaN for the last). Raises ValueError for fewer than two seeds: a ranking
    needs its band.
    """
    means, drawn = _resampled(table, [column], repeats, seed)
    order = means[column].sort_values(ascending=sign(column) < 0, kind="stable").index
    values = drawn[column][order].to_numpy() * sign(column)
    places = pd.DataFrame(-values).rank(axis=1).to_numpy()
    tails = [(1 - level) / 2, (1 + level) / 2]
    (low, high), (first, last) = (
        np.quantile(values * sign(column), tails, 0),
        np.quantile(places, tails, 0),
    )
    rank = pd.Series(-sign(column) * means[column][order]).rank()
    ahead = [*_ahead(values[:, :-1], values[:, 1:]), np.nan]
    found = {
        "mean": means[column][order],
        "low": low,
        "high": high,
        "rank": rank,
        "rank_low": first,
        "rank_high": last,
    }
    return pd.DataFrame(found | {"ahead": ahead}, index=order)


def differences(
    table: pd.DataFrame,
    column: str,
    than: str = "single",
    *,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> pd.DataFrame:
    """Each method minus another, paired over seeds: difference, low, high; ahead: share of resamples where it wins."""
    means, drawn = _resampled(table, [column], repeats, seed)
    if than not in means.index:
        raise ValueError(f"than must be one of {', '.join(means.index)}, got {than!r}")
    gaps = drawn[column].sub(drawn[column][than], axis=0).drop(columns=than)
    low, high = np.quantile(gaps, [(1 - level) / 2, (1 + level) / 2], 0)
    mean = (means[column] - means[column][than]).drop(than)
    ahead = _ahead(gaps.to_numpy() * sign(column), np.zeros(gaps.shape))
    return pd.DataFrame({"difference": mean, "low": low, "high": high, "ahead": ahead})


def pareto(
    table: pd.DataFrame, quality: str, cost: str, *, repeats: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """The front: methods that no other equals or beats in both means and beats in one, from the cheapest.

    Columns: quality, cost and share, the share of resamples in which the method is on the front (NaN for one seed).
    """
    several = len(set(table["seed"])) > 1
    means, drawn = _resampled(table, [quality, cost], repeats if several else 0, seed)
    sides = [(column, sign(column)) for column in (quality, cost)]
    here = _on_front(*(side * means[[column]].to_numpy().T for column, side in sides))[
        0
    ]
    share = (
        _on_front(*(side * drawn[column].to_numpy() for column, side in sides)).mean(0)
        if several
        else np.nan
    )
    return means.assign(share=share)[here].sort_values(cost, ascending=sign(cost) < 0)


class Advice(NamedTuple):
    """What `recommend` says. best, runner_up: methods, empty where none is left; all other numbers are NaN then."""

    best: str
    runner_up: str
    value: float  # of the best method
    margin: float  # by how much it is better than the runner-up, at least 0; with the ends of its band
    low: float
    high: float
    ahead: float  # share of resamples in which it is better
    refused: dict[str, str]  # method -> the first limit that it breaks
    reason: str  # a sentence


def recommend(
    table: pd.DataFrame,
    quality: str,
    limits: Mapping[str, int | float],
    *,
    repeats: int = 1000,
    seed: int = 0,
) -> Advice:
    """The method with the best mean quality among those that you can afford, and why.

    limits: column -> the most that its mean over seeds may be; the least, where more is better.
    """
    means, _ = _resampled(
        table, [quality, *(column for column in limits if column != quality)], 0, seed
    )
    least = {
        column: sign(column) * limit - 1e-9 * abs(limit)
        for column, limit in limits.items()
    }
    refused = {  # a limit that is a method's own mean admits it, although sums in another order may differ
        str(method): column
        for column in reversed(list(limits))
        for method in means.index[sign(column) * means[column] < least[column]]
    }
    left: Any = means[quality].drop(list(refused)) * sign(quality)
    first, *others = [
        str(name) for name in left.sort_values(ascending=False, kind="stable").index
    ] or [""]
    margin = low = high = ahead = float("nan")
    named = {
        name: getattr(recipes.METHODS.get(name), "label", name) for name in means.index
    }
    if others:
        kept: Any = table[table["method"].isin([first, others[0]])]
        side = differences(kept, quality, others[0], repeats=repeats, seed=seed).loc[
            first
        ]
        margin, ahead = sign(quality) * float(side["difference"]), float(side["ahead"])
        low, high = sorted(sign(quality) * float(side[end]) for end in ("low", "high"))
    better = (
        means.index[sign(quality) * means[quality] > left.max()] if len(left) else []
    )
    words = f"no method keeps {' and '.join(limits)} within the limits"
    if first:
        words = f"{named[first]} has the best {quality} of the {len(left)} methods that you can afford"
        words = (
            words
            if others
            else f"{named[first]} is the only method that you can afford"
        )
    if others:
        sure = "ahead of" if low > 0 else "but these seeds cannot tell it from"
        words += f", {sure} {named[others[0]]} (by {margin:.3g}, 95 %: {low:.3g} to {high:.3g})"
    if len(better):
        words += "; better but too dear: " + ", ".join(
            f"{named[each]} ({refused[each]})" for each in better
        )
    value = float(means[quality][first]) if first else float("nan")
    return Advice(
        first,
        (others or [""])[0],
        value,
        margin,
        low,
        high,
        ahead,
        refused,
        words + ".",
    )


def by_score(table: pd.DataFrame, ood: str, kind: str = "auroc") -> pd.DataFrame:
    """Means over seeds of one kind of column, "auroc" or "fpr95", against one OOD set: [methods, scores]."""
    columns = {
        f"{kind}_{name}_{ood}": name
        for name in rating.SCORES
        if f"{kind}_{name}_{ood}" in table
    }
    means: Any = table.groupby("method", sort=False)[list(columns)].mean()
    return means.rename(columns=columns)


def _resampled(
    table: pd.DataFrame, columns: list[str], repeats: int, seed: int
) -> tuple[Any, dict[str, Any]]:
    """Means [methods, columns], and for every column those of resampled seeds [repeats, methods], alike for all."""
    if missing := [column for column in columns if column not in table]:
        raise ValueError(
            f"the table has no column {missing[0]!r}; it has {', '.join(table.columns)}"
        )
    wide: Any = table.pivot(index="seed", columns="method", values=columns)
    named = [
        m
        for m in table["method"].unique()
        if not any(wide[column][m].isna().all() for column in columns)
    ]
    each = {column: wide[column][named] for column in columns}
    if any(values.isna().to_numpy().any() for values in each.values()):
        raise ValueError("every method needs every seed: seeds are compared in pairs")
    if repeats and len(wide) < 2:
        raise ValueError(
            "a comparison needs its band: measure two seeds or more, better five"
        )
    picks = np.random.default_rng(seed).integers(len(wide), size=(repeats, len(wide)))
    drawn = {
        column: pd.DataFrame(v.to_numpy()[picks].mean(1), columns=named)
        for column, v in each.items()
    }
    return pd.DataFrame(
        {column: values.mean() for column, values in each.items()}
    ), drawn


def _tensor(data: Dataset) -> Tensor:
    if not isinstance(data.inputs, Tensor):
        raise TypeError(
            f"{data.name} holds texts: give a Dataset with the tokenizer's tensor as its inputs"
        )
    return data.inputs


def _ahead(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return ((a > b) + (a == b) / 2).mean(0)


def _on_front(quality: np.ndarray, cost: np.ndarray) -> Any:
    """Of each row, more being better in both [rows, methods]: which methods no other dominates."""
    q, c = quality[:, :, None], cost[:, :, None]
    others, theirs = quality[:, None], cost[:, None]
    return ~((others >= q) & (theirs >= c) & ((others > q) | (theirs > c))).any(2)


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; NaN where one of them is constant."""
    constant = len(a.unique()) == 1 or len(b.unique()) == 1
    return (
        float("nan")
        if constant
        else float(np.asarray(spearmanr(a.numpy(), b.numpy()))[0])
    )


door.room(__name__)
