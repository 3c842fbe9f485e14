"""Files that are fetched once, compared with a checksum at every use, and kept."""

import json
from pathlib import Path
from typing import NamedTuple

from uqlab.core.extras import extra


class Remote(NamedTuple):
    """Where a file comes from, and its checksum."""

    checksum: str  # "sha256:..." or "md5:..."
    urls: list[str]  # mirrors, tried in this order


def _registered() -> dict[str, Remote]:
    files = {}
    groups = json.loads(Path(__file__).with_name("files.json").read_text())
    for group in groups:
        for file, checksum in group["files"].items():
            urls = [mirror.format(file=file) for mirror in group["mirrors"]]
            files[group["folder"] + file] = Remote(checksum, urls)
    return files


FILES = _registered()  # by their paths below root


def fetch(file: str, root: Path) -> Path:
    """Return the path of a registered file, downloaded if it is missing or damaged."""
    with extra("notebooks"):
        import pooch

    remote = FILES[file]
    path = root / file
    failures = ""
    for url in remote.urls:
        try:  # the file appears whole and compared, or not at all
            pooch.retrieve(
                url, remote.checksum, path.name, path.parent, progressbar=True
            )
            return path
        except (OSError, ValueError) as error:
            failures += f"\n  {url}: {error}"
    damaged = path.is_file()
    kind = ValueError if damaged else FileNotFoundError
    raise kind(
        f"{path} is {'corrupted' if damaged else 'missing'}, and no mirror delivered "
        f"it:{failures}\nPut the file with the checksum {remote.checksum} there by "
        "hand, or name another folder (root or $UQLAB_DATA)."
    )
