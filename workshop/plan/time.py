"""Predict the seconds of a training step from a model, a layout and a card."""

import tomllib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from workshop.plan.cards import Card
from workshop.plan.layout import Layout
from workshop.plan.sizes import Model, part

CONSTANTS = Path(__file__).with_name("constants.toml")
EAGER = 2.5  # without fusion, each element-wise operation of a norm, a rotation or a SiLU reads and writes its tensors
FLASH3 = (
    1.75  # on Hopper, 1.5 to 2.0 times as fast as FlashAttention-2: Shah et al., 2024, https://arxiv.org/abs/2407.08608
)
HEAD = 1.25  # FlashAttention is slower for small heads: d / (d + 32), as much as FlashAttention-2's figures show; 1 for 128
INSIDE = 0.2  # the latency between two GPUs of a node, in units of that between two nodes


@dataclass(frozen=True)
class Constants:
    """What we cannot compute: fitted to published runs by ``workshop plan --fit``.

    Attributes:
        matmul: share of the best matrix-product rate of the card that hot GPUs sustain in training.
        attention: rate of the attention, relative to that of FlashAttention-2 on the card.
        traffic: bytes that element-wise operations move, relative to perfectly fused operations.
        link: share of the peak of the link in a node that collectives reach.
        network: share of the peak of the network that collectives reach.
        latency: seconds per node that a ring crosses, relative to the latency of a message.
        overlap: share of the communication during computation that costs no time.
        step: seconds in each step for data, logging, the norm of the gradients and the wait for the slowest rank.
    """

    matmul: float
    attention: float
    traffic: float
    link: float
    network: float
    latency: float
    overlap: float
    step: float


@lru_cache
def fitted() -> Constants:
    """Return the constants of constants.toml."""
    table = tomllib.loads(CONSTANTS.read_text())
    return Constants(**{field.name: table[field.name] for field in fields(Constants)})


@dataclass(frozen=True)
class Times:
    """The seconds of a step on the GPU that takes longest, by what they are spent on; they add up to the step.

    Attributes:
        matmul: matrix products, those that are computed again included.
        attention: the products of queries, keys and values.
        traffic: element-wise operations, which wait for the memory.
        tp, cp, ep, dp, p2p: exchanges for tensor, context, expert and data parallelism and between stages, as far as computation
            does not hide them.
        bubble: waiting of a pipeline that fills and drains.
        optimizer: the optimizer step.
        other: data, logging, the norm of the gradients, the slowest rank.
    """

    matmul: float
    attention: float
    traffic: float
    tp: float
    cp: float
    ep: float
    dp: float
    p2p: float
    bubble: float
    optimizer: float
    other: float

    @property
    def step(self) -> float:
        return sum(vars(self).values())

    @property
    def binds(self) -> str:
        """What takes most time apart from the matrix products that cannot be avoided, or "compute" if nothing takes a tenth."""
        words = {"traffic": "memory traffic", "tp": "TP", "cp": "CP", "ep": "EP", "dp": "DP", "p2p": "PP transfers"}
        words |= {"bubble": "PP bubble", "optimizer": "optimizer step", "other": "fixed time of a step"}
        share, name = max((vars(self)[name], name) for name in words)
        return words[name] if share > 0.1 * self.step else "compute"


class Machine:
    """Rates of a card with fitted constants, and the time of products and collectives on it."""

    def __init__(self, card: Card, constants: Constants):
        self.card, self.constants = card, constants
        self.bf16 = card.bf16 * card.matmul * constants.matmul
        self.fp8 = card.fp8 * card.matmul * constants.matmul
        self.attention = card.bf16 * card.attention * constants.attention
        self.latency = card.latency * constants.latency
        self.link, self.network = card.link * constants.link, card.rate * constants.network

    def product(self, m: float, k: float, n: float, fp8: str = "", weights: int = 1) -> float:
        """Return the seconds of the product of an m x k and a k x n matrix.

        The additional time for reading and writing the matrices makes small ones slow. float8 also costs the conversion of both
        operands: reading for the maximum, reading and writing.

        Args:
            m, k, n: the sizes.
            fp8: "", "tensorwise" or "rowwise".
            weights: the number of k x n matrices among which the m rows are divided (experts).
        """
        bandwidth = self.card.memory_bandwidth
        moved = 2 * (m * k + weights * k * n + m * n)
        if not fp8 or not self.fp8:
            return 2 * m * k * n / self.bf16 + moved / bandwidth
        rate, conversions = (self.fp8, 5) if fp8 == "tensorwise" else (self.fp8 * 0.75, 15)
        return 2 * m * k * n / rate + (moved / 2 + conversions * (m * k + weights * k * n)) / bandwidth

    def ring(self, full: float, ranks: int, per_node: int, calls: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of ``full`` bytes: alpha-beta model of a ring.

        Args:
            full: bytes of the whole tensor.
            ranks: the processes of the group.
            per_node: how many of them are in each node; each one has its own adapter.
            calls: the parts that the tensor is sent in, each with its own latency.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // per_node)
        rate = self.link if nodes == 1 else min(self.link, per_node * self.network)
        return full * (ranks - 1) / ranks / rate + calls * self.latency * (nodes - 1 + INSIDE * (ranks - nodes))

    def hidden(self, exchange: float, computation: float) -> float:
        """Return the seconds of an exchange that computation beside it does not hide."""
        return exchange - self.constants.overlap * min(exchange, computation)


@dataclass(frozen=True)
class Layer:
    """The seconds of one layer for one micro-batch, forward and backward; the backward pass has what is computed again."""

    matmul: tuple[float, float]
    attention: tuple[float, float]
    traffic: tuple[float, float]
    tp: tuple[float, float]
    cp: tuple[float, float]
    ep: tuple[float, float]

    def total(self, direction: int) -> float:
        return sum(pair[direction] for pair in vars(self).values())

    def computing(self, direction: int) -> float:
        return self.matmul[direction] + self.attention[direction] + self.traffic[direction]


# What the backward pass computes again: shares of the matrix products, attention, element-wise operations, and exchanges.
AGAIN = {"none": (0, 0, 0, 0), "selective": (0.5, 0, 1, 0.5), "half": (0.5, 0.5, 0.5, 0.5), "full": (1, 1, 1, 1)}


def layer_times(model: Model, layout: Layout, machine: Machine, sequence_length: int) -> Layer:
    """Return the seconds of a decoder layer."""
    tp, cp = layout.tp, layout.cp
    own = part(model, tp, ep=layout.ep)
    tokens = layout.mbs * sequence_length / cp
    queries, keys = own.heads * own.head, own.kv_heads * own.head
    fp8 = layout.fp8
    product = machine.product(tokens, model.hidden, queries + 2 * keys, fp8)
    product += machine.product(tokens, queries, model.hidden, fp8)
    routed = tokens * model.active
    up = (2 if model.gated else 1) * own.intermediate
    product += machine.product(routed, model.hidden, up, fp8, own.experts)
    product += machine.product(routed, own.intermediate, model.hidden, fp8, own.experts)
    # Causal: a token sees half of the others. The backward pass has five products in place of two.
    scores = 2 * tokens * sequence_length * queries / (machine.attention * HEAD * own.head / (own.head + 32))
    if layout.attention == "flash3" and machine.card.fp8:
        scores /= FLASH3
    moved = tokens / (tp if layout.sp else 1) * 20 * model.hidden + tokens * 4 * (queries + keys)
    moved += routed * (6 if model.gated else 4) * own.intermediate
    moved *= machine.constants.traffic * (EAGER if layout.kernels == "eager" else 1)
    if model.experts > 1:  # the rows are sorted by expert, and back
        moved += 8 * routed * model.hidden
    if layout.attention == "plain":  # scores, softmax, mask and dropout, each read and written
        moved += 11 * own.heads * tokens * sequence_length
    elementwise = moved / machine.card.memory_bandwidth
    exchange = 4 * machine.ring(2 * tokens * model.hidden, tp, min(tp, machine.card.gpus_per_node))
    if layout.async_tp:
        exchange *= 0.5
    experts = _all_to_all(model, layout, machine, tokens)
    again = AGAIN[layout.recompute]
    ring = _context(model, layout, machine, tokens, scores)
    return Layer(
        (product, (2 + again[0]) * product),
        (scores, (2.5 + again[1]) * scores),
        (elementwise, (2 + again[2]) * elementwise),
        (exchange, (1 + again[3]) * exchange),
        (ring[0], ring[1] + again[1] * ring[0]),
        (experts, (1 + again[0]) * experts),
    )


def _context(model: Model, layout: Layout, machine: Machine, tokens: float, scores: float) -> tuple[float, float]:
    """Return the seconds that a ring of keys and values takes beside the attention, forward and backward."""
    if layout.cp == 1:
        return 0.0, 0.0
    keys = 2 * max(1, model.kv_heads // layout.tp) * model.head
    per_node = max(1, min(layout.cp, machine.card.gpus_per_node // layout.tp))
    once = machine.ring(2 * keys * tokens * layout.cp, layout.cp, per_node)
    return machine.hidden(once, scores), machine.hidden(2 * once, 2.5 * scores)


def _all_to_all(model: Model, layout: Layout, machine: Machine, tokens: float) -> float:
    """Return the seconds of sending the tokens to their experts and back."""
    if layout.ep == 1:
        return 0.0
    per_node = max(1, min(layout.ep, machine.card.gpus_per_node // (layout.tp * layout.cp)))
    inside = (layout.ep - per_node) / layout.ep
    full = 2 * tokens / layout.tp * model.active * model.hidden
    rate = machine.network if layout.ep > per_node else machine.link
    share = inside if layout.ep > per_node else (layout.ep - 1) / layout.ep
    return 2 * (full * share / rate + machine.latency * layout.ep)


def predict(
    model: Model, layout: Layout, card: Card, sequence_length: int, constants: Constants | None = None
) -> Times:
    """Predict a training step.

    Computation: operations of each matrix product over the rate that the card keeps up, plus the time for its operands. Traffic:
    bytes of element-wise operations over the memory bandwidth. Exchanges: rings with a latency for each node and a rate. FSDP's
    are hidden behind the computation of a layer, those of DDP and ZeRO behind the last backward pass, those of context
    parallelism behind the attention; those of tensor and expert parallelism are not hidden. A pipeline adds its bubble
    (Narayanan et al., 2021, https://arxiv.org/abs/2104.04473; zero bubble: Qi et al., 2024, https://arxiv.org/abs/2401.10241).

    Args:
        model: its sizes.
        layout: how it is divided among the GPUs.
        card: the GPU, its node and its network.
        sequence_length: tokens.
        constants: None: those of constants.toml.
    """
    machine = Machine(card, constants or fitted())
    layer = layer_times(model, layout, machine, sequence_length)
    head = _head(model, layout, machine, sequence_length)
    each = layer.total(0) + layer.total(1)
    layers = layout.stage_layers(model.layers, head / each)
    shares = layers * layout.microbatches
    fsdp, data = _data_parallel(model, layout, machine, layer, layers)
    last = model.layers - layers * (layout.pp - 1)  # the layers beside the head
    extra = max(0.0, head - (layers - last) * each)
    stage = layers * each + extra + fsdp
    bubble = (layout.pp - 1) * stage / layout.vpp * (1 / 3 if layout.schedule == "zero-bubble" else 1)
    sent = 2 * layout.mbs * sequence_length / layout.cp * model.hidden / layout.tp
    p2p = 2 * layout.vpp * (sent / machine.network + machine.latency) if layout.pp > 1 else 0.0
    p2p = layout.microbatches * machine.hidden(p2p, stage)
    stepped = model.parameters / (layout.tp * layout.pp * (layout.sharding if layout.zero else 1))
    sums = {name: sum(getattr(layer, name)) * shares for name in ("matmul", "attention", "traffic", "tp", "cp", "ep")}
    sums["matmul"] += extra * layout.microbatches
    return Times(
        **sums,
        dp=fsdp * layout.microbatches + data,
        p2p=p2p,
        bubble=bubble,
        optimizer=32 * stepped / card.memory_bandwidth,
        other=machine.constants.step,
    )


def _head(model: Model, layout: Layout, machine: Machine, sequence_length: int) -> float:
    """Return the seconds of the output layer and the loss for one micro-batch."""
    tokens = layout.mbs * sequence_length / layout.cp
    own = -(-model.vocabulary // layout.tp)
    moved = (24 if layout.kernels == "eager" else 16) * tokens * own
    return 3 * machine.product(tokens, model.hidden, own) + moved / machine.card.memory_bandwidth


def _data_parallel(model: Model, layout: Layout, machine: Machine, layer: Layer, layers: int) -> tuple[float, float]:
    """Return the seconds of exchanges of data parallelism that are not hidden, in each micro-batch and once in a step."""
    ranks = layout.dp * layout.cp // layout.replicas
    per_node = max(1, min(ranks, machine.card.gpus_per_node // layout.tp))
    own = part(model, layout.tp, ep=layout.ep)
    size, root = own.layer_parameters, own.root_parameters / layout.pp
    ring = lambda full: machine.ring(full, ranks, per_node)  # noqa: E731
    if layout.zero == 3:
        gather = ring((1 if layout.fp8 == "tensorwise" else 2) * size)
        scatter = ring(layout.gradient_bytes * size)
        copies = max(1, per_node // ranks)
        if layout.replicas > 1:
            scatter += 2 * machine.ring(layout.gradient_bytes * size / ranks, layout.replicas, copies)
        if layout.pp == 1:
            forward = machine.hidden(gather, layer.computing(0))
            backward = machine.hidden(gather + scatter, layer.computing(1))
            rest = ring(2 * root) + ring(layout.gradient_bytes * root)
            return layers * (forward + backward) + rest, 0.0
        # A pipeline gathers once in a step, and reduces after the last micro-batch.
        once = layers * (gather + scatter) + ring((2 + layout.gradient_bytes) * root)
        return 0.0, machine.hidden(once, layers * (layer.computing(0) + layer.computing(1)))
    # With several parts on each stage, the last group of micro-batches goes through one part after the other, so that a part
    # exchanges its gradients while the others compute.
    window = layers * (min(layout.pp, layout.microbatches) if layout.vpp > 1 else 1)
    full, calls = layers * size + root, layers * (6 if layout.by_tensor and layout.zero else 1)
    ring = lambda full: machine.ring(full, ranks, per_node, calls)  # noqa: E731
    reduce = ring(layout.gradient_bytes * full)
    if layout.zero == 0:
        return 0.0, machine.hidden(2 * reduce, window * layer.computing(1))
    gathered = machine.hidden(ring(2 * full), window * layer.computing(0))
    return 0.0, machine.hidden(reduce, window * layer.computing(1)) + gathered
