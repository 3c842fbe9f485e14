"""Moved: `uqlab.diversity` is `uqlab.analysis.diversity`; this name goes with version 0.3."""

import warnings

from uqlab.analysis.diversity import *  # noqa: F403

warnings.warn(
    "uqlab.diversity is uqlab.analysis.diversity", DeprecationWarning, stacklevel=2
)
