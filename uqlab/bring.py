"""The old place of `uqlab.study.bring`, for one release."""

import warnings

from uqlab.study.bring import *  # noqa: F403

warnings.warn("uqlab.bring is uqlab.study.bring", DeprecationWarning, stacklevel=2)
