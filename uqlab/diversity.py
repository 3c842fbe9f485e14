"""The old place of `uqlab.analysis.diversity`, for one release."""

import warnings

from uqlab.analysis.diversity import *  # noqa: F403

warnings.warn(
    "uqlab.diversity is uqlab.analysis.diversity", DeprecationWarning, stacklevel=2
)
