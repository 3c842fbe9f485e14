"""Evaluate predictions and their uncertainty in one call.

    print(study.evaluate(ensemble, test_loader, {"clothes": clothes.inputs}))

Intervals are over the inputs. They do not cover other seeds of training.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.special import entr

from uqlab import metrics, training, uncertainty
from uqlab.core.checks import as_labels, as_tensor, by_name
from uqlab.core.extras import extra
from uqlab.core.modules import trainable
from uqlab.core.reading import read_batches

if TYPE_CHECKING:
    from pandas import DataFrame

Sets = Mapping[str, Any] | None  # by name
NOTE = """
low and high: 95 % interval over the inputs; ece_floor ends at its 95 % quantile.
baseline: predict the distribution of the labels for every input. For ece it is the
floor, for aurc, auroc and fpr95 a random ranking (a distance of pixels is a better one:
baselines.aurocs). nll in nats; seconds an input."""
_ROWS = ("accuracy", "nll", "ece", "brier", "aurc")


class Estimate(NamedTuple):
    """A number, its 95 % interval and a simple baseline; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    baseline: float = math.nan


class Evaluation(dict[str, Estimate]):
    """Estimates by name, which print as a table: `result["nll"].low`.

    With several models `result["nll deep"]`, and `result["nll deep - lora"]` for the
    difference of two.
    """

    def frame(self) -> "DataFrame":
        """Return a DataFrame with the columns value, low, high, baseline."""
        with extra("notebooks"):
            import pandas
        return pandas.DataFrame.from_dict(self, "index", columns=Estimate._fields)

    def __repr__(self) -> str:
        wide = max(map(len, self), default=0)
        lines = [" " * wide + "".join(f"{name:>11}" for name in Estimate._fields)]
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
    batch_size: int = 1024,
    precision: str = "float32",
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
    batch_size, precision
        As in `predict`.
    repeats, seed
        Bootstrap resamples, and their seed.

    Returns
    -------
    Evaluation
        Rows accuracy, nll, ece, ece_floor (its interval ends at the 95 % quantile),
        brier, aurc (by the largest probability); auroc_mi_<name>, fpr95_mi_<name> and
        the same with the entropy of the mean prediction for each OOD set, without MI
        where members do not differ; the first rows with _<name> for shifted sets;
        trained parameters, and seconds an input.

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
    by_name("ood", {} if ood is None else ood, '{"a name": ...}')
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    how = {"batch_size": batch_size, "precision": precision, "reduce": _reduced}
    networks = all(isinstance(each, nn.Module) for each in models.values())
    read = partial(_from_networks if networks else _from_logits, models, how)
    resample = {"repeats": repeats, "seed": seed}
    known = read(test if networks else (models, test))
    table = Evaluation()
    _add_quality(table, "", known, resample)
    for name, data in (shifted or {}).items():
        _add_quality(table, f"_{name}", read(data), resample)
    for name, data in (ood or {}).items():
        _add_detection(table, name, known.of_model, read(data).of_model, resample)
    _add_cost(table, models, known)
    return table


class _Answers(NamedTuple):
    labels: Any  # [samples]
    of_model: dict  # name -> epistemic, total, log prediction; samples first
    seconds: dict  # name -> of all predictions


def _reduced(z):
    """Return what is kept of logits."""
    if z.shape[-1:] == (1,):
        z = torch.cat([0 * z, z], -1)
    total, _, epistemic = uncertainty.decompose(z)
    return epistemic, total, metrics.log_prediction(z)


def _from_networks(models, how, data):
    labels, parts, seconds = [], defaultdict(list), defaultdict(float)
    for inputs, some in read_batches(data, how["batch_size"]):
        labels.append(some)
        for name, model in models.items():
            started = time.perf_counter()
            parts[name].append(training.predict(model, inputs, **how))
            seconds[name] += time.perf_counter() - started
    joined = {
        name: [*map(torch.cat, zip(*each, strict=True))] for name, each in parts.items()
    }
    if any(some is None for some in labels):
        return _Answers(None, joined, seconds)
    every = [as_tensor("labels", some, floating=False).cpu() for some in labels]
    return _Answers(torch.cat(every), joined, seconds)


def _from_logits(models, how, data):
    """Return the same for (logits, labels), or for logits alone."""
    logits, labels = data if isinstance(data, tuple) else (data, None)
    by_model = logits if isinstance(logits, Mapping) else {"": logits}
    found = {}
    for name in models:
        z = as_tensor(f"logits {name}".strip(), by_model.get(name))
        found[name] = _reduced(z.detach().cpu())
    return _Answers(labels, found, {})


def _pairs(models):
    """Yield each model, and each but the first with the first, and an end of a row."""
    first, *others = models
    yield from ((name, None, f" {name}".rstrip()) for name in models)
    yield from ((name, first, f" {name} - {first}") for name in others)


def _add_quality(table, suffix, known, resample):
    if known.labels is None:
        raise ValueError(
            "labels are missing: give (inputs, labels), or a loader of both"
        )
    columns = {}
    baselines: dict[Any, Any] = {None: [math.nan] * len(_ROWS)}
    for name, (_, _, log_p) in known.of_model.items():
        labels = as_labels(known.labels, *log_p.shape)
        columns[name] = _columns(log_p, labels)
        floor, most = metrics.ece_floor(log_p[None], labels=labels)
        table[f"ece_floor{suffix} {name}".strip()] = Estimate(floor, 0.0, most)
        baselines[name] = _simple(columns[name], labels, floor)
    for name, than, label in _pairs(columns):
        arrays = [columns[key] for key in (name, than) if key is not None]
        ends = metrics.bootstrap(_lead, *arrays, **resample)
        simple = baselines[None if than else name]
        for row, *estimate in zip(_ROWS, _lead(*arrays), *ends, simple, strict=True):
            table[f"{row}{suffix}{label}"] = Estimate(*map(float, estimate))


def _simple(columns, labels, floor):
    """Return the numbers of _ROWS for the distribution of the labels."""
    shares = labels.bincount().double() / len(labels)
    errors = 1 - columns[:, 0].mean()
    return shares.max(), entr(shares).sum(), floor, 1 - shares @ shares, errors


def _lead(mine, theirs=None):
    return _measures(mine) - (0 if theirs is None else _measures(theirs))


def _columns(log_p, labels):
    """Return [samples, 4]: hit, loss, squared error and confidence."""
    top, predicted = log_p.max(1)
    of_label = log_p.gather(1, labels[:, None])[:, 0]
    errors = log_p.exp().square().sum(1) - 2 * of_label.exp() + 1
    return torch.stack([predicted == labels, -of_label, errors, top.exp()], 1)


def _measures(columns):
    """Return the numbers of _ROWS."""
    hit, loss, errors, top = columns.unbind(1)
    ece = metrics.bins_of(top, 15).bincount(top - hit).abs().sum() / len(hit)
    right = torch.stack([hit - 0.5, 0 * hit], 1)[None]  # class 0 where it hits
    aurc = metrics.aurc(right, torch.zeros_like(hit).long(), -top)
    means = [hit.mean(), loss.mean(), ece, errors.mean(), aurc]
    return torch.tensor(means, dtype=torch.float64)


def _add_detection(table, set_name, known, outside, resample):
    for place, score in enumerate(("mi", "entropy")):
        scores = {name: (known[name][place], outside[name][place]) for name in known}
        # one member has no epistemic part
        scores = {name: pair for name, pair in scores.items() if pair[0].any()}
        for measure, chance in {"auroc": 0.5, "fpr95": 0.95}.items() if scores else ():
            value = {None: 0.0}
            for name, pair in scores.items():
                value[name] = getattr(metrics.ood_detection(*pair), measure)
            for name, than, label in _pairs(scores):
                how = {"than": scores.get(than), "measure": measure, **resample}
                ends = metrics.auroc_interval(*scores[name], **how)
                baseline = chance if than is None else math.nan
                row = f"{measure}_{score}_{set_name}{label}"
                table[row] = Estimate(value[name] - value[than], *ends, baseline)


def _add_cost(table, models, known):
    for name, seconds in known.seconds.items():
        trained = sum(p.numel() for p in trainable(models[name]))
        table[f"parameters {name}".strip()] = Estimate(trained)
        table[f"seconds {name}".strip()] = Estimate(seconds / len(known.labels))
