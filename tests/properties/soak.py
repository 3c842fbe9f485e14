"""The net at length, `make soak`: bad calls, damaged files, kills, pages; counts, and a fault ends with code 1.

python tests/properties/soak.py calls=20000 files=2000 kills=200 real=20 readonly=20 disk=50 twice=20 clock=20 pages=17
"""

import collections
import inspect
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import net
import numpy as np
import recipes
import torch
from small_networks import images, vit
from soak_pages import pages  # noqa: F401  by its name, as the others

from uqlab import data, ensembles, training
from uqlab.core.files import sha256, write
from uqlab.runs import execution, sweeps
from uqlab.runs.manifest import Manifest, finished

Counts = collections.Counter


def calls(number: int, rng: random.Random) -> Iterator[str]:
    """Calls of all public names with one or two arguments that are bad or nearly good: "worked" or "refused"."""
    public = {
        n: t
        for n, t in recipes.public().items()
        if n not in recipes.NO_CALLS and inspect.signature(t).parameters
    }
    proper = {name: recipes.valid(name, thing) for name, thing in public.items()}
    for _ in range(number):
        name = rng.choice(sorted(public))
        chosen = rng.choices(
            list(inspect.signature(public[name]).parameters), k=rng.choice((1, 1, 2))
        )
        given = {
            p: rng.choice([*net.BAD, *3 * net.spoiled(proper[name].get(p))])
            for p in chosen
        }
        outcome: list[str] = []
        found = net.faults(name, public[name], given, outcome)
        yield from (f"FAULT {name}: {fault} {str(given)[:200]}" for fault in found)
        yield outcome[0]


# Files ----------------------------------------------------------------------------------------------------------------
def kinds(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Files that uqlab writes or reads: a path, and what reads it; what is read must be what it was, or an error."""
    x, y = images(6)
    ensemble, saved = ensembles.lora(vit(), 2, 2), folder / "ensemble"
    training.fit(ensemble, x, y, epochs=1, lr=0.1, progress=False)
    ensemble.save_pretrained(saved)

    def train() -> Any:
        member = ensembles.lora(vit(), 2, 2)
        training.fit(
            member,
            x,
            y,
            epochs=2,
            lr=0.1,
            progress=False,
            resume=folder / "training",
        )
        return member.state_dict()

    train()
    np.savez(folder / "own.npz", x=(255 * x.numpy()).astype(np.uint8), y=y.numpy())
    run = folder / "run"
    (run / "inner").mkdir(parents=True)
    write(run / "results.json", json.dumps({"numbers": {"a": 1}}))
    files = {"results.json": sha256(run / "results.json")}
    Manifest(files=files, parameters={"seed": 0}, seconds=1.5).save(run)

    def manifest_read() -> Any:
        if not finished(run):
            raise ValueError("the run is damaged and is computed anew")
        return json.loads((run / "manifest.json").read_text())

    return {
        "ensemble": (saved / "ensemble.safetensors", lambda: ensembles.from_pretrained(saved, vit())(x)),
        "description": (saved / "uqlab.json", lambda: ensembles.from_pretrained(saved, vit())(x)),
        "training": (folder / "training" / "training.pt", train),
        "own images": (folder / "own.npz", lambda: data.load(folder / "own.npz").inputs),
        "manifest": (run / "manifest.json", manifest_read),
        "results": (run / "results.json", manifest_read),
    }  # fmt: skip


def damaged(whole: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(whole))
    some = bytearray(whole)
    match rng.randrange(5):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + bytes(64) + whole[at + 64 :]
        case 2:
            return whole[:at] + rng.randbytes(9) + whole[at:]
        case _:
            for _ in range(rng.choice((1, 1, 8))):
                some[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            return bytes(some)


def files(number: int, rng: random.Random) -> Iterator[str]:
    """Files with bytes flipped, cut, zeroed or inserted: refused, or read as what they were."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        all_kinds = kinds(Path(folder))
        first = {kind: net.content(read()) for kind, (_, read) in all_kinds.items()}
        whole = {kind: path.read_bytes() for kind, (path, _) in all_kinds.items()}
        for i in range(number):
            kind = list(all_kinds)[i % len(all_kinds)]
            path, read = all_kinds[kind]
            path.write_bytes(damaged(whole[kind], rng))
            try:
                same = net.content(read()) == first[kind]
                yield (
                    f"{kind} read as it was"
                    if same
                    else f"FAULT {kind}: read as something else"
                )
            except Exception as error:
                found = (
                    [] if "computed anew" in str(error) else net.bug(error, read, {})
                )
                yield f"FAULT {kind}: {found[0]}" if found else f"{kind} refused"
            path.write_bytes(whole[kind])


# Sweeps ---------------------------------------------------------------------------------------------------------------
def fake_papermill(job: execution.Job, output: Path, *_: Any) -> None:
    """Stands in for papermill: writes what a page leaves, slowly enough to be killed."""
    write(output, job.notebook.read_text())
    time.sleep(0.01)
    numbers = {"seed": job.parameters["seed"]}
    write(output.parent / "results.json", json.dumps({"numbers": numbers}))


SWEEP = Path("figures/quick/0.sweep")


@contextmanager
def page(seeds: int = 12) -> Iterator[Callable[[], sweeps.Report]]:
    """A folder with a page of one parameter, and the sweep over it."""
    cell = nbformat.v4.new_code_cell(
        "seed = 0  # a seed", metadata={"tags": ["parameters"]}
    )
    before = os.getcwd(), execution._papermill, execution.packages
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), "0.ipynb")
        execution._papermill, execution.packages = fake_papermill, dict
        try:
            yield lambda: sweeps.sweep(
                "0.ipynb", {"seed": range(seeds)}, progress=False, keep_stale=True
            )
        finally:
            os.chdir(before[0])
            execution._papermill, execution.packages = before[1:]


def done(sweep: Path = SWEEP) -> set[Path]:
    runs = sweep.glob("[!.]*")
    return {
        path.absolute() for path in runs if path.suffix != ".failed" and finished(path)
    }


def child(work: Callable[[], Any]) -> int:
    """Another process that does the work."""
    if process := os.fork():
        return process
    with suppress(BaseException), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        work()
    os._exit(0)


def seed(run: Path) -> int:
    return json.loads((run / "manifest.json").read_text())["parameters"]["seed"]


def whole(run: Callable[[], sweeps.Report], seeds: int) -> Iterator[str]:
    """After all a sweep finishes, and nothing of the dead is left."""
    report = run()
    left = [
        path.name
        for path in report.folder.iterdir()
        if path.name[0] == "." or path.suffix == ".failed"
    ]
    if len(done(report.folder)) != seeds or left:
        yield f"FAULT sweep: {len(done(report.folder))} of {seeds} runs at the end, left {left[:3]}"
    bad = [
        p
        for p in done(report.folder)
        if json.loads((p / "results.json").read_text())["numbers"].get("seed", seed(p))
        != seed(p)
    ]
    if bad:
        yield f"FAULT sweep: {len(bad)} runs hold another's numbers"


def kills(number: int, rng: random.Random) -> Iterator[str]:
    """Kills of sweeps at any moment: no finished run is lost, none counts half, nothing stays behind."""
    while number > 0:
        with page() as run:
            for _ in range(min(number, rng.randrange(1, 9))):
                before, number = done(), number - 1
                process = child(run)
                time.sleep(rng.uniform(0, 0.4))
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                yield (
                    "FAULT kill: a finished run is lost"
                    if before - done()
                    else "kill survived"
                )
            yield from whole(run, 12)


def kernels_of(folder: str) -> list[str]:
    """The processes that were started with a file of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found.append(path.read_bytes().decode())
    return [command for command in found if folder in command]


def real(number: int, rng: random.Random) -> Iterator[str]:
    """Kills of sweeps over page 01 with kernels, at `tiny`: the same, and no kernel lives on."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = Path(folder, "tiny", "01_toy_regression_collapse.sweep")

        def run() -> sweeps.Report:
            return sweeps.sweep(
                "01",
                {"seed": range(4)},
                profile="tiny",
                root=folder,
                progress=False,
                keep_stale=True,
            )

        for _ in range(number):
            before, process = done(sweep), child(run)
            time.sleep(rng.uniform(0, 15))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            yield (
                "FAULT real page: a finished run is lost"
                if before - done(sweep)
                else "kill survived"
            )
            until = time.monotonic() + 30
            while (left := kernels_of(folder)) and time.monotonic() < until:
                time.sleep(0.2)
            if left:
                yield f"FAULT real page: {len(left)} kernels live on"
        yield from whole(run, 4)


def readonly(number: int, rng: random.Random) -> Iterator[str]:
    """Another user sweeps where nothing may be written: told in words, and what is finished is read."""
    for _ in range(number):
        with page() as run:
            run() if rng.random() < 0.5 else SWEEP.mkdir(parents=True)
            every = [Path(), *Path().rglob("*")]
            shut = rng.choice([Path(), Path("figures"), SWEEP.parent, SWEEP])
            for path in every:
                os.chown(path, 65534, 65534)
            for path in (path for path in (shut, *shut.rglob("*")) if path.is_dir()):
                path.chmod(0o555)
            before, (ours, theirs) = done(), os.pipe()

            def other(write: int = theirs, run: Callable = run) -> None:
                os.setgid(65534)
                os.setuid(65534)
                try:
                    said = " ".join({outcome.reason for outcome in run().outcomes})
                except (OSError, ValueError) as error:
                    said = f"{error}"
                except BaseException as error:
                    said = f"FAULT read-only: {type(error).__name__}: {error}"
                os.write(write, said.encode())

            os.waitpid(child(other), 0)
            os.close(theirs)
            with open(ours) as pipe:
                said = pipe.read()
            fit = (
                said
                if said.startswith("FAULT")
                else "read-only folder told"
                if "ermission" in said
                else ""
            )
            yield fit or (
                "all was finished"
                if len(before) == 12
                else f"FAULT read-only: {said[:200]!r}"
            )
            for path in (path for path in every if path.is_dir()):
                path.chmod(0o755)
            if before - done():
                yield "FAULT read-only: a finished run is lost"
            yield from whole(run, 12)


def twice(number: int, rng: random.Random) -> Iterator[str]:
    """Two sweeps of one grid at once."""
    for _ in range(number):
        with page() as run:
            both = [child(run), child(run)]
            for process in both:
                os.waitpid(process, 0)
            yield (
                "two at once finished"
                if len(done()) == 12
                else f"FAULT two at once: {len(done())} of 12"
            )
            yield from whole(run, 12)


def clock(number: int, rng: random.Random) -> Iterator[str]:
    """The wall clock jumps between runs, by up to ten years."""
    real = time.time
    for _ in range(number):
        with page() as run:
            time.time = lambda: real() + rng.uniform(-3e8, 3e8)
            try:
                ended = {outcome.status for outcome in run().outcomes}
                yield (
                    "clock jump survived"
                    if ended == {"ok"}
                    else f"FAULT clock: {ended}"
                )
            finally:
                time.time = real
            yield from whole(run, 12)


def disk(number: int, rng: random.Random) -> Iterator[str]:
    """A small disk that fills up (a tmpfs, for root), and writes that fail half-way: finished runs stay."""
    for i in range(number):
        with page() as run:
            SWEEP.mkdir(parents=True)
            size = rng.randrange(16, 400)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(SWEEP)]
            if (
                i % 2
                and subprocess.run(mount, capture_output=True, check=False).returncode
                == 0
            ):
                os.waitpid(child(run), 0)
                before = done()
                os.waitpid(child(run), 0)
                yield (
                    "FAULT disk: a finished run is lost"
                    if before - done()
                    else "full tmpfs survived"
                )
                subprocess.run(
                    ["mount", "-o", "remount,size=64m", str(SWEEP)], check=True
                )
                yield from whole(run, 12)
                subprocess.run(["umount", str(SWEEP)], check=True)
                continue
            run() if rng.random() < 0.3 else None
            before, limit = done(), rng.randrange(0, 3000)

            def full(limit: int = limit, run: Callable = run) -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY)
                )
                run()

            os.waitpid(child(full), 0)
            yield (
                "FAULT disk: a finished run is lost"
                if before - done()
                else "failing write survived"
            )
            yield from whole(run, 12)


def main(wanted: dict[str, int]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (10 << 30, resource.RLIM_INFINITY))
    rng, faults = random.Random(wanted.pop("seed", 0)), Counts()
    torch.set_num_threads(1)
    for name, number in wanted.items():
        started, counts = time.monotonic(), Counts()
        for outcome in globals()[name](number, rng):
            counts[outcome] += 1
            if outcome.startswith("FAULT") and counts[outcome] == 1:
                print(outcome, flush=True)
        faults += Counts({o: n for o, n in counts.items() if o.startswith("FAULT")})
        good = ", ".join(
            f"{n} {o}" for o, n in sorted(counts.items()) if not o.startswith("FAULT")
        )
        bad = sum(n for o, n in counts.items() if o.startswith("FAULT"))
        print(
            f"| {name} | {number} | {good} | {bad} | {time.monotonic() - started:.0f} s |",
            flush=True,
        )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(
        main(
            {
                name: int(number)
                for name, number in (each.split("=") for each in sys.argv[1:])
            }
        )
    )
