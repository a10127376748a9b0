"""The model and the text of stage 04: created here or fetched from a test server, verified, resumed, or refused in one line."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import runs
from workshop.data import codellama
from workshop.data.code import load_blocks, read_documents
from workshop.errors import UserError

# ---------------------------------------------------------------- created on this machine


def test_the_tiny_model_differs_from_codellama_only_in_size(data):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = data / "models" / codellama.TINY
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.rope_parameters["rope_theta"] == 1e6
    text = "def f(x):\n\treturn x**2  # Größe → 漢字\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert set(codellama.weight_files(folder)) == set(model.state_dict())


@pytest.mark.full
def test_the_tiny_model_is_reproducible_and_two_processes_create_it_once(tmp_path):
    program = "from workshop.data.codellama import model_folder; print(model_folder('tiny-codellama'))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=runs.environment(WORKSHOP_DATA=tmp_path / name),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "one", "two")
    ]
    printed = [process.communicate()[0].strip() for process in started]
    assert printed[0] == printed[1] == str(tmp_path / "one" / "models" / codellama.TINY)
    assert [path.name for path in (tmp_path / "one" / "models").iterdir()] == [codellama.TINY]
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        first, second = (Path(place) / name for place in printed[1:])
        assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest(), name


def test_any_rank_creates_the_complete_tiny_model(tmp_path):
    """In a process group, save_pretrained of transformers writes only on rank 0."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        made = codellama.make_tiny(tmp_path / "tiny", layers=2, width=64, vocabulary=512)
    finally:
        dist.destroy_process_group()
    assert codellama.model_folder(made) == made


@pytest.fixture
def tokenizer(data, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("WORKSHOP_DATA", str(data))
    return AutoTokenizer.from_pretrained(data / "models" / codellama.TINY)


def test_each_document_is_in_one_part_and_each_token_is_used_once(tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    documents = [f"document {number}: " + "x = 1\n" * 40 for number in range(50)]
    path.write_text("\n".join(json.dumps({"text": text, "more": 1}) for text in documents) + "\n\n")
    train_set, validation_set = load_blocks(str(path), tokenizer, 16)
    found = [
        tokenizer.decode(torch.cat([part[index] for index in range(len(part))])) for part in (train_set, validation_set)
    ]
    pieces = [text.split("</s>") for text in found]
    numbers = [
        {int(piece.split(":")[0].split()[1]) for piece in part if piece.startswith("document ")} for part in pieces
    ]
    assert numbers[0] & numbers[1] == set()
    assert len(numbers[0] | numbers[1]) >= 49  # the tokens after the last full block are dropped
    assert all(piece in documents for part in pieces for piece in part[:-1])
    assert train_set[0].shape == (16,)
    assert train_set[0].dtype == torch.int64


def test_a_changed_file_is_read_again(tokenizer, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": "a b c d e f g h " * 9}) + "\n" for _ in range(20)))
    before, _ = load_blocks(str(path), tokenizer, 16)
    path.write_text("".join(json.dumps({"text": "1 2 3 4 5 6 7 8 " * 12}) + "\n" for _ in range(20)))
    after, _ = load_blocks(str(path), tokenizer, 16)
    assert not torch.equal(before[0], after[0])


def test_broken_lines_are_named_and_skipped_only_on_request(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = ['{"text": "good"}', "not json", "", '{"prompt": "no text"}', '["text"]', '{"text": 5}', '{"text": "also"}']
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r'no JSON object with a "text" in lines 2, 4, 5, 6 \(4 of 6\).*--skip-broken'):
        read_documents(path)
    assert read_documents(path, skip_broken=True) == ["good", "also"]


# ---------------------------------------------------------------- fetched from a hub

NAME = f"/{codellama.REPOSITORY}/resolve/main/"
BIG = "model-00001-of-00002.safetensors"


class Hub(http.server.ThreadingHTTPServer):
    """A server that offers these files as CodeLlama, as the Hugging Face hub does.

    Args:
        files: the content of each file, by name.
        behaviour: "good", "breaks" (it sends half of the big file), "corrupt" (its last bytes are wrong) or "gated".

    Attributes:
        requests: the method, path and Range header of each request.
    """

    def __init__(self, files: dict[str, bytes], behaviour: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.behaviour, self.requests = files, behaviour, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def content(self, path: str) -> bytes | None:
        """Return what is at this path: the list of files, one file, or None."""
        if path.startswith("/api/models/"):
            siblings = []
            for name, content in self.files.items():
                lfs = {"lfs": {"sha256": sha256(content), "size": len(content), "pointerSize": 1}}
                siblings.append(
                    {"rfilename": name, "size": len(content), "blobId": "0" * 40} | (lfs if "-of-" in name else {})
                )
            answer = {
                "id": codellama.REPOSITORY,
                "modelId": codellama.REPOSITORY,
                "sha": "a" * 40,
                "siblings": siblings,
            }
            return json.dumps(answer).encode()
        return self.files[path.removeprefix(NAME)] if path.startswith(NAME) else None


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        hub, which = self.server, self.headers.get("Range")
        hub.requests.append((self.command, self.path, which))
        if hub.behaviour == "gated":
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}
            return self.answer(403, headers)
        content = hub.content(self.path)
        if content is None:
            return self.send_error(404)
        headers = {"ETag": f'"{sha256(content)}"', "X-Repo-Commit": "a" * 40}
        if hub.behaviour == "corrupt" and BIG in self.path:
            content = content[:-10] + bytes(10)
        first = int(which.split("=")[1].split("-")[0]) if which else 0
        headers["Content-Length"] = str(len(content) - first)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.answer(206 if first else 200, headers)
        if body:
            broken = hub.behaviour == "breaks" and BIG in self.path and not first
            self.wfile.write(content[first : len(content) // 2] if broken else content[first:])

    def answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def files(data) -> dict[str, bytes]:
    """The small model in files with the names of CodeLlama."""
    folder = data / "models" / codellama.TINY
    weights = (folder / "model.safetensors").read_bytes()
    index = {"metadata": {}, "weight_map": dict.fromkeys(codellama.weight_files(folder), BIG)}
    return {
        "config.json": (folder / "config.json").read_bytes(),
        "generation_config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        BIG: weights,
        "model-00002-of-00002.safetensors": weights[:1000],
        "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
    }


@pytest.fixture
def hub(files):
    """A function that starts a hub and returns its address and its requests."""
    started = []

    def serve(behaviour="good"):
        started.append(Hub(files, behaviour))
        return f"http://127.0.0.1:{started[-1].server_port}", started[-1].requests

    yield serve
    for each in started:
        each.shutdown()
        each.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch(url, folder):
    command = [sys.executable, "-P", "-m", "workshop", "fetch", "codellama", "--mirror", url]
    return runs.run(command, folder, WORKSHOP_DATA=folder, HF_HOME=folder / "hf", HF_HUB_OFFLINE=None, HF_TOKEN=None)


def test_the_fetched_model_is_complete_and_is_not_fetched_again(hub, files, tmp_path, monkeypatch):
    url, _ = hub()
    done = fetch(url, tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "CodeLlama-7b-hf"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    monkeypatch.setenv("WORKSHOP_DATA", str(tmp_path))
    assert codellama.model_folder("codellama") == folder
    again = fetch("http://127.0.0.1:9", tmp_path)
    assert (again.returncode, again.stdout) == (0, f"codellama is already in {folder}\n")


@pytest.mark.full
def test_an_interrupted_download_of_the_model_resumes(hub, files, tmp_path):
    url, requests = hub("breaks")
    done = fetch(url, tmp_path)
    assert done.returncode == 2
    assert "could not fetch codellama/CodeLlama-7b-hf" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "models" / "CodeLlama-7b-hf").exists()
    done = fetch(url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [which for method, path, which in requests if method == "GET" and BIG in path and which], (
        "the download started again instead of resuming"
    )
    assert (tmp_path / "models" / "CodeLlama-7b-hf" / BIG).read_bytes() == files[BIG]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("corrupt", f"{BIG}: the downloaded file is not the expected one (size or SHA-256 differs)"),
        ("gated", "is only available after you accept its licence"),
        ("unreachable", "could not fetch codellama/CodeLlama-7b-hf"),
    ],
)
def test_a_failed_download_of_the_model_is_reported_in_one_line(behaviour, message, hub, tmp_path):
    url = hub(behaviour)[0] if behaviour != "unreachable" else "http://127.0.0.1:9"
    done = fetch(url, tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "models" / "CodeLlama-7b-hf").exists()
