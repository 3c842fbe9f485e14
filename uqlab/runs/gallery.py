"""One page for all runs: each figure beside its caption, parameters, numbers and the paper's figure and numbers.

The page works from disk: pictures and notebooks by relative links, style and script inside.
"""

import html
import json
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from uqlab.core.files import read_json, write
from uqlab.runs import tables
from uqlab.runs.parameters import cells

PICTURES = (".png", ".svg")
PAPER = "paper_and_this_run"  # the table that compares; it comes first


def build(root: Path, profiles: Sequence[str] = ()) -> Path:
    """Write index.html for the result folders in a folder such as figures/quick, and return its path.

    profiles: folders in `root` to show instead, such as those of figures; the page then filters by profile too.
    """
    sections, notebooks = [], {}
    for profile in profiles or [""]:
        parent = root / profile
        names = {
            path.name.removesuffix(".failed") for path in parent.iterdir() if path.is_dir() and path.name[0] != "."
        }
        for name in sorted(names):
            notebook = name.removesuffix(".sweep")
            notebooks[notebook] = None
            content = (_run if name == notebook else _sweep)(root, parent, name)
            key, shown = f"{profile}/{name}".lstrip("/"), f"data-notebook={_quoted(notebook)}"
            sections.append(f"<section id={_quoted(key)} {shown} data-profile={_quoted(profile)}>{content}</section>")
    links = [("notebook", "", "all"), *(("notebook", name, name.replace("_", " ")) for name in sorted(notebooks))]
    if profiles:
        links = [("profile", "", "all profiles"), *(("profile", name, name) for name in profiles), *links]
    chips = "".join(
        f'<a href="#{_url(name)}" data-{kind}={_quoted(name)}>{_text(text)}</a>' for kind, name, text in links
    )
    pictures = sum(section.count("<figure") for section in sections)
    counts = f"{_count(len(notebooks), 'notebook')}, {_count(pictures, 'figure')}"
    shown = f"profiles {', '.join(profiles)}" if profiles else f"profile {root.name}"
    page = _PAGE.replace("{{title}}", _text(f"uqlab: {root.name}")).replace("{{profile}}", _text(f"{shown}: {counts}"))
    write(root / "index.html", page.replace("{{links}}", chips).replace("{{runs}}", "\n".join(sections)))
    return root / "index.html"


def found(root: Path) -> list[str]:
    """Return the profiles of which runs lie in a folder such as figures."""
    patterns = ("*/manifest.json", "*.failed", "*.sweep")
    return sorted(path.name for path in root.iterdir() if any(next(path.glob(each), None) for each in patterns))


def _run(root: Path, parent: Path, name: str) -> str:
    """Return the content of one notebook's section: figures and tables, beside them parameters and numbers."""
    failure = parent / f"{name}.failed"
    folder = parent / name if (parent / name).is_dir() else failure
    manifest = read_json(folder / "manifest.json")
    missing = [file for file in _dict(manifest.get("files")) if not (folder / file).is_file()]
    problem = ""
    if failure.is_dir():
        kept = "" if folder == failure else "; below is the result of an earlier run"
        problem = f"The last run failed{kept}."
    elif not manifest.get("files"):
        problem = "Incomplete: manifest.json is missing or broken."
    elif missing:
        problem = f"Incomplete: {', '.join(missing)} missing."
    links = " ".join(_link(path, root, f"the failed {path.name}") for path in failure.glob("*.ipynb"))
    return f"""
<h2>{_text(_title(folder) or name)}</h2>
<p class="meta">{_text(_circumstances(manifest))}</p>
{_problem(problem, failure)}
{_content(root, folder, manifest, links if folder != failure else "")}"""


def _content(root: Path, folder: Path, manifest: dict[str, Any], links: str = "") -> str:
    """Return what a result folder holds."""
    results = read_json(folder / "results.json")
    recorded = _dict(results.get("tables"))
    order = sorted(recorded, key=lambda name: name != PAPER)
    files = [next(folder.glob("*.ipynb"), None), folder / "results.json", folder / "manifest.json"]
    links = " ".join([*(_link(path, root, path.name) for path in files if path and path.is_file()), links])
    return f"""<div class="run"><div class="found">
<div class="figures">{"".join(_figures(root, folder, _dict(results.get("figures"))))}</div>
{"".join(_table(name, _dict(recorded[name])) for name in order)}
</div><aside>
{_pairs("Parameters", _dict(manifest.get("parameters")))}
{_pairs("Numbers", _dict(results.get("numbers")))}
{_pairs("Run", _provenance(manifest))}
<p class="files">{links}</p>
</aside></div>"""


def _problem(text: str, failure: Path) -> str:
    if not text:
        return ""
    with suppress(OSError):
        text += "\n" + (failure / "error.txt").read_text(encoding="utf-8")
    return f'<pre class="problem">{_text(text)}</pre>'


def _sweep(root: Path, parent: Path, name: str) -> str:
    """Return the content of a sweep's section: a table of all runs, then each of them, folded."""
    sweep = parent / name
    runs = tables.read(sweep)
    varied = [p for p in runs.parameters if len({json.dumps(row.get(p)) for row in runs.rows}) > 1]
    columns = [*varied, *runs.numbers, "run_seconds"]
    data = [[row.get(column) for column in columns] for row in runs.rows]
    ran = []
    for row in runs.rows:
        folder, label = sweep / row["run"], ", ".join(f"{p} = {_short(row.get(p))}" for p in varied)
        manifest = read_json(folder / "manifest.json")
        content = f'<p class="meta">{_text(_circumstances(manifest))}</p>{_content(root, folder, manifest)}'
        ran.append(f"<details><summary>{_text(label or 'the only run')}</summary>{content}</details>")
    for folder in sorted(sweep.glob("*.failed")):
        notebook = next(folder.glob("*.ipynb"), None)
        about = _dict(_dict(read_json(notebook).get("metadata") if notebook else {}).get("papermill"))
        label = ", ".join(f"{p} = {_short(v)}" for p, v in _dict(about.get("parameters")).items() if p != "output_dir")
        link = _link(notebook, root, notebook.name) if notebook else ""
        content = f'{_problem("This run failed.", folder)}<p class="files">{link}</p>'
        ran.append(f"<details><summary>failed: {_text(label or folder.stem)}</summary>{content}</details>")
    left_out = f"{_count(len(runs.left_out), 'run')} left out: {'; '.join(runs.left_out[:5])}" if runs.left_out else ""
    title = _title(sweep / runs.rows[0]["run"]) if runs.rows else name
    files = " ".join(_link(path, root, path.name) for path in sorted(sweep.glob("table.*")))
    return f"""
<h2>{_text(title)}: {_count(len(runs.rows), "run")}</h2>
<p class="meta files">{files}</p>
{_problem(left_out, sweep)}
{_table("", {"columns": columns, "data": data, "index": [row["run"] for row in runs.rows]}) if data else ""}
<div class="sweep">{"".join(ran)}</div>"""


def _figures(root: Path, folder: Path, described: dict[str, Any]) -> Iterable[str]:
    """Yield the folder's figures, those with a caption first, in the order in which they were saved."""
    found = {path.stem: path for suffix in reversed(PICTURES) for path in sorted(folder.glob(f"*{suffix}"))}
    for name in [*(name for name in described if name in found), *(name for name in found if name not in described)]:
        picture, about = found[name], _dict(described.get(name))
        caption, paper = str(about.get("caption") or ""), str(about.get("paper") or "")
        others = [path for path in sorted(folder.glob("*.*")) if path.stem == name and path != picture]
        links = " ".join(_link(path, root, path.suffix[1:].upper()) for path in others if path.suffix != ".json")
        width, height = _size(picture)
        size = f' width="{width}" height="{height}"' if width else ""
        style = f' style="--width: {width}px"' if width else ""
        source = f"<b>{_text(paper)}</b>" if paper else ""
        url, alt = _relative(picture, root), _text(caption or name)
        yield (
            f'<figure{style}><a class="picture" href="{url}"><img src="{url}" alt="{alt}" loading="lazy"{size}></a>'
            f'<figcaption><p>{alt}</p><p class="source">{source} {links}</p></figcaption></figure>'
        )


def _size(picture: Path) -> tuple[int, int]:
    """Return the width and height of a PNG in CSS pixels, 100 per inch at 200 dpi; (0, 0) if they cannot be read."""
    with suppress(OSError, struct.error), picture.open("rb") as file:
        head = file.read(24)
        if head.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", head[16:24])
            return width // 2, height // 2
    return 0, 0


def _table(name: str, table: dict[str, Any]) -> str:
    """Return a recorded DataFrame; columns that hold text align left, numbers right."""
    rows = table.get("data") or []
    text = {i for row in rows for i, value in enumerate(row) if isinstance(value, str)}

    def line(label: str, tag: str, values: list) -> str:
        kinds = (" class=text" if i in text else "" for i in range(len(values)))
        return f"<tr><th>{_text(label)}</th>" + "".join(
            f"<{tag}{kind}>{_text(_label(value))}</{tag}>" for kind, value in zip(kinds, values, strict=True)
        )

    head = line(", ".join(table.get("index_names") or []), "th", table.get("columns") or [])
    labels = map(_label, table.get("index") or [""] * len(rows))
    body = "".join(line(label, "td", row) for label, row in zip(labels, rows, strict=False))
    head = f"<caption>{_text(name.replace('_', ' '))}</caption><thead>{head}</thead>"
    return f'<div class="table"><table>{head}<tbody>{body}</tbody></table></div>'


def _label(label: Any) -> str:
    return ", ".join(map(_short, label)) if isinstance(label, list) else _short(label)


def _short(value: Any) -> str:
    """Return a value as a reader wants it: four significant digits, an absent one as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_short(item)}" for key, item in value.items())
    return str(value)


def _pairs(title: str, values: dict[str, Any]) -> str:
    """Return names and values as a folding list; a long value folds on its own."""
    if not values:
        return ""
    rows = []
    for name, value in values.items():
        short = _text(_short(value))
        if len(short) > 60 and isinstance(value, list | dict):
            short = f"<details><summary>{_count(len(value), 'value')}</summary>{short}</details>"
        rows.append(f'<div><dt>{_text(name)}</dt><dd title="{_text(json.dumps(value)[:500])}">{short}</dd></div>')
    return f"<details open><summary>{title}</summary><dl>{''.join(rows)}</dl></details>"


def _circumstances(manifest: dict[str, Any]) -> str:
    seconds = manifest.get("seconds")
    took = ""
    if isinstance(seconds, int | float):
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    facts = [manifest.get("notebook"), took, manifest.get("device"), str(manifest.get("started") or "")[:10]]
    return " · ".join(str(fact) for fact in facts if fact)


def _provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    git, packages = _dict(manifest.get("git")), _dict(manifest.get("packages"))
    commit = str(git.get("commit") or "")[:10] + (" + changes" if git.get("dirty") else "")
    facts = {
        "commit": commit,
        "uqlab": manifest.get("uqlab"),
        "torch": packages.get("torch"),
        "python": manifest.get("python"),
        "threads": manifest.get("threads"),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _title(folder: Path) -> str:
    """Return the first heading of the notebook in a folder."""
    with suppress(ValueError, OSError, LookupError, TypeError, StopIteration):
        for cell in cells(next(folder.glob("*.ipynb"))):
            line = "".join(cell["source"]).lstrip().split("\n")[0]
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line[2:].strip()
    return ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return html.escape(str(value))


def _quoted(value: str) -> str:
    return f'"{_text(value)}"'


def _url(path: str) -> str:
    return html.escape(quote(path))


def _relative(path: Path, root: Path) -> str:
    return _url(path.relative_to(root).as_posix())


def _link(path: Path, root: Path, text: str) -> str:
    return f'<a href="{_relative(path, root)}">{_text(text)}</a>'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root { color-scheme: light dark; --ink: #1f2430; --soft: #667085; --line: #e3e5ea; --page: #fbfbf9; --card: #fff;
  --link: #2563a8; --bad: #b42318; --tint: #f2f4f7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --soft: #98a2b3; --line: #2c323d; --page: #14171c;
  --card: #1b1f26; --link: #84b9f5; --bad: #f97066; --tint: #20252e; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 4rem; }
body { margin: 0 auto; padding: 2.5rem 1.5rem 5rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
h1, h2 { font-weight: 600; letter-spacing: -.01em; line-height: 1.25; text-wrap: balance; }
h1 { margin: 0; font-size: 1.75rem; }
h2 { margin: 0; font-size: 1.4rem; }
header p, .meta { margin: .35rem 0 0; color: var(--soft); font-size: .9rem; }
nav { position: sticky; top: 0; z-index: 1; display: flex; gap: .4rem; margin: 1.25rem -1.5rem 0; padding: .6rem 1.5rem;
  overflow-x: auto; background: var(--page); border-bottom: 1px solid var(--line); font-size: .85rem; }
nav a { flex: none; padding: .25rem .75rem; border: 1px solid var(--line); border-radius: 99px; color: var(--soft); }
nav a:hover { color: var(--ink); text-decoration: none; }
nav a[data-profile] { border-style: dashed; }
nav a[aria-current] { background: var(--ink); border-color: var(--ink); color: var(--page); }
section { padding: 2.5rem 0; }
section:not(:last-of-type) { border-bottom: 1px solid var(--line); }
.run { display: grid; grid-template-columns: minmax(0, 1fr) 17rem; gap: 2rem; margin-top: 1.25rem; }
.figures { display: flex; flex-wrap: wrap; align-items: flex-start; gap: 1rem; }
figure { margin: 0; width: calc(var(--width, 100%) + 1.5rem + 2px); max-width: 100%; background: var(--card);
  border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.picture { display: block; padding: .75rem; background: #fff; }
.picture img { display: block; margin: 0 auto; max-width: 100%; height: auto; }
figcaption { padding: .7rem 1rem .8rem; border-top: 1px solid var(--line); font-size: .9rem; }
figcaption p { margin: 0; }
figcaption .source:not(:empty) { margin-top: .25rem; color: var(--soft); font-size: .8rem; }
.source a, .files a { margin-right: .6rem; }
.source b { font-weight: 500; margin-right: .6rem; }
.table { margin-top: 1.5rem; overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { padding-bottom: .4rem; text-align: left; font-weight: 600; }
th, td { padding: .3rem 0 .3rem 1.25rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; font-weight: 500; }
th:first-child { padding-left: 0; }
th:first-child, .text { text-align: left; }
thead th { color: var(--soft); white-space: nowrap; }
td { font-weight: 400; }
aside { position: sticky; top: 4rem; align-self: start; max-height: calc(100vh - 5rem); overflow-y: auto;
  font-size: .85rem; }
aside > details { padding: .6rem 0; border-top: 1px solid var(--line); }
summary { cursor: pointer; }
aside > details > summary { font-weight: 600; }
dl { margin: .4rem 0 0; }
dl div { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; }
dt { color: var(--soft); overflow-wrap: anywhere; }
dd { margin: 0; max-width: 65%; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
nav a[data-profile] + a[data-notebook] { margin-left: 1rem; }
.sweep > details { margin-top: .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
.sweep > details > summary { font-variant-numeric: tabular-nums; }
aside > .files { margin: 0; padding-top: .6rem; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
.problem { margin: 1rem 0 0; padding: .8rem 1rem; overflow-x: auto; background: var(--tint);
  border-left: 3px solid var(--bad); border-radius: 4px; font-size: .8rem; line-height: 1.45; }
@media (max-width: 60rem) { .run { grid-template-columns: minmax(0, 1fr); }
  aside { position: static; max-height: none; } }
@media (max-width: 40rem) { body { padding: 1.5rem 1rem 3rem; } nav { margin-inline: -1rem; padding-inline: 1rem; }
  figure { width: 100%; } }
@media print { nav { display: none; } section { break-before: page; } }
</style>
</head>
<body>
<header><h1>What the notebooks found</h1><p>{{profile}}</p></header>
<nav aria-label="Filters">{{links}}</nav>
<main>
{{runs}}
</main>
<script>
const sections = [...document.querySelectorAll("section")], links = [...document.querySelectorAll("nav a")];
function choose() {
  const wanted = decodeURIComponent(location.hash.slice(1)).split("&");
  const chosen = { notebook: wanted[0], profile: wanted[1] ?? "" };
  for (const kind in chosen)
    if (!sections.some((run) => run.dataset[kind] === chosen[kind])) chosen[kind] = "";
  for (const run of sections) run.hidden = Object.keys(chosen).some((k) => chosen[k] && run.dataset[k] !== chosen[k]);
  for (const link of links) {
    const kind = "profile" in link.dataset ? "profile" : "notebook", to = { ...chosen, [kind]: link.dataset[kind] };
    link.href = "#" + encodeURIComponent(to.notebook) + (to.profile ? "&" + encodeURIComponent(to.profile) : "");
    link.toggleAttribute("aria-current", link.dataset[kind] === chosen[kind]);
  }
}
if (matchMedia("(max-width: 60rem)").matches)
  for (const list of document.querySelectorAll("aside > details")) list.open = false;
addEventListener("hashchange", choose);
choose();
</script>
</body>
</html>
"""
