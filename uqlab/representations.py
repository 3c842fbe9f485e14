"""Moved: `uqlab.representations` is `uqlab.analysis.representations`; this name goes with version 0.3."""

import warnings

from uqlab.analysis.representations import *  # noqa: F403

warnings.warn(
    "uqlab.representations is uqlab.analysis.representations",
    DeprecationWarning,
    stacklevel=2,
)
