"""Data sets by name: embedded ones, downloads checked by checksum, and your own files.

test = load("digits[0-6]"); ood = load("digits[7-9]"); far = load("cifar10", limit=1000).resize(8, channels=1)
"""

from uqlab.core import door
from uqlab.data.captions import pictures
from uqlab.data.datasets import Dataset, check, fetched, file, load, names
from uqlab.data.sounds import LOG_MEL, RATE

__all__ = [
    "LOG_MEL",
    "RATE",
    "Dataset",
    "check",
    "fetched",
    "file",
    "load",
    "names",
    "pictures",
]

door.room(__name__)
