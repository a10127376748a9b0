"""The data sets, and downloads from a test server that can misbehave."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import pickle
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torchvision import transforms

import runs
from workshop.data import chess, cifar10, load_dataset, mnist
from workshop.errors import UserError


def test_the_digits_are_those_of_scikit_learn():
    train_set, test_set = load_dataset("digits")
    assert (len(train_set), len(test_set)) == (1437, 360)
    image, label = train_set[0]
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.float32
    assert 0 <= image.min() < image.max() <= 1
    assert isinstance(label, int)
    labels = sorted(train_set.labels + test_set.labels)
    assert labels == sorted(load_digits().target.tolist())
    # Enlarging 8x8 to 28x28 keeps the mean brightness, so the sorted means match those of the originals.
    means = sorted(image.mean() / 255 for part in (train_set, test_set) for image in part.images)
    np.testing.assert_allclose(means, sorted(load_digits().images.mean(axis=(1, 2)) / 16), atol=0.02)


def test_the_split_of_the_digits_is_fixed_and_disjoint():
    train_set, test_set = load_dataset("digits")
    digest = hashlib.sha256(
        np.concatenate([train_set.images, test_set.images]).tobytes() + bytes(train_set.labels)
    ).hexdigest()
    assert digest == "7d2df8934a1a12aabcc74d4b0aade46abd859aec4cd2da16901cd5d6729df2ae"
    seen = {image.tobytes() for image in train_set.images}
    assert not any(image.tobytes() in seen for image in test_set.images)
    assert set(test_set.labels) == set(range(10))


def test_a_transform_receives_a_grey_pil_image():
    train_set, _ = load_dataset(
        "digits", transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    )
    plain, _ = load_dataset("digits")
    torch.testing.assert_close(train_set[5][0], plain[5][0] * 2 - 1)
    _, sizes = load_dataset("digits", lambda image: (image.mode, image.size))
    assert sizes[0][0] == ("L", (28, 28))


def test_an_unknown_data_set_is_refused():
    with pytest.raises(UserError, match="unknown data set 'cifar'; choose from: digits, mnist, cifar10"):
        load_dataset("cifar")


def idx(array: np.ndarray) -> bytes:
    """Return an array of unsigned bytes in the IDX format of MNIST: http://yann.lecun.com/exdb/mnist/"""
    return (
        bytes([0, 0, 8, array.ndim])
        + b"".join(size.to_bytes(4, "big") for size in array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def archives(monkeypatch):
    """Four small files in the format of MNIST; the table of MNIST describes these files instead."""
    random = np.random.RandomState(0)
    contents = {}
    for part, count in (("train", 50), ("t10k", 20)):
        contents[f"{part}-images-idx3-ubyte.gz"] = idx(random.randint(0, 256, (count, 28, 28)))
        contents[f"{part}-labels-idx1-ubyte.gz"] = idx(random.randint(0, 10, count))
    packed = {name: gzip.compress(content) for name, content in contents.items()}
    table = tuple(
        mnist.Archive(a.name, hashlib.sha256(packed[a.name]).hexdigest(), len(contents[a.name])) for a in mnist.ARCHIVES
    )
    monkeypatch.setattr(mnist, "ARCHIVES", table)
    return packed


@pytest.fixture
def server():
    """A function that starts a server with a given misbehaviour and returns its address and the list of requests."""
    started, resumed = [], []

    def serve(files: dict[str, bytes], behaviour="good"):
        requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rsplit("/", 1)[-1]
                requests.append(name)
                body = files.get(name)
                if body is None or behaviour == "missing":
                    self.send_error(404)
                    return
                if behaviour == "corrupt":
                    body = body[:-20] + bytes(20)
                asked = self.headers.get("Range")  # bytes=100-
                first = int(asked[len("bytes=") : -1]) if asked and behaviour != "no ranges" else 0
                resumed.append(first)
                if first >= len(body) > 0:
                    self.send_error(416)
                    return
                self.send_response(206 if first else 200)
                self.send_header("Content-Length", str(len(body) - first))
                self.end_headers()
                self.wfile.write(body[first : len(body) // 2] if behaviour == "truncated" else body[first:])

            def log_message(self, *_):
                pass

        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        started.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}/mnist/", requests

    serve.resumed = resumed  # the first byte of each answer
    yield serve
    for httpd in started:
        httpd.shutdown()
        httpd.server_close()


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_data_set_is_fetched_only_once(archives, server, tmp_path, monkeypatch):
    url, requests = server(archives)
    assert mnist.fetch(tmp_path, [url]) == 4
    assert left_in(tmp_path) == sorted(f"MNIST/raw/{name.removesuffix('.gz')}" for name in archives)
    assert mnist.fetch(tmp_path, [url]) == 0
    assert len(requests) == 4
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    train_set, test_set = load_dataset("mnist")
    assert (len(train_set), len(test_set)) == (50, 20)
    assert train_set[0][0].shape == (1, 28, 28)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("corrupt", "SHA-256 differs"),
        ("missing", "HTTP status 404"),
    ],
)
def test_a_wrong_file_is_deleted_and_the_next_mirror_is_tried(behaviour, message, archives, server, tmp_path):
    bad, _ = server(archives, behaviour)
    with pytest.raises(UserError, match=f"could not fetch train-images-idx3-ubyte.gz.*({message})"):
        mnist.fetch(tmp_path, [bad])
    assert left_in(tmp_path) == []
    good, _ = server(archives)
    assert mnist.fetch(tmp_path, [bad, good]) == 4, "the next mirror was not used"


@pytest.mark.parametrize("next_time", ["good", "no ranges"])
def test_an_interrupted_download_resumes(next_time, archives, server, tmp_path):
    name, content = next(iter(archives.items()))
    url, _ = server(archives, "truncated")
    with pytest.raises(UserError, match=f"could not fetch {name}.*; the downloaded part stays in .*{name}.part"):
        mnist.fetch(tmp_path, [url])
    kept = (tmp_path / f".{name}.part").stat().st_size
    assert len(content) // 4 < kept
    url, _ = server(archives, next_time)
    assert mnist.fetch(tmp_path, [url]) == 4
    assert server.resumed == [0, kept if next_time == "good" else 0, 0, 0, 0]
    assert left_in(tmp_path) == sorted(f"MNIST/raw/{name.removesuffix('.gz')}" for name in archives)


def test_a_complete_download_is_unpacked_without_a_second_download(archives, server, tmp_path):
    name, content = next(iter(archives.items()))
    (tmp_path / f".{name}.part").write_bytes(content)
    url, _ = server(archives)
    assert mnist.fetch(tmp_path, [url]) == 4
    assert server.resumed == [len(content), 0, 0, 0]


def test_a_partial_download_of_a_different_file_starts_again(archives, server, tmp_path):
    name = next(iter(archives))
    (tmp_path / f".{name}.part").write_bytes(bytes(100))
    url, _ = server(archives)
    assert mnist.fetch(tmp_path, [url, url]) == 4
    assert server.resumed == [100, 0, 0, 0, 0]


def test_a_truncated_file_is_fetched_again(archives, server, tmp_path):
    url, requests = server(archives)
    mnist.fetch(tmp_path, [url])
    victim = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    os.truncate(victim, 100)
    assert [archive.name for archive in mnist.missing_files(tmp_path)] == ["t10k-images-idx3-ubyte.gz"]
    assert mnist.fetch(tmp_path, [url]) == 1
    assert requests[4:] == ["t10k-images-idx3-ubyte.gz"]
    assert mnist.missing_files(tmp_path) == []


def test_several_fetches_at_once_succeed(archives, server, tmp_path):
    url, _ = server(archives)
    problems = []

    def fetch():
        try:
            mnist.fetch(tmp_path, [url])
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert mnist.missing_files(tmp_path) == []
    assert all(name.startswith("MNIST/raw/") for name in left_in(tmp_path))


workshop = functools.partial(subprocess.run, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("behaviour", ["truncated", "corrupt", "missing"])
def test_the_fetch_command_reports_a_failed_download_in_one_line(behaviour, archives, server, tmp_path):
    url, _ = server(archives, behaviour)
    done = workshop(
        [sys.executable, "-m", "workshop", "fetch", "mnist", "--mirror", url],
        cwd=tmp_path,
        env=runs.environment(WORKSHOP_DATA=tmp_path / "data"),
    )
    assert done.returncode == 2
    assert [line[:9] for line in done.stderr.splitlines()] == ["fetching ", "workshop:"]
    assert [name for name in left_in(tmp_path) if not name.endswith(".part")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["imagenet"], "'imagenet' cannot be fetched; choose from: mnist, cifar10"),
        (
            ["mnist", "--mirror", "nowhere"],
            "could not fetch train-images-idx3-ubyte.gz; nowhere/train-images-idx3-ubyte.gz: MissingSchema",
        ),
    ],
)
def test_the_fetch_command_refuses_wrong_arguments(arguments, message, tmp_path):
    done = workshop(
        [sys.executable, "-m", "workshop", "fetch", *arguments], env=runs.environment(WORKSHOP_DATA=tmp_path / "data")
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_fetch_command_reports_a_folder_that_is_not_writable(tmp_path):
    (tmp_path / "file").touch()
    done = workshop(
        [sys.executable, "-m", "workshop", "fetch", "mnist"], env=runs.environment(WORKSHOP_DATA=tmp_path / "file")
    )
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr


def test_truncated_files_in_the_data_folder_are_not_used_for_training(tmp_path, monkeypatch):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in mnist.ARCHIVES:
        (raw / archive.name.removesuffix(".gz")).write_bytes(b"cut short")
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(UserError, match="4 of 4 files missing or cut short"):
        load_dataset("mnist")


@pytest.mark.full
def test_training_works_with_files_of_the_size_of_mnist(tmp_path):
    """Train on files with the format and sizes of MNIST that repeat the digits."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count, digits in zip(("train", "t10k"), (60_000, 10_000), load_dataset("digits"), strict=True):
        repeats = count // len(digits) + 1
        images = np.tile(digits.images, (repeats, 1, 1))[:count]
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.tile(digits.labels, repeats)[:count]))
    log = runs.train("torchrun", 2, tmp_path, "--epochs", 1, "--dataset", "mnist", WORKSHOP_DATA=tmp_path / "data")
    assert len(log[0]["losses"]) == 60_000 // 128
    assert log[0]["accuracy"] > 0.95


@pytest.fixture
def cifar(monkeypatch):
    """A small archive in the format of CIFAR-10; the description of CIFAR-10 describes this archive instead."""
    from torchvision.datasets import CIFAR10

    random = np.random.RandomState(0)
    packed, sums = io.BytesIO(), {}
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in (*cifar10.FILES, "readme.html"):
            part = {"data": random.randint(0, 256, (8, 3072), dtype=np.uint8), "labels": list(range(8))}
            content = pickle.dumps({"label_names": list("abcdefghij")} if name == "batches.meta" else part)
            sums[name] = hashlib.md5(content).hexdigest()
            entry = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setattr(CIFAR10, "train_list", [[name, sums[name]] for name in cifar10.FILES[1:-1]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})
    return {cifar10.ARCHIVE: packed.getvalue()}


def test_cifar10_is_fetched_and_verified(cifar, server, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"CIFAR-10 is not in .* \(7 of 7 files missing\); .*workshop.sh fetch cifar10"):
        load_dataset("cifar10")
    bad, _ = server(cifar, "corrupt")
    with pytest.raises(UserError, match="the downloaded file is not the expected one"):
        cifar10.fetch(tmp_path, [bad])
    assert left_in(tmp_path) == []
    good, requests = server(cifar)
    assert cifar10.fetch(tmp_path, [bad, good]) == 7
    assert left_in(tmp_path) == sorted(f"{cifar10.FOLDER}/{name}" for name in cifar10.FILES)
    assert cifar10.fetch(tmp_path, [good]) == 0
    assert len(requests) == 1
    train_set, test_set = load_dataset("cifar10")
    assert (len(train_set), len(test_set)) == (40, 8)
    assert train_set[0][0].shape == (3, 32, 32)
    _, sizes = load_dataset("cifar10", lambda image: (image.mode, image.size))
    assert sizes[0][0] == ("RGB", (32, 32))
    (tmp_path / cifar10.FOLDER / "data_batch_3").write_bytes(b"cut short")
    with pytest.raises(UserError, match="is damaged; delete cifar-10-batches-py there and fetch it again"):
        load_dataset("cifar10")
    (tmp_path / cifar10.FOLDER / "data_batch_3").unlink()
    assert cifar10.fetch(tmp_path, [good]) == 7, "the remains of an interrupted attempt were not replaced"


GAMES = b"".join(b'{"text": "%d. e4 e5"}\n' % number for number in range(1, 4000))


def test_a_download_of_chess_resumes_and_is_verified(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(
        UserError, match=r"--data chess: it is not in .* fetch it once with: \./workshop.sh fetch chess --from"
    ):
        chess.fetched_file()
    sha256 = hashlib.sha256(GAMES).hexdigest().upper()
    url, _ = server({"games.jsonl": GAMES}, "truncated")
    with pytest.raises(UserError, match=r"could not fetch games\.jsonl.*the downloaded part stays"):
        chess.fetch(url + "games.jsonl", sha256)
    kept = (tmp_path / ".games.jsonl.part").stat().st_size
    url, _ = server({"games.jsonl": GAMES})
    assert chess.fetch(url + "games.jsonl", sha256) == 3999
    assert server.resumed == [0, kept]
    assert chess.fetched_file().read_bytes() == GAMES
    assert left_in(tmp_path) == ["chess.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GAMES + b'{"game": "1. e4"}\n', 'line 4,000 of .* is not a JSON object with a "text"'),
        (b'\n["text"]\n', "line 2 of .*"),
        (b"<html>moved</html>", "line 1 of .*"),
        (b"\n\n", "there is no document in"),
    ],
)
def test_a_chess_file_with_a_broken_line_is_not_kept(content, message, server, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path / "data"))
    url, _ = server({"games.jsonl": content})
    (tmp_path / "file").write_bytes(content)
    for source in (url + "games.jsonl", str(tmp_path / "file")):
        with pytest.raises(UserError, match=message):
            chess.fetch(source)
    assert left_in(tmp_path / "data") in ([], [".games.jsonl.part"])
    url, _ = server({"games.jsonl": GAMES})
    assert chess.fetch(url + "games.jsonl") == 3999, "the broken file was not replaced"


@pytest.mark.parametrize(
    ("source", "sha256", "message"),
    [
        ("", "", "chess has no public address; give the address or the path of your file .* --from URL-or-file"),
        ("nowhere.jsonl", "", "nowhere.jsonl.*No such file"),
        (__file__, "12", "--sha256 12: a SHA-256 has 64 hexadecimal digits"),
        (__file__, 64 * "0", "is not the expected file"),
    ],
)
def test_wrong_arguments_for_chess_are_refused(source, sha256, message, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    with pytest.raises(UserError, match=message):
        chess.fetch(source, sha256)
    assert left_in(tmp_path) == []
