"""A JupyterLab server of its own and pages in headless Chromium: what the browser tests and a benchmark drive."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import papermill
from papermill.parameterize import parameterize_notebook
from playwright.sync_api import Locator, Page, sync_playwright

from uqlab.runs import parameters

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
QUIET = [
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

EXPLORERS = r"(^|[^\w.])widgets\.(?!guess)\w+\("  # the source of a cell that makes one

RUN = """() => { window.ran = (async () => {
  const app = window.jupyterapp, panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await app.commands.execute('notebook:run-all-cells');
  const outputs = panel.content.widgets.filter(cell => cell.model.type === 'code')
    .flatMap(cell => cell.model.outputs.toJSON());
  return outputs.filter(output => output.output_type === 'error')
    .map(output => [output.ename + ': ' + output.evalue, ...output.traceback.slice(-1)].join(' '));
})(); }"""
RAN = """seconds => Promise.race([window.ran, new Promise((_, fail) => {
  setTimeout(() => fail(new Error(`not done after ${seconds} s`)), 1000 * seconds);
})])"""
ASK = """async code => {
  const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel, said = [];
  const future = kernel.requestExecute({code});
  future.onIOPub = message => said.push(message.content.text ?? message.content.evalue ?? '');
  await future.done;
  return said.join('');
}"""
SHOW = """async (pattern) => {
  const content = window.jupyterapp.shell.currentWidget.content;
  const at = content.widgets.findIndex(cell => cell.model.type === 'code'
    && new RegExp(pattern).test(cell.model.sharedModel.getSource()));
  content.activeCellIndex = at;
  await content.scrollToItem(at, 'start');
  return at;
}"""


def chromium() -> str | None:
    """The path of a Chromium or Chrome, playwright's own if it was installed; None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


def small_copy(notebook: Path, folder: Path, **changes: Any) -> str:
    """Write the notebook, its parameters `tiny` and `changes`, into folder/notebooks; returns its path from folder."""
    results = folder / "results" / notebook.stem
    results.mkdir(parents=True, exist_ok=True)
    nb = papermill.iorw.load_notebook_node(str(notebook))
    nb = parameterize_notebook(
        nb,
        parameters.overrides(notebook, "tiny", changes) | {"output_dir": str(results)},
    )
    (folder / "notebooks").mkdir(exist_ok=True)
    papermill.iorw.write_ipynb(nb, str(folder / "notebooks" / notebook.name))
    return f"notebooks/{notebook.name}"


@contextmanager
def server(folder: Path, root: Path | None = None) -> Iterator[str]:
    """JupyterLab with `root` as its root, or `uqlab lab` without; yields the address of a page, with {path} in it.

    On 127.0.0.1 and with a token. Its settings and its log lie in `folder`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, home = (
        secrets.token_hex(16),
        folder / ".jupyter",
    )  # hidden from the page's file browser
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
    environment = os.environ | {
        f"JUPYTER_{name}": str(home / place) for name, place in places.items()
    }
    environment |= {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "OMP_WAIT_POLICY": "passive",
    }
    environment |= {"OMP_NUM_THREADS": "1"}  # two kernels at a time
    environment |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    start = (
        ["jupyterlab", f"--ServerApp.root_dir={root}"]
        if root
        else ["uqlab.runs", "lab"]
    )
    command = [
        sys.executable,
        "-m",
        *start,
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
    ]
    command += [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
    ]
    command += [f"--IdentityProvider.token={token}"]
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(
                    f"{address}/api/status?token={token}", timeout=5
                ).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"JupyterLab did not start:\n{(home / 'server.log').read_text()}"
                    ) from error
                time.sleep(0.2)
        yield f"{address}/{{path}}?reset&token={token}"
    finally:
        process.terminate()  # and with it every kernel
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def browser(path: str) -> Iterator[Any]:
    """A headless Chromium, its program at `path`."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", *QUIET]
        )
        try:
            yield found
        finally:
            found.close()


class Lab:
    """One JupyterLab page, and what went wrong in it."""

    def __init__(self, page: Page, address: str):
        self.page, self.address = page, address
        self.errors: list[str] = []
        page.set_default_timeout(180_000)
        page.on("pageerror", lambda error: self.errors.append(f"{error}"))
        page.on(
            "console",
            lambda message: (
                message.type == "error" and self.errors.append(message.text)
            ),
        )

    def open(self, path: str) -> None:
        self.page.goto(self.address.format(path=f"lab/tree/{path}"))
        self.page.wait_for_function(
            "window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length"
        )

    def theme(self, name: str) -> None:
        self.page.evaluate(
            "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})",
            THEMES[name],
        )
        self.page.wait_for_selector(
            f"body[data-jp-theme-name='{THEMES[name]}']", state="attached"
        )

    def start(self) -> None:
        """Begin to run every cell."""
        self.page.evaluate(RUN)

    def finish(self, seconds: float = 400) -> list[str]:
        """Wait until every cell has run; returns the errors that cells raised."""
        return self.page.evaluate(RAN, seconds)

    def show(self, pattern: str, what: str) -> Locator:
        """Scroll to the first cell whose source matches; returns what of the kind is below it."""
        self.page.bring_to_front()
        assert self.page.evaluate(SHOW, pattern) >= 0, f"no cell has {pattern}"
        return self.page.locator(f".jp-Cell.jp-mod-active {what}")

    def ask(self, code: str) -> str:
        """What the code prints in the page's kernel."""
        return self.page.evaluate(ASK, code)

    def shut_kernel(self) -> None:
        """Stop the kernel, once it runs: a server that ends while one of its kernels starts waits for a minute."""
        self.page.evaluate("""async () => {
          const session = jupyterapp.shell.currentWidget.sessionContext;
          await session.ready;
          await session.session?.kernel?.info;
          await session.shutdown();
        }""")

    def close(self) -> None:
        self.shut_kernel()
        self.page.close()
