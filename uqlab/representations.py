"""The old place of `uqlab.analysis.representations`, for one release."""

import warnings

from uqlab.analysis.representations import *  # noqa: F403

warnings.warn(
    "uqlab.representations is uqlab.analysis.representations",
    DeprecationWarning,
    stacklevel=2,
)
