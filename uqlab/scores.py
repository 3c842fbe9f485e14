"""The old place of `uqlab.study.scores`, for one release."""

import warnings

from uqlab.study.scores import *  # noqa: F403

warnings.warn("uqlab.scores is uqlab.study.scores", DeprecationWarning, stacklevel=2)
