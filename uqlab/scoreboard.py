"""The old place of `uqlab.study.scoreboard`, for one release."""

import warnings

from uqlab.study.scoreboard import *  # noqa: F403

warnings.warn(
    "uqlab.scoreboard is uqlab.study.scoreboard", DeprecationWarning, stacklevel=2
)
