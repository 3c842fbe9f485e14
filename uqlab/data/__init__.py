"""Data sets by name: embedded ones, downloads checked by checksum, and your own files.

test = load("digits[0-6]"); ood = load("digits[7-9]"); far = load("cifar10", limit=1000).resize(8, channels=1)
"""

from uqlab.data.datasets import Dataset, file, load, names

__all__ = ["Dataset", "file", "load", "names"]
