"""One call for the answer: how good predictions and their uncertainty are.

    print(study.evaluate(ensemble, test_loader, {"clothes": clothes.inputs}))

Intervals are over the inputs. They do not know what other seeds of training would
change.
"""

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Normal
from torch.special import entr

from uqlab import metrics, training, uncertainty
from uqlab.core.checks import as_labels, as_scores, as_tensor, by_name, one_of
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, writing
from uqlab.core.modules import trainable
from uqlab.core.reading import read_batches

if TYPE_CHECKING:
    from pandas import DataFrame

Sets = Mapping[str, Any] | None  # by name
NOTE = """
low and high: 95 % interval over the inputs; ece_floor ends at its 95 % quantile.
baseline: predict the distribution of the labels for every input. For ece it is the
floor, for aurc, auroc and fpr95 a random ranking (a distance of pixels is a better one:
baselines.aurocs). nll in nats; coverage should be 0.9; seconds an input."""
COVERAGE = 0.9  # of the central interval of a regression
CHANCE = {"auroc": 0.5, "fpr95": 0.95}
ROWS = ("nll", "crps", "coverage")


class Estimate(NamedTuple):
    """A number, its 95 % interval and a simple baseline; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    baseline: float = math.nan


class Evaluation(dict[str, Estimate]):
    """Estimates by name, which print as a table: `result["nll"].low`.

    Of several models `result["nll deep"]`, and `result["nll deep - lora"]` for what
    lies between two.
    """

    def frame(self) -> "DataFrame":
        """Return the table of pandas: columns value, low, high, baseline."""
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
    outputs: str = "classes",
    batch_size: int = 1024,
    precision: str = "float32",
    save: StrPath | None = None,
    repeats: int = 1000,
    seed: int = 0,
) -> Evaluation:
    """Measure predictions, their calibration and their uncertainty, with intervals.

    Every set is read once, also of several models. What is kept of an input is its mean
    prediction, not the members' logits.

    Parameters
    ----------
    model
        An ensemble, any other torch module, or logits [members, samples, classes]; one
        output counts as two classes. Several by name are compared with the first.
    test
        (inputs, labels), a dataset or a loader, as `fit` takes them; with logits the
        labels.
    ood
        OOD inputs by name, as `predict` takes them; with logits their logits, of
        several models by the models' names.
    shifted
        Labelled sets by name in which the classes are the same, such as corruptions:
        {"noise 3": (inputs, labels)}; with logits (logits, labels).
    outputs
        "classes", or "gaussian": [members, samples, 2], the mean and the logarithm of
        the variance of a number.
    batch_size, precision
        As in `predict`.
    save
        An .npz for the logits and labels of one model, which `uqlab report --logits`
        reads; then all logits are held in memory.
    repeats, seed
        Bootstrap resamples, and the random numbers.

    Returns
    -------
    Evaluation
        Rows accuracy, nll, ece, ece_floor (its interval ends at the 95 % quantile),
        brier, aurc (by the largest probability); auroc_mi_<name>, fpr95_mi_<name> and
        those of the entropy of the mean prediction for each OOD set, without MI where
        members do not differ; accuracy_<name>, nll_, ece_ and ece_floor_<name> of
        shifted sets; parameters that are trained, and seconds an input. Of a regression
        nll, crps, coverage (of the central 90 % interval of the members' mixture), and
        the epistemic and the total variance as scores.

    Raises
    ------
    TypeError, ValueError
        For sets without labels, labels that do not fit, logits beside modules, and
        what `predict` and the metrics refuse.

    Examples
    --------
    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]])
    >>> result = evaluate(logits, [0, 1, 1])
    >>> round(result["accuracy"].value, 3), round(result["accuracy"].baseline, 3)
    (0.667, 0.667)
    """
    models = _models(model, outputs, save, {"ood": ood, "shifted": shifted})
    reduce = partial(_reduced, outputs, save is not None)
    how = {"batch_size": batch_size, "precision": precision, "reduce": reduce}
    networks = any(isinstance(each, nn.Module) for each in models.values())
    read = partial(_read, models, networks, how)
    known = read(test if networks else (models, test))
    unknown = {k: read(z if networks else (z, None)) for k, z in (ood or {}).items()}
    if save is not None:
        _save(save, known, unknown)
    labelled = {"": known}
    for name, data in (shifted or {}).items():
        labelled[f"_{name}"] = read(data)
    table = _table(outputs, labelled, unknown, {"repeats": repeats, "seed": seed})
    _cost(table, models, known)
    return table


def _models(model, outputs, save, others):
    """Return the models by name, after checks of what is given with them."""
    one_of("outputs", outputs, tuple(OUTPUTS))
    for name, sets in others.items():
        by_name(name, {} if sets is None else sets, '{"a name": ...}')
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    if not models:
        raise ValueError("model must not be empty; give a model, or several by name")
    if save is not None and (len(models) > 1 or outputs != "classes"):
        raise ValueError("save takes the logits of one classifier; evaluate it alone")
    return models


def _table(outputs, labelled, unknown, resample):
    _, columns, scores = OUTPUTS[outputs]
    table = Evaluation()
    for suffix, there in labelled.items():
        _quality(table, suffix, columns, there, resample)
    for name, there in unknown.items():
        _detection(table, name, scores, labelled[""].of, there.of, resample)
    return table


# Reading
class _Answers(NamedTuple):
    labels: Any  # of each batch
    of: Any  # model -> epistemic, total, prediction, and logits where they are kept
    seconds: Any


def _read(models, networks, how, data):
    """Return what networks say of a set; of logits the set is (logits, labels)."""
    if not networks and not isinstance(data, tuple):
        raise TypeError("with logits a shifted set must be (logits, labels)")
    labels, parts, seconds = [], defaultdict(list), defaultdict(float)
    read = read_batches(data, how["batch_size"])
    for inputs, some in read if networks else [data]:
        labels.append(some)
        for name, model in models.items():
            if networks:
                started = time.perf_counter()
                answers = training.predict(model, inputs, **how)
                seconds[name] += time.perf_counter() - started
            else:
                z = inputs if isinstance(inputs, Mapping) else {"": inputs}
                z = as_tensor(f"logits {name}".strip(), z.get(name))
                answers = how["reduce"](z.detach().cpu())
            parts[name].append(answers)
    of = {
        name: [*map(torch.cat, zip(*each, strict=True))] for name, each in parts.items()
    }
    return _Answers(labels, of, seconds)


def _joined(labels):
    if any(some is None for some in labels):
        raise ValueError(
            "labels are missing: give (inputs, labels), or a loader of both"
        )
    every = [as_tensor("labels", some, floating=False).cpu() for some in labels]
    return torch.cat(every).detach()


def _save(path, known, unknown):
    sets = {"logits": known} | {f"ood_{name}": there for name, there in unknown.items()}
    arrays: Any = {"labels": _joined(known.labels)}
    for name, there in sets.items():
        [(*_, z)] = there.of.values()
        arrays[name] = z.transpose(0, 1)
    with writing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def _reduced(outputs, keep, z):
    """Return what is kept of logits."""
    return *OUTPUTS[outputs][0](z), *([z.transpose(0, 1)] if keep else [])


# Measuring
def _add(table, row, models, statistic):
    """Add a row of each model, and of each but the first minus the first."""
    first, *_ = models
    for name, (mine, baseline) in models.items():
        value, low, high = statistic(mine)
        table[f"{row} {name}".strip()] = Estimate(value, low, high, float(baseline))
        if name != first and not math.isnan(baseline):
            difference = statistic(mine, models[first][0])
            table[f"{row} {name} - {first}"] = Estimate(*difference)


def _quality(table, suffix, columns, known, resample):
    labels = _joined(known.labels)
    found = {name: columns(each[2], labels) for name, each in known.of.items()}
    for row in next(iter(found.values())):
        measure = partial(_interval, MEASURES.get(row, torch.mean), resample)
        if row == "ece_floor":
            measure = tuple  # its interval is known
        models = {name: values[row] for name, values in found.items()}
        _add(table, row + suffix, models, measure)


def _interval(measure, resample, mine, than=None):
    """Return a measure of samples, or how far it is above theirs, and its interval."""

    def value(rows):
        theirs = 0.0 if than is None else float(measure(than[rows]))
        return float(measure(mine[rows])) - theirs

    rows = torch.arange(len(mine))
    low, high = metrics.bootstrap(value, rows, **resample)
    return value(rows), float(low), float(high)


def _detection(table, name, scores, known, there, resample):
    for (place, score), measure in product(enumerate(scores), CHANCE):
        models = {
            model: ((each[place], there[model][place]), CHANCE[measure])
            for model, each in known.items()
            if each[place].any()  # one member has no epistemic part
        }
        if models:
            statistic = partial(_separation, measure, resample)
            _add(table, f"{measure}_{score}_{name}", models, statistic)


def _separation(measure, resample, mine, than=None):
    pairs = [mine, than] if than else [mine]
    value, *theirs = [getattr(metrics.ood_detection(*p), measure) for p in pairs]
    ends = metrics.auroc_interval(*mine, than=than, measure=measure, **resample)
    return value - sum(theirs), *ends


def _cost(table, models, known):
    for name, seconds in known.seconds.items():
        trained = sum(p.numel() for p in trainable(models[name]))
        each = seconds / len(_joined(known.labels))
        table[f"parameters {name}".strip()] = Estimate(trained)
        table[f"seconds {name}".strip()] = Estimate(each)


# Classes
def _classes(z):
    if z.shape[-1:] == (1,):
        z = torch.cat([0 * z, z], -1)
    total, _, epistemic = uncertainty.decompose(z)
    return epistemic, total, metrics.log_prediction(z)


def _class_columns(log_p, labels):
    """Return what each measure takes, samples first, and its baseline."""
    y = as_labels(labels, *log_p.shape)
    shares = y.bincount() / len(y)
    top, predicted = log_p.max(1)
    hit = (predicted == y).double()
    of_label = log_p.gather(1, y[:, None])[:, 0]
    errors = log_p.exp().square().sum(1) - 2 * of_label.exp() + 1
    both = torch.stack([hit, top], 1)
    floor, most = metrics.ece_floor(log_p[None], labels=y)
    return {
        "accuracy": (hit, shares.max()),
        "nll": (-of_label, entr(shares).sum()),
        "ece": (both, floor),
        "ece_floor": ((floor, 0.0, most), math.nan),
        "brier": (errors, 1 - shares.square().sum()),
        "aurc": (both, 1 - hit.mean()),
    }


def _aurc(columns):
    hit, top = columns.unbind(1)
    right = torch.stack([hit - 0.5, 0 * hit], 1)[None]  # class 0 where it hits
    return metrics.aurc(right, torch.zeros_like(hit).long(), -top)


def _ece(columns):
    hit, top = columns.unbind(1)
    at = metrics.bins_of(top.exp(), 15)
    return at.bincount(top.exp() - hit).abs().sum() / len(hit)


# Regression
def _gaussians(z):
    if z.shape[2:] != (2,):
        raise ValueError(
            "outputs must be [members, samples, 2], the mean and the logarithm of the "
            f"variance, got {list(z.shape)}"
        )
    total, _, epistemic = uncertainty.decompose_gaussian(z[..., 0], z[..., 1].exp())
    return epistemic, total, z.transpose(0, 1).double()


def _gaussian_columns(z, labels):
    y = as_scores(labels, len(z), "labels").double()
    one = torch.stack([y.mean(), y.var(correction=0).clamp(min=1e-300).log()]).expand(
        len(z), 1, 2
    )
    pairs = zip(ROWS, _of_mixture(z, y), _of_mixture(one, y), strict=True)
    return {row: (mine, simple.mean()) for row, mine, simple in pairs}


def _of_mixture(z, y):
    """Return loss, CRPS and coverage of each label by a mixture [samples, members, 2].

    The CRPS is E|X - y| - E|X - X'| / 2, and both are means of those of Gaussians.
    """
    mean, log_variance = z.unbind(-1)
    variance = log_variance.exp()
    member = Normal(mean, variance.sqrt())
    y = y[:, None]
    apart = _mean_distance(
        mean[:, :, None] - mean[:, None], variance[:, :, None] + variance[:, None]
    )
    crps = _mean_distance(mean - y, variance).mean(1) - apart.mean((1, 2)) / 2
    loss = math.log(z.shape[1]) - member.log_prob(y).logsumexp(1)
    within = (member.cdf(y).mean(1) - 0.5).abs() <= COVERAGE / 2
    return loss, crps, within.double()


def _mean_distance(mean, variance):
    """Return E|X| of Gaussians."""
    width = (2 * variance).sqrt()
    spread = (-(mean / width).square()).exp() * width / math.pi**0.5
    return spread + mean * torch.erf(mean / width)


MEASURES = {"aurc": _aurc, "ece": _ece}  # others are means
OUTPUTS = {  # how they are read and measured, and their scores
    "classes": (_classes, _class_columns, ("mi", "entropy")),
    "gaussian": (_gaussians, _gaussian_columns, ("epistemic", "total")),
}
