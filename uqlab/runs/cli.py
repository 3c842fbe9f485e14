"""The `uqlab` command; what takes long to import is imported where it is needed."""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from uqlab import __version__
from uqlab.core.files import read_json, write
from uqlab.core.recording import Record
from uqlab.runs import execution, tables
from uqlab.runs.execution import Job
from uqlab.runs.manifest import Manifest
from uqlab.runs.parameters import (
    PACKED,
    PROJECT,
    all_notebooks,
    find,
    meant,
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
    values = {name: _from_here(value) for name, value in pairs}
    if len(values) < len(pairs):
        raise click.BadParameter("each NAME once; several values go into one VALUE")
    return values


def _from_here(text: str, folders: bool = False) -> str:
    """Make the paths in a text absolute: kernels run in another folder.

    They are files, folders and patterns with a dot, / or *; with `folders`, any that
    are there.
    """

    def absolute(match):
        path = os.path.expanduser(match[0])
        there = re.search("[./*]", path) and glob.glob(path)
        return Path(path).absolute().as_posix() if there else match[0]

    if folders and text and glob.glob(os.path.expanduser(text)):
        return str(Path(text).expanduser().absolute())
    return re.sub(r"""[^\s'"[\]{},:]([^'"[\]{},:]*[^\s'"[\]{},:])?""", absolute, text)


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
    return click.option("--output-dir", default=default, show_default=True, type=folder)


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
_gpus = click.option(
    "--gpus",
    default="",
    metavar="LIST",
    callback=_gpu_list,
    help="Of this machine, 0,1,2,3: one for each run, and as many runs at a time.",
)
_dry_run = click.option(
    "--dry-run",
    is_flag=True,
    help="Only say what would run, what it needs, how long it took last time.",
)
_file = click.Path(exists=True, dir_okay=False, resolve_path=True)


# Begin -------------------------------------------------------------------------------


@main.command("new")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--student",
    is_flag=True,
    help='Leave the functions under "Your turn" to be written.',
)
def _new(folder: Path, student: bool) -> None:
    """Make a folder to work in.

    FOLDER is new or empty, and gets the notebooks, their profiles and a place for
    results. What is changed there changes no other folder.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files; name another, new or empty folder")
    left_out = shutil.ignore_patterns("*.sweep", ".*", "__pycache__")
    for part in ("notebooks", "figures/real"):
        shutil.copytree(PROJECT / part, folder / part, ignore=left_out)
    (folder / "data").mkdir()
    shutil.copy(PROJECT / "data" / "README.md", folder / "data")
    shutil.copy(PACKED.with_suffix(".md"), folder / "README.md")
    for page in folder.glob("notebooks/[0-9]*.ipynb") if student else ():
        _leave_blank(page)
    enter = shlex.quote(str(folder))
    click.echo(f"next:\n  cd {enter}\n  uqlab run 00 --profile tiny\n  uqlab lab")


def _leave_blank(page: Path) -> None:
    """Take the solutions out of the cells of a page that are tagged `your-turn`."""
    solution = re.compile(r"^( *)### BEGIN SOLUTION$.*?### END SOLUTION$", re.S | re.M)
    notebook = read_json(page)
    for cell in notebook["cells"]:  # tagged as nbgrader has it
        if "your-turn" in cell["metadata"].get("tags", []):
            blank = r'\1raise NotImplementedError("your turn")'
            text = solution.sub(blank, "".join(cell["source"]))
            cell["source"] = text.splitlines(keepends=True)
    write(page, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


@main.command("lab", context_settings={"ignore_unknown_options": True})
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def _lab(args) -> None:
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


# Run in a process of its own, as a kernel is: what is broken in there breaks no report.
PROBE = """import os, sys
import joblib, numpy, pooch, torch, transformers, uqlab
from uqlab import data, models
from uqlab.core import modules
from uqlab.runs import parameters
pages = parameters.all_notebooks()
kept = os.environ.get("UQLAB_CACHE", pooch.os_cache("uqlab") / "trainings")
print("uqlab     ", uqlab.__version__, "in", uqlab.__path__[0])
print("Python    ", sys.version.split()[0], "in", sys.executable)
for package in (torch, transformers, numpy):
    print("package   ", package.__name__, package.__version__)
print("notebooks ", len(pages), "in", pages[0].parent)
print("trainings ", kept or "none is kept")
print("data      ", *data.fetched()[:1], *(data.fetched()[1] or ["nothing fetched"]))
models.embedded()(data.load("mnist-mini").inputs[:1])
print("embedded   data and network work; lessons need no download")
place = modules.device()
gpu = place.type == "cuda" and torch.cuda.get_device_name()
print("device    ", gpu or "CPU, no GPU", "beside", joblib.cpu_count(), "cores")
"""


@main.command("doctor")
def _doctor() -> None:
    """Say what is installed, and where things are.

    Exit code 1 if something is wrong: then the last lines say what, and what to do.
    """
    probe, pip = _python("-c", PROBE), _python("-m", "pip", "check")
    click.echo(probe.stdout, nl=False)
    wrong = [line for line in pip.stdout.splitlines() if line.startswith("uqlab ")]
    if "No module named pip" in pip.stderr:
        click.echo("packages   not checked: pip is not installed")
    if probe.returncode:
        wrong.append(probe.stderr.strip().rpartition("\n")[2])
    for line in wrong:
        click.echo(f"wrong      {line}; install uqlab anew")
    if wrong:
        raise SystemExit(1)
    click.echo("all is well")


def _python(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# Run ---------------------------------------------------------------------------------


@main.command("run")
@click.argument("notebooks", nargs=-1)
@_profile
@_parameters
@_into("figures")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    help="Notebooks at a time; default all cores, or 1 beside a GPU.",
)
@_gpus
@click.option(
    "--studies",
    "kind",
    flag_value="studies",
    default="lessons",
    help="By default all studies, not all lessons.",
)
@_dry_run
def _run(
    notebooks, profile, parameters, output_dir, jobs, kind, dry_run, **options
) -> None:
    """Run notebooks headless, with other values.

    The results go into OUTPUT_DIR/PROFILE/NOTEBOOK, and the gallery is built. NOTEBOOKS
    are paths, names or starts of names (03, studies/03); default all lessons that have
    the profile. Exit code 1 if any fails; a claim that does not hold is a finding, no
    failure.
    """
    from joblib import cpu_count

    root = output_dir / profile
    every = all_notebooks(kind)
    having = [path for path in every if path.stem in profiles(path).get(profile, ())]
    paths = [find(name) for name in notebooks] or having or every
    planned = [Job.of(path, parameters, profile, root / path.stem) for path in paths]
    if not planned:
        raise ValueError(f"no {kind} in this folder; name those that should run")
    if len({job.folder for job in planned}) < len(planned):
        raise ValueError("two notebooks of one name would share a folder")
    if dry_run:
        return _only_say(planned)
    cores = 1 if shutil.which("nvidia-smi") else min(cpu_count(), len(planned))
    execution.run_all(planned, at_a_time=jobs or cores, **options)
    click.echo(f"look at: {tables.gallery(root)}")
    _end(execution.Report(root, planned))


def _end(report: execution.Report) -> None:
    """Say how runs ended; exit with 1 if any failed."""
    click.echo(execution.summary(report))
    if report.failed:
        raise SystemExit(1)


def _only_say(jobs: list[Job]) -> None:
    """Say what would run, what it needs, and how long it took before."""
    for job in jobs:
        seconds = Manifest.read(job.folder).seconds
        last = f"last time {seconds:.0f} s" if seconds else ""
        click.echo(f"{job} {job.parameters}  {last}")
    for notebook in {job.notebook: None for job in jobs}:
        for line in _needs(notebook, jobs[0].profile):
            click.echo(f"{notebook.stem} needs {line}")
    done = [job.status for job in jobs].count("done before")
    click.echo(f"would run {len(jobs) - done} of {len(jobs)}, {done} done before")


def _needs(notebook: Path, profile: str) -> list[str]:
    """Return what a notebook's metadata says that a profile needs.

    Data that uqlab has fetched are here; others have their size.
    """
    about = read_json(notebook)["metadata"].get("uqlab", {}).get("needs", {})
    if profile not in about:
        return []
    show = "from uqlab import data; print(*data.fetched()[1])"
    fetched = _python("-c", show).stdout.split()  # this process imports no networks
    lines = [*about[profile]["notes"]]
    for name, size in about[profile]["data"].items():
        where = "here" if name in fetched else f"{size / 1e6:.0f} MB to fetch"
        lines.append(f"{name}: {where}")
    return lines


@main.command("sweep")
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
@click.option(
    "--keep-stale",
    is_flag=True,
    help="Take runs for done although code or data have changed since.",
)
@_dry_run
def _sweep(notebook, grid, parameters, output_dir, **options) -> None:
    """Run a notebook on every point of a grid.

    The results, computed here or on a cluster, go into
    OUTPUT_DIR/PROFILE/NOTEBOOK.sweep, with a table and the gallery.
    Finished runs are skipped, and the same command again does what is missing. Runs
    that are stale, because the package's code or a data file has changed since, are
    computed anew. Exit code 1 if any run fails.
    """
    report = execution.sweep(notebook, grid, parameters, root=output_dir, **options)
    if options["dry_run"]:
        return _only_say(report.outcomes)
    if len(report.failed) < len(report.outcomes):
        _save(report.folder)
    click.echo(f"look at: {tables.gallery(report.folder.parent)}")
    _end(report)


def _save(folder: Path) -> None:
    """Write the table of a sweep."""
    frame = tables.save(folder)
    rows, columns = frame.shape
    click.echo(f"{rows} runs, {columns} columns: {folder}/table.parquet and .csv")


# A model of the user's ----------------------------------------------------------------

LESSON = "16_bring_your_model"
SAVED = "saved_logits"  # the study that needs no model


@main.command("report")
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
def _report(parameters, profile, output_dir, **brought) -> None:
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
    page, name, values = _report_of(output_dir, **brought)
    if twice := sorted(values.keys() & parameters.keys()):
        raise ValueError(f"{twice[0]}: given by an option and by -p; choose")
    folder = output_dir / name if "alarm" in values else output_dir
    job = Job.of(find(page), values | parameters, profile, folder / page)
    execution.run_all([job])
    if job.status == "ok":
        _show(job.folder, output_dir, name)
    _end(execution.Report(output_dir, [job]))


def _report_of(output_dir, logits, watch, **brought):
    """Return the notebook that runs, the report's name, and the parameters."""
    values = _brought(**brought)
    if bool(values) + bool(logits) + bool(watch) > 1:
        raise ValueError("give one of --logits, --watch and a model")
    if logits:
        return SAVED, "logits", {"logits": logits}
    if not watch:
        return LESSON, "report", values
    alarm, name = output_dir.absolute() / "alarm.json", f"watch_{Path(watch).stem}"
    if not alarm.is_file():
        raise ValueError(f"no {alarm}; first: uqlab report --logits FILE")
    earlier = Manifest.read(output_dir / name / SAVED).parameters.get("watch", watch)
    if earlier != watch:
        raise ValueError(f"{output_dir / name} is the report on {earlier}; rename one")
    return SAVED, name, {"watch": watch, "alarm": str(alarm)}


def _brought(model, weights, dataset, ood, settings):
    """Return what a command line names as parameters of lesson 16."""
    module, _, function = model.partition(":")
    file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    if Path(file).expanduser().is_file():  # a kernel runs in another folder
        model = f"{file}:{function}"
    elif file == module:
        raise ValueError(f"no file {file}; a model is FILE.py:FUNCTION or a folder")
    values = {
        "model": _from_here(model, folders=True),
        "weights": [_from_here(text, folders=True) for text in weights],
        "dataset": _from_here(dataset or ""),
        "ood": [_from_here(text) for text in ood],
        "settings": {name: meant(text) for name, text in settings.items()},
    }
    return {name: value for name, value in values.items() if value}


def _show(run: Path, folder: Path, name: str) -> None:
    """Write a finished run as one HTML file, and print its findings."""
    import pandas

    if (run / "alarm.json").is_file():
        shutil.copy(run / "alarm.json", folder)
    page = folder / f"{name}.html"
    _write_html(run / f"{run.name}.ipynb", page)
    record = Record.read(run)
    table = record.tables["report"]
    frame = pandas.DataFrame(table["data"], table["index"], table["columns"])
    claims = [
        f"[{'x' if c.holds else ' '}] {c.sentence}" for c in record.claims.values()
    ]
    advice = record.numbers["next"]
    lessons = re.search(r"\(\d\d\)", str(advice))
    title = "What to do next" + (" (in brackets: the lesson)" if lessons else "")
    parts = [[frame.to_string()], claims, [title, *advice]]
    parts += [[f"figures and numbers: {run}", f"look at: {page}"]]
    click.echo("\n\n".join("\n".join(lines) for lines in parts if lines))


def _write_html(notebook: Path, page: Path) -> None:
    """Write an executed notebook as HTML that loads nothing from a network."""
    from nbconvert import HTMLExporter  # takes a second
    from traitlets.config import Config

    hidden = {"hide-input", "injected-parameters"}
    fold = {"enabled": True, "remove_input_tags": hidden}
    nothing = {"mathjax_url": "", "require_js_url": "", "jquery_url": ""}
    exporter = HTMLExporter(config=Config(TagRemovePreprocessor=fold), **nothing)
    text, _ = exporter.from_filename(str(notebook))
    lessons = find(LESSON).parent.as_uri()
    write(page, re.sub(r'href="(?=\d\d_\w+\.ipynb")', f'href="{lessons}/', text))


# Look --------------------------------------------------------------------------------


@main.command("gallery")
@_into("figures")
def _gallery(output_dir) -> None:
    """Write one page of all figures and claims, of the runs of all profiles.

    OUTPUT_DIR/index.html shows every figure beside its parameters, its numbers and the
    paper's; runs and sweeps write such a page of their profile.
    """
    click.echo(tables.gallery(output_dir))


@main.command("collect")
@click.argument("sweep")
@_profile
@_into("figures")
@click.option(
    "--table", help="Join the tables recorded under this name, into NAME.csv."
)
def _collect(sweep, profile, output_dir, table) -> None:
    """Write a table of a sweep, one row a run.

    table.parquet and table.csv go into the folder of SWEEP, which is that or a
    notebook. A row holds the run's parameters, the numbers it recorded, whether each
    claim holds, a digest of its code, and its circumstances. With --table, NAME.json
    says what the runs depend on.
    """
    folder = tables.locate(sweep, profile, output_dir)
    _save(folder)
    if table:
        rows = tables.join(folder, table)
        click.echo(f"{rows} rows of {table}: {folder / table}.csv and .json")
