"""Find the fastest layouts for a model and a number of GPUs: try all that are reasonable, keep those that fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workshop.errors import UserError
from workshop.plan.cards import Card
from workshop.plan.layout import Layout, misfit
from workshop.plan.memory import Bytes, predict_bytes
from workshop.plan.sizes import Model
from workshop.plan.time import Times, predict

ROOM = 0.9  # of the memory of a card; the rest is about the median error of the prediction


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        model, card, gpus, sequence_length: as the names say.
        batch: sequences in a step of all GPUs; 0: about four million tokens, as far as the GPUs divide them.
        fixed: the fields of the layout that must have a value.
        fp8: also try float8.
    """

    model: Model
    card: Card
    gpus: int
    sequence_length: int
    batch: int = 0
    fixed: tuple[tuple[str, object], ...] = ()
    fp8: bool = False

    @property
    def sequences(self) -> int:
        """The sequences in a step."""
        if self.batch:
            return self.batch
        usual = max(1, round(4 * 2**20 / self.sequence_length))
        return round(usual / self.gpus) * self.gpus if usual >= self.gpus else usual


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction."""

    layout: Layout
    times: Times
    bytes: Bytes
    request: Request

    @property
    def tokens(self) -> float:
        """Tokens per second and GPU."""
        return self.layout.global_batch * self.request.sequence_length / self.times.step / self.layout.gpus

    @property
    def mfu(self) -> float:
        """The share of the peak in bfloat16 that the model's operations use (PaLM's definition, also with float8)."""
        return self.tokens * self.request.model.flops_per_token(self.request.sequence_length) / self.request.card.bf16

    @property
    def fits(self) -> bool:
        return self.bytes.total <= ROOM * self.request.card.memory


def evaluate(request: Request, layout: Layout) -> Plan:
    """Return a layout with its prediction."""
    times = predict(request.model, layout, request.card, request.sequence_length)
    return Plan(layout, times, predict_bytes(request.model, layout, request.sequence_length), request)


def _powers(limit: int) -> list[int]:
    return [2**n for n in range(limit.bit_length()) if 2**n <= limit]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def meshes(request: Request) -> Iterator[Layout]:
    """Yield the meshes: sizes whose product is the number of GPUs, and that the model allows."""
    model, gpus, fixed = request.model, request.gpus, dict(request.fixed)
    node = request.card.gpus_per_node
    few = 16 if request.sequence_length >= 32768 else 2
    for tp in _choices(fixed, "tp", [n for n in _divisors(min(node, gpus)) if gpus % n == 0 and n <= 16]):
        for cp in _choices(fixed, "cp", [n for n in _powers(few) if request.sequence_length >= 8192 * n or n == 1]):
            for pp in _choices(fixed, "pp", [n for n in _divisors(gpus) if n <= min(64, model.layers)]):
                if gpus % (tp * cp * pp):
                    continue
                dp = gpus // (tp * cp * pp)
                if fixed.get("dp", dp) != dp:
                    continue
                for ep in _choices(fixed, "ep", _divisors(model.experts) if model.experts > 1 else [1]):
                    if dp % ep == 0:
                        yield Layout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)


def _choices(fixed: dict, name: str, usual: list) -> list:
    return [fixed[name]] if name in fixed else usual


def layouts(request: Request) -> Iterator[Layout]:
    """Yield all layouts to try."""
    fixed, sequences = dict(request.fixed), request.sequences
    node = request.card.gpus_per_node
    for mesh in meshes(request):
        if sequences % mesh.dp:
            continue
        mine = sequences // mesh.dp
        for mbs in _choices(fixed, "mbs", [n for n in _powers(min(mine, 16)) if mine % n == 0]):
            if mine % mbs:
                continue
            count = mine // mbs
            for vpp in _choices(fixed, "vpp", _parts(request.model, mesh, count)):
                for zero, replicas in _sharding(fixed, mesh, node):
                    for recompute in _choices(fixed, "recompute", ["none", "selective", "full"]):
                        for fp8 in _choices(fixed, "fp8", ["", "tensorwise"] if request.fp8 else [""]):
                            changed = {
                                "mbs": mbs,
                                "microbatches": count,
                                "vpp": vpp,
                                "zero": zero,
                                "replicas": replicas,
                                "recompute": recompute,
                                "fp8": fp8,
                                "schedule": "interleaved" if vpp > 1 else "1f1b",
                            }
                            yield replace(mesh, **changed | fixed)


def _parts(model: Model, mesh: Layout, count: int) -> list[int]:
    """Return the parts of the model that each stage of a pipeline can have."""
    if mesh.pp == 1 or count % mesh.pp:
        return [1]
    return [n for n in (1, 2, 4, 8) if not model.layers % (mesh.pp * n) or not (model.layers + 2) % (mesh.pp * n)] or [
        1
    ]


def _sharding(fixed: dict, mesh: Layout, node: int) -> list[tuple[int, int]]:
    """Return the pairs of ZeRO stage and replicas to try: FSDP in pipelines only if asked for."""
    if "zero" in fixed or "replicas" in fixed:
        return [(fixed.get("zero", 3), fixed.get("replicas", 1))]
    if mesh.dp * mesh.cp == 1:
        return [(0, 1)]
    if mesh.pp > 1:
        return [(1, 1)]
    inside = node // (mesh.tp * mesh.cp)
    hybrid = [(3, mesh.dp // inside)] if inside > 1 and mesh.dp % inside == 0 and mesh.dp > inside else []
    return [(0, 1), (1, 1), (3, 1), *hybrid]


def search(request: Request) -> list[Plan]:
    """Return the plans that fit, the fastest first.

    Raises:
        UserError: no layout is possible, or none fits into the memory; says what would.
    """
    found, smallest, reason = [], None, ""
    for layout in layouts(request):
        if why := misfit(layout, request.model, request.sequence_length):
            reason = reason or why
            continue
        held = predict_bytes(request.model, layout, request.sequence_length)
        if held.total > ROOM * request.card.memory:
            if smallest is None or held.total < smallest.total:
                smallest = held
            continue
        found.append(Plan(layout, predict(request.model, layout, request.card, request.sequence_length), held, request))
    if found:
        return sorted(found, key=lambda plan: -plan.tokens)
    if smallest is None:
        raise UserError(reason or _no_mesh(request))
    raise UserError(_too_large(request, smallest))


def _no_mesh(request: Request) -> str:
    """Say why no mesh exists."""
    product = 1
    for name, value in request.fixed:
        product *= value if name in ("tp", "pp", "cp", "dp") else 1
    if request.gpus % product:
        return (
            f"the mesh has {product:,} GPUs, which does not divide {request.gpus:,}; use a multiple of {product:,} GPUs"
        )
    if {"dp", "tp", "pp", "cp"} <= dict(request.fixed).keys() and product != request.gpus:
        return f"the mesh has {product:,} GPUs, not {request.gpus:,}; use --gpus {product}, or leave out dp"
    per = max(1, request.gpus // max(1, product))
    most = next((n for n in range(per, 0, -1) if request.sequences % n == 0), 1)
    return (
        f"no mesh of {request.gpus:,} GPUs divides a global batch of {request.sequences:,} sequences; "
        f"use a multiple of {request.gpus:,} sequences (--global-batch), or at most {most * product:,} GPUs with pp, tp or cp"
    )


def _too_large(request: Request, smallest: Bytes) -> str:
    """Say that nothing fits, and find a number of GPUs on which it would."""
    said = (
        f"no layout fits {request.card.name} with {request.card.memory / 1e9:.0f} GB on {request.gpus:,} "
        f"GPU{'s' * (request.gpus > 1)}: the smallest needs {smallest.total / 1e9:,.0f} GB"
    )
    gpus = request.gpus
    while gpus < 2**15:
        gpus *= 2
        wider = replace(request, gpus=gpus, batch=max(request.sequences, gpus))
        for layout in layouts(wider):
            if layout.recompute != "full" or layout.mbs > 1 or misfit(layout, request.model, request.sequence_length):
                continue
            if predict_bytes(request.model, layout, request.sequence_length).total <= ROOM * request.card.memory:
                return f"{said}; {gpus:,} GPUs would do ({layout.mesh()}, full recomputation)"
    return f"{said}; shorter sequences (--sequence-length) or GPUs with more memory would help"
