"""Train, measure, time and compare methods on one backbone.

`measure` gives a row a (method, seed). `differences` and `recommend` compare methods by
Student's t over seeds, which all methods share.
"""

import time
import warnings
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import kl_div

from uqlab import ensembles, metrics, training, uncertainty
from uqlab.core.checks import as_inputs, by_name, one_of
from uqlab.core.modules import evaluating, like_parameters
from uqlab.data import read
from uqlab.study import methods as recipes
from uqlab.study import scores as rating

Sets = Mapping[str, Any]  # by name
# All scores without gradients, which take up to hundreds of times as long.
CHEAP = tuple(n for n, score in rating.SCORES.items() if score.of != "network")
_LESS_IS_BETTER = (
    "nll", "ece", "brier", "aurc", "soft_kl",
    "trained", "stored", "peak_memory", "train_seconds", "latency",
)  # fmt: skip


def measure(
    backbone: nn.Module,
    train: Any,
    test: Any,
    ood: Sets,
    *,
    methods: Iterable[str] | None = None,
    scores: Iterable[str] = CHEAP,
    members: int = 4,
    seeds: Iterable[int] = range(3),
    validation: Any = None,
    shifted: Sets | None = None,
    method_kwargs: Mapping[str, dict] | None = None,
    repeats: int = 10,
    **settings: Any,
) -> pd.DataFrame:
    """Train every method with every seed on one backbone, and measure the result.

    Parameters
    ----------
    backbone
        The pretrained network.
    train, test
        A Dataset (of texts with the tokenizer's tensor as inputs), or what `data.read`
        takes: (inputs, labels), a dataset or a loader of torch.
    ood, shifted
        Sets by name: OOD inputs, and known classes that look different.
    methods
        Names in METHODS; None for all that this backbone can carry, with a warning for
        the others.
    scores
        Names in SCORES. One that a model cannot give is left out (NaN).
    members, seeds
        Members of every ensemble, and seeds of the trainings.
    validation
        Labelled inputs for the columns after temperature scaling.
    method_kwargs
        Settings of single methods, by name; `settings` are for all. Both are those of
        `methods.train`.
    repeats
        Rounds of the timing, in which the ensemble and the single network take turns.

    Returns
    -------
    DataFrame
        A row a (method, seed). Columns: accuracy, nll (nats), ece, brier, aurc (by
        "msp"); with `validation` temperature, nll_scaled, ece_scaled; accuracy_, nll_
        and ece_<shifted>; where a set has soft labels soft_kl, the mean KL from them to
        the prediction, and soft_correlation, the rank correlation of their entropy and
        the aleatoric part; auroc_<score>_<ood>. Costs: trained, the parameters that are
        not the backbone's; stored, all parameters without what follows from them, such
        as singular vectors; latency_1 and latency_64, for as many inputs, relative to
        the single network; train_seconds.

    Raises
    ------
    ValueError
        If a name is unknown, or no method could be trained.
    """
    by_name("ood", ood, '{"letters": letters}')
    scores = _checked(scores, rating.SCORES, "score")
    names = _checked(methods, recipes.METHODS, "method")
    train, test = read(train), read(test)
    how = {"members": members, **settings}
    pairs = product(names, seeds)
    strict = methods is not None
    trained = _trained(backbone, train, pairs, how, method_kwargs or {}, strict)
    rows = []
    for row, model in trained:
        row |= _quality(model, test, validation, shifted or {})
        row |= _detection(model, train, test, ood, scores)
        rows.append(row | _cost(model, backbone, test.inputs, repeats))
    if not rows:
        raise ValueError("no method could be trained on this backbone; see warnings")
    return pd.DataFrame(rows)


def _trained(backbone, train, pairs, how, own, strict):
    """Yield the first columns of each row, and its ensemble."""
    for name, seed in pairs:
        data = train.inputs, train.labels
        options = how | own.get(name, {})
        started = time.perf_counter()
        try:
            model = recipes.train(name, backbone, *data, seed=seed, **options)
        except (ValueError, TypeError) as error:
            if strict:
                raise
            warnings.warn(f"{name} is left out: {error}", stacklevel=3)
            continue
        row = {"method": name, "seed": seed, "members": model.members}
        yield row | {"train_seconds": time.perf_counter() - started}, model


def _checked(names, known, what):
    """Return the names as a list, all known ones for None."""
    names = list(known) if names is None else list(names)
    for name in names:
        one_of(what, name, known)
    return names


def _quality(model, test, validation, shifted):
    """Return the columns of the predictions."""
    z = training.predict(model, test.inputs)
    row = _basic(z, test) | {"brier": metrics.brier(z, test.labels)}
    row["ece_floor"], _ = metrics.ece_floor(z, labels=test.labels)
    row["aurc"] = metrics.aurc(z, test.labels, -metrics.log_prediction(z).amax(1))
    for name, other in shifted.items():
        there = read(other)
        found = _basic(training.predict(model, there.inputs), there)
        row |= {f"{column}_{name}": value for column, value in found.items()}
    if validation is not None:
        held = read(validation)
        found = training.predict(model, held.inputs)
        row["temperature"] = temperature = metrics.fit_temperature(found, held.labels)
        scaled = metrics.log_prediction(z)[None] / temperature
        row["nll_scaled"] = metrics.nll(scaled, test.labels)
        row["ece_scaled"] = metrics.ece(scaled, test.labels)
    return row


def _basic(z, data):
    """Return the columns of every labelled set."""
    measures = metrics.accuracy, metrics.nll, metrics.ece
    row = {measure.__name__: measure(z, data.labels) for measure in measures}
    if data.label_probs is not None:
        truth = data.label_probs.double()
        ambiguity = stats.entropy(truth, axis=1)
        aleatoric = uncertainty.decompose(z.double()).aleatoric
        log_p = metrics.log_prediction(z)
        row["soft_kl"] = kl_div(log_p, truth, reduction="batchmean").item()
        pair: Any = stats.spearmanr(ambiguity, aleatoric)
        row["soft_correlation"] = pair.statistic
    return row


def _detection(model, train, test, ood, scores):
    """Return how well scores tell OOD inputs from the test set."""
    if model.members == 1:
        scores = [name for name in scores if not rating.SCORES[name].needs_members]
    left_out = rating.fit(scores, model, train.inputs, train.labels)
    for name, reason in left_out.items():
        warnings.warn(f"{name} is left out: {reason}", stacklevel=3)
    names = [name for name in scores if name not in left_out]
    known = rating.values(names, model, test.inputs)
    row = {}
    for where, unfamiliar in ood.items():
        there = rating.values(names, model, read(unfamiliar).inputs)
        for name in names:
            found = metrics.ood_detection(known[name], there[name])
            row[f"auroc_{name}_{where}"] = found.auroc
    return row


# Costs
def _cost(ensemble, single, inputs, repeats):
    """Return the costs of a trained ensemble, beside those of the single network."""
    some = as_inputs(inputs)
    stored = _stored(ensemble)
    row = {
        "trained": sum(p.numel() for p in stored if _is_new(p, single)),
        "stored": sum(t.numel() for t in stored),
    }
    alone = ensembles.from_members([single])
    with torch.no_grad(), evaluating(ensemble), evaluating(single):
        for size in (1, 64):
            x = like_parameters(ensemble, some[torch.arange(size) % len(some)])
            rounds = [
                (_seconds(ensemble, x), _seconds(alone, x)) for _ in range(1 + repeats)
            ]
            many, one = np.median(rounds[1:], axis=0)  # the first one warms up
            row[f"latency_{size}"] = many / one
    return row


def _is_new(p, single):
    """Tell whether a tensor is a parameter that the single network does not have."""
    if not isinstance(p, nn.Parameter):
        return False
    # perhaps the network's own, once for every member
    same = [t for t in single.parameters() if t.shape in (p.shape, p.shape[1:])]
    return not any(bool((p == t).all()) for t in same)


def _seconds(model, x):
    started = time.perf_counter()
    model(x.clone()).sum().item()  # waits for a GPU
    return time.perf_counter() - started


def _stored(ensemble):
    """Return the stored tensors of an ensemble, those that share memory once.

    Not stored are buffers that follow from the network's weight, such as its singular
    vectors, and tensors of the network where members have their own.
    """
    state = ensemble.network.state_dict(keep_vars=True)
    left_out = {id(state.get(name)) for name in ensemble.replaced}
    for part in ensemble.seen.values():
        shared = getattr(part.kind, "shared", ())
        left_out |= {id(getattr(part.kind, key)) for key in shared}
    tensors = [*ensemble.parameters(), *ensemble.buffers()]
    counted = [t for t in tensors if t.numel() and id(t) not in left_out]
    return list({t.data_ptr(): t for t in counted}.values())


# Comparisons
def sign(column: str) -> int:
    """Return 1 for a column where more is better, -1 where less is."""
    return -1 if column.startswith(_LESS_IS_BETTER) else 1


def label(method: str) -> str:
    """Return a method's label, or its name where METHODS lacks it.

    Examples
    --------
    >>> label("single_temperature")
    'single network + temperature'
    """
    one, scaled, _ = method.partition("_temperature")
    if one not in recipes.METHODS:
        return method
    return recipes.METHODS[one].label + (" + temperature" if scaled else "")


def with_temperature(table: pd.DataFrame) -> pd.DataFrame:
    """Append rows of the single network with its fitted temperature.

    A temperature leaves the predicted classes of one network. It changes NLL and ECE,
    which `measure` has as nll_scaled and ece_scaled, and adds one parameter. The other
    columns of these rows are missing.

    Parameters
    ----------
    table
        A table of `measure` with `validation` and the method "single".

    Returns
    -------
    DataFrame
        The table and, below it, rows of the method "single_temperature".
    """
    one = table[table["method"] == "single"]
    if one.empty or "nll_scaled" not in one:
        raise ValueError("`table` must have the method 'single' and nll_scaled")
    stays = one.filter(
        regex="^(backbone|dataset|seed|members|accuracy|.*_scaled|temperature"
        "|latency_1|latency_64)$"
    )
    scaled = stays.assign(
        method="single_temperature",
        nll=one["nll_scaled"],
        ece=one["ece_scaled"],
        trained=one["trained"] + 1,
        stored=one["stored"] + 1,
    )
    return pd.concat([table, scaled], ignore_index=True)


def differences(
    table: pd.DataFrame, column: str, baseline: str = "single"
) -> pd.DataFrame:
    """Compare each method with a baseline, paired over seeds.

    Parameters
    ----------
    table
        A table of `measure`.
    column
        The column to compare.
    baseline
        The method to compare with.

    Returns
    -------
    DataFrame
        difference with low and high (95 %, Student's t); p, of Student's t and adjusted
        by Holm's method for the comparisons of all methods.
    """
    values = _by_seed(table, [column])[column]
    one_of("`baseline`", baseline, list(values))
    gaps: Any = values.drop(columns=baseline).sub(values[baseline], axis=0)
    rows = {name: metrics.paired_t(gaps[name].to_numpy()) for name in gaps}
    found = pd.DataFrame.from_dict(rows, "index", columns=["difference", "low", "high"])
    ratio = gaps.mean().abs() / gaps.sem().clip(lower=1e-300)  # equal gaps: p is 0 or 1
    return found.assign(p=metrics.holm(2 * stats.t.sf(ratio, len(gaps) - 1)))


def pareto(table: pd.DataFrame, quality: str, cost: str) -> pd.DataFrame:
    """Find the methods that no other equals or beats in both means and beats in one.

    Parameters
    ----------
    table
        A table of `measure`.
    quality, cost
        Two of its columns.

    Returns
    -------
    DataFrame
        The means of both columns by method, from the cheapest.
    """
    values = _by_seed(table, [quality, cost])
    means = pd.DataFrame({column: wide.mean() for column, wide in values.items()})
    points = means.to_numpy() * [sign(quality), sign(cost)]  # more is better
    dominated = [
        ((points >= own).all(1) & (points > own).any(1)).any() for own in points
    ]
    front: Any = means[~np.array(dominated)]
    return front.sort_values(cost, ascending=sign(cost) < 0, kind="stable")


class _Advice(NamedTuple):
    """The advice of `recommend`; without a method, names are empty and numbers NaN."""

    best: str
    runner_up: str  # empty where one method is left
    margin: float  # the best method's lead over the runner-up, with its 95 % interval,
    low: float  # on seeds that chose neither; NaN where there are fewer than two
    high: float
    refused: dict[str, str]  # method -> the first limit that it breaks
    reason: str  # a sentence


def recommend(
    table: pd.DataFrame, quality: str, limits: Mapping[str, int | float]
) -> _Advice:
    """Name the method with the best mean quality within limits.

    The first half of the seeds chooses it and the runner-up, the others judge its lead.

    Parameters
    ----------
    table
        A table of `measure`.
    quality
        The column that matters.
    limits
        Column -> the most that its mean over seeds may be; the least, where more is
        better.
    """
    values = _by_seed(table, [quality, *limits])
    refused = _refused(values, limits)
    worth: Any = sign(quality) * values[quality]
    half = max(1, len(worth) // 2)
    better = worth[:half].mean()
    left = better.drop(list(refused)).sort_values(ascending=False, kind="stable")
    best, runner_up, *_ = [*left.index, "", ""]
    dear = [f"{label(m)} ({refused[m]})" for m in better.index[better > left.max()]]
    ahead = _lead(worth[half:], best, runner_up)
    reason = f"no method keeps {' and '.join(limits)} within the limits."
    if best:
        quality += f" on {half} of {len(worth)} seeds"
        reason = _reason(quality, best, runner_up, ahead, len(left), dear)
    return _Advice(best, runner_up, *ahead, refused, reason)


def _lead(worth, best, runner_up):
    """Return by how much the best method leads, NaN without two seeds to judge."""
    if not runner_up or len(worth) < 2:
        return metrics.Interval(np.nan, np.nan, np.nan)
    return metrics.paired_t((worth[best] - worth[runner_up]).to_numpy())


def _refused(values, limits):
    """Return the first limit that a method breaks, by method."""
    refused = {}
    for column, limit in limits.items():
        # A limit that is a method's own mean admits it, however the mean was rounded.
        spare = sign(column) * (values[column].mean() - limit)
        for method in spare.index[spare < -1e-9 * abs(limit)]:
            refused.setdefault(method, column)
    return refused


def _reason(quality, best, runner_up, ahead, count, dear):
    """Return the advice in a sentence."""
    words = f"{label(best)} is the only method that you can afford"
    margin, low, high = ahead
    if runner_up:
        words = (
            f"{label(best)} has the best {quality} of the {count} methods that you can "
            f"afford; {label(runner_up)} is next"
        )
        verdict = "it is ahead" if low > 0 else "the difference is not significant"
        words += (
            f", and on the other seeds {verdict} ({margin:.3g}, 95 %: {low:.3g} to "
            f"{high:.3g})"
            if low == low
            else ", and too few seeds are left to compare them"
        )
    if dear:
        words += f"; better but too expensive: {', '.join(dear)}"
    return f"{words}."


def _by_seed(table, columns):
    """Return each column's values [seeds, methods], of the methods that have them."""
    missing = {"method", "seed", *columns} - set(table)
    if missing:
        raise ValueError(f"`table` has no column {', '.join(sorted(missing))}")
    names = table.groupby("method", sort=False)[columns].mean().dropna().index
    values = {
        column: table.pivot(index="seed", columns="method", values=column)[names]
        for column in columns
    }
    if any(wide.isna().any(axis=None) for wide in values.values()):
        raise ValueError("every method needs every seed: seeds are compared in pairs")
    return values
