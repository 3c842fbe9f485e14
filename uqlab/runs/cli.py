"""The `uqlab` command; what takes long to import is imported where it is needed."""

import json
import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from uqlab import __version__
from uqlab.core.files import TRAININGS, Values, write
from uqlab.core.recording import Record
from uqlab.runs import execution, sweeps, tables
from uqlab.runs.execution import Job, Result
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import (
    PACKED,
    all_notebooks,
    find,
    from_here,
    new_project,
    profiles,
)

EXAMPLES = """\b
Examples:
  uqlab new demo && cd demo            # a folder with the lessons, to work in
  uqlab run 00 --profile tiny          # one notebook, headless, in seconds
  uqlab run 03 -p seed 1 --dry-run     # what would run, how long it took last time
  uqlab sweep 03 -g seed 0:5 --jobs 2  # five runs, two at a time; again: goes on
  uqlab COMMAND --help                 # every option

\b
Completion by the Tab key, in bash, zsh or fish (name yours in place of bash, twice):
  eval "$(_UQLAB_COMPLETE=bash_source uqlab)"
"""


class _Commands(click.Group):
    """Commands that say in one line what they or the system refuse."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C ends it with the shell's exit code 130."""
        try:
            return super().invoke(ctx)
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error), ctx) from error
        except (ImportError, OSError) as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit(130) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES,
)
@click.version_option(__version__)
def main() -> None:
    """Run the notebooks headless and look at what they found."""


# Options of several commands ----------------------------------------------------------


def _by_name(context, parameter, pairs):
    """Return values by name; none takes another's place in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise click.BadParameter("each NAME once; several values go into one VALUE")
    return values


def _by_resource(context, parameter, pairs):
    """Return numbers by name; without a number, float says what is wrong."""
    parts = [pair.partition("=") for pair in pairs]
    return {name: float(number) for name, _, number in parts}


def _pairs(*names, metavar="NAME VALUE", help="Repeatable."):
    return click.option(
        *names,
        type=(str, str),
        multiple=True,
        metavar=metavar,
        help=help,
        callback=_by_name,
    )


def _into(default):
    folder = click.Path(file_okay=False, writable=True, path_type=Path)
    return click.option(
        "--output-dir",
        default=default,
        show_default=True,
        type=folder,
        metavar="FOLDER",
    )


def _gpu_list(context, parameter, text):
    numbers = [number.strip() for number in text.split(",")] if text else []
    if wrong := [n for n in numbers if not re.fullmatch(r"\d+|(GPU|MIG)-[\w-]+", n)]:
        raise click.BadParameter(f"give numbers like 0,1 or UUIDs, got {wrong[0]!r}")
    return numbers


_parameters = _pairs("-p", "--parameter", "parameters")
_profile = click.option(
    "--profile",
    default="quick",
    show_default=True,
    help="Parameter set of notebooks/profiles.yaml.",
)
_timeout = click.option("--timeout", type=float, help="Seconds for each notebook.")
_gpus = click.option(
    "--gpus",
    default="",
    metavar="LIST",
    callback=_gpu_list,
    help="Of this machine, 0,1,2,3: one for each run, and as many runs at a time.",
)
_quiet = click.option(
    "--quiet", is_flag=True, help="No progress: failures and the summary only."
)
_dry_run = click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would run, what it needs, how long it took last time.",
)
_file = click.Path(exists=True, dir_okay=False, resolve_path=True)


# Begin -------------------------------------------------------------------------------


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--student",
    is_flag=True,
    help='Leave the functions under "Your turn" to be written.',
)
def new(folder, student) -> None:
    """Make a folder to work in.

    FOLDER is new or empty, and gets the notebooks, their profiles and a place for
    results. What is changed there changes no other folder.
    """
    new_project(folder, student)
    enter = shlex.quote(str(folder))
    click.echo(f"next:\n  cd {enter}\n  uqlab run 00 --profile tiny\n  uqlab lab")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def lab(args) -> None:
    """Open JupyterLab on the guide to the lessons.

    ARGS are JupyterLab's own: --no-browser --port 9000.
    """
    from jupyterlab.labapp import LabApp

    root = all_notebooks()[0].parents[1]
    if root == PACKED:  # the package's own notebooks belong to all projects
        raise ValueError(
            "no notebooks/[0-9]*.ipynb in this folder; "
            "first: uqlab new FOLDER, then cd FOLDER"
        )
    LabApp.launch_instance(
        [
            f"--ServerApp.root_dir={root}",
            f"--LabApp.app_settings_dir={Path(__file__).with_name('lab')}",
            "--LabApp.default_url=/lab/tree/notebooks/README.md",
            *args,
        ]
    )


@main.command()
def doctor() -> None:
    """Say what is installed, and where things are.

    Exit code 1 if something is wrong: then the last lines say what, and what to do.
    """
    from uqlab.runs import doctor

    lines, wrong = doctor.report()
    click.echo("\n".join([*lines, *(wrong or ["all is well"])]))
    if wrong:
        raise SystemExit(1)


# Run ---------------------------------------------------------------------------------


@main.command()
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...")
@_profile
@_parameters
@_into("figures")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Notebooks at a time; default all cores, or 1 beside a GPU.",
)
@_gpus
@_timeout
@click.option("--no-cache", is_flag=True, help="Train anew, and keep no training.")
@click.option(
    "--studies",
    "kind",
    flag_value="studies",
    default="lessons",
    help="By default all studies, not all lessons.",
)
@_quiet
@_dry_run
def run(
    notebooks, profile, parameters, output_dir, jobs, no_cache, kind, dry_run, **options
) -> None:
    """Run notebooks headless, with other values.

    The results go into OUTPUT_DIR/PROFILE/NOTEBOOK, and the gallery is built. NOTEBOOK
    is a path, a name or the start of one (03, studies/03); default all lessons that
    have the profile. Exit code 1 if any fails; a claim that does not hold is a finding,
    no failure.
    """
    from uqlab.runs import gallery

    if no_cache:
        os.environ[TRAININGS] = ""
    root = output_dir / profile
    planned = _planned(notebooks, profile, parameters, root, kind)
    if dry_run:
        return _only_say(planned, ())
    jobs = jobs or execution.default_jobs(len(planned))
    results = execution.run_all(planned, at_a_time=jobs, **options)
    click.echo(f"results: {root}\nlook at: {gallery.build(root)}")
    _end(results)


def _planned(
    names: Sequence[str], profile: str, parameters: Values, root: Path, kind: str
) -> list[Job]:
    """Return a job for each notebook, by default all that have the profile."""
    every = all_notebooks(kind)
    having = [path for path in every if path.stem in profiles(path).get(profile, ())]
    given = {name: from_here(value) for name, value in parameters.items()}
    jobs = {}
    for path in [find(name) for name in names] or having or every:
        folder = root / path.stem
        if folder in jobs:
            raise ValueError(f"two notebooks named {path.stem} would share {folder}")
        jobs[folder] = execution.make_job(path, given, profile, folder)
    if not jobs:
        raise ValueError(f"no {kind} in this folder; name those that should run")
    return list(jobs.values())


def _end(results: dict[Path, Result]) -> None:
    """Say how many claims hold and why runs failed; exit with 1 if any did."""
    held = []
    for folder, result in results.items():
        if result.status == "ok":
            held += Record.read(folder).claims_held()
        else:
            click.echo(f"\n{result.reason}")
    click.echo(f"{sum(held)} of {len(held)} claims hold")
    if any(result.status != "ok" for result in results.values()):
        raise SystemExit(1)


def _only_say(jobs: list[Job], done: Collection[Path]) -> None:
    """Say what would run, what it needs, and how long it took before."""
    from uqlab.runs import doctor

    for job in jobs:
        status = "done before, kept" if job.folder in done else "would run"
        seconds = Manifest.read(job.folder).seconds
        last = f"last time {seconds:.0f} s" if seconds else ""
        click.echo(f"{status}: {job.label}  {job.parameters}  {last}")
    for notebook in dict.fromkeys(job.notebook for job in jobs):
        for line in doctor.needs(notebook, jobs[0].profile):
            click.echo(f"{notebook.stem} needs {line}")
    click.echo(
        f"would run {len(jobs) - len(done)} of {len(jobs)}, {len(done)} done before"
    )


@main.command()
@click.argument("notebook")
@_pairs(
    "-g",
    "--grid",
    metavar="NAME VALUES",
    help="0:5 or 1,2,4 or [1],[1,2]. Repeatable.",
)
@_parameters
@_profile
@_into("figures")
@click.option(
    "--jobs", default=1, type=click.IntRange(1), help="Runs at a time on this machine."
)
@click.option("--cluster", metavar="ADDRESS", help="Of a Dask scheduler, to run there.")
@click.option(
    "--resources",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_by_resource,
    help="Of a worker, for each run: GPU=1 gives it one for itself.",
)
@_gpus
@_timeout
@_quiet
@click.option(
    "--keep-stale",
    is_flag=True,
    help="Take runs for done although code or data have changed since.",
)
@_dry_run
def sweep(
    notebook,
    grid,
    parameters,
    profile,
    output_dir,
    resources,
    quiet,
    keep_stale,
    dry_run,
    **options,
) -> None:
    """Run a notebook on every point of a grid.

    The results, computed here or on a cluster, go into
    OUTPUT_DIR/PROFILE/NOTEBOOK.sweep, with a table and the gallery.
    Finished runs are skipped, and the same command again does what is missing. Runs
    that are stale, because the package's code or a data file has changed since, are
    computed anew. Exit code 1 if any run fails.
    """
    from uqlab.runs import gallery

    grid = {name: from_here(values) for name, values in grid.items()}
    given = {name: from_here(value) for name, value in parameters.items()}
    if dry_run:
        jobs = sweeps.jobs_of_grid(find(notebook), profile, output_dir, grid, given)
        return _only_say(jobs, sweeps.done_before(jobs, keep_stale))
    report = sweeps.sweep(
        notebook,
        grid,
        given,
        profile=profile,
        root=output_dir,
        progress=not quiet,
        keep_stale=keep_stale,
        resources=resources,
        **options,
    )
    click.echo(sweeps.summary(report))
    if len(report.failed) < len(report.outcomes):
        _save(report.folder)
    click.echo(f"look at: {gallery.build(output_dir / profile)}")
    if report.failed:
        raise SystemExit(1)


def _save(folder: Path) -> None:
    """Write the table of a sweep, and say what is wrong with it."""
    frame = tables.save(folder)
    for line in frame.attrs["problems"]:
        click.echo(line, err=True)
    rows, columns = frame.shape
    click.echo(f"{rows} runs, {columns} columns: {folder}/table.parquet and .csv")


@main.command()
@click.argument("model", default="")
@click.option("--data", "dataset", help="What it is for: a name or a file of yours.")
@click.option(
    "--ood",
    multiple=True,
    help="What it should not know: a name or a file. Repeatable.",
)
@click.option(
    "--weights", multiple=True, help="A file, a folder or a pattern. Repeatable."
)
@_pairs("-s", "--setting", "settings", help="Of the function. Repeatable.")
@click.option(
    "--logits", type=_file, help="An .npz of a model's logits; no model is needed."
)
@click.option(
    "--watch", type=_file, help="An .npz of new inputs, for the alarm of --logits."
)
@_pairs("-p", "--parameter", "parameters", help="Of the notebook. Repeatable.")
@_profile
@_into("report")
@_timeout
@_quiet
def report(
    parameters, profile, output_dir, logits, watch, timeout, quiet, **brought
) -> None:
    """Report what a network of yours knows.

    MODEL is FILE.py:FUNCTION or MODULE:FUNCTION, whose function returns a network, or a
    folder that transformers wrote; without it an example is trained. Several weights
    are an ensemble. Lesson 16 runs headless: OUTPUT_DIR gets report.html, and the
    figures and numbers in a folder of the lesson's name. With --logits it is
    logits.html, with --watch watch_NAME.html of the file's name.

    \b
      uqlab report mymodel.py:make --data mine.npz --ood letters
      uqlab report mymodel.py:make --weights checkpoints/ --data mine.npz
      uqlab report uqlab.models:cifar_resnet -s depth 32 --weights resnet32.th \\
          --data cifar10
      uqlab report --logits run.npz
      uqlab report --watch new.npz
    """  # noqa: D301
    from uqlab.runs import report

    page, name, values = report.plan(logits, watch, output_dir, **brought)
    if twice := sorted(values.keys() & parameters.keys()):
        raise ValueError(f"{twice[0]}: given by an option and by -p; choose")
    folder = (output_dir / name if watch else output_dir) / page
    values |= {name: from_here(value) for name, value in parameters.items()}
    job = execution.make_job(find(page), values, profile, folder)
    results = execution.run_all([job], timeout=timeout, quiet=quiet)
    if results[job.folder].status == "ok":
        click.echo(report.finish(job.folder, output_dir, name))
    _end(results)


# Look --------------------------------------------------------------------------------


@main.command("gallery")
@_into("figures")
@click.option("--profile", help="Of this profile alone, into its folder; default all.")
def show(output_dir: Path, profile: str | None) -> None:
    """Write one page of all figures and claims.

    OUTPUT_DIR/index.html, or that of OUTPUT_DIR/PROFILE, shows every figure beside its
    parameters, its numbers and the paper's.
    """
    from uqlab.runs import gallery

    if profile:
        return click.echo(gallery.build(output_dir / profile))
    click.echo(gallery.build(output_dir, gallery.profiles_of(output_dir)))


@main.command()
@click.argument("sweep", nargs=-1, metavar="[SWEEP]...")
@_profile
@_into("figures")
@click.option(
    "--table", help="Join the tables recorded under this name, into NAME.csv."
)
def collect(sweep, profile, output_dir, table) -> None:
    """Write a table of a sweep, one row a run.

    table.parquet and table.csv go into each SWEEP: its folder or its notebook; default
    all of the profile. A row holds the run's parameters, the numbers it recorded,
    whether each claim holds, a digest of its code, and its circumstances. With --table,
    NAME.json says what the runs depend on.
    """
    folders = [tables.locate(name, profile, output_dir) for name in sweep]
    folders = folders or sorted((output_dir / profile).glob("*.sweep"))
    if not folders:
        raise ValueError(f"no sweep in {output_dir / profile}; {tables.FIRST}")
    for folder in folders:
        _save(folder)
        if table:
            path = folder / table
            frame, about = tables.joined(folder, table)
            write(f"{path}.csv", frame.to_csv(index=False, float_format="%.5g"))
            write(f"{path}.json", json.dumps(about, indent=1))
            click.echo(f"{len(frame)} rows of {table}: {path}.csv and .json")
