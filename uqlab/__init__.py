"""uqlab: epistemic uncertainty of deep ensembles, taken apart.

Every ensemble is a callable `inputs -> logits [members, batch, classes]`; every measure
starts from that tensor. All information quantities are in nats.
"""

from importlib.metadata import version

__version__ = version("uqlab")
