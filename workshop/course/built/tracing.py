"""Trace one step of a program of stage 06: what it computes, sends and holds, in order."""

import gc
import sys
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from workshop.check.evidence.events import BuildReported, CaseTried, Moment, StepTraced
from workshop.check.probes.probe import Function, Probe, after, around, before, on
from workshop.check.probes.recorder import Recorder
from workshop.course.built import cases
from workshop.tensors import own_part
from workshop.training.building import COUNTED, Log
from workshop.training.decoder import Block
from workshop.training.traffic import Messages, group_of

POINT_TO_POINT = {"c10d::send": "send", "c10d::recv_": "recv"}
ASYNCHRONOUS = """
    all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_single reduce_scatter reduce_scatter_tensor
    reduce_scatter_single all_to_all all_to_all_single isend irecv
"""


class Tracing(TorchDispatchMode):
    """Notes collectives while it is entered, and knows the tensors that are alive."""

    def __init__(self, recorder: Recorder, probe: "StepTracer") -> None:
        super().__init__()
        self.recorder, self.probe = recorder, probe
        self.moments: list[Moment] = []
        self.flops = self.normalized = 0
        self.exchanges: list[str] = []
        self.tensors: list[weakref.ref[torch.Tensor]] = [
            weakref.ref(own_part(each)) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)
        ]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        with self.recorder.guard:
            if count := flop_registry.get(function.overloadpacket):
                self.flops += count(*args, **(kwargs or {}), out_val=result)
            if function.name() == "aten::native_layer_norm":
                self.normalized += args[0].nbytes
            counted = Messages()
            counted.count(function, args)
            peer = args[2] if function.name() in POINT_TO_POINT else -1  # (tensors, group, peer, tag)
            for name in counted.calls or filter(None, [POINT_TO_POINT.get(function.name())]):
                self.probe.called = name
                if _with_gradients():
                    self.exchanges.append(self.recorder.where())
                self.note("call", name, counted.bytes, peer, _ranks(args))
            if function.name() == "_c10d_functional::wait_tensor":
                self.probe.ended(args[0])
            for each in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(each, torch.Tensor):
                    self.tensors.append(weakref.ref(each))
        return result

    def note(self, what: str, name: str = "", size: int = 0, peer: int = -1, group: tuple[int, ...] = ()) -> None:
        """Note a moment, and measure what is held."""
        held, where = self.held(), self.recorder.where()
        self.moments.append(Moment(what, name, size, peer, group, self.flops, self.probe.phase, held, where))

    def held(self) -> int:
        """The bytes of the tensors that are alive, with shared memory counted once."""
        alive = [(each, tensor) for each in self.tensors if (tensor := each()) is not None]
        self.tensors = [each for each, _ in alive]
        return _bytes([tensor for _, tensor in alive])


class StepTracer(Probe):
    """Traces the third step of a program of stage 06, and records its losses."""

    writes = (StepTraced, BuildReported, CaseTried)

    def clear(self) -> None:
        self.tracing: Tracing | None = None
        self.numbers: dict[int, int] = {}  # of the blocks, by their ids
        self.in_step = self.in_forward = False
        self.called = ""  # the last collective
        # For each handle of a collective that was asked for: a list with the name of the collective, which its end removes.
        self.handles: MutableMapping[object, list[str]] = WeakIdKeyDictionary()

    @property
    def phase(self) -> str:
        """What the program does now."""
        if self.in_step:
            return "optimizer"
        return "backward" if self.recorder.in_backward else "forward" if self.in_forward else ""

    @before(Log, "step")
    def _begin(self, log: Log, loss: Any) -> None:
        if log.steps == COUNTED - 2:  # the step that begins now is the third one
            self.tracing = Tracing(self.recorder, self)
            self.tracing.__enter__()

    @after(Log, "step")
    def _end(self, result: None, log: Log, loss: Any) -> None:
        if log.steps == COUNTED and self.tracing:
            tracing, self.tracing = self.tracing, None
            tracing.__exit__(None, None, None)
            if _has_pipeline():
                where = next((each.where for each in tracing.moments if each.name == "send"), "")
                tracing.moments.append(Moment("class", "PipelineStage", 0, -1, (), tracing.flops, "", 0, where))
            optimizers = list(self.recorder.optimizers)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            state = [value for optimizer in optimizers for each in optimizer.state.values() for value in each.values()]
            traced = StepTraced(
                moments=tracing.moments,
                optimizers=_classes(self.recorder),
                parameters=_bytes([each for group in groups for each in group["params"]]),
                state=_bytes([each for each in state if isinstance(each, torch.Tensor) and each.dim()]),
                held=tracing.held(),
                flops=tracing.flops,
                normalized=tracing.normalized,
                exchanges=tracing.exchanges,
            )
            self.note_here(traced)

    @after(Log, "report")
    def _report(self, losses: list[float], log: Log) -> None:
        self.note_here(BuildReported(losses=losses))

    @on("before_step")
    def _before(self, optimizer: Optimizer) -> None:
        self.in_step, self.in_forward = True, False

    @on("after_step")
    def _after(self, optimizer: Optimizer) -> None:
        self.in_step = False

    @around(Block, "forward")
    def _block(self, original: Function, block: Block, *args: Any, **kwargs: Any) -> Any:
        number = str(self.numbers.setdefault(id(block), len(self.numbers)))
        self.in_forward = True
        self._note("forward", number, sum(each.nbytes for each in args if isinstance(each, torch.Tensor)))
        output = original(block, *args, **kwargs)
        if self.tracing and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._note("backward", number))
        return output

    @after(c10d, *ASYNCHRONOUS.split())
    def _begun(self, handle: Any, *_: Any, **__: Any) -> None:
        if handle is not None and handle not in self.handles:
            self.handles[handle] = [self.called]

    @after(dist.Work, "get_future")
    def _future(self, future: Any, work: Any) -> None:
        self.handles[future] = self.handles.setdefault(work, [self.called])

    @before(dist.Work, "wait")
    @before(torch._C.Future, "wait")
    def _wait(self, handle: Any, *_: Any, **__: Any) -> None:
        self.ended(handle)

    @after(dist.Work, "is_completed")
    def _asked(self, completed: bool, work: Any) -> None:
        if completed:
            self.ended(work)

    def ended(self, handle: Any) -> None:
        """Note that the program has waited for a collective, the first time; a handle is unknown if the call itself waits."""
        if names := self.handles.setdefault(handle, [self.called]):
            self._note("wait", names.pop())

    def _note(self, what: str, name: str = "", size: int = 0) -> None:
        with self.recorder.guard:
            if self.tracing:
                self.tracing.note(what, name, size)

    @before(cases, "report")
    def _case(self, name: str, problem: str | None, where: str = "") -> None:
        self.recorder.note(CaseTried(name=name, problem=problem, where=where))


def _classes(recorder: Recorder) -> dict[str, list[str]]:
    """The classes of torch.distributed to which the optimizers of each line and their parameters belong.

    This includes optimizers inside of another one.
    """
    found: dict[str, list[str]] = {}
    for optimizer, line in recorder.optimizers.items():
        parameters = {type(each) for group in optimizer.param_groups for each in group["params"]}
        kinds = (*type(optimizer).__mro__, *parameters)
        found.setdefault(line, []).extend(
            each.__name__ for each in kinds if each.__module__.startswith("torch.distributed")
        )
    return found


def _with_gradients() -> bool:
    """Whether a function of PyTorch that adds a backward pass to a collective is running."""
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if (
            code.co_filename.endswith("torch/distributed/nn/functional.py")
            or code.co_name == "all_to_all_single_autograd"
        ):
            return True
        frame = frame.f_back
    return False


def _has_pipeline() -> bool:
    """Whether this process has a stage of PyTorch's pipelines. Importing their module takes a second, so only a program does."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    return module is not None and any(isinstance(each, module._PipelineStageBase) for each in gc.get_objects())


def _ranks(args: Any) -> tuple[int, ...]:
    """The ranks in the group of a collective."""
    group = group_of(args)
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes of tensors, with shared memory counted once."""
    storages = [each.untyped_storage() for each in map(own_part, tensors)]
    # _cdata identifies a storage; data_ptr() of one that was resized to zero is an error.
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
