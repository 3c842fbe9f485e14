"""Evaluate predictions and their uncertainty in one call.

    print(study.evaluate(ensemble, test_loader, {"clothes": clothes.inputs}))

Intervals are over the inputs. They do not cover other seeds of training.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.special import entr
from torch.utils._pytree import tree_map

from uqlab import metrics, training, uncertainty
from uqlab.core.checks import (
    as_inputs,
    as_labels,
    as_scores,
    as_tensor,
    by_name,
    one_of,
    read_batches,
)
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, writing
from uqlab.core.modules import rows_of, trainable

if TYPE_CHECKING:
    from pandas import DataFrame

Sets = Mapping[str, Any] | None  # by name
NOTE = """
low and high: 95 % interval over the inputs; ece_floor ends at its 95 % quantile.
baseline: predict the distribution of the labels for every input. For ece it is the
floor, for aurc, auroc and fpr95 a random ranking (a distance of pixels is a better one:
baselines.aurocs). nll in nats; coverage should be 0.9; seconds an input."""


class _Estimate(NamedTuple):
    """A number, its 95 % interval and a simple baseline; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    baseline: float = math.nan


class Evaluation(dict[str, _Estimate]):
    """Estimates by name, which print as a table: `result["nll"].low`.

    With several models `result["nll deep"]`, and `result["nll deep - lora"]` for the
    difference of two.
    """

    def frame(self) -> "DataFrame":
        """Return a DataFrame with the columns value, low, high, baseline."""
        with extra("notebooks"):
            import pandas
        return pandas.DataFrame.from_dict(self, "index", columns=_Estimate._fields)

    def __repr__(self) -> str:
        wide = max(map(len, self), default=0)
        lines = [" " * wide + "".join(f"{name:>11}" for name in _Estimate._fields)]
        for row, estimate in self.items():
            cells = "".join(map(_text, estimate))
            lines.append(f"{row:{wide}}{cells}".rstrip())
        return "\n".join([*lines, NOTE])


def _text(number):
    if math.isnan(number):
        return " " * 11
    return f"{number:11,}" if isinstance(number, int) else f"{number:11.4g}"


def evaluate(
    model: Any,
    test: Any,
    ood: Sets = None,
    *,
    shifted: Sets = None,
    outputs: str = "classes",
    batch_size: int = 1024,
    precision: str = "float32",
    save: StrPath | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Measure predictions, their calibration and their uncertainty, with intervals.

    Every set is read once, also for several models. The mean prediction of each input
    is kept, not the members' logits.

    Parameters
    ----------
    model
        An ensemble, any other torch module, or logits [members, samples, classes]; one
        output counts as two classes. Several by name are compared with the first.
    test
        (inputs, labels), a dataset or a loader, as `fit` takes them; with logits the
        labels.
    ood
        OOD inputs by name, as `predict` takes them; with logits their logits, for
        several models by the models' names.
    shifted
        Labelled sets by name with the same classes, such as corruptions: {"noise 3":
        (inputs, labels)}; with logits (logits, labels).
    outputs
        "classes", or "gaussian": [members, samples, 2], the mean and the logarithm of
        the variance of a number.
    batch_size, precision
        As in `predict`.
    save
        An .npz for the logits and labels of one classifier, which `uqlab report
        --logits` reads; all logits are held in memory then.
    repeats, seed
        Bootstrap resamples, and their seed.

    Returns
    -------
    Evaluation
        Rows accuracy, nll, ece, ece_floor (its interval ends at the 95 % quantile),
        brier, aurc (by the largest probability); auroc_mi_<name>, fpr95_mi_<name> and
        the same with the entropy of the mean prediction for each OOD set, without MI
        where members do not differ; the first rows with _<name> for shifted sets;
        trained parameters, and seconds an input. For a regression nll, crps, coverage
        (of the central 90 % interval of the members' mixture), and the epistemic and
        the total variance as scores.

    Raises
    ------
    TypeError, ValueError
        If labels are missing or do not fit, or `predict` or the metrics refuse a value.

    Examples
    --------
    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]])
    >>> result = evaluate(logits, [0, 1, 1])
    >>> round(result["accuracy"].value, 3), round(result["accuracy"].baseline, 3)
    (0.667, 0.667)
    """
    for name, sets in (("ood", ood), ("shifted", shifted)):
        by_name(name, {} if sets is None else sets, '{"a name": ...}')
    one_of("outputs", outputs, ("classes", "gaussian"))
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    several = len(models) > 1 or outputs != "classes"
    if save is not None and (several or Path(save).is_dir()):
        raise ValueError(
            f"save is a file for the logits of one classifier, got {save}; evaluate it "
            "alone, and name a file"
        )
    reduce = _gaussians if outputs == "gaussian" else partial(_classes, save)
    how = {"batch_size": batch_size, "precision": precision, "reduce": reduce}
    labelled, others = _answers(models, how, test, shifted or {}, ood or {})
    table = _table(labelled, others, {"repeats": repeats, "seed": seed})
    _add_cost(table, models, labelled[""])
    if save is not None:
        _save(save, labelled[""], others)
    return table


def _table(labelled, others, resample):
    table = Evaluation()
    for suffix, answers in labelled.items():
        _add_quality(table, suffix, answers, resample)
    for name, there in others.items():
        _add_detection(table, name, labelled[""].kept, there.kept, resample)
    return table


# Reading
class _Answers(NamedTuple):
    labels: Any  # [samples], or None
    kept: dict  # model -> scores, prediction, logits to be saved; samples first
    seconds: dict  # model -> of all predictions


def _answers(models, how, test, shifted, ood):
    """Return the answers for the labelled sets by the ends of rows, and for others."""
    networks = all(isinstance(each, nn.Module) for each in models.values())
    read = partial(_from_networks if networks else _from_logits, models, how)
    labelled = {"": read(test if networks else (models, test))}
    labelled |= {f"_{name}": read(data) for name, data in shifted.items()}
    return labelled, {name: read(data) for name, data in ood.items()}


def _from_networks(models, how, data):
    labels, parts, seconds = [], defaultdict(list), defaultdict(float)
    for inputs, some in read_batches(data, how["batch_size"]):
        labels.append(some)
        for name, model in models.items():
            if name not in parts:  # an ensemble's first call has more to do
                training.predict(model, rows_of(as_inputs(inputs), slice(2)), **how)
            started = time.perf_counter()
            parts[name].append(training.predict(model, inputs, **how))
            seconds[name] += time.perf_counter() - started
    kept = {name: tree_map(_joined, *each) for name, each in parts.items()}
    if any(some is None for some in labels):
        return _Answers(None, kept, seconds)
    every = [as_tensor("labels", some, floating=False).cpu() for some in labels]
    return _Answers(torch.cat(every), kept, seconds)


def _joined(*parts):
    return torch.cat(parts)


def _from_logits(models, how, data):
    """Return the same for (logits, labels), or for logits alone."""
    logits, labels = data if isinstance(data, tuple) else (data, None)
    by_model = logits if isinstance(logits, Mapping) else {"": logits}
    kept = {}
    for name in models:
        z = as_tensor(f"logits {name}".strip(), by_model.get(name))
        kept[name] = how["reduce"](z.detach().cpu())
    return _Answers(labels, kept, {})


def _save(path, known, others):
    sets = {"logits": known} | {f"ood_{name}": each for name, each in others.items()}
    arrays = {}
    for key, answers in sets.items():
        [(*_, z)] = answers.kept.values()
        arrays[key] = z.transpose(0, 1)
    with writing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, labels=known.labels, **arrays)


# Measuring
def _add(table, row, by_model, value, ends):
    """Add a row a model, and one for each that is compared with the first.

    `by_model` has what `value` takes, and a simple baseline; `ends` takes the same of
    one model, or of two for their difference.
    """
    first, *others = by_model
    for name, (given, simple) in by_model.items():
        numbers = map(float, (value(given), *ends(given), simple))
        table[f"{row} {name}".strip()] = _Estimate(*numbers)
    for name in others:
        lead = table[f"{row} {name}"].value - table[f"{row} {first}"].value
        low, high = ends(by_model[name][0], by_model[first][0])
        table[f"{row} {name} - {first}"] = _Estimate(lead, float(low), float(high))


def _add_quality(table, suffix, answers, resample):
    if answers.labels is None:
        raise ValueError(
            "labels are missing: give (inputs, labels), or a loader of both"
        )
    judged = {}
    for name, (_, prediction, *_) in answers.kept.items():
        judge = _of_classes if prediction.ndim == 2 else _of_gaussians
        judged[name], *floor = judge(prediction, answers.labels)
        if floor:
            table[f"ece_floor{suffix} {name}".strip()] = _Estimate(*floor)
    for row in next(iter(judged.values())):
        value = {"ece": _ece, "aurc": _aurc}.get(row, torch.mean)
        by_model = {name: rows[row] for name, rows in judged.items()}
        _add(table, row + suffix, by_model, value, partial(_ends, value, resample))


def _ends(value, resample, *given):
    def lead(mine, *theirs):
        return value(mine) - sum(map(value, theirs))

    return metrics.bootstrap(lead, *given, **resample)


def _add_detection(table, set_name, known, outside, resample):
    for score in next(iter(known.values()))[0]:
        pairs = {
            name: (known[name][0][score], outside[name][0][score]) for name in known
        }
        for measure, chance in {"auroc": 0.5, "fpr95": 0.95}.items():
            by_model = {
                name: (pair, chance)
                for name, pair in pairs.items()
                if pair[0].any()  # one member has no epistemic part
            }
            how = resample | {"measure": measure}
            ways = partial(_separation, measure), partial(_separation_ends, how)
            row = f"{measure}_{score}_{set_name}"
            if next(iter(pairs)) in by_model:
                _add(table, row, by_model, *ways)
                continue
            for name, each in by_model.items():  # the first has nothing to compare with
                _add(table, row, {name: each}, *ways)


def _separation(measure, pair):
    return getattr(metrics.ood_detection(*pair), measure)


def _separation_ends(how, pair, than=None):
    return metrics.auroc_interval(*pair, than=than, **how)


def _add_cost(table, models, known):
    for name, seconds in known.seconds.items():
        every = list(models[name].parameters())  # MC dropout freezes all
        trained = sum(p.numel() for p in trainable(models[name]) or every)
        table[f"parameters {name}".strip()] = _Estimate(trained)
        table[f"seconds {name}".strip()] = _Estimate(seconds / len(known.labels))


# Classes
def _classes(save, z):
    """Return what is kept of logits, which are only kept themselves to be saved."""
    if z.shape[-1:] == (1,):
        z = torch.cat([0 * z, z], -1)
    total, _, epistemic = uncertainty.decompose(z)
    logits = [z.transpose(0, 1)] if save else []
    return {"mi": epistemic, "entropy": total}, metrics.log_prediction(z), *logits


def _of_classes(log_p, labels):
    """Return rows, and the ends of the ECE's floor.

    A row has numbers of every sample, and what a simple baseline has.
    """
    labels = as_labels(labels, *log_p.shape)
    z = log_p[None]
    hit, losses, errors = (
        metrics.BY_SAMPLE[name](z, labels) for name in ("accuracy", "nll", "brier")
    )
    shares = labels.bincount().double() / len(labels)
    both = torch.stack([log_p.amax(1).exp(), hit], 1)
    floor, most = metrics.ece_floor(z, labels=labels)
    rows = {
        "accuracy": (hit, shares.max()),
        "nll": (losses, entr(shares).sum()),
        "ece": (both, floor),
        "brier": (errors, 1 - shares @ shares),
        "aurc": (both, 1 - hit.mean()),
    }
    return rows, floor, 0.0, most


def _ece(both):
    confidence, hit = both.unbind(1)
    sums = metrics.bins_of(confidence, 15).bincount(confidence - hit)
    return sums.abs().sum() / len(both)


def _aurc(both):
    confidence, hit = both.unbind(1)
    logits = torch.stack([hit - 0.5, 0 * hit], 1)[None]  # class 0 where it hits
    return metrics.aurc(logits, torch.zeros_like(hit).long(), -confidence)


# Regression
def _gaussians(z):
    if z.ndim != 3 or z.shape[2] != 2:
        raise ValueError(
            'outputs must be [members, samples, 2] for "gaussian", the mean and the '
            f"logarithm of the variance of a number, got {list(z.shape)}; a network of "
            'two outputs is trained by loss="gaussian_nll"'
        )
    mean, log_variance = z.unbind(2)
    total, _, epistemic = uncertainty.decompose_gaussian(mean, log_variance.exp())
    return {"epistemic": epistemic, "total": total}, z.transpose(0, 1).double()


def _of_gaussians(z, labels):
    """Return rows alone; the baseline is one Gaussian for all samples."""
    y = as_scores(labels, len(z), "labels").double()[:, None, None]
    one = torch.stack([y.mean(), y.var(correction=0).clamp(min=1e-300).log()])
    simple = _of_mixture(one.expand(1, 1, 2), y)
    rows = {row: (x, simple[row].mean()) for row, x in _of_mixture(z, y).items()}
    return (rows,)


def _of_mixture(z, y):
    """Return loss, CRPS and coverage of numbers by mixtures [samples, members, 2].

    The CRPS is E|X - y| - E|X - X'| / 2 (Grimit et al. 2006).
    """
    mean, log_variance = z[..., None].unbind(2)
    variance = log_variance.exp()
    member = Normal(mean, variance.sqrt())
    loss = math.log(z.shape[1]) - member.log_prob(y).logsumexp((1, 2))
    apart = _distance(mean - mean.mT, variance + variance.mT)
    within = (member.cdf(y).mean((1, 2)) - 0.5).abs() <= 0.45
    crps = _distance(mean - y, variance) - apart / 2
    return {"nll": loss, "crps": crps, "coverage": within.double()}


def _distance(mean, variance):
    """Return E|X| of mixtures [samples, ...] of Gaussians."""
    width = (2 * variance).sqrt()
    share = mean / width
    distances = width * (-share.square()).exp() / math.pi**0.5 + mean * share.erf()
    return distances.mean((1, 2))
