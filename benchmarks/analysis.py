"""What comparing members costs: spectra in batches, CKA without Gram matrices, a large ensemble layer by layer.

Singular vectors of many same-shaped matrices, together against a Python loop of torch.linalg.svd: small ones, and 768 x
768, of which only the 16 leading vectors are computed. Linear CKA of 20,000 samples: from both Gram matrices, from the
features, and as a stream of batches. Then `ensemble_spectra` of a LoRA-Ensemble of 16 members on 12 layers of width
768, all four projections. Each way of the latter two runs in a process of its own, whose memory is measured.

Targets: batched at most 1.05x the loop's time for small matrices and 0.7x for large; minibatch CKA faster than the Gram
matrices, with 20x less memory, within 0.01; the analysis under 2 GB beyond the weights. Exit status 1 if one is missed.

    python benchmarks/analysis.py [LAYERS] [--device cuda]     12 by default, about two minutes on two cores
"""

import functools
import multiprocessing
import sys
import time

import torch
from _timing import DEVICE, interleaved, report
from transformers import ViTConfig, ViTForImageClassification

from uqlab import ensembles
from uqlab.analysis import representations, spectra

MEMBERS, WIDTH, K = 16, 768, 16
LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
SAMPLES, FEATURES, BATCH = 20_000, 64, 500


def loop(before, after):
    """|cos| of the leading left singular vectors, one matrix after the other."""
    found = []
    for w0, w1 in zip(before, after, strict=True):
        u0, u1 = (torch.linalg.svd(w, full_matrices=False).U[:, :K] for w in (w0, w1))
        found.append((u1.mT @ u0).abs())
    return torch.stack(found)


def batched(missed):
    for count, width, rounds, target in ((768, 32, 7, 1.05), (4, WIDTH, 3, 0.7)):
        before, change = torch.randn(2, count, width, width).to(DEVICE) / width**0.5
        after = before + 0.1 * change
        print(f"\n{count} pairs of {width} x {width} matrices, {K} leading vectors")
        together = spectra.singular_vector_similarity(before, after, K)
        assert torch.allclose(together, loop(before, after), atol=1e-2)
        candidates = {
            "loop": lambda b=before, a=after: loop(b, a),
            "batched": lambda b=before, a=after: spectra.singular_vector_similarity(
                b, a, K
            ),
        }
        ratio = report(interleaved(candidates, rounds), "loop")["batched"]
        if ratio > target:
            missed.append(
                f"batched, {width} x {width}: {ratio:.2f} > {target} of the loop"
            )


def features(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x.to(device), (x + torch.randn(SAMPLES, FEATURES, generator=generator)).to(
        device
    )


def gram_cka(x, y):
    """Unbiased linear CKA as written: tr(K L), sums of K and L, K L, all without diagonals."""
    n, grams = len(x), []
    for z in (x.double(), y.double()):
        grams.append((z @ z.mT).fill_diagonal_(0))

    def hsic(k, l):  # noqa: E741
        rows, columns = k.sum(1), l.sum(1)
        parts = (
            torch.dot(k.view(-1), l.view(-1)),
            rows.sum() * columns.sum() / ((n - 1) * (n - 2)),
            rows @ columns,
        )
        return (parts[0] + parts[1] - 2 / (n - 2) * parts[2]) / (n * (n - 3))

    k, l = grams  # noqa: E741
    return (hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()).item()


def minibatches(x, y):
    return representations.minibatch_cka(
        zip(x.split(BATCH), y.split(BATCH), strict=True)
    )


CKA = {
    "Gram matrices": gram_cka,
    "features": representations.cka,
    "minibatches": minibatches,
}


def analysis(device):
    """The ensemble, which is the weights, and its spectra."""
    config = ViTConfig(num_hidden_layers=LAYERS, patch_size=32)  # ViT-B/32
    ensemble = ensembles.lora(ViTForImageClassification(config), MEMBERS, 8).to(device)
    for part in ensemble.modules():
        if isinstance(part, ensembles.LowRank):
            torch.nn.init.normal_(part.up, std=0.02)
    return lambda: len(spectra.ensemble_spectra(ensemble, k=K))


def memory(field, device):
    """This process's VmRSS, in bytes, or VmHWM, the most it has been; of a GPU, what its tensors take and took."""
    if device.startswith("cuda"):
        return (
            torch.cuda.memory_allocated()
            if field == "VmRSS"
            else torch.cuda.max_memory_allocated()
        )
    with open("/proc/self/status") as file:
        return next(
            1024 * int(line.split()[1]) for line in file if line.startswith(field)
        )


def measured(way, answer, device):
    """Run `way` and send its result, seconds and the bytes by which it raised the memory that is taken."""
    run = (
        analysis(device)
        if way == "analysis"
        else functools.partial(CKA[way], *features(device))
    )
    before = memory("VmRSS", device)
    start = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - start
    answer.send((found, seconds, memory("VmHWM", device) - before))


def alone(way):
    """`measured` in a process of its own, printed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=measured, args=(way, there, DEVICE))
    process.start()
    there.close()
    found, seconds, size = here.recv()
    process.join()
    print(f"{way:<14} {seconds:8.2f} s  {size / 1e6:9.0f} MB  {found:.4g}")
    return found, seconds, size


def main():
    missed = []
    batched(missed)
    print(
        f"\nunbiased linear CKA, {SAMPLES} samples, {FEATURES} features, batches of {BATCH}"
    )
    gram, ours, stream = map(alone, CKA)
    if abs(gram[0] - ours[0]) > 1e-6 or abs(gram[0] - stream[0]) > 0.01:
        missed.append(
            f"CKA {gram[0]:.4f} of the Gram matrices, {ours[0]:.4f} of the features, {stream[0]:.4f} streamed"
        )
    if stream[1] > gram[1] or 20 * stream[2] > gram[2]:
        missed.append(f"minibatch CKA: {stream[1]:.2f} s and {stream[2] / 1e6:.0f} MB")
    print(
        f"\nLoRA-Ensemble of {MEMBERS} members, {LAYERS} layers of width {WIDTH}: spectra of 4 x {LAYERS} x {MEMBERS}"
    )
    _, _, size = alone("analysis")
    if size > 2e9:
        missed.append(f"the analysis took {size / 1e9:.2f} GB beyond the weights")
    if missed:
        sys.exit("targets missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
