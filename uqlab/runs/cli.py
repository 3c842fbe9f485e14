"""The `uqlab` command; what takes long to import is imported where it is needed."""

import itertools
import json
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from uqlab import __version__
from uqlab.core.files import TRAININGS, write
from uqlab.core.recording import Record
from uqlab.runs import execution, plans, sweeps, tables
from uqlab.runs.parameters import (
    KINDS,
    PACKED,
    all_notebooks,
    from_here,
    new_project,
    per_notebook,
    profiles,
)

EXAMPLES = """\b
Examples:
  uqlab new demo && cd demo            # a folder with the pages, to work in
  uqlab run 00 --profile tiny          # one page, headless, in seconds
  uqlab run 03 -p seed 1 --dry-run     # what would run, how long it took last time
  uqlab sweep 03 -g seed 0:5 --jobs 2  # five runs, two at a time; again: goes on
  uqlab COMMAND --help                 # every option

\b
Completion by the Tab key, in bash, zsh or fish (name yours in place of bash, twice):
  eval "$(_UQLAB_COMPLETE=bash_source uqlab)"
"""


class Place(click.Path):
    """A path, in which ~ is the home folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path; a shell leaves --output-dir=~/runs as it is."""
        return super().convert(os.path.expanduser(value), param, ctx)


FOLDER = Place(file_okay=False, writable=True, path_type=Path)
FILE = Place(exists=True, dir_okay=False, resolve_path=True)


class Command(click.Command):
    """A command that says in one line what it refuses or what the system refuses."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with the shell's exit code 130."""
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from error
        except (ImportError, OSError) as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit(130) from None


class Commands(click.Group):
    """All commands."""

    command_class = Command


class Resource(click.ParamType):
    """NAME=NUMBER."""

    name = "resource"

    def convert(self, value: str, param: Any, ctx: Any) -> tuple[str, float]:
        """Return the name and the number."""
        name, _, number = value.partition("=")
        return name, click.FLOAT(number, param, ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES,
)
@click.version_option(__version__)
def main() -> None:
    """Run the notebooks headless and look at what they found."""


# Arguments and options of several commands -------------------------------------------


def _pages(context, parameter, incomplete):
    """Complete a notebook: the pages by name, else paths."""
    pages = itertools.chain(*map(all_notebooks, KINDS))
    stems = [path.stem for path in pages if path.stem.startswith(incomplete)]
    path = CompletionItem(incomplete, type="file")
    return [CompletionItem(stem) for stem in stems] or [path]


def _profiles(context, parameter, incomplete):
    names = profiles(all_notebooks()[0])
    return [name for name in names if name.startswith(incomplete)]


def _into(folder):
    return click.option(
        "--output-dir", default=folder, show_default=True, type=FOLDER, metavar="FOLDER"
    )


def _jobs(default, help):
    return click.option(
        "--jobs", default=default, type=click.IntRange(1), help=help, show_default=True
    )


def _pairs(*names, values="VALUE", help="Repeatable."):
    metavar = f"NAME {values}"
    return click.option(
        *names,
        type=(str, str),
        multiple=True,
        metavar=metavar,
        help=help,
        callback=_by_name,
    )


def _by_name(context, parameter, pairs):
    """Return values by name; none takes another's place in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise click.BadParameter("each NAME once; several values go into one VALUE")
    return values


def _numbers_of_gpus(context, parameter, text):
    numbers = [number.strip() for number in text.split(",")] if text else []
    if wrong := [n for n in numbers if not re.fullmatch(r"\d+|(GPU|MIG)-[\w-]+", n)]:
        raise click.BadParameter(f"give numbers like 0,1 or UUIDs, got {wrong[0]!r}")
    return numbers


one_page = click.argument("notebook", shell_complete=_pages)
pages = click.argument(
    "notebooks", nargs=-1, metavar="[NOTEBOOK]...", shell_complete=_pages
)
parameters = _pairs("-p", "--parameter", "parameters")
of_profile = click.option(
    "--profile",
    default="quick",
    show_default=True,
    help="Parameter set of notebooks/profiles.yaml.",
    shell_complete=_profiles,
)
timeout = click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds for each notebook.",
)
gpus = click.option(
    "--gpus",
    default="",
    metavar="LIST",
    callback=_numbers_of_gpus,
    help="Of this machine, 0,1,2,3: one for each run, and as many runs at a time.",
)
quiet = click.option(
    "--quiet", is_flag=True, help="No progress: failures and the summary only."
)
dry_run = click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would run, what is reused, how long it took last time.",
)


# Begin -------------------------------------------------------------------------------


@main.command()
@click.argument("folder", type=FOLDER)
@click.option(
    "--student",
    is_flag=True,
    help='Leave the functions under "Your turn" to be written.',
)
def new(folder, student) -> None:
    """Make a folder to work in.

    FOLDER is new or empty, and gets the pages, their profiles and a place for results.
    What is changed there changes no other folder.
    """
    new_project(folder, student)
    count = len(list(folder.glob("notebooks/[0-9]*.ipynb")))
    click.echo(f"{folder}: {count} lessons and studies; README.md says what is where")
    enter = shlex.quote(str(folder))
    click.echo(f"next:\n  cd {enter}\n  uqlab run 00 --profile tiny\n  uqlab lab")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def lab(args) -> None:
    """Open JupyterLab on the guide to the pages.

    ARGS are JupyterLab's own: --no-browser --port 9000.
    """
    from jupyterlab.labapp import LabApp

    root = all_notebooks()[0].parents[1]
    if root == PACKED:  # the package's own pages belong to all projects
        raise ValueError(
            "no notebooks/[0-9]*.ipynb in this folder; "
            "first: uqlab new FOLDER, then cd FOLDER"
        )
    viewers = {"defaultViewers": {"markdown": "Markdown Preview"}}
    rendered = json.dumps({"@jupyterlab/docmanager-extension:plugin": viewers})
    with tempfile.TemporaryDirectory(prefix="uqlab-") as settings:
        Path(settings, "overrides.json").write_text(rendered)
        LabApp.launch_instance(
            [
                f"--ServerApp.root_dir={root}",
                f"--LabApp.app_settings_dir={settings}",
                "--LabApp.default_url=/lab/tree/notebooks/README.md",
                *args,
            ]
        )


@main.command("doctor")
def examine() -> None:
    """Say what is installed, and where things are.

    Exit code 1 if something is wrong: then the last lines say what, and what to do.
    """
    from uqlab.runs import doctor

    lines, wrong = doctor.report()
    for title, line in lines.items():
        click.echo(f"{title:<10} {line}")
    for line in wrong:
        click.echo(f"wrong      {line}")
    if wrong:
        raise SystemExit(1)
    click.echo("all is well")


# Run ---------------------------------------------------------------------------------


@main.command()
@pages
@of_profile
@parameters
@_into("figures")
@_jobs(None, "Notebooks at a time; default all cores, or 1 beside a GPU.")
@gpus
@timeout
@click.option("--no-cache", is_flag=True, help="Train anew, and keep no training.")
@click.option(
    "--studies",
    "kind",
    flag_value="studies",
    default="lessons",
    help="By default all studies, not all lessons.",
)
@quiet
@dry_run
def run(
    notebooks,
    profile,
    parameters,
    output_dir,
    jobs,
    gpus,
    timeout,
    no_cache,
    kind,
    quiet,
    dry_run,
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
    plan = per_notebook(notebooks, profile, parameters, kind)
    if dry_run:
        at_a_time = execution.at_a_time(jobs or len(gpus), len(plan))
        return click.echo("\n".join(plans.of_run(plan, root, profile, at_a_time)))
    outcomes = execution.execute_all(plan, root, profile, jobs, timeout, quiet, gpus)
    click.echo(f"\nresults: {root}\nlook at: {gallery.build(root)}")
    ended = [root / path.stem for path in plan if outcomes[path].status == "ok"]
    held = []
    for path in ended:
        held += Record.read(path).claims_held()
    click.echo(tables.counted(held))
    if len(ended) < len(plan):
        raise SystemExit(1)


@main.command()
@one_page
@_pairs("-g", "--grid", values="VALUES", help="0:5 or 1,2,4 or [1],[1,2]. Repeatable.")
@parameters
@of_profile
@_into("figures")
@_jobs(1, "Runs at a time on this machine.")
@click.option("--cluster", metavar="ADDRESS", help="Of a Dask scheduler, to run there.")
@click.option(
    "--resources",
    type=Resource(),
    multiple=True,
    metavar="NAME=NUMBER",
    help="Of a worker, for each run: GPU=1 gives it one for itself.",
)
@gpus
@timeout
@quiet
@click.option(
    "--keep-stale",
    is_flag=True,
    help="Take runs for done although code or data have changed since.",
)
@dry_run
def sweep(
    notebook, grid, parameters, profile, output_dir, resources, quiet, **options
) -> None:
    """Run a notebook on every point of a grid.

    The results, computed here or on a cluster, go into
    OUTPUT_DIR/PROFILE/NOTEBOOK.sweep, with a table and the gallery.
    Finished runs are skipped, and the same command again does what is missing. Runs
    that are stale, because the package's code or a data file has changed since, are
    computed anew. Exit code 1 if any run fails.
    """
    from uqlab.runs import gallery

    report = sweeps.sweep(
        notebook,
        {name: from_here(values) for name, values in grid.items()},
        {name: from_here(value) for name, value in parameters.items()},
        profile=profile,
        root=output_dir,
        progress=not quiet,
        resources=dict(resources),
        **options,
    )
    if options["dry_run"]:
        return
    click.echo(("" if quiet else "\n") + sweeps.summary(report) + "\n")
    if len(report.failed) < len(report.outcomes):
        _save(report.folder)
        click.echo(f"table: {execution.named(report.folder)}/table.csv")
    click.echo(f"look at: {gallery.build(output_dir / profile)}")
    if report.failed:
        raise SystemExit(1)


def _save(folder: Path) -> tuple[int, int]:
    """Write the table of a sweep, say what is wrong with it, and return its size."""
    table = tables.read(folder)
    for line in table.left_out:
        click.echo(f"left out {line}", err=True)
    if table.mixed:
        click.echo(table.mixed, err=True)
    return tables.save(table, folder).shape


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
    "--logits", type=FILE, help="An .npz of what a model said; no model is needed."
)
@click.option(
    "--watch", type=FILE, help="An .npz of new inputs, for the alarm of --logits."
)
@_pairs("-p", "--parameter", "parameters", help="Of the page that runs. Repeatable.")
@of_profile
@_into("report")
@timeout
@quiet
def report(
    parameters, profile, output_dir, timeout, quiet, logits, watch, **brought
) -> None:
    """Report what a network of yours knows.

    MODEL is FILE.py:FUNCTION or MODULE:FUNCTION, whose function returns a network and
    is run, or a folder that transformers wrote; without it an example is trained and
    asked. Several weights are an ensemble. Page 16 runs headless: OUTPUT_DIR gets
    report.html, and the figures and numbers in a folder of the page's name. With
    --logits it is logits.html, with --watch watch_NAME.html of the file's name.

    \b
      uqlab report mymodel.py:make --data mine.npz --ood letters
      uqlab report mymodel.py:make --weights checkpoints/ --data mine.npz
      uqlab report uqlab.models:cifar_resnet -s depth 32 --weights resnet32.th \\
          --data cifar10
      uqlab report --logits run.npz
      uqlab report --watch new.npz
    """  # noqa: D301
    from uqlab.runs import report

    name, page, values = report.plan(logits, watch, output_dir, **brought)
    plan = per_notebook([page], profile, report.with_parameters(values, parameters))
    root = output_dir / name if watch else output_dir
    outcomes = execution.execute_all(plan, root, profile, 1, timeout, quiet)
    (outcome,) = outcomes.values()
    if outcome.status != "ok":
        raise SystemExit(1)
    folder = root / page
    if logits:
        shutil.copy(folder / "alarm.json", output_dir)
    click.echo(f"\n{report.screen(folder)}\n\nfigures and numbers: {folder}")
    click.echo(f"look at: {report.html(folder, output_dir, name)}")


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

    present = gallery.profiles_of(output_dir)
    if profile and profile in present:
        return click.echo(gallery.build(output_dir / profile))
    if profile or not present:
        path = output_dir / (profile or "")
        page = " NOTEBOOK" if profile else ""
        first = f"uqlab run{page}{tables.options(profile or 'quick', output_dir)}"
        raise ValueError(f"no runs in {path}; first: {first}")
    click.echo(gallery.build(output_dir, present))


@main.command()
@click.argument("sweep", nargs=-1, metavar="[SWEEP]...")
@of_profile
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
        place = tables.options(profile, output_dir)
        first = f"uqlab sweep NOTEBOOK -g NAME VALUES{place}"
        raise ValueError(f"no sweep in {output_dir / profile}; first: {first}")
    for folder in folders:
        rows, columns = _save(folder)
        click.echo(f"{rows} runs, {columns} columns: {folder}/table.parquet and .csv")
        if table:
            path = folder / table
            frame, about = tables.joined(folder, table)
            write(f"{path}.csv", frame.to_csv(index=False, float_format="%.5g"))
            write(f"{path}.json", json.dumps(about, indent=1))
            click.echo(f"{len(frame)} rows of {table}: {path}.csv and .json")
