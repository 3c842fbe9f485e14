"""One call for the answer: how good predictions and their uncertainty are.

    print(study.evaluate(ensemble, test_loader, {"clothes": clothes.inputs}))

Intervals are over the inputs. They do not know what other seeds of training would
change.
"""

import html
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from uqlab import metrics, training, uncertainty
from uqlab.core.checks import as_labels, as_scores, as_tensor, by_name, one_of
from uqlab.core.extras import extra
from uqlab.core.files import StrPath, writing
from uqlab.core.modules import trainable

if TYPE_CHECKING:
    from pandas import DataFrame

BINS = 15  # of the ECE
COVERAGE = 0.9  # of the intervals that a regression predicts


class Estimate(NamedTuple):
    """A number, its 95 % interval and a simple baseline; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    baseline: float = math.nan


class Evaluation(dict):
    """A table: an `Estimate` a row, of several models such a table for each.

    `result["nll"].low`; of several models `result["lora"]["nll"]`, and for what lies
    between them `result["deep - lora"]["nll"]`.

    Parameters
    ----------
    rows
        Estimates by name, or tables of them by the model's name.
    note
        What stands below the table.
    """

    def __init__(self, rows: Mapping[str, Any], note: str):
        super().__init__(rows)
        self.note = note

    @property
    def _blocks(self) -> dict[str, Any]:
        one = any(isinstance(row, Estimate) for row in self.values())
        return {"value": self} if one else dict(self)

    def frame(self) -> "DataFrame":
        """Return the table of pandas: columns value, low, high, baseline."""
        with extra("notebooks"):
            import pandas
        frames = {
            name: pandas.DataFrame.from_dict(rows, "index", columns=Estimate._fields)
            for name, rows in self._blocks.items()
        }
        return frames.get("value", pandas.concat(frames, axis=1))

    def _cells(self) -> list[list[str]]:
        blocks = self._blocks
        cells = [["", *blocks, "baseline"]]
        for row in dict.fromkeys(row for rows in blocks.values() for row in rows):
            found = [rows.get(row, Estimate(math.nan)) for rows in blocks.values()]
            stands = [_text(each.baseline, row) for each in found]
            cells.append([row, *(_cell(each, row) for each in found), max(stands)])
        return cells

    def __repr__(self) -> str:
        cells = self._cells()
        name, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for first, *rest in cells:
            right = [c.rjust(width) for c, width in zip(rest, others, strict=True)]
            lines.append("  ".join([first.ljust(name), *right]).rstrip())
        return "\n".join([*lines, "", self.note])

    def _repr_html_(self) -> str:
        rows = [
            "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            for row in self._cells()
        ]
        return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table><p>{self.note}</p>"


def _text(value: float, row: str) -> str:
    if math.isnan(value):
        return ""
    if row == "parameters":
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.001 or not value else f"{value:.1e}"


def _cell(estimate: Estimate, row: str) -> str:
    value, low, high = (_text(number, row) for number in estimate[:3])
    return f"{value} [{low}, {high}]" if low else value


def evaluate(
    model: Any,
    test: Any,
    ood: Mapping[str, Any] | None = None,
    *,
    shifted: Mapping[str, Any] | None = None,
    outputs: Literal["classes", "gaussian"] = "classes",
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
    one_of("outputs", outputs, tuple(KINDS))
    by_name("ood", ood or {}, '{"far": inputs}')
    by_name("shifted", shifted or {}, '{"noise 3": (inputs, labels)}')
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    if save is not None and (len(models) != 1 or outputs != "classes"):
        raise ValueError("save takes the logits of one classifier; evaluate it alone")
    kind = KINDS[outputs]
    reduce = partial(_kept, kind.reduce) if save is not None else kind.reduce
    how = {"batch_size": batch_size, "precision": precision}
    networks = any(isinstance(each, nn.Module) for each in models.values())
    read = (
        partial(_read, models, reduce, how)
        if networks
        else partial(_given, models, reduce)
    )
    resample = {"repeats": repeats, "seed": seed}

    known = read("test", test)
    tables = _quality(kind, known, resample)
    unknown = {name: read("ood", data) for name, data in (ood or {}).items()}
    for name, there in unknown.items():
        _detection(tables, kind.scores, name, known, there, resample)
    for name, data in (shifted or {}).items():
        for block, rows in _quality(kind, read("shifted", data), resample).items():
            few = rows.keys() - {"brier", "aurc"}
            tables[block] |= {f"{k}_{name}": v for k, v in rows.items() if k in few}
    for name, seconds in known.seconds.items():
        trained = sum(p.numel() for p in trainable(models[name]))
        tables[name]["parameters"] = Estimate(trained)
        tables[name]["seconds"] = Estimate(seconds / len(known.labels))
    if save is not None:
        _save(save, known, unknown)
    return Evaluation(tables.get("", tables), kind.note)


# Reading
class _Answers(NamedTuple):
    """What models said of a set, each of their tensors with the samples first."""

    labels: Any
    by_model: dict[str, tuple[Tensor, ...]]  # prediction, total, epistemic, logits
    seconds: dict[str, float]


def _read(models, reduce, how, part, data) -> _Answers:
    """Return what networks say of the inputs of a set, and its labels."""
    labels = []
    parts = {name: [] for name in models}
    seconds = dict.fromkeys(models, 0.0)
    for inputs, given in training.read_batches(data, how["batch_size"]):
        if part != "ood":
            labels.append(_labels(part, given))
        for name, model in models.items():
            started = time.perf_counter()
            parts[name].append(training.predict(model, inputs, reduce=reduce, **how))
            seconds[name] += time.perf_counter() - started
    joined = {
        name: tuple(map(torch.cat, zip(*parts[name], strict=True))) for name in models
    }
    return _Answers(torch.cat(labels) if labels else None, joined, seconds)


def _given(models, reduce, part, data) -> _Answers:
    """Return what logits say."""
    labels = None
    logits = models
    if part == "shifted":
        logits, labels = data
    elif part == "ood":
        logits = data
    else:
        labels = data
    logits = logits if isinstance(logits, Mapping) else {"": logits}
    if logits.keys() != models.keys():
        raise ValueError(
            f"{part} must hold the logits of {', '.join(models)} by these names, got "
            f"{', '.join(logits)}"
        )
    reduced = {name: reduce(as_tensor("logits", z)) for name, z in logits.items()}
    return _Answers(None if part == "ood" else _labels(part, labels), reduced, {})


def _labels(part: str, labels: Any) -> Tensor:
    if labels is None:
        raise ValueError(
            f"{part} must hold labels: give (inputs, labels), or a dataset or loader "
            "with batches of them"
        )
    return as_tensor("labels", labels, floating=False).detach().cpu()


def _kept(reduce: Callable, z: Tensor) -> tuple[Tensor, ...]:
    return *reduce(z), z.transpose(0, 1)


def _save(path, known, unknown):
    """Write what `decide.saved` reads."""
    sets = {"logits": known} | {f"ood_{name}": there for name, there in unknown.items()}
    arrays = {"labels": known.labels.numpy()}
    for name, answers in sets.items():
        [(*_, z)] = answers.by_model.values()
        arrays[name] = z.transpose(0, 1).numpy()
    with writing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


# Measuring
def _blocks(models) -> dict[str, tuple[str, str | None]]:
    """Return the columns of a table: each model, and each minus the first."""
    first, *others = models
    alone = {name: (name, None) for name in models}
    return alone | {f"{name} - {first}": (name, first) for name in others}


def _quality(kind, known, resample):
    """Return the measures of each model's answers, and paired differences."""
    columns = [kind.columns(a[0], known.labels) for a in known.by_model.values()]

    def values(rows):
        each = [kind.measures(*(c[rows] for c in model)) for model in columns]
        each = np.array(each, dtype=float)
        return np.concatenate([each, each[1:] - each[0]])

    rows = torch.arange(len(known.labels))
    ends = metrics.bootstrap(values, rows, **resample)
    found = np.stack([values(rows), *ends], -1).tolist()
    tables = {
        block: {k: Estimate(*n) for k, n in zip(kind.rows, numbers, strict=True)}
        for block, numbers in zip(_blocks(known.by_model), found, strict=True)
    }
    for block, (prediction, *_) in known.by_model.items():
        constant = kind.constant(prediction, known.labels)
        simple = kind.measures(*kind.columns(constant, known.labels))
        simple = dict(zip(kind.rows, map(float, simple), strict=True))
        table = tables[block]
        if "ece" in simple:
            floor = metrics.ece_floor(
                prediction[None], labels=known.labels, seed=resample["seed"]
            )
            table["ece_floor"] = Estimate(floor[0], 0.0, floor[1])
            simple |= {"ece": floor[0], "aurc": 1 - table["accuracy"].value}
        for row, baseline in simple.items():
            table[row] = table[row]._replace(baseline=baseline)
    return tables


def _detection(tables, scores, name, known, there, resample):
    """Add to the tables how the scores tell a set's inputs from those of the test."""
    for place, score in enumerate(scores, 1):
        pairs = {
            model: (answers[place], there.by_model[model][place])
            for model, answers in known.by_model.items()
            if answers[place].any()  # one member has no epistemic part
        }
        for block, (model, first) in _blocks(known.by_model).items():
            if model not in pairs or first not in (None, *pairs):
                continue
            than = None if first is None else pairs[first]
            for measure, chance in ("auroc", 0.5), ("fpr95", 0.95):
                values = [
                    getattr(metrics.ood_detection(*pair), measure)
                    for pair in (pairs[model], than)
                    if pair
                ]
                ends = metrics.auroc_interval(
                    *pairs[model], than=than, measure=measure, **resample
                )
                value = values[0] - sum(values[1:])
                baseline = math.nan if than else chance
                row = f"{measure}_{score}_{name}"
                tables[block][row] = Estimate(value, *ends, baseline)


# Classes
def _of_classes(z: Tensor) -> tuple[Tensor, ...]:
    if z.shape[-1] == 1:
        z = torch.cat([torch.zeros_like(z), z], -1)
    total, _, epistemic = uncertainty.decompose(z)
    return metrics.log_prediction(z), total, epistemic


def _class_columns(log_p: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return hit, loss, squared error and the logarithm of the confidence."""
    labels = as_labels(labels, *log_p.shape)
    top, predicted = log_p.max(1)
    of_label = log_p.gather(1, labels[:, None])[:, 0]
    errors = log_p.exp().square().sum(1) - 2 * of_label.exp() + 1
    return (predicted == labels).double(), -of_label, errors, top


def _class_measures(hit, loss, error, top):
    confidence = top.exp()
    at = metrics.bins_of(confidence, BINS)
    gaps = at.bincount(confidence - hit, minlength=BINS)
    right_or_wrong = torch.stack([hit, 1 - hit], 1).log().clamp(min=-1)[None]
    aurc = metrics.aurc(right_or_wrong, torch.zeros_like(at), -top)
    return hit.mean(), loss.mean(), error.mean(), aurc, gaps.abs().sum() / len(hit)


def _frequencies(log_p: Tensor, labels: Tensor) -> Tensor:
    counts = as_labels(labels, *log_p.shape).bincount(minlength=log_p.shape[1])
    return (counts / len(labels)).double().clamp(min=1e-300).log().expand_as(log_p)


# Regression
def _of_gaussians(z: Tensor) -> tuple[Tensor, ...]:
    if z.ndim != 3 or z.shape[-1] != 2:
        raise ValueError(
            "outputs must be [members, samples, 2], mean and logarithm of the "
            f"variance, got {list(z.shape)}"
        )
    total, _, epistemic = uncertainty.decompose_gaussian(z[..., 0], z[..., 1].exp())
    return z.transpose(0, 1).double(), total, epistemic


def _gaussian_columns(z: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return loss, CRPS and whether the central interval holds the label.

    z [samples, members, 2]. The CRPS of a mixture is E|X - y| - E|X - X'| / 2, and both
    are means of those of Gaussians.
    """
    y = as_scores(labels, len(z), "labels").double()[:, None]
    mean, log_variance = z.unbind(-1)
    variance = log_variance.exp()
    member = Normal(mean, variance.sqrt())
    loss = math.log(z.shape[1]) - member.log_prob(y).logsumexp(1)
    apart = _mean_distance(
        mean[:, :, None] - mean[:, None], variance[:, :, None] + variance[:, None]
    )
    crps = _mean_distance(mean - y, variance).mean(1) - apart.mean((1, 2)) / 2
    held = (member.cdf(y).mean(1) - 0.5).abs() <= COVERAGE / 2
    return loss, crps, held.double()


def _mean_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """Return E|X| of Gaussians."""
    spread = (-mean.square() / (2 * variance)).exp() * (2 * variance / math.pi).sqrt()
    return spread + mean * torch.erf(mean / (2 * variance).sqrt())


def _one_gaussian(z: Tensor, labels: Tensor) -> Tensor:
    y = as_scores(labels, len(z), "labels").double()
    return torch.stack([y.mean(), y.var(correction=0).log()]).expand(len(z), 1, 2)


class _Kind(NamedTuple):
    """What outputs are: how they are read, measured and compared."""

    reduce: Callable  # outputs -> prediction, total, epistemic, each [samples, ...]
    columns: Callable  # prediction, labels -> what `measures` takes, [samples] each
    measures: Callable
    rows: tuple[str, ...]  # the names of the measures
    constant: Callable  # prediction, labels -> one that does not look at the input
    scores: tuple[str, str]  # the names of total and epistemic
    note: str


KINDS = {
    "classes": _Kind(
        _of_classes,
        _class_columns,
        _class_measures,
        ("accuracy", "nll", "brier", "aurc", "ece"),
        _frequencies,
        ("entropy", "mi"),
        "In brackets the 95 % bootstrap interval over the inputs; NLL in nats. Baseline:"
        " the class frequencies as the prediction of every input; of ECE its floor, that"
        " of a calibrated prediction; of AURC, AUROC and FPR95 a random ranking.",
    ),
    "gaussian": _Kind(
        _of_gaussians,
        _gaussian_columns,
        lambda *columns: [column.mean() for column in columns],
        ("nll", "crps", "coverage"),
        _one_gaussian,
        ("total", "epistemic"),
        "In brackets the 95 % bootstrap interval over the inputs; NLL in nats, CRPS in"
        " the labels' unit; coverage of the central 90 % interval. Baseline: one Gaussian"
        " with the labels' mean and variance; of AUROC and FPR95 a random ranking.",
    ),
}
