"""``workshop fetch codellama`` from a hub of our own: verified, resumed after a break, and its mistakes in one line."""

import hashlib
import http.server
import json
import sys
import threading

import pytest

import runs
from workshop.data import codellama

NAME = f"/{codellama.REPOSITORY}/resolve/main/"
BIG = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(data):
    """A function that starts a hub with the small model in CodeLlama's files, and returns its address, files and requests."""
    started = []
    folder = data / "models" / codellama.TINY
    weights = (folder / "model.safetensors").read_bytes()
    index = {"metadata": {}, "weight_map": dict.fromkeys(codellama.weight_files(folder), BIG)}
    files = {
        "config.json": (folder / "config.json").read_bytes(),
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        BIG: weights,
        "model-00002-of-00002.safetensors": weights[:1000],
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
    }

    def serve(behaviour="good"):
        requests = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET(body=False)

            def do_GET(self, body=True):
                requests.append((self.command, self.path, self.headers.get("Range")))
                if behaviour == "gated":
                    self.send_response(403)
                    self.send_header("X-Error-Code", "GatedRepo")
                    self.send_header("X-Error-Message", "Access to model is restricted")
                    self.end_headers()
                    return
                if self.path.startswith("/api/models/"):
                    entries = [
                        {"rfilename": name, "size": len(content), "blobId": "0" * 40}
                        | (
                            {"lfs": {"sha256": sha256(content), "size": len(content), "pointerSize": 1}}
                            if "-of-" in name
                            else {}
                        )
                        for name, content in files.items()
                    ]
                    answer = {
                        "id": codellama.REPOSITORY,
                        "modelId": codellama.REPOSITORY,
                        "sha": "a" * 40,
                        "siblings": entries,
                    }
                    content = json.dumps(answer).encode()
                elif self.path.startswith(NAME):
                    content = files[self.path.removeprefix(NAME)]
                else:
                    self.send_error(404)
                    return
                etag = sha256(content)
                if behaviour == "corrupt" and BIG in self.path:
                    content = content[:-10] + bytes(10)
                first = int(self.headers["Range"].split("=")[1].split("-")[0]) if self.headers.get("Range") else 0
                self.send_response(206 if first else 200)
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", "a" * 40)
                self.send_header("Content-Length", str(len(content) - first))
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
                self.end_headers()
                if body:
                    broken = behaviour == "breaks" and BIG in self.path and not first
                    self.wfile.write(content[first : len(content) // 2] if broken else content[first:])

            def log_message(self, *_):
                pass

        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        started.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}", requests

    serve.files = files
    yield serve
    for httpd in started:
        httpd.shutdown()
        httpd.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch(url, folder):
    command = [sys.executable, "-P", "-m", "workshop", "fetch", "codellama", "--mirror", url]
    return runs.run(command, folder, WORKSHOP_DATA=folder, HF_HOME=folder / "hf", HF_HUB_OFFLINE=None, HF_TOKEN=None)


def test_fetched_it_is_a_model_of_its_own(hub, tmp_path, monkeypatch):
    url, _ = hub()
    done = fetch(url, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "CodeLlama-7b-hf"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == hub.files
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    assert codellama.model_folder("codellama") == folder
    again = fetch("http://127.0.0.1:9", tmp_path)
    assert (again.returncode, again.stdout) == (0, f"codellama is already in {folder}\n")


def test_after_a_break_it_goes_on_where_it_was(hub, tmp_path):
    url, requests = hub("breaks")
    done = fetch(url, tmp_path)
    assert done.returncode == 2
    assert "could not fetch codellama/CodeLlama-7b-hf" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "models" / "CodeLlama-7b-hf").exists()
    done = fetch(url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [which for method, path, which in requests if method == "GET" and BIG in path and which], "it began anew"
    assert (tmp_path / "models" / "CodeLlama-7b-hf" / BIG).read_bytes() == hub.files[BIG]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("corrupt", f"{BIG}: what came is not the file expected (size or SHA-256 differs)"),
        ("gated", "is handed out to those who have accepted its licence"),
        ("nobody", "could not fetch codellama/CodeLlama-7b-hf"),
    ],
)
def test_what_goes_wrong_is_one_line(behaviour, message, hub, tmp_path):
    url = hub(behaviour)[0] if behaviour != "nobody" else "http://127.0.0.1:9"
    done = fetch(url, tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "models" / "CodeLlama-7b-hf").exists()
