"""The old place of `uqlab.study.published`, for one release."""

import warnings

from uqlab.study.published import *  # noqa: F403

warnings.warn(
    "uqlab.published is uqlab.study.published", DeprecationWarning, stacklevel=2
)
