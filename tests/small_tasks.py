"""Logits and labels of small made-up tasks, for the tests of the metrics."""

import torch


def make_task(
    samples: int = 500, classes: int = 5, members: int = 4, seed: int = 0
) -> tuple:
    """Logits of a fair ensemble and labels that it often gets right."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    logits = 2 * torch.randn(
        members, samples, classes, generator=generator, dtype=torch.float64
    )
    logits[:, torch.arange(samples), labels] += 2
    return logits, labels


def from_probabilities(*rows: list[float]) -> torch.Tensor:
    """A single model [1, N, C] that predicts these probabilities; zeros become 1e-300."""
    return torch.tensor(rows, dtype=torch.float64).clamp(min=1e-300).log()[None]


def binary(confidences: list[float], hits: list[int]) -> tuple:
    """A model that predicts class 0 with these confidences (above 1/2), right where `hits` says so."""
    return from_probabilities(*([c, 1 - c] for c in confidences)), 1 - torch.tensor(
        hits
    )
