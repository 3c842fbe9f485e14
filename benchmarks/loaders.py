"""Does memory grow with the data? An ensemble is trained by a loader, and asked, on images that two workers make on the fly.

Target: with 20,000 images of 3 x 224 x 224 (12 GB) the peak is within 200 MB of that with 2,000, in `fit` over a `DataLoader`, in `fit` over a
`Dataset` in each member's own order, and in `predict(..., reduce=)`. Each is measured in a process of its own; the peak is that of the process
and of its largest worker. Exit status 1 if it is missed. glibc is told to give large blocks back (MALLOC_MMAP_THRESHOLD_): its heap has holes
where they lay between small ones, which were measured to cost up to 0.8 GB after 600 batches, at random.
Run: python benchmarks/loaders.py [IMAGES]
"""

import os
import resource
import subprocess
import sys

WAYS = "fit, loader", "fit, dataset", "predict"
FEW, MAX_MB = 2000, 200


def peak(way: str, images: int) -> None:
    """Run one way in this process, and print its peak in MB."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from uqlab import ensembles, training, uncertainty

    class Images(Dataset):
        def __len__(self) -> int:
            return images

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return torch.full((3, 224, 224), i / images), i % 10

    def small() -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(147, 10))

    ensemble = ensembles.deep(small, 2)
    loader = DataLoader(Images(), 32, num_workers=2)
    how = {"epochs": 1, "lr": 0.1, "progress": False}
    if way == "predict":
        kept = training.predict(ensemble, loader, reduce=uncertainty.decompose)
        assert len(kept.total) == images
    elif way == "fit, loader":
        training.fit(ensemble, loader, **how)
    else:
        training.fit(ensemble, Images(), batch_size=16, num_workers=2, **how)
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    print(sum(resource.getrusage(who).ru_maxrss for who in whose) / 1024)


def main() -> int:
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    missed = 0
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    for way in WAYS:
        few_mb, many_mb = (
            float(
                subprocess.check_output(
                    [sys.executable, __file__, way, str(images)], env=environment
                )
            )
            for images in (FEW, many)
        )
        missed |= many_mb - few_mb > MAX_MB
        print(
            f"{way:<13} {FEW:,} images {few_mb:6.0f} MB, {many:,} images {many_mb:6.0f} MB"
        )
    return missed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        peak(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(main())
