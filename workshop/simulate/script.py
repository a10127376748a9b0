"""Run a training script as one rank of many: its modules get fake tensors, and its process group is fake.

The data stay real, so that loaders and tokenizers work. An operation with a fake tensor returns a fake tensor.
"""

import copy
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed import fsdp
from torch.distributed.tensor import parallel
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from workshop.errors import UserError
from workshop.simulate import world
from workshop.simulate.recorder import PARAMETERS, Recorder, Watch, observed

STEPS = 3  # the first creates the optimizer state; the last is reported
GPUS = 8  # ranks per node
# Elements. Larger tensors of modules are fake at once, so a large model takes no memory. Smaller ones are fake from the first use
# that shows that the module will train, so that a program can create a small model and save it.
LARGE = 2**20
USES = ("parameters", "train")
MADE_UP = 1.0  # what .item() of a fake tensor returns


@dataclass
class Outcome:
    """What a script did.

    Attributes:
        step: the last optimizer step that was complete, or the one in which the script stopped; None: no module computed.
        steps: how many optimizer steps were complete.
        stopped: why the script did not get further, in one sentence; "": it ended, or did enough steps.
        read: the lines that read a value, which was made up.
    """

    step: Recorder | None = None
    steps: int = 0
    stopped: str = ""
    read: list[str] = field(default_factory=list)


class Enough(BaseException):
    """The script has done enough steps."""


def run_script(words: Sequence[str], ranks: int, rank: int) -> Outcome:
    """Run a script until it has done STEPS optimizer steps, it ends, or it needs a value.

    Args:
        words: the program and its options; a launcher with its options before them is ignored.
        ranks, rank: how many ranks there are, and which one to be.

    Raises:
        UserError: there is no program among the words, or it does not exist.
    """
    at = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise UserError(f"{' '.join(words)}: name a Python program, such as: -- train.py --epochs 1")
    program = Path(words[at])
    if not program.is_file():
        raise UserError(f"{program}: there is no such file")
    outcome = Outcome()
    environment = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % GPUS, "LOCAL_WORLD_SIZE": min(ranks, GPUS)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "GROUP_RANK": rank // GPUS}
    settings = {name: str(value) for name, value in environment.items()}
    run = Run(outcome, program.resolve().parent)
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(sys, "argv", list(words[at:])),
        run.patched(rank, ranks),
    ):
        sys.path.insert(0, str(run.folder))
        try:
            runpy.run_path(str(program), run_name="__main__")
        except Enough:
            pass
        except SystemExit as end:
            if end.code not in (None, 0) and not outcome.steps:
                outcome.stopped = f"The program ended itself with status {end.code}."
        except BaseException as error:
            outcome.stopped = run.explain(error)
    if not outcome.steps and run.recorder.position:
        run.recorder.end()
        outcome.step = run.recorder
    return outcome


class Run:
    """A script that runs with fake modules."""

    def __init__(self, outcome: Outcome, folder: Path):
        self.outcome, self.folder = outcome, folder
        self.recorder, self.fake, self.depth = Recorder(), FakeTensorMode(allow_non_fake_inputs=True), 0
        self.made = WeakTensorKeyDictionary()  # the fake tensor of each real one

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make all new tensors fake in a with-block, and record what happens there."""
        self.depth += 1
        try:
            if self.depth > 1:
                yield
            else:
                with self.fake, Watch(self.recorder, self.made_up):
                    yield
        finally:
            self.depth -= 1

    @contextmanager
    def patched(self, rank: int, ranks: int) -> Iterator[None]:
        """Change PyTorch for the script in a with-block."""
        stack, optimizing = ExitStack(), ExitStack()
        with stack:
            stack.enter_context(world.ddp_of_fake_tensors())
            stack.enter_context(observed(self.recorder))
            for owner, name, changed in (*self.changes(), *self.launching(rank, ranks)):
                stack.enter_context(mock.patch.object(owner, name, changed))
            handles = (
                hooks.register_module_parameter_registration_hook(self.registered),
                hooks.register_module_buffer_registration_hook(self.registered),
                register_optimizer_step_pre_hook(lambda *_: optimizing.enter_context(self.inside()) and None),
                register_optimizer_step_post_hook(lambda *_: self.after_step(optimizing)),
            )
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(Watch(self.recorder, self.made_up))
            try:
                yield
            finally:
                optimizing.close()
                if dist.is_initialized():
                    dist.destroy_process_group()

    def changes(self) -> list[tuple]:
        """Return what to replace: the owner, the name, and the new function."""
        call, init = nn.Module.__call__, DDP.__init__

        def ddp_init(model, module, *args, **kwargs):
            with self.inside():  # the buckets are fake too
                init(model, self.convert(module), *args, **kwargs)

        def module_call(module, *args, **kwargs):
            if self.depth or not any(isinstance(own(each), FakeTensor) for each in module.parameters()):
                return call(module, *args, **kwargs)
            with self.inside():
                return call(module, *args, **kwargs)

        def within(function: Callable) -> Callable:
            def changed(*args, **kwargs):
                with self.inside():
                    return function(*args, **kwargs)

            return changed

        def converted(function: Callable) -> Callable:
            def changed(module, *args, **kwargs):
                return function(self.convert(module), *args, **kwargs)

            return changed

        def applied(module, function, recurse=True):
            made = {}  # two modules may share a parameter
            for part in self.convert(module).modules() if recurse else (module,):
                for held in (part._parameters, part._buffers):
                    for name, tensor in held.items():
                        if tensor is not None and tensor not in made:
                            with torch.no_grad():
                                new = function(tensor)
                            parameter = isinstance(tensor, nn.Parameter) and new is not tensor
                            made[tensor] = nn.Parameter(new, tensor.requires_grad) if parameter else new
                        held[name] = tensor if tensor is None else made[tensor]
            return self.convert(module)

        found = [(torch.autograd, name, within(getattr(torch.autograd, name))) for name in ("backward", "grad")]
        # On a GPU, foreach is the default of the optimizers.
        devices = [*optimizer._get_foreach_kernels_supported_devices(), "cpu"]
        found += [(optimizer, "_get_foreach_kernels_supported_devices", lambda: devices)]
        found += [(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor])]
        # Module.to() calls _apply(), which cannot exchange fake tensors.
        found += [(nn.Module, "_apply", applied)]
        # An optimizer gets the parameters, and DDP reads them; both must get the fake ones.
        found += [
            (nn.Module, "__call__", module_call),
            *((nn.Module, name, converted(getattr(nn.Module, name))) for name in USES),
        ]
        found += [(DDP, "__init__", ddp_init)]
        found += [(fsdp, "fully_shard", converted(fsdp.fully_shard))]
        found += [(parallel, "parallelize_module", converted(parallel.parallelize_module))]
        return found

    def launching(self, rank: int, ranks: int) -> list[tuple]:
        """Return what to replace so that the script joins the fake process group, and neither starts nor compiles anything."""

        def spawn(function, args=(), *_, **__):
            function(rank % GPUS, *args)

        def join(*_, **__):
            world.join(rank, ranks)

        found = [(module, "init_process_group", join) for module in (dist, c10d)]
        return [*found, (torch.multiprocessing, "spawn", spawn), (torch, "compile", compile_nothing)]

    def registered(self, module: nn.Module, name: str, tensor):
        """Return what a module keeps in place of a tensor that it gets."""
        return self.faked(tensor) if tensor is not None and tensor.numel() >= LARGE else tensor

    def faked(self, tensor):
        """Return a fake tensor in place of a real one; None and fake tensors stay."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return tensor
        if tensor not in self.made:  # two modules may share a parameter
            with self.fake, torch.no_grad():
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            trained = tensor.requires_grad
            self.made[tensor] = nn.Parameter(made, trained) if isinstance(tensor, nn.Parameter) else made
        return self.made[tensor]

    def convert(self, module: nn.Module) -> nn.Module:
        """Replace the parameters and buffers that a module got in another way than by registration, as from a file."""
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                for name, tensor in held.items():
                    if type(tensor) in (torch.Tensor, nn.Parameter):
                        held[name] = self.faked(tensor)
        self.recorder.add_all(
            (each for part in module.modules() for each in part._parameters.values() if each is not None), PARAMETERS
        )
        return module

    def after_step(self, optimizing: ExitStack) -> None:
        """Note a complete step; after the last one, stop the script."""
        optimizing.close()
        self.outcome.steps += 1
        last = self.outcome.step = copy.copy(self.recorder)
        last.end()
        if self.outcome.steps == STEPS:
            raise Enough
        self.recorder.begin()

    def made_up(self, tensor: FakeTensor, error: DataDependentOutputException) -> float:
        """Return the value of a fake tensor that the script reads, and note the line.

        Raises:
            DataDependentOutputException: it is not a floating-point number. Sizes and decisions cannot be made up.
        """
        if not tensor.is_floating_point():
            raise error
        line = self.line_of(traceback.extract_stack())
        if line and not self.recorder.updating and line not in self.outcome.read:
            self.outcome.read.append(line)
        return MADE_UP

    def line_of(self, frames) -> str:
        """Return the innermost line of the script, or of a file in its folder, as "train.py:12"."""
        own_frames = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(self.folder)]
        if not own_frames:
            return ""
        frame = own_frames[-1]
        return f"{os.path.relpath(frame.filename)}:{frame.lineno}"

    def explain(self, error: BaseException) -> str:
        """Return where and why the script stopped, in one sentence."""
        frames = traceback.extract_tb(error.__traceback__)
        place, _, number = self.line_of(frames).rpartition(":")
        where = f"{place}:{number} ({linecache.getline(place, int(number)).strip()})" if place else "its start"
        if isinstance(error, DataDependentOutputException):
            return f"Stopped at {where}: this line needs a value, but simulated tensors have no values."
        words = " ".join(str(error).split())[:200]
        return f"Stopped at {where}: {type(error).__name__}{': ' if words else ''}{words}"


def own(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def compile_nothing(model=None, **_):
    """Stand in for ``torch.compile``, also as a decorator with options: the function stays as it is."""
    return (lambda function: function) if model is None else model
