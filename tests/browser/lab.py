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

from playwright.sync_api import Locator, Page, sync_playwright

QUIET = "gpu background-networking component-update sync".split()  # noqa: SIM905
OPEN = "window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length"
RUN = """async () => {
  const app = window.jupyterapp, panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await app.commands.execute('notebook:run-all-cells');
  const outputs = panel.content.widgets.filter(cell => cell.model.type === 'code')
    .flatMap(cell => cell.model.outputs.toJSON());
  return outputs.filter(output => output.output_type === 'error').map(output => output.evalue);
}"""
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
}"""
STOP = """async () => {
  const session = jupyterapp.shell.currentWidget.sessionContext;
  await session.ready;
  await session.session?.kernel?.info;
  await session.shutdown();
}"""


def chromium() -> str | None:
    """The path of a Chromium or Chrome, playwright's own if it was installed; None where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


@contextmanager
def server(folder: Path, *start: str) -> Iterator[str]:
    """What is started, its settings and its log in `folder`; yields the address of a page, with {path} in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, home = secrets.token_hex(16), folder / ".jupyter"
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    places = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data"}
    places |= {"JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython"}
    places |= {"JUPYTERLAB_SETTINGS_DIR": "settings"}
    places |= {"JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    environment = os.environ | {k: str(home / place) for k, place in places.items()}
    environment |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *start, "--no-browser"]
    command += ["--allow-root", "--expose-app-in-browser", "--ServerApp.port_retries=0"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += [f"--IdentityProvider.token={token}"]
    with (home / "server.log").open("wb") as log:
        how = {"env": environment, "stdout": log, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, **how)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                status = f"{address}/api/status?token={token}"
                urllib.request.urlopen(status, timeout=5).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (home / "server.log").read_text()
                    raise RuntimeError(f"JupyterLab did not start:\n{said}") from error
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
    options = ["--no-sandbox", *(f"--disable-{name}" for name in QUIET)]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=options)
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

    def open(self, path: str) -> None:
        """Open a notebook and run every cell."""
        self.page.goto(self.address.format(path=f"lab/tree/{path}"))
        self.page.wait_for_function(OPEN)
        assert self.page.evaluate(RUN) == []

    def show(self, pattern: str, what: str) -> Locator:
        """Scroll to the first cell whose source matches; returns what of the kind is below it."""
        self.page.evaluate(SHOW, pattern)
        return self.page.locator(f".jp-Cell.jp-mod-active {what}")

    def ask(self, code: str) -> str:
        """What the code prints in the page's kernel."""
        return self.page.evaluate(ASK, code)

    def close(self) -> None:
        """Stop the kernel too: a server that ends while one of its kernels starts waits for a minute."""
        self.page.evaluate(STOP)
        self.page.close()
