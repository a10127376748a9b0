"""The cards (models of GPUs) and networks that a plan can use, each with its source and date: the files in ``cards/``."""

import tomllib
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cache
from pathlib import Path

from workshop.errors import UserError

FOLDER = Path(__file__).parent / "cards"
HERE = (
    Path.home() / ".cache" / "distributed-pytorch-workshop" / "card.toml"
)  # what `workshop bench --card` has measured


@dataclass(frozen=True)
class Card:
    """A GPU as a plan sees it. All rates are per GPU and second, and those of links are for one direction.

    Attributes:
        name: its full name.
        bf16, fp8: peak operations with dense matrices; fp8 is 0 if the GPU has none.
        memory, memory_bandwidth: bytes, and bytes/s.
        power: watts at full load.
        link: bytes/s to the other GPUs of the node.
        gpus_per_node: GPUs that this link connects.
        network: the network between nodes, a table of networks.toml.
        rate, latency: bytes/s of this network for each GPU, and seconds for a message between two nodes.
        matmul: the share of the peak that the best shape of a matrix product reaches, as measured alone.
        attention: the share of the peak that FlashAttention-2 reaches, forward and backward, with 8,192 tokens.
        source, date: where the values come from, and when we read them.
    """

    name: str
    bf16: float
    fp8: float
    memory: float
    memory_bandwidth: float
    power: float
    link: float
    gpus_per_node: int
    network: str
    rate: float
    latency: float
    matmul: float
    attention: float
    source: tuple[str, ...]
    date: date


@cache
def networks() -> dict[str, dict[str, float]]:
    """Return ``rate`` and ``latency`` of all networks."""
    tables = tomllib.loads((FOLDER / "networks.toml").read_text())
    return {name: {key: table[key] for key in ("rate", "latency")} for name, table in tables.items()}


def known_cards() -> list[str]:
    """Return the names of the cards, for ``--gpu``."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "networks")


def find_card(name: str, network: str = "", gpus_per_node: int = 0) -> Card:
    """Return a card.

    Args:
        name: its name; "here": the one that ``workshop bench --card`` has measured on this machine.
        network: the network of a site; "": the usual one for this card.
        gpus_per_node: GPUs of a node of the site; 0: the usual number.

    Raises:
        UserError: there is no such card or network, or this machine has not been measured.
    """
    path = HERE if name == "here" else FOLDER / f"{name.lower()}.toml"
    if name == "here" and not path.is_file():
        raise UserError("this machine has not been measured as a card: run workshop bench --card first")
    if name != "here" and name.lower() not in known_cards():
        raise UserError(f"there is no card {name}; choose from {', '.join(known_cards())}, or here")
    card = read_card(path)
    if network:
        if network not in networks():
            raise UserError(f"there is no network {network}; choose from {', '.join(networks())}")
        card = replace(card, network=network, **networks()[network])
    return replace(card, gpus_per_node=gpus_per_node) if gpus_per_node else card


def read_card(path: Path) -> Card:
    """Read the file of a card.

    Raises:
        UserError: it cannot be read, or a value is missing or unknown.
    """
    try:
        table = tomllib.loads(path.read_text())
        table["source"] = tuple(table["source"])
        table = networks().get(table["network"], {}) | table
        if unknown := set(table) ^ {field.name for field in fields(Card)}:
            raise UserError(f"{path.name}: {', '.join(sorted(unknown))}: missing or unknown")
        return Card(**table)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} does not describe a card ({type(error).__name__}: {error})") from None
