"""Provide CodeLlama as a checkpoint in the format of Hugging Face: fetched, or created here as a small model."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from workshop.data.archive import file_sha256, go_on
from workshop.data.code import LIBRARY, library_files, load_blocks
from workshop.data.datasets import data_folder
from workshop.errors import UserError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TINY = "tiny-codellama"
REPOSITORY = "codellama/CodeLlama-7b-hf"
HUB = "https://huggingface.co"
# The files of the repository that loading needs. (It also contains the parameters a second time, as pickles.)
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
VOCABULARY = 2048  # tokens


def models_folder() -> Path:
    """Return the folder of the models."""
    return data_folder() / "models"


def model_folder(name: str) -> Path:
    """Return the folder of a model: a checkpoint in the format of Hugging Face, with its tokenizer.

    Args:
        name: "tiny-codellama", which is created if it does not exist yet; "codellama", once it has been fetched; or a folder.

    Raises:
        UserError: there is no such model, or a file is missing in its folder.
    """
    if name == TINY:
        folder = models_folder() / TINY
        if not folder.is_dir():
            make_tiny()
    elif name in ("codellama", REPOSITORY):
        folder = models_folder() / REPOSITORY.split("/")[1]
        if not folder.is_dir():
            raise UserError(
                f"{REPOSITORY} is not in {models_folder()}; fetch it once with: ./workshop.sh fetch codellama"
            )
    else:
        folder = Path(name)
        if not folder.is_dir():
            raise UserError(
                f"there is no model {name}: name a folder, or one of: {TINY}, codellama. Training downloads nothing"
            )
    for what, names in {
        "configuration": ["config.json"],
        "weights": ["model.safetensors", "model.safetensors.index.json"],
        "tokenizer": ["tokenizer.json", "tokenizer.model"],
    }.items():
        if not any((folder / name).is_file() for name in names):
            raise UserError(f"the model in {folder} has no {what} ({' or '.join(names)})")
    for file in set(weight_files(folder).values()):
        if not file.is_file():
            raise UserError(f"the model in {folder} lacks a part of its weights ({file.name}); fetch or copy it again")
    return folder


def weight_files(folder: str | os.PathLike) -> dict[str, Path]:
    """Map the name of each parameter of a checkpoint to the safetensors file that contains it.

    Raises:
        UserError: the index, or the only file, cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index, single = Path(folder, "model.safetensors.index.json"), Path(folder, "model.safetensors")
    try:
        if index.is_file():
            return {name: Path(folder, file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        with safe_open(single, framework="pt") as file:
            return {name: single for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {error}") from error


def make_tiny(
    folder: Path | None = None,
    *,
    layers: int = 4,
    width: int = 256,
    vocabulary: int = VOCABULARY,
    documents: Iterable[str] | None = None,
) -> Path:
    """Create a small checkpoint of CodeLlama's architecture with random parameters, and a tokenizer; return its folder.

    The tokenizer is a byte-level BPE, trained on the source of Python's standard library (so it differs a little from one version
    of Python to the next); CodeLlama's own is a SentencePiece BPE. This takes a few seconds and needs no network. The folder
    appears only when it is complete.

    Args:
        folder: the folder to create; None: the one where ``model_folder`` looks.
        layers: decoder layers; CodeLlama-7b has 32.
        width: size of the hidden state, a multiple of 32; CodeLlama-7b has 4,096.
        vocabulary: number of tokens; CodeLlama-7b has 32,016.
        documents: the text that the tokenizer is trained on; None: the standard library.

    Raises:
        UserError: the folder cannot be written.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from safetensors.torch import save_file

    folder = folder or models_folder() / TINY
    tokenizer = _train_tokenizer(vocabulary, documents)
    model = _random_model(layers, width, vocabulary)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".make-") as scratch:
            made = Path(scratch) / folder.name
            # Not with model.save_pretrained: if there is a process group, it writes only on rank 0.
            model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
            model.config.save_pretrained(made)
            model.generation_config.save_pretrained(made)
            save_file(model.state_dict(), made / "model.safetensors", {"format": "pt"})
            tokenizer.save_pretrained(made)
            put_in_place(made, folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _train_tokenizer(vocabulary: int, documents: Iterable[str] | None) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer with this vocabulary size on the documents; None: on Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<unk>", "<s>", "</s>"],  # with the token numbers of Llama
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = documents or (path.read_text(errors="replace") for path in library_files())
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=512
    )


def _random_model(layers: int, width: int, vocabulary: int) -> "LlamaForCausalLM":
    """Return a model of CodeLlama's architecture with random parameters, the same in every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 43 // 16,  # 11008 / 4096, as in CodeLlama-7b
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def put_in_place(made: Path, folder: Path) -> None:
    """Move a complete folder into place, unless a different process has just put one there."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)


def fetch(name: str, mirror: str | None = None) -> None:
    """Create the small model, or fetch CodeLlama-7b (13 GB) from the Hugging Face Hub, and print what was done.

    An interrupted download resumes. Each weight file is compared with the SHA-256 that the Hub reports.

    Args:
        name: "tiny-codellama" or "codellama".
        mirror: the address of a different hub.

    Raises:
        UserError: the hub cannot be reached or denies access, a file is not the expected one, or the disk is full.
    """
    from transformers import AutoTokenizer

    folder = models_folder() / (TINY if name == TINY else REPOSITORY.split("/")[1])
    if name == TINY:
        there = folder.is_dir()
        model_folder(TINY)
        # Compute the tokens of the standard library too: a user who may only read this folder could not store them here.
        load_blocks(LIBRARY, AutoTokenizer.from_pretrained(folder, local_files_only=True), 128)
        print(f"{TINY} is already in {folder}" if there else f"{TINY} was created in {folder}")
        return
    import requests

    if folder.is_dir():
        print(f"{name} is already in {folder}")
        return
    parts = folder.with_name(folder.name + ".part")  # moved into place when it is complete
    hub, token = (mirror or HUB).rstrip("/"), os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        parts.mkdir(parents=True, exist_ok=True)
        answer = requests.get(f"{hub}/api/models/{REPOSITORY}?blobs=true", headers=headers, timeout=30)
        answer.raise_for_status()
        listed = {entry["rfilename"]: entry for entry in answer.json()["siblings"]}
        for file in (file for file in FILES if file in listed):
            print(f"fetching {file} into {parts}", flush=True)
            _download(f"{hub}/{REPOSITORY}/resolve/main/{file}", parts / file, listed[file], headers)
        os.rename(parts, folder)
    except requests.HTTPError as error:
        if error.response.headers.get("X-Error-Code") == "GatedRepo":
            raise UserError(
                f"{REPOSITORY} is only available after you accept its licence: accept it at {HUB}/{REPOSITORY}, "
                "create a token there, and set it: export HF_TOKEN=..."
            ) from error
        raise UserError(f"could not fetch {REPOSITORY}: HTTP status {error.response.status_code}") from error
    except requests.RequestException as error:
        raise UserError(
            f"could not fetch {REPOSITORY}: {type(error).__name__}; the downloaded part stays in {parts}"
        ) from error
    except (KeyError, ValueError) as error:
        raise UserError(f"{hub} does not answer like a Hugging Face hub") from error
    except OSError as error:
        raise UserError(f"cannot write {parts}: {error.strerror or error}; the downloaded part stays there") from error
    print(f"{name}: fetched into {folder}")


def _download(url: str, path: Path, entry: dict, headers: dict) -> None:
    """Download a file, or resume its download, and compare it with the size and the SHA-256 that the hub reports."""
    size, sha256 = entry["size"], (entry.get("lfs") or {}).get("sha256")
    if not path.exists() or path.stat().st_size < size:
        go_on(url, path, headers, size)
    if path.stat().st_size != size or (sha256 and file_sha256(path) != sha256):
        path.unlink()
        raise UserError(
            f"{path.name}: the downloaded file is not the expected one (size or SHA-256 differs); fetch it again"
        )
