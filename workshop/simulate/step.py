"""Run a training step as one rank of many, with the real code of PyTorch's strategies and without values."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from workshop.plan.sizes import Model
from workshop.simulate.experts import Experts
from workshop.simulate.layout import SAME, Layout
from workshop.simulate.model import Part, divide, make_model, parallelize, recompute
from workshop.simulate.recorder import PARAMETERS, Recorder, Watch, observed
from workshop.simulate.ring import use_ring
from workshop.training.pipeline import SEVERAL, schedule_class


@dataclass(frozen=True)
class Settings:
    """What to train.

    Attributes:
        sequence_length: tokens per sequence.
        batch_size: sequences per micro-batch, on each rank of dp and fsdp.
        micro_batches: micro-batches per step.
        schedule: of the pipeline: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        recompute: keep only the input of each layer for the backward pass.
        bf16: compute in bfloat16; parameters, gradients and optimizer state stay in float32.
    """

    sequence_length: int
    batch_size: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: bool = False
    bf16: bool = True

    def stages(self, layout: Layout) -> int:
        """Return the stages of the whole pipeline; with some schedules each rank has two."""
        return layout.pp * (2 if self.schedule in SEVERAL and layout.pp > 1 else 1)


def simulate(sizes: Model, layout: Layout, settings: Settings) -> Recorder:
    """Run a step as a rank of the process group, which exists already, and return what happened in it.

    The parameters, the optimizer state and, with DDP, the buckets exist before the step.
    """
    recorder, fake = Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
    _ = layout.mesh  # a mesh has tensors with values, so it must be made outside of the fake mode
    own_tokens = settings.sequence_length // layout.cp
    ring = layout.group("cp")
    with fake:
        model = make_model(sizes, use_ring(ring) if ring else "sdpa", layout.group("ep"), layout.tp)
    stages = settings.stages(layout)
    numbers = divide(sizes.layers, stages)[layout.rank("pp") :: layout.pp]
    parts = [Part(model, each, own_tokens) for each in numbers]
    del model
    with observed(recorder):
        wrapped = [_distribute(part, layout, settings, fake, recorder) for part in parts]
        parameters = [parameter for part in wrapped for parameter in part.parameters()]
        recorder.add_all(parameters, PARAMETERS)
        # On a GPU, foreach is the default of AdamW. It does not accept DTensors together with other tensors.
        mixed = len({isinstance(each, DTensor) for each in parameters}) > 1
        optimizer = torch.optim.AdamW(parameters, foreach=not mixed)
        with fake, Watch(recorder):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # creates the optimizer state
            optimizer.zero_grad()
            run = _pipeline(wrapped, layout, settings) if layout.pp > 1 else _plain(wrapped[0], layout, settings)
            recorder.begin()
            run()
            optimizer.step()
            optimizer.zero_grad()
            recorder.end()
    return recorder


def _distribute(part: Part, layout: Layout, settings: Settings, fake, recorder: Recorder) -> nn.Module:
    """Apply the strategies of the mesh to a part, from the inside to the outside, as their authors say."""
    if layout.tp > 1:
        parallelize(part, layout.mesh["tp"])
    if settings.recompute:
        recompute(part.layers.values())
    if layout.fsdp > 1:
        shard = layout.together("fsdp", "cp")
        mesh = layout.mesh["dp", shard.mesh_dim_names[0]] if layout.dp > 1 else shard
        policy = MixedPrecisionPolicy(torch.bfloat16 if settings.bf16 else None, reduce_dtype=torch.float32)
        if layout.ep > 1:  # each rank has only some experts, which it shares with fewer ranks
            same = layout.mesh["dp", SAME] if layout.dp > 1 else layout.mesh[SAME]
            for experts in (each for each in part.modules() if isinstance(each, Experts)):
                fully_shard(experts, mesh=same, mp_policy=policy, shard_placement_fn=_shard)
        for each in (*part.layers.values(), part):
            fully_shard(each, mesh=mesh, mp_policy=policy, shard_placement_fn=_shard)
        return part
    copies = layout.together("dp", "cp")
    if copies is None:
        return part
    if layout.tp > 1:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(part)  # DDP needs plain tensors
    with fake, Watch(recorder):  # the buckets
        return DDP(part, process_group=copies.get_group())


def _shard(parameter: nn.Parameter) -> Shard | None:
    """Shard the matrices of experts by their rows, because a rank can have fewer experts than there are shards."""
    return Shard(1) if parameter.ndim == 3 else None


def _precision(layout: Layout, settings: Settings):
    """Return the context of the forward pass. FSDP has a policy instead."""
    return torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16 and layout.fsdp == 1)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _plain(model: nn.Module, layout: Layout, settings: Settings) -> Callable[[], None]:
    """Return a function that runs the forward and the backward pass of each micro-batch."""
    tokens = torch.zeros(settings.batch_size, settings.sequence_length // layout.cp, dtype=torch.long)

    def run() -> None:
        for number in range(settings.micro_batches):
            last = number == settings.micro_batches - 1
            waiting = model.no_sync() if isinstance(model, DDP) and not last else nullcontext()
            with waiting, loss_parallel() if layout.tp > 1 else nullcontext():
                with _precision(layout, settings):
                    loss = _loss(model(tokens), tokens)
                loss.backward()
                del loss

    return run


def _pipeline(parts: list[nn.Module], layout: Layout, settings: Settings) -> Callable[[], None]:
    """Return a function that runs a step of the schedule. The stages know all shapes, so they do not ask each other."""
    from torch.distributed import pipelining

    place, group, stages = layout.rank("pp"), layout.group("pp"), settings.stages(layout)
    tokens = torch.zeros(settings.batch_size, settings.sequence_length // layout.cp, dtype=torch.long)
    inner = next(each for each in parts[0].modules() if isinstance(each, Part))
    hidden = next(iter(inner.layers.values())).input_layernorm.weight.shape[0]
    # With autocast, the residual stream stays in float32.
    dtype = torch.bfloat16 if settings.bf16 and layout.fsdp > 1 else torch.float32
    between = torch.zeros(settings.batch_size, tokens.shape[1] // layout.tp, hidden, dtype=dtype, requires_grad=True)
    own = []
    for number, part in zip(range(place, stages, layout.pp), parts, strict=True):
        given = tokens if number == 0 else between
        own.append(
            pipelining.PipelineStage(
                part, number, stages, torch.device("cpu"), input_args=(given,), output_args=(between,), group=group
            )
        )
    schedule = schedule_class(settings.schedule)(
        own if settings.schedule in SEVERAL else own[0], settings.micro_batches, loss_fn=_loss
    )
    everything = tokens.repeat(settings.micro_batches, 1)
    last = place == layout.pp - 1

    def run() -> None:
        with _precision(layout, settings), loss_parallel() if layout.tp > 1 else nullcontext():
            schedule.step(
                *([everything] if place == 0 else []), target=everything if last else None, return_outputs=False
            )

    return run
