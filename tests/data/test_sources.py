"""Fetched data sets: downloads against a server on this machine."""

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from small_files import IMAGES, LABELS, MNIST, below, digest, same

from uqlab import data
from uqlab.data import datasets
from uqlab.data.readers import FILES


@pytest.fixture
def mirror():
    """A server on this machine that delivers what is put into .files, and the address where nothing listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked.append(self.path)
            content = server.files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.url = (
        {},
        [],
        f"http://127.0.0.1:{server.server_port}",
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_registry_names_one_checksum_per_file_and_two_mirrors_for_mnist():
    for file, remote in FILES.items():
        assert re.fullmatch("sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", remote.checksum)
        name = "checkpoint.th" if "ensemble" in file else file.rpartition("/")[2]
        assert all(url.endswith(f"/{name}") for url in remote.urls)
        assert len(remote.urls) > ("mnist/" in file[:14] and file[0] in "mf")
    assert len({remote.checksum for remote in FILES.values()}) == len(FILES)
    named = {
        "mnist",
        "fashion-mnist",
        "kmnist",
        "dirty-mnist",
        "cifar10",
        "cifar100",
        "svhn",
        "sst2",
        "agnews",
    }
    assert named <= {*data.names()}


def test_fetched_once_from_the_first_mirror_that_answers(tmp_path, mirror, register):
    mirror.files = {"/" + file: content for file, content in MNIST.items()}
    register(MNIST, mirror.nowhere, mirror.url + "/gone", mirror.url)
    d = data.load("mnist", root=tmp_path)
    assert torch.equal(d.inputs, torch.from_numpy(IMAGES)[:, None].float() / 255)
    assert d.labels.tolist() == LABELS.tolist()
    assert below(tmp_path) == MNIST
    assert (
        len(mirror.asked) == 4
    )  # each file: refused, not found at one mirror, delivered by another
    assert same(d, data.load("mnist", root=tmp_path))
    assert len(mirror.asked) == 4


def test_a_corrupted_download_is_refused_and_leaves_nothing(tmp_path, mirror, register):
    images, labels = MNIST
    mirror.files = {
        "/bad/" + images: MNIST[images][:-1],
        "/" + images: MNIST[images],
        "/" + labels: MNIST[labels],
    }
    register(MNIST, mirror.url + "/bad")
    with pytest.raises(
        FileNotFoundError, match=f"(?s){images}.*expected {digest(MNIST[images])}"
    ):
        data.load("mnist", root=tmp_path)
    assert below(tmp_path) == {}
    register(MNIST, mirror.url + "/bad", mirror.url)
    assert len(data.load("mnist", root=tmp_path)) == 5
    assert below(tmp_path) == MNIST


def test_a_corrupted_file_is_fetched_again_or_refused(tmp_path, mirror, register):
    images = next(iter(MNIST))
    (tmp_path / "mnist").mkdir()
    for file, content in MNIST.items():
        (tmp_path / file).write_bytes(content)
    register(MNIST, mirror.nowhere)
    assert len(data.load("mnist", root=tmp_path)) == 5  # no network needed
    (tmp_path / images).write_bytes(MNIST[images][:-1])
    checksum = digest(MNIST[images])
    with pytest.raises(
        ValueError, match=f"(?s){images} is corrupted.*{checksum}.*by hand"
    ):
        data.load("mnist", root=tmp_path)
    register(MNIST, mirror.url)
    mirror.files = {"/" + images: MNIST[images]}
    assert len(data.load("mnist", root=tmp_path)) == 5
    assert (tmp_path / images).read_bytes() == MNIST[images]
    assert mirror.asked == ["/" + images]


def test_no_network_says_what_to_do(tmp_path, mirror, register, monkeypatch):
    register(MNIST, mirror.nowhere)
    monkeypatch.setenv("UQLAB_DATA", str(tmp_path))
    file = next(iter(MNIST))
    expected = f"(?s){file} is missing.*{mirror.nowhere}.*{digest(MNIST[file])}"
    with pytest.raises(FileNotFoundError, match=expected) as error:
        data.load("mnist")
    assert "mnist-mini" in error.value.__notes__[0]  # needs no download


def test_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("UQLAB_DATA", raising=False)
    package = tmp_path / "uqlab"
    monkeypatch.setattr(datasets, "__file__", str(package / "data" / "datasets.py"))
    monkeypatch.setattr("pooch.os_cache", lambda name: f"cache of {name}")
    assert data.fetched()[0] == Path("cache of uqlab")
    (tmp_path / "data").mkdir()
    (tmp_path / ".git").mkdir()
    assert data.fetched()[0] == tmp_path / "data"
    monkeypatch.setenv("UQLAB_DATA", "shared")
    assert data.fetched()[0] == Path("shared")
    assert data.fetched("mine")[0] == Path("mine")
