"""The mesh of a simulation: which axes it has, whether the model fits to them, and the groups of each axis."""

import math
from dataclasses import dataclass, fields
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workshop.errors import UserError
from workshop.plan.sizes import Model


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes of a mesh. The ranks of the last axis follow each other, so they share a node.

    Attributes:
        pp: stages of the pipeline.
        dp: copies of the parameters: DDP, or with ``fsdp`` HSDP.
        fsdp: ranks that share the parameters of a copy with FSDP.
        cp: ranks that share the tokens of a sequence.
        tp: ranks that share each matrix.
        ep: ranks of fsdp that share the experts of each layer. Each has all parameters of its experts, or shares them with the
            ranks of fsdp that have the same experts.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The axes with more than one place."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items()) or "one rank"

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the axes with more than one place, None without such an axis. The process group must exist."""
        if not self._axes:
            return None
        return init_device_mesh("cpu", tuple(self._axes.values()), mesh_dim_names=tuple(self._axes))

    @property
    def _axes(self) -> dict[str, int]:
        """The axes of the mesh: those of ``sizes``, but with experts the axis fsdp consists of two axes."""
        if self.ep == 1:
            return self.sizes
        sizes = {"pp": self.pp, "dp": self.dp, SAME: self.fsdp // self.ep, "ep": self.ep, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == SAME}

    def together(self, *axes: str) -> DeviceMesh | None:
        """Return the mesh of some axes as one axis, without those that have only one place; None: all have one."""
        found = [axis for axis in axes if axis in self.sizes]
        if not found or self.mesh is None:
            return None
        name = "+".join(found)
        parts = [part for axis in found for part in ((SAME, "ep") if self.ep > 1 and axis == "fsdp" else (axis,))]
        return self.mesh[parts[0]] if len(parts) == 1 else self.mesh[tuple(parts)]._flatten(name)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        if axis not in self.sizes:
            return None
        mesh = self.together(axis)
        return mesh.get_group() if mesh is not None else None

    def group_names(self) -> dict[str, str]:
        """Return the axis of each group of this rank, by the name that PyTorch gave to the group."""
        names = {self.group(axis).group_name: axis for axis in self.sizes}
        if self.ep == self.fsdp > 1:
            names[self.group("ep").group_name] = "fsdp, ep"  # the same ranks
        shared = self.together("fsdp" if self.fsdp > 1 else "dp", "cp")
        if self.ep > 1 and self.fsdp > self.ep:
            names[self.mesh[SAME].get_group().group_name] = SAME
        return names if shared is None else {shared.get_group().group_name: shared.mesh_dim_names[0]} | names

    def rank(self, axis: str) -> int:
        """Return the place of this rank on an axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None and axis in self.sizes else 0


AXES = tuple(field.name for field in fields(Layout))
SAME = "fsdp/ep"  # the axis of the mesh with the ranks of fsdp that have the same experts


def read_layout(text: str, ranks: int) -> Layout:
    """Read the option ``--mesh``, such as "fsdp=128,tp=8".

    Raises:
        UserError: it has a different form, or its sizes do not multiply to the number of ranks.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh {text}: write sizes for {', '.join(AXES)}, such as fsdp=128,tp=8")
        sizes[axis] = int(size)
    ep, fsdp = sizes.pop("ep", 1), sizes.get("fsdp", 1)
    if fsdp % ep:
        raise UserError(
            f"--mesh {text}: ep={ep} does not divide fsdp={fsdp}; the ranks of ep are a part of those of fsdp"
        )
    if (places := math.prod(sizes.values())) != ranks:
        product = " x ".join(map(str, sizes.values())) or "nothing"
        hint = f"; fsdp={ranks // others} would" if not ranks % (others := places // sizes.get("fsdp", 1)) else ""
        raise UserError(f"--mesh {text}: {product} is {places}, not the {ranks} ranks of --ranks{hint}")
    return Layout(**sizes, ep=ep)


def check_model(
    layout: Layout, sizes: Model, sequence_length: int, stages: int, micro_batches: int, batch_size: int = 1
) -> None:
    """Check that a model can be divided over a mesh.

    Raises:
        UserError: it cannot; the message says what would work.
    """
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    if not sizes.gated:
        raise UserError("the MLP of this model has no gate; the simulation needs a model like Llama, Qwen or Mixtral")
    if sizes.experts % ep:
        raise UserError(
            f"ep={ep} does not divide the {sizes.experts} experts of a layer; {_divisors(sizes.experts)} would"
        )
    if ep > 1 and cp > 1:
        raise UserError("ep and cp cannot be simulated together; use only one of them")
    rows, shards = math.gcd(sizes.hidden, sizes.intermediate // tp), layout.fsdp // ep
    if sizes.experts > 1 and rows % shards:
        raise UserError(
            f"fsdp/ep = {shards} does not divide the rows of the matrices of the experts; {_divisors(rows)} would"
        )
    if sizes.experts > 1 and batch_size * sequence_length // cp * sizes.active % sizes.experts:
        raise UserError(
            f"{batch_size} x {sequence_length:,} tokens cannot be divided equally among {sizes.experts} experts; "
            f"with a --sequence-length that {sizes.experts * cp} divides, they can"
        )
    for what, number in (("heads", sizes.heads), ("key-value heads", sizes.kv_heads)):
        if number % tp:
            raise UserError(f"tp={tp} does not divide the {number} {what} of the model; {_divisors(number)} would")
    for what, number in (
        ("hidden units of the MLP", sizes.intermediate),
        ("tokens of the vocabulary", sizes.vocabulary),
    ):
        if number % tp:
            raise UserError(
                f"tp={tp} does not divide the {number:,} {what}; {_divisors(math.gcd(number, sizes.heads))} would"
            )
    if sequence_length % (parts := tp * (2 * cp if cp > 1 else 1)):
        parallel = "2 cp tp" if cp > 1 else "tp"
        lower = max(sequence_length // parts, 1) * parts
        raise UserError(
            f"{parallel} = {parts} does not divide the {sequence_length:,} tokens of a sequence; "
            f"--sequence-length {lower} would work"
        )
    if stages > sizes.layers:
        raise UserError(
            f"{stages} stages are more than the {sizes.layers} layers of the model; each stage needs at least one layer"
        )
    if stages > 1 and sizes.tied:
        raise UserError("the first and the last stage of a pipeline cannot share the embedding, as this model does")
    if layout.pp > 1 and micro_batches < layout.pp:
        raise UserError(f"pp={layout.pp} needs at least {layout.pp} micro-batches, not {micro_batches}")


def _divisors(number: int) -> str:
    """Return the largest divisors of a number up to 64, as a text."""
    found = [str(each) for each in range(1, 65) if number % each == 0]
    return " or ".join(found[-2:])
