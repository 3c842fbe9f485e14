"""How good predictions and uncertainty scores are, and how sure these numbers are."""

from uqlab.metrics.calibration import (
    adaptive_ece,
    bins_of,
    calibration_gap,
    classwise_ece,
    ece,
    ece_floor,
    fit_temperature,
    quality,
)
from uqlab.metrics.detection import OOD, ood_detection
from uqlab.metrics.intervals import (
    Interval,
    auroc_interval,
    bootstrap,
    holm,
    interval,
    paired_t,
    proportion,
)
from uqlab.metrics.quality import (
    accuracy,
    brier,
    log_prediction,
    macro_f1,
    nll,
)
from uqlab.metrics.selective import (
    augrc,
    aurc,
    by_quantile,
    coverage_at_risk,
    risk_at_coverage,
    risk_coverage,
)

__all__ = [
    "OOD",
    "Interval",
    "accuracy",
    "adaptive_ece",
    "augrc",
    "aurc",
    "auroc_interval",
    "bins_of",
    "bootstrap",
    "brier",
    "by_quantile",
    "calibration_gap",
    "classwise_ece",
    "coverage_at_risk",
    "ece",
    "ece_floor",
    "fit_temperature",
    "holm",
    "interval",
    "log_prediction",
    "macro_f1",
    "nll",
    "ood_detection",
    "paired_t",
    "proportion",
    "quality",
    "risk_at_coverage",
    "risk_coverage",
]
