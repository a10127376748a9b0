"""Published training runs: one row of a CSV file each, as a model, a layout, a card, and what was measured.

The columns are those of published.csv. Its first 40 rows were collected first; their errors are also reported alone. What a
source leaves out, we choose as its software does; ``Run.assumed`` says so.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from workshop.errors import UserError
from workshop.plan.cards import Card, find_card, networks
from workshop.plan.layout import Layout
from workshop.plan.memory import predict_bytes
from workshop.plan.sizes import Model

ROWS = Path(__file__).with_name("published.csv")
GIVEN = 40  # rows
# The card for a text in the column gpu; the first match counts.
CARDS = (
    ("H100.*96", "h100-96"),
    ("H100.*PCIe", "h100-pcie"),
    ("H100.*64 ?GB", "h100-64"),
    ("GH200", "gh200"),
    ("GB200", "gb200"),
    ("B200", "b200"),
    ("H200", "h200"),
    ("H[18]00", "h100"),
    ("A100.*40", "a100-40"),
    ("A100", "a100-80"),
    ("MI250", "mi250x"),
    ("MI300", "mi300x"),
)
UNGATED = "GPT|OPT|BLOOM|MPT|NeoX|Falcon|Turing|NLG|PaLM"
SHARDED = (
    "torchtitan|llm-foundry|FSDP|ZeRO-3|fully sharded"  # sources that shard parameters if a row states no ZeRO stage
)
SOFTWARE = (
    ("torchtitan", "torchtitan"),
    ("nanotron", "nanotron"),
    ("llm-foundry", "llm-foundry"),
    ("bigscience", "deepspeed"),
    ("Megatron|NeMo|MegaScale|Nemotron|Korthikanti|Narayanan|Llama 3 |2407.21783", "megatron"),
)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        source, name: who published it, and the model.
        model, layout, card, sequence_length: what ran.
        tokens: tokens per second and GPU.
        memory: bytes of the fullest GPU; None: not stated.
        assumed: what the source does not state.
        reserved: the memory is what the allocator has reserved (torchtitan), else the tensors alone (nanotron).
    """

    source: str
    name: str
    model: Model
    layout: Layout
    card: Card
    sequence_length: int
    tokens: float
    memory: float | None
    assumed: tuple[str, ...]
    reserved: bool = True

    @property
    def group(self) -> str:
        """The project that published it, whose rows are held out together."""
        name = re.match(r"[\w-]+", self.source)[0]
        return {"Megatron-Bridge": "NeMo"}.get(name, name)


def read_runs(path: Path = ROWS) -> list[Run]:
    """Read all rows of a file.

    Raises:
        UserError: the file cannot be read, or a row does not describe a run.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    runs = []
    for number, row in enumerate(rows, 2):
        try:
            runs.append(_run({key: (value or "").strip() for key, value in row.items() if key}))
        except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{path.name}, line {number}: {type(error).__name__}: {error}") from None
    return runs


def _number(text: str, default: int | None = None) -> int:
    found = re.match(r"\s*(\d+)", text)
    if found is None and default is None:
        raise ValueError(f"{text!r} is not a whole number")
    return int(found[1]) if found else default


def _run(row: dict[str, str]) -> Run:
    text = f"{row['source']}; {row['gpu']}; {row['notes']}"
    model, card = _model(row), _card(row["gpu"], text)
    sequence_length, gpus = _number(row["seq"]), _number(row["gpus"])
    software = next((name for pattern, name in SOFTWARE if re.search(pattern, row["source"])), "other")
    layout, assumed = _layout(row, model, gpus, software, text)
    layout = _completed(layout, assumed, model, card, sequence_length, _number(row["global_batch_seqs"], 0), text)
    memory = float(row["mem_gib_or_gb"]) if row.get("mem_gib_or_gb") else None
    return Run(
        row["source"],
        row["model"],
        model,
        layout,
        card,
        sequence_length,
        _tokens(row, model, card, layout, sequence_length, text),
        memory and memory * (2**30 if software == "torchtitan" or "GiB" in text else 1e9),
        tuple(assumed),
        reserved=software != "nanotron",
    )


def _card(gpu: str, text: str) -> Card:
    card = find_card(next((card for pattern, card in CARDS if re.search(pattern, gpu)), gpu))
    if "Omni-Path, 4 links" in text:  # of 100 Gbit/s, for a node of 8
        return replace(card, rate=6.25e9)
    if "A3 machines" in text:
        return replace(card, network="gcp-a3", **networks()["gcp-a3"])
    if "nanotron" in text or "AWS" in text:
        return replace(card, network="efa-p5", **networks()["efa-p5"])
    found = re.search(r"(?:(\d+) ?x ?)?([\d,]+) ?Gb(?:it)?/s[^;,]*per (node|GPU)", text)
    if found:
        rate = int(found[1] or 1) * float(found[2].replace(",", "")) / 8 * 1e9
        return replace(card, rate=rate / (card.gpus_per_node if found[3] == "node" else 1))
    return card


def _model(row: dict[str, str]) -> Model:
    heads, hidden = _number(row["heads"]), _number(row["hidden"])
    gated = row.get("gated") or str(int(not re.search(UNGATED, row["model"], re.IGNORECASE)))
    return Model(
        _number(row["layers"]),
        hidden,
        _number(row["ffn"], 4 * hidden),
        heads,
        _number(row["kv"], heads),
        _number(row.get("head_dim", ""), hidden // heads),
        _number(row["vocab"], 51200),
        row["tied"] == "1",
        gated=gated == "1",
        experts=_number(row.get("experts", ""), 1),
        active=_number(row.get("topk", ""), 1),
    )


def _tokens(row: dict[str, str], model: Model, card: Card, layout: Layout, sequence_length: int, text: str) -> float:
    """Return tokens per second and GPU.

    From FLOP/s by the convention of Megatron, nanotron and PaLM, 6 N + 12 L h s, unless the notes name another one.
    """
    if row["tok_s_gpu"]:
        return float(row["tok_s_gpu"])
    if row["iter_s"]:
        return layout.global_batch * sequence_length / float(row["iter_s"]) / layout.gpus
    rate = float(row["tflops_gpu"]) * 1e12 if row["tflops_gpu"] else float(row["mfu_pct"]) / 100 * card.bf16
    counted = sequence_length / 2 if "attention halved" in text else sequence_length
    return rate / model.flops_per_token(counted) * (3 / 4 if "recomputed forward" in text else 1)


def _layout(row: dict[str, str], model: Model, gpus: int, software: str, text: str) -> tuple[Layout, list[str]]:
    """Return the layout as far as the row states it; micro-batches of 0 and the recomputation "" are not stated."""
    tp, cp, pp, vpp = (_number(row[key], 1) for key in ("tp", "cp", "pp", "vpp"))
    dp = gpus // (tp * cp * pp)
    stated = row["recompute"] not in ("", "not stated") and "share of layers recomputed not stated" not in text
    assumed = [] if stated else ["recomputation"]
    mbs, count = _number(row["mbs_per_rank"], 0), _number(row["microbatches"], 0)
    if "micro-batches not stated" in text or "ColossalAI" in text:  # then it is the batch of a rank in a whole step
        mbs = 0
    if software == "torchtitan" and pp > 1 and mbs:  # it cuts the batch of a rank into micro-batches
        count = count or pp
        mbs = max(1, mbs // count)
    node = re.search(r"sharded over the (\d+) GPUs", text)
    compiled = row["compile"] == "1"
    fuses = software in ("megatron", "deepspeed", "llm-foundry") or "JAX" in text
    # Megatron's fused attention and its overlap of tensor parallelism came with the Transformer Engine, for Hopper.
    transformer_engine = software == "megatron" and "A100" not in row["gpu"] and "Llama 3 " not in text
    early = bool(re.search("2104.04473|bigscience", text))  # before sequence parallelism
    layout = Layout(
        dp=dp,
        zero=3 if "ColossalAI" in text else _number(row["zero"], 3 if re.search(SHARDED, text, re.IGNORECASE) else 1),
        replicas=max(1, dp // int(node[1])) if node else 1,
        tp=tp,
        pp=pp,
        vpp=vpp if row["vpp"] or software != "megatron" else 0,
        cp=cp,
        ep=_number(row.get("ep", ""), 1),
        mbs=mbs,
        microbatches=count,
        recompute=_recompute(row["recompute"]) if stated else "",
        fp8=_fp8(row["dtype"]),
        kernels="fused" if compiled or fuses else "partly" if software == "nanotron" else "eager",
        fused_loss=(compiled and "202412" not in text) or software != "torchtitan",
        attention="plain"
        if early or ("A100" in row["gpu"] and "Korthikanti" in text)
        else "flash3"
        if transformer_engine
        else "flash2",
        sp=not early,
        async_tp=("async TP" in text and "vanilla" not in text) or transformer_engine,
        gradient_bytes=4 if "fp32 grad" in row["dtype"] + text or software == "torchtitan" else 2,
        by_tensor=software == "nanotron",
        balanced=bool(re.search("nanotron|Llama 3 |2407.21783|counted as a layer", text)),
    )
    return layout, assumed


def _completed(
    layout: Layout, assumed: list[str], model: Model, card: Card, sequence_length: int, batch: int, text: str
) -> Layout:
    """Return the layout with what the source does not state: as its users would choose, so that it fits the memory."""
    per_copy = batch // layout.dp if batch else 0
    if not layout.mbs:
        assumed.append("micro-batch")
        sizes = [n for n in (4, 2, 1) if per_copy % n == 0 and per_copy // n >= 2 * layout.pp] or [1]
    else:
        sizes = [layout.mbs]
    found = layout
    choices = [layout.recompute] if layout.recompute else ["none", "selective", "full"]
    if "recomputation mostly off" in text:
        choices = ["none"]
    for recompute in choices:
        for mbs in sizes:
            count = layout.microbatches or max(1, per_copy // mbs)
            vpp = layout.vpp
            if not vpp:
                each = (model.layers + 2 * layout.balanced) // layout.pp
                vpp = max(
                    (n for n in range(1, 9) if layout.pp > 1 and each % n == 0 and count % layout.pp == 0), default=1
                )
            found = replace(layout, mbs=mbs, microbatches=count, vpp=vpp, recompute=recompute)
            found = replace(found, schedule="interleaved" if vpp > 1 else "1f1b")
            if predict_bytes(model, found, sequence_length).peak < card.memory:
                break
        else:
            continue
        break
    if layout.pp > 1 and not layout.vpp:
        assumed.append("interleaving")
    return found


def _recompute(text: str) -> str:
    if "selective" in text and "attention" in text:
        return "none"
    if "selective" in text and "layer" in text:
        return "half"
    return next((word for word in ("selective", "full") if word in text), "none")


def _fp8(text: str) -> str:
    if "float8" not in text and "fp8" not in text:
        return ""
    return "rowwise" if "rowwise" in text else "tensorwise"
