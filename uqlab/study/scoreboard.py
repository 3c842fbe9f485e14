"""Which method, which score, at what cost: trained, measured, timed and compared alike.

`measure` gives a row a (method, seed). `differences` and `recommend` compare methods by
Student's t over seeds, which all methods share. Ranks and fronts have no such law:
`ranks` and `pareto` resample the seeds, and of two only three resamples differ.
"""

import math
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor, nn
from torch.special import entr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from uqlab import ensembles, metrics, training, uncertainty
from uqlab.core.checks import InputsLike, as_inputs, by_name, one_of, several
from uqlab.core.modules import evaluating, like_parameters
from uqlab.data import read
from uqlab.study import methods as recipes
from uqlab.study import scores as rating

Sets = Mapping[str, Any]  # Datasets, or what `data.read` takes
Row = dict[str, Any]  # column -> value
# All scores but "regrad", which takes hundreds of times as long.
CHEAP = tuple(name for name in rating.SCORES if name != "regrad")
LESS_IS_BETTER = (
    "nll", "ece", "adaptive_ece", "brier", "aurc", "fpr95", "soft_kl",
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
    own: Mapping[str, Row] | None = None,
    few: Mapping[str, int] | None = None,
    trained: dict[tuple[str, int], nn.Module] | None = None,
    repeats: int = 10,
    **settings: Any,
) -> pd.DataFrame:
    """Train every method with every seed on one backbone, and measure what came of it.

    Parameters
    ----------
    train, test
        A Dataset, of texts with the tokenizer's tensor as their inputs; or what
        `data.read` takes: (inputs, labels), a dataset or a loader of torch.
    ood, shifted
        Sets by name: OOD inputs, and known classes that look different.
    methods
        Names in METHODS; None for all that this backbone can carry, with a warning for
        those that it cannot.
    scores
        Names in SCORES. Those that compare members are left out (NaN) where there is
        one member.
    validation
        Labelled inputs that were not trained on, for the columns after temperature
        scaling.
    own
        Settings of some methods, by name; `settings` are for all. Both are those of
        `methods.train`.
    few
        Further scores, which are dear, and how many inputs of each set they see, always
        the first: {"regrad": 20}.
    trained
        Takes (method, seed) -> what was trained.
    repeats
        Rounds of the timing, in which the ensemble and the single network take turns.

    Returns
    -------
    DataFrame
        A row a (method, seed); tables of many runs may be joined. Columns: method,
        seed, members; those of `quality`, `detection` and `cost`; train_seconds.

    Raises
    ------
    ValueError
        For unknown names, and where no method could be trained.
    """
    scores = several("scores", scores)
    few = few or {}
    how = _settings(methods, settings, own or {})
    _check_names(how, [*scores, *few], ood)
    train = read(train)
    test = read(test)
    rows = []
    for row, ensemble in _trained(how, backbone, train, members, seeds, methods):
        rows.append(row)
        row |= _row(ensemble, train, test, ood, validation, shifted, scores, few)
        row |= cost(ensemble, backbone, test.inputs, repeats)
        if trained is not None:
            trained[row["method"], row["seed"]] = ensemble
    return _table(rows)


def _table(rows):
    if rows:
        return pd.DataFrame(rows)
    raise ValueError(
        "no method could be trained on this backbone: the warnings say why"
    )


def _settings(methods, settings, overrides):
    """Return the settings of each method."""
    names = recipes.METHODS if methods is None else methods
    names = several("methods", names, '["deep", "lora"]')
    return {name: settings | dict(overrides.get(name, {})) for name in names}


def _check_names(methods, scores, ood):
    by_name("ood", ood, '{"letters": letters}')
    for name in methods:
        one_of("method", name, recipes.METHODS)
    for name in scores:
        one_of("score", name, rating.SCORES)


def _trained(
    how, backbone, train, members, seeds, methods
) -> Iterator[tuple[Row, ensembles.Ensemble]]:
    """Yield the ensembles, with what is known of each; warn of methods left out."""
    seeds = several("seeds", seeds, "range(3)")
    for name, settings in how.items():
        for seed in seeds:
            started = time.perf_counter()
            try:
                ensemble = recipes.train(
                    name,
                    backbone,
                    train.inputs,
                    train.labels,
                    members=members,
                    seed=seed,
                    **settings,
                )
            except (ValueError, TypeError) as error:
                if methods is not None:
                    raise
                warnings.warn(f"{name} is left out: {error}", stacklevel=3)
                break
            row = {"method": name, "seed": seed, "members": ensemble.members}
            yield row | {"train_seconds": time.perf_counter() - started}, ensemble


def _row(ensemble, train, test, ood, validation, shifted, scores, few):
    """Return all columns of an ensemble but its costs."""
    row = {}
    for score, count in few.items():
        some = {where: read(unfamiliar)[:count] for where, unfamiliar in ood.items()}
        row |= detection(ensemble, train, test[:count], some, [score])
    row |= quality(ensemble, test, validation, shifted)
    return row | detection(ensemble, train, test, ood, scores)


def quality(
    model: nn.Module,
    test: Any,
    validation: Any = None,
    shifted: Sets | None = None,
) -> Row:
    """Return what `measure` says of the predictions of an ensemble or network.

    Returns
    -------
    dict
        accuracy, nll, ece, adaptive_ece, brier; accuracy_, nll_ and ece_<shifted>. With
        `validation`: temperature, nll_scaled, ece_scaled. With two members or more
        correlation, the rank correlation of the aleatoric and the epistemic part. Where
        a set has soft labels soft_kl, the mean KL from them to the prediction, and
        soft_correlation, that of their entropy and the aleatoric part.
    """
    test = read(test)
    z = training.predict(model, test.inputs)
    row = _basic(z, test)
    row["adaptive_ece"] = metrics.adaptive_ece(z, test.labels)
    row["brier"] = metrics.brier(z, test.labels)
    for name, other in (shifted or {}).items():
        other = read(other)
        there = _basic(training.predict(model, other.inputs), other)
        row |= {f"{column}_{name}": value for column, value in there.items()}
    if validation is not None:
        row |= _scaled(model, z, test, validation)
    if len(z) > 1:
        parts = uncertainty.decompose(z.double())
        row["correlation"] = _rank_correlation(parts.aleatoric, parts.epistemic)
    return row


def _scaled(model, z, test, validation):
    """Return the temperature, and what it makes of logits of the test set."""
    validation = read(validation)
    held_out = training.predict(model, validation.inputs)
    temperature = metrics.fit_temperature(held_out, validation.labels)
    scaled = metrics.log_prediction(z)[None] / temperature
    return {
        "temperature": temperature,
        "nll_scaled": metrics.nll(scaled, test.labels),
        "ece_scaled": metrics.ece(scaled, test.labels),
    }


def _basic(z, data):
    """Return what is said of every set, and the agreement with its soft labels."""
    row = {
        "accuracy": metrics.accuracy(z, data.labels),
        "nll": metrics.nll(z, data.labels),
        "ece": metrics.ece(z, data.labels),
    }
    if data.label_probs is not None:
        truth = data.label_probs.double()
        ambiguity = entr(truth).sum(1)
        cross_entropy = -(truth * metrics.log_prediction(z)).sum(1)
        aleatoric = uncertainty.decompose(z.double()).aleatoric
        row["soft_kl"] = (cross_entropy - ambiguity).mean().item()
        row["soft_correlation"] = _rank_correlation(ambiguity, aleatoric)
    return row


def _rank_correlation(a, b):
    """Return Spearman's; NaN where one of them is constant."""
    pair = pd.DataFrame({"a": a.numpy(), "b": b.numpy()})
    return pair.corr("spearman").loc["a", "b"]


def detection(
    model: nn.Module,
    train: Any,
    test: Any,
    ood: Sets,
    scores: Iterable[str] = CHEAP,
) -> Row:
    """Return how each score orders the test set, and how it tells OOD inputs from it.

    Returns
    -------
    dict
        aurc (by "msp"), aurc_<score>, auroc_<score>_<ood>, fpr95_<score>_<ood>. A score
        that cannot be fitted, such as a distance of features that do not vary, is left
        out with a warning.
    """
    _check_names((), scores, ood)
    train, test = read(train), read(test)
    z = training.predict(model, test.inputs)
    if len(z) == 1:
        scores = [name for name in scores if not rating.SCORES[name].compares]
    names = [name for name in scores if _fits(name, model, train)]
    known = rating.values(names, model, test.inputs, z=z)
    unsure = {"aurc": -metrics.log_prediction(z).amax(1)}
    unsure |= {f"aurc_{name}": score for name, score in known.items()}
    row = {key: metrics.aurc(z, test.labels, score) for key, score in unsure.items()}
    for where, unfamiliar in ood.items():
        there = rating.values(names, model, read(unfamiliar).inputs)
        row |= _separations(where, known, there)
    return row


def _separations(where, known, unfamiliar):
    """Return how well each score tells inputs of a set from those that are known."""
    row = {}
    for name, score in unfamiliar.items():
        separation = metrics.ood_detection(known[name], score)
        row[f"auroc_{name}_{where}"] = separation.auroc
        row[f"fpr95_{name}_{where}"] = separation.fpr95
    return row


def _fits(score, model, train):
    """Fit a score; return whether the model allows it, and warn if it does not."""
    try:
        rating.fit([score], model, train.inputs, train.labels)
        rating.values([score], model, as_inputs(train.inputs)[:2])
    except ValueError as error:
        warnings.warn(f"{score} is left out: {error}", stacklevel=3)
        return False
    return True


# Costs
def cost(
    ensemble: ensembles.Ensemble,
    single: nn.Module,
    inputs: InputsLike,
    repeats: int = 10,
) -> Row:
    """Return the costs of a trained ensemble, beside those of the single network.

    Returns
    -------
    dict
        trained parameters, those that are not the single network's, which whoever has
        it must be sent; stored parameters, without what follows from them, such as
        singular vectors; peak_memory (bytes: what is held always, and what 64 inputs
        take at once); latency_1 and latency_64, for as many inputs, relative to the
        single network.
    """
    some = as_inputs(inputs)
    stored = held_tensors(ensemble, derived=False)
    row = {
        "trained": sum(p.numel() for p in _new(ensemble, single)),
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
        with _Peak() as held:
            ensemble(x)
    always = sum(t.nbytes for t in held_tensors(ensemble))
    return row | {"peak_memory": held.most + always}


def _new(ensemble, single):
    """Return the parameters that the single network does not have."""
    had = list(single.parameters())
    stored = held_tensors(ensemble, derived=False)
    held = [t for t in stored if isinstance(t, nn.Parameter)]

    def known(p):  # perhaps once for every member
        each = [t for t in had if p.shape[1:] == t.shape]
        return any(map(p.equal, had)) or any(bool((p == t).all()) for t in each)

    return [p for p in held if not known(p)]


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the memory of all tensors in nested lists, tuples and dictionaries."""
    return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)]


class _Peak(TorchDispatchMode):
    """The most bytes that new tensors inside the block took at once."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self.live = {}  # bytes of each piece of memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = storage._cdata
            if key not in inputs | self.live.keys():
                self.live[key] = storage.nbytes()
                self.most = max(self.most, sum(self.live.values()))
                weakref.finalize(storage, self.live.pop, key)
        return result


def _seconds(model, x):
    started = time.perf_counter()
    model(x).sum().item()  # waits for a GPU
    return time.perf_counter() - started


def held_tensors(ensemble: ensembles.Ensemble, derived: bool = True) -> list[Tensor]:
    """Return the tensors of an ensemble, those that share memory once.

    Parameters
    ----------
    derived
        Whether to count what is held in memory, but not stored: buffers that members
        share and that follow from the network's weight, such as its singular vectors,
        and what stands in the network where members have tensors of their own.
    """
    left_out = set()
    if not derived:
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
    """Return 1 where more is better, -1 where less is."""
    less = any(f"{column}_".startswith(f"{name}_") for name in LESS_IS_BETTER)
    return -1 if less else 1


def with_temperature(table: pd.DataFrame, method: str = "single") -> pd.DataFrame:
    """Append the rows of a method whose logits are divided by its fitted temperature.

    A temperature leaves the answers of one network. It changes its NLL and ECE, which
    `quality` measures as nll_scaled and ece_scaled, and adds one parameter. What the
    table does not tell of the scaled network is missing.

    Returns
    -------
    DataFrame
        The table and, below it, rows of the method <method>_temperature.

    Raises
    ------
    ValueError
        Where the table has no such method, or was measured without `validation`.
    """
    one = table[table["method"] == method]
    if one.empty or "nll_scaled" not in one:
        raise ValueError(
            f"a temperature needs rows of {method!r} with nll_scaled and ece_scaled"
        )
    stays = one.filter(
        regex="^(backbone|dataset|seed|members|accuracy|.*_scaled|temperature"
        "|peak_memory|latency_1|latency_64)$"
    )
    scaled = stays.assign(
        method=f"{method}_temperature",
        nll=one["nll_scaled"],
        ece=one["ece_scaled"],
        trained=one["trained"] + 1,
        stored=one["stored"] + 1,
    )
    return pd.concat([table, scaled], ignore_index=True)


def ranks(
    table: pd.DataFrame,
    column: str,
    *,
    repeats: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> pd.DataFrame:
    """Order the methods from the best to the worst by their mean over seeds.

    Returns
    -------
    DataFrame
        mean with low and high, by Student's t; rank with rank_low and rank_high, of
        resampled seeds; ahead: the share of resamples in which the order holds between
        a method and the next one, ties counting one half (NaN for the last).

    Raises
    ------
    ValueError
        For fewer than two seeds: a ranking needs its band.
    """
    values = _by_seed(table, [column])[column]
    mean = values.mean().sort_values(ascending=sign(column) < 0, kind="stable")
    better = sign(column) * _resampled(values[mean.index], repeats, seed)
    tails = [(1 - level) / 2, (1 + level) / 2]
    first, last = np.quantile(stats.rankdata(-better, axis=1), tails, axis=0)
    gaps = better[:, :-1] - better[:, 1:]
    return _intervals(values[mean.index], level).assign(
        rank=stats.rankdata(-sign(column) * mean),
        rank_low=first,
        rank_high=last,
        ahead=[*np.heaviside(gaps, 0.5).mean(0), np.nan],
    )


def differences(
    table: pd.DataFrame, column: str, than: str = "single", *, level: float = 0.95
) -> pd.DataFrame:
    """Compare each method with another, paired over seeds.

    Returns
    -------
    DataFrame
        difference with low and high, by Student's t; p, of Student's t and by Holm's
        method, because all methods of the table are compared with that one.

    Raises
    ------
    ValueError
        For fewer than two seeds, and where the table lacks the other method.
    """
    values = _by_seed(table, [column])[column]
    if than not in values:
        raise ValueError(f"than must be one of {', '.join(values)}, got {than!r}")
    gaps = values.drop(columns=than).sub(values[than], axis=0)
    found = _intervals(gaps, level).rename(columns={"mean": "difference"})
    return found.assign(p=metrics.holm([_p_value(gaps[name]) for name in gaps]))


def _p_value(gaps):
    """Return Student's p-value of a mean of 0, also where all gaps are equal."""
    ratio = abs(gaps.mean()) / max(gaps.sem(), 1e-300)
    return float(2 * stats.t.sf(ratio, len(gaps) - 1))


def _intervals(values, level):
    """Return mean, low and high of each method's values [seeds, methods]."""
    _check_seeds(values)
    rows = {name: metrics.paired_t(values[name].to_numpy(), level) for name in values}
    return pd.DataFrame.from_dict(rows, "index", columns=["mean", "low", "high"])


def pareto(
    table: pd.DataFrame, quality: str, cost: str, *, repeats: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Find the methods that no other equals or beats in both means and beats in one.

    Returns
    -------
    DataFrame
        From the cheapest: quality, cost and share, the share of resamples in which the
        method is on the front (NaN for one seed).
    """
    values = _by_seed(table, [quality, cost])
    means = _means(values)
    signs = [sign(quality), sign(cost)]
    share = np.nan
    if len(values[quality]) > 1:
        drawn = [
            _resampled(values[column], repeats, seed) for column in (quality, cost)
        ]
        share = _on_front(np.stack(drawn, -1) * signs).mean(0)
    here = _on_front(means[[quality, cost]].to_numpy() * signs)
    front: Any = means.assign(share=share)[here]
    return front.sort_values(cost, ascending=sign(cost) < 0, kind="stable")


def _on_front(points):
    """Tell which of the points [..., methods, 2] none dominates; more is better."""
    others = points[..., None, :, :]
    own = points[..., :, None, :]
    dominated = (others >= own).all(-1) & (others > own).any(-1)
    return ~dominated.any(-1)


class Advice(NamedTuple):
    """What `recommend` says; where no method is left, names are empty, numbers NaN."""

    best: str
    runner_up: str  # empty where one method is left; the comparison is NaN then
    value: float  # of the best method
    margin: float  # by how much it is better than the runner-up; with its band
    low: float
    high: float
    refused: dict[str, str]  # method -> the first limit that it breaks
    reason: str  # a sentence


def recommend(
    table: pd.DataFrame,
    quality: str,
    limits: Mapping[str, int | float],
) -> Advice:
    """Name the method with the best mean quality among those that you can afford.

    Parameters
    ----------
    limits
        Column -> the most that its mean over seeds may be; the least, where more is
        better.
    """
    values = _by_seed(table, [quality, *limits])
    means: Any = _means(values)
    refused = _refused(means, limits)
    better = sign(quality) * means[quality]
    left = better.drop(list(refused)).sort_values(ascending=False, kind="stable")
    best, runner_up, *_ = [*left.index, "", ""]
    value = float(means[quality].get(best, math.nan))
    margin, low, high = [math.nan] * 3
    if runner_up:
        ahead = sign(quality) * (values[quality][best] - values[quality][runner_up])
        _check_seeds(ahead)
        margin, low, high = metrics.paired_t(ahead.to_numpy())
    advice = Advice(best, runner_up, value, margin, low, high, refused, "")
    reason = _reason(advice, quality, limits, left, better)
    return advice._replace(reason=reason)


def _refused(means, limits):
    """Return the first limit that a method breaks, by method."""
    refused = {}
    for column, limit in limits.items():
        # A limit that is a method's own mean admits it, however the mean was rounded.
        spare = sign(column) * (means[column] - limit)
        for method in means.index[spare < -1e-9 * abs(limit)]:
            refused.setdefault(method, column)
    return refused


def _reason(advice, quality, limits, left, better):
    """Say in a sentence what came of it."""
    if not advice.best:
        return f"no method keeps {' and '.join(limits)} within the limits."
    best = label(advice.best)
    words = f"{best} is the only method that you can afford"
    if advice.runner_up:
        sure = advice.low > 0
        verdict = "ahead of" if sure else "with no significant difference to"
        words = (
            f"{best} has the best {quality} of the {len(left)} methods that you can "
            f"afford, {verdict} {label(advice.runner_up)} (by {advice.margin:.3g}, "
            f"95 %: {advice.low:.3g} to {advice.high:.3g})"
        )
    dear = better.index[better > left.max()]
    if len(dear):
        each = [f"{label(name)} ({advice.refused[name]})" for name in dear]
        words += f"; better but too expensive: {', '.join(each)}"
    return f"{words}."


def label(method: str) -> str:
    """Return a method's label; of one that METHODS lacks its name.

    Examples
    --------
    >>> label("single_temperature")
    'single network + temperature'
    """
    one, scaled, _ = method.partition("_temperature")
    known = recipes.METHODS.get(one)
    if not known:
        return method
    return f"{known.label} + temperature" if scaled else known.label


def by_score(table: pd.DataFrame, ood: str, kind: str = "auroc") -> pd.DataFrame:
    """Return means over seeds, [methods, scores], against one OOD set.

    Parameters
    ----------
    kind
        "auroc" or "fpr95".
    """
    columns = {f"{kind}_{name}_{ood}": name for name in rating.SCORES}
    means: Any = table.groupby("method", sort=False).mean(numeric_only=True)
    return means.filter(items=list(columns)).rename(columns=columns)


# Seeds
def _by_seed(table, columns):
    """Return each column's values [seeds, methods], of the methods that have them."""
    for column in ("method", "seed", *columns):
        if column not in table:
            has = ", ".join(table.columns)
            raise ValueError(f"the table has no column {column!r}; it has {has}")
    means = table.groupby("method", sort=False)[columns].mean()
    names = means.dropna().index
    values = {}
    for column in columns:
        wide = table.pivot(index="seed", columns="method", values=column)
        values[column] = wide[names]
        if values[column].isna().any(axis=None):
            raise ValueError(
                "every method needs every seed: seeds are compared in pairs"
            )
    return values


def _check_seeds(values):
    if len(values) < 2:
        raise ValueError(
            "a comparison needs its band: measure two seeds or more, better five"
        )


def _means(values):
    return pd.DataFrame({column: wide.mean() for column, wide in values.items()})


def _resampled(values, repeats, seed):
    """Return means [repeats, methods] of resampled seeds, alike for all columns."""
    _check_seeds(values)
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(values), size=(repeats, len(values)))
    return values.to_numpy()[picks].mean(1)
