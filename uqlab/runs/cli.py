"""The `uqlab` command; papermill and the gallery are imported where they are needed, so that it starts at once."""

import json
import os
import shlex
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
    PAGES,
    PROJECT,
    all_notebooks,
    find,
    from_here,
    new_project,
    per_notebook,
    profiles,
)


class Command(click.Command):
    """A command that reports bad input in one line, and that ends with the shell's exit code 130 on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise click.UsageError(str(error), ctx) from error
        except ConnectionError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit(130) from None


class Commands(click.Group):
    """The commands, shown in groups."""

    command_class = Command
    groups = {  # noqa: RUF012
        "Begin": {
            "new": "a folder to work in: the pages, their profiles and a place for results",
            "lab": "JupyterLab on the guide to the pages",
            "doctor": "what is installed, what is found, where things are kept",
        },
        "Run": {
            "run": "notebooks headless, with other parameters if you like",
            "sweep": "one notebook on every point of a grid, here or on a cluster; resumable",
            "report": "what a trained network of yours knows about itself",
        },
        "Look": {
            "gallery": "one page of all figures, beside parameters, numbers and claims",
            "collect": "a table of a sweep, one row a run",
            "dashboards": "the explorers alone, in large type for a projector",
        },
    }

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        for title, lines in self.groups.items():
            with formatter.section(title):
                formatter.write_dl(
                    [line for line in lines.items() if line[0] in self.commands]
                )


EXAMPLES = """\b
Examples:
  uqlab new demo && cd demo            a folder with the pages, to work in
  uqlab run 00 --profile tiny          one page, headless, in seconds
  uqlab run 03 -p seed 1 --dry-run     what would run, and how long it took last time
  uqlab sweep 03 -g seed 0:5 --jobs 2  five runs, two at a time; the same again does what is missing
  uqlab COMMAND --help                 every option

\b
Completion by the Tab key, in bash, zsh or fish (name yours in place of bash, in the variable too):
  eval "$(_UQLAB_COMPLETE=bash_source uqlab)"
"""


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES,
)
@click.version_option(__version__)
def main() -> None:
    """Run the notebooks headless and look at what they found."""


def _pages(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a notebook: the pages by name, else paths."""
    stems = [path.stem for path in all_notebooks() if path.stem.startswith(incomplete)]
    return [CompletionItem(stem) for stem in stems] or [
        CompletionItem(incomplete, type="file")
    ]


def _profiles(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    return [
        name for name in profiles(all_notebooks()[0]) if name.startswith(incomplete)
    ]


def _folder(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    """Refuse, before anything runs, what cannot be an output folder."""
    try:
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
    except OSError as error:  # a name that is too long
        raise click.BadParameter(f"{path.name}: {error.strerror}") from error
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise click.BadParameter(
            f"{there} is no folder that you may write to; name another"
        )
    return path


of_profile = click.option(
    "--profile",
    default="quick",
    show_default=True,
    help="Parameter set of notebooks/profiles.yaml.",
    shell_complete=_profiles,
)
into_folder = click.option(
    "--output-dir",
    default="figures",
    show_default=True,
    type=click.Path(path_type=Path),
    callback=_folder,
)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), callback=_folder)
def new(folder) -> None:
    """Make a folder to work in: the pages, their profiles and a place for results.

    FOLDER is new or empty. What is changed there changes no other folder.
    """
    new_project(folder)
    click.echo(
        f"{folder}: {len(list(folder.glob('notebooks/[0-9]*.ipynb')))} pages; README.md says what is where"
    )
    click.echo(
        f"next:\n  cd {shlex.quote(str(folder))}\n  uqlab run 00 --profile tiny\n  uqlab lab"
    )


@main.command()
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...", shell_complete=_pages)
@of_profile
@click.option(
    "-p",
    "--parameter",
    "given",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Repeatable.",
)
@into_folder
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Notebooks at a time; default all cores, or 1 beside a GPU.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds for each notebook.",
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Train everything anew, and keep no training for other runs.",
)
@click.option(
    "--quiet", is_flag=True, help="No progress: failures and the summary only."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would run, what is reused, how long it took last time.",
)
def run(
    notebooks, profile, given, output_dir, jobs, timeout, no_cache, quiet, dry_run
) -> None:
    """Execute notebooks into OUTPUT_DIR/PROFILE/NOTEBOOK and build the gallery.

    NOTEBOOK is a path, a name or the start of one (03); default all. Exit code 1 if any fails; a claim that does not
    hold is a finding, no failure.
    """
    from uqlab.runs import gallery

    if no_cache:
        os.environ[TRAININGS] = ""
    root, plan = output_dir / profile, per_notebook(notebooks, profile, dict(given))
    if dry_run:
        return click.echo(
            "\n".join(
                plans.of_run(plan, root, profile, execution.at_a_time(jobs, len(plan)))
            )
        )
    outcomes = execution.execute_all(plan, root, profile, jobs, timeout, quiet)
    width = max(len(path.stem) for path in plan)
    click.echo(f"\n{'notebook':{width}}  status  seconds  numbers  figures  claims")
    held: list[bool] = []
    for path, result in outcomes.items():
        succeeded = result.status == "ok"
        status = (
            click.style("ok    ", fg="green")
            if succeeded
            else click.style("FAILED", fg="red")
        )
        found = Record.read(root / path.stem) if succeeded else Record()
        counts = f"{len(found.numbers):7}  {len(found.figures):7}" if succeeded else ""
        if claimed := found.claims_held():
            held += claimed
            counts += f"  {tables.counted(claimed, '')}"
        click.echo(
            f"{path.stem:{width}}  {status}  {result.seconds:7.1f}  {counts}".rstrip()
        )
    click.echo(f"\nresults: {root}\nlook at: {gallery.build(root)}")
    if held:
        click.echo(tables.counted(held))
    if any(result.status != "ok" for result in outcomes.values()):
        raise SystemExit(1)


@main.command()
@click.argument("model", default="")
@click.option(
    "--data",
    "dataset",
    help="What the model is for: a name, or your own .npz or table; default mnist-mini.",
)
@click.option(
    "--ood",
    multiple=True,
    help="Inputs that it should not know: a name or a file. Repeatable.",
)
@click.option(
    "--weights",
    multiple=True,
    help="A file, a folder or a pattern; several are an ensemble. Repeatable.",
)
@click.option(
    "-s",
    "--setting",
    "settings",
    type=(str, str),
    multiple=True,
    help="Of the function. Repeatable.",
)
@click.option(
    "-p",
    "--parameter",
    "given",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Of page 16.",
)
@of_profile
@click.option(
    "--output-dir",
    default="report",
    show_default=True,
    type=click.Path(path_type=Path),
    callback=_folder,
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds.")
@click.option("--quiet", is_flag=True, help="No progress: the report only.")
def report(
    model, dataset, ood, weights, settings, given, profile, output_dir, timeout, quiet
) -> None:
    """Ask a trained MODEL what it knows about itself: page 16, headless, and its report on one screen.

    MODEL is FILE.py:FUNCTION or MODULE:FUNCTION, whose function returns a network and is run, or a folder that
    transformers wrote; without it an example is trained and asked. OUTPUT_DIR gets report.html, and the figures and
    numbers in a folder of the page's name.

    \b
      uqlab report mymodel.py:make --data mine.npz --ood letters
      uqlab report mymodel.py:make --weights checkpoints/ --data mine.npz
      uqlab report uqlab.models:cifar_resnet -s depth 32 --weights resnet32.th --data cifar10 --ood svhn
    """
    from uqlab.runs import report

    lists = {"ood": list(ood), "weights": report.weights(weights)}
    named = {
        "model": report.source(model),
        "settings": repr(dict(settings)) if settings else "",
        "dataset": dataset,
    }
    values = {name: value for name, value in named.items() if value} | {
        n: repr(v) for n, v in lists.items() if v
    }
    plan = per_notebook([report.PAGE], profile, values | dict(given))
    ((path, result),) = execution.execute_all(
        plan, output_dir, profile, 1, timeout, quiet
    ).items()
    if result.status != "ok":
        raise SystemExit(1)
    folder = output_dir / path.stem
    click.echo(f"\n{report.screen(folder)}\n\nfigures and numbers: {folder}")
    click.echo(f"look at: {report.html(folder, output_dir / 'report.html')}")


@main.command()
@click.argument("notebook", shell_complete=_pages)
@click.option(
    "-g",
    "--grid",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUES",
    help="0:5 or 1,2,4. Repeatable.",
)
@click.option(
    "-p",
    "--parameter",
    "given",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Repeatable.",
)
@of_profile
@into_folder
@click.option(
    "--jobs",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Runs at a time on this machine.",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="A running Dask scheduler, whose workers compute the runs.",
)
@click.option(
    "--resources",
    multiple=True,
    metavar="NAME=NUMBER",
    help="Of a worker, for each run: GPU=1.",
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), help="Seconds for each run."
)
@click.option(
    "--quiet", is_flag=True, help="No progress: failures and the summary only."
)
@click.option(
    "--keep-stale",
    is_flag=True,
    help="Take runs for done although code or data have changed since.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would run, what is kept, and how long it takes.",
)
def sweep(
    notebook,
    grid,
    given,
    profile,
    output_dir,
    jobs,
    cluster,
    resources,
    timeout,
    quiet,
    keep_stale,
    dry_run,
) -> None:
    """Run NOTEBOOK on every point of a grid into OUTPUT_DIR/PROFILE/NOTEBOOK.sweep, then collect and build the gallery.

    Finished runs are skipped, and the same command again does what is missing. Runs that are stale, because the
    package's code or a data file has changed since, are computed anew. Exit code 1 if any run fails.
    """
    from uqlab.runs import gallery

    path = find(notebook)
    if not set(path.parents) & {Path.cwd(), PAGES.parent}:
        click.echo(f"note: {path} is not of this repository", err=True)
    if len(dict(grid)) < len(grid):
        raise ValueError(
            f"each parameter has one -g: {', '.join(name for name, _ in grid)}"
        )
    report = sweeps.sweep(
        path,
        {name: from_here(values) for name, values in grid},
        {name: from_here(value) for name, value in given},
        profile=profile, root=output_dir, jobs=jobs, timeout=timeout, progress=not quiet,
        cluster=cluster, resources=_resources(resources), keep_stale=keep_stale, dry_run=dry_run,
    )  # fmt: skip
    if dry_run:
        return
    click.echo(("" if quiet else "\n") + sweeps.summary(report))
    ran = {outcome.status for outcome in report.outcomes} - {"done before"}
    try:
        if "ok" in ran:
            _save(report.folder)
        if ran:
            gallery.build(output_dir / profile)
    except OSError as error:  # a full disk; the runs that are done are safe
        click.echo(
            f"neither table nor page: {error}; when that is mended: uqlab collect, uqlab gallery",
            err=True,
        )
        raise SystemExit(1) from error
    click.echo(
        f"\ntable: {execution.named(report.folder)}/table.csv\nlook at: {output_dir / profile / 'index.html'}"
    )
    if report.failed:
        raise SystemExit(1)


def _save(folder: Path) -> tuple[int, int]:
    """Write the table of a sweep, say what its reader must know, and return its numbers of rows and columns."""
    found = tables.read(folder)
    for remark in [
        *(f"left out {line}" for line in found.left_out),
        *([found.mixed] if found.mixed else []),
    ]:
        click.echo(remark, err=True)
    return tables.save(found, folder).shape


def _resources(given: tuple[str, ...]) -> dict[str, float]:
    try:
        return {
            name: float(number) for name, number in (each.split("=") for each in given)
        }
    except ValueError:
        raise ValueError(
            f"resources are NAME=NUMBER, like GPU=1; got {' '.join(given)}"
        ) from None


@main.command()
@click.argument("sweep", nargs=-1, metavar="[SWEEP]...")
@of_profile
@into_folder
@click.option(
    "--table",
    help="Join the tables that the runs recorded under this name too, into NAME.csv.",
)
def collect(sweep, profile, output_dir, table) -> None:
    """Write table.parquet and table.csv into each SWEEP: its folder or its notebook; default all of the profile.

    One row a finished run: its parameters, the numbers it recorded, whether each claim holds, a digest of its code,
    and its circumstances. With --table, NAME.json says what the runs depend on.
    """
    folders = [tables.locate(each, profile, output_dir) for each in sweep]
    folders = folders or sorted((output_dir / profile).glob("*.sweep"))
    if not folders:
        raise ValueError(
            f"no sweep in {output_dir / profile}; first: uqlab sweep NOTEBOOK -g NAME VALUES"
        )
    for folder in folders:
        rows, columns = _save(folder)
        click.echo(
            f"{rows} runs, {columns} columns: {folder / 'table.parquet'} and .csv"
        )
        if table:
            frame, about = tables.joined(folder, table)
            write(
                folder / f"{table}.csv", frame.to_csv(index=False, float_format="%.5g")
            )
            write(folder / f"{table}.json", json.dumps(about, indent=1))
            click.echo(f"{len(frame)} rows of {table}: {folder / table}.csv and .json")


@main.command("gallery")
@into_folder
@click.option(
    "--profile",
    help="Of this profile alone, into its folder; default all, into OUTPUT_DIR.",
)
def show(output_dir: Path, profile: str | None) -> None:
    """Write OUTPUT_DIR[/PROFILE]/index.html: every figure beside its parameters, its numbers and the paper's."""
    from uqlab.runs import gallery

    folder = output_dir / (profile or "")
    found = [] if profile else gallery.found(output_dir)
    if not (found or (profile and folder in output_dir.glob("*") and folder.is_dir())):
        raise ValueError(
            f"no runs in {folder}; first: uqlab run --profile {profile or 'quick'}"
        )
    click.echo(gallery.build(folder, found))


@main.command("doctor")
def examine() -> None:
    """Say what is installed, what is found, and where things are kept.

    Exit code 1 if something is wrong: then the last lines say what, and what to do.
    """
    from uqlab.runs import doctor

    lines, wrong = doctor.report()
    for title, line in lines.items():
        click.echo(f"{title:<10} {line}")
    for line in wrong:
        click.echo(f"{click.style('wrong', fg='red')}      {line}")
    if wrong:
        raise SystemExit(1)
    click.echo("all is well")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def lab(args) -> None:
    """Open JupyterLab on the index of the notebooks; ARGS are its own: --no-browser --port 9000."""
    from jupyterlab.labapp import LabApp

    root = all_notebooks()[0].parents[1]
    if (
        root == PROJECT.resolve()
    ):  # the package's own copy, which belongs to all projects
        raise ValueError(
            "no notebooks/[0-9]*.ipynb in this folder; first: uqlab new FOLDER, then cd FOLDER"
        )
    rendered = {
        "@jupyterlab/docmanager-extension:plugin": {
            "defaultViewers": {"markdown": "Markdown Preview"}
        }
    }
    with tempfile.TemporaryDirectory(prefix="uqlab-") as settings:
        Path(settings, "overrides.json").write_text(json.dumps(rendered))
        options = [
            f"--ServerApp.root_dir={root}",
            f"--LabApp.app_settings_dir={settings}",
        ]
        LabApp.launch_instance(
            [*options, "--LabApp.default_url=/lab/tree/notebooks/README.md", *args]
        )


@main.command("dashboards")
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...", shell_complete=_pages)
@of_profile
@click.option(
    "-p",
    "--parameter",
    "given",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Repeatable.",
)
@click.option(
    "--port",
    default=8866,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Or the next free one.",
)
@click.option(
    "--theme", default="light", show_default=True, type=click.Choice(["light", "dark"])
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def project(notebooks, profile, given, port, theme, no_browser) -> None:
    """Serve the explorers of notebooks alone, in large type for a projector, with Voila.

    NOTEBOOK is a path, a name or the start of one (03); default 00 01 02 03. Nothing is kept; Ctrl-C ends it.
    """
    from uqlab.runs import dashboards

    try:
        plan = per_notebook(notebooks or ("00", "01", "02", "03"), profile, dict(given))
        dashboards.serve(plan, port=port, browser=not no_browser, theme=theme)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("voila"):
            raise
        raise click.ClickException(
            "Voila is missing: pip install -c constraints.txt -e '.[dashboards]'"
        ) from error
