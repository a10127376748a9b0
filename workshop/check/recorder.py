"""What runs inside each process of a checked program: it notes what the program does, and changes nothing that it computes.

``install`` replaces functions of torch with ones that note and then call the original. Each process appends its notes
("events") to a file of its own, so that what happened before a crash or a hang is there. An event is a tuple
(seconds, kind, dict); ``evidence.py`` reads them.
"""

import atexit
import fcntl
import gc
import io
import multiprocessing.process
import os
import pickle
import re
import runpy
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Subset, dataloader

from workshop.tensors import bf16_is_fast, own_part

COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "broadcast_object_list",
    "send",
    "recv",
    "isend",
    "irecv",
    "all_reduce_coalesced",
)
LIGHTNING = {"lightning.pytorch", "pytorch_lightning"}  # the two names under which it is installed
NOTHING = nullcontext()
SAMPLES = 12  # how many values of a tensor stand for it, beside its norm


class Recorder:
    """The notes of this process.

    Args:
        folder: where the files of events and of output go, one of each for a process.
        script: the program that is checked; "where" always names a line of it.
        scratch: the folder that the program may write to.
    """

    def __init__(self, folder: Path, script: Path, scratch: Path):
        self.folder, self.script, self.scratch = folder, str(script), scratch
        self.start = time.monotonic()
        self.lock = threading.RLock()
        self.depth = 0  # of nested module calls
        self.quiet = 0  # inside a call of torch that itself calls what is recorded
        self.in_collective = 0
        self.in_backward = False
        self.starting = False  # whether a library starts that leaves files of its own; for stage 05
        self.fails = False  # whether it is to raise an exception in its third step
        self.dies = False  # whether it is to die in the step after its first snapshot
        self.saved = False
        self.bf16 = None  # whether the device of the model is fast at bfloat16; unknown before the first step
        self.optimizers = []
        self.fitting = False  # whether Lightning's Trainer is at work
        self.test_set = None  # of the workshop's data, as the program made it
        self.around = lambda module: NOTHING  # what is to be noted around a forward of the whole model; for stage 04
        self.spread = lambda model: None  # notes how the model is spread; for stage 04
        self.open()

    def open(self):
        """Begin the files of this process: at the start, and in each child that is forked."""
        self.events = os.open(self.folder / f"events-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.stacks = os.open(self.folder / f"stacks-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(self.folder / f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        import faulthandler

        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=False, chain=False)
        self.names = {}  # id of a parameter -> its name in the model
        self.pending = deque(maxlen=64)  # batches that a loader gave, and no forward has taken
        self.untrained = []  # forwards that no backward has followed
        self.steps = self.values = self.prepared = 0
        self.dtypes = set()  # of what the layers put out in training
        self.convolved = []  # height and width of what each convolution puts out, in the first step
        self.batchnorm = False  # whether a layer normalizes with the batch
        self.model = None
        environment = {
            name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        self.environment = environment
        self.note("start", pid=os.getpid(), parent=os.getppid(), **environment)

    def note(self, kind: str, **what) -> None:
        """Append an event."""
        data = pickle.dumps((time.monotonic() - self.start, kind, what))
        with self.lock:
            os.write(self.events, data)

    def where(self) -> str:
        """The line of the program that we are called from, as "file.py:12"."""
        frame = sys._getframe(2)
        while frame:
            if frame.f_code.co_filename == self.script:
                return f"{Path(self.script).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def called_by_script(self) -> bool:
        """Whether the program itself calls, and not a library on its behalf."""
        return sys._getframe(2).f_code.co_filename == self.script


def sketch(tensors) -> list:
    """Norm and some values of each tensor (None for None): enough to tell whether two processes hold the same."""
    result = []
    with torch.no_grad():
        for tensor in tensors:
            if tensor is None:
                result.append(None)
                continue
            if tensor.is_sparse:
                tensor = tensor.to_dense()
            flat = own_part(tensor).detach().reshape(-1)
            values = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double().tolist()
            result.append((torch.linalg.vector_norm(flat.float()).item(), values))
    return result


def rows(tensor) -> list:
    """A key for each row of a tensor: equal for equal content."""
    flat = tensor.detach().cpu().contiguous()
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    array = flat.reshape(len(flat), -1).numpy()
    return [("content", zlib.crc32(row.tobytes()), row.nbytes) for row in array]


def first_tensor(value):
    """The first tensor with rows in nested arguments, or None."""
    if isinstance(value, torch.Tensor):
        return value if value.dim() > 0 and len(value) > 0 else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


def base_indices(dataset, indices):
    """The indices in the data set under all Subsets, and that data set."""
    while isinstance(dataset, Subset):
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    return dataset, [int(index) for index in indices]


def install(recorder: Recorder) -> None:
    """Replace what is to be noted."""
    _processes(recorder)
    _collectives(recorder)
    _models(recorder)
    _data(recorder)
    _optimizers(recorder)
    _values(recorder)
    _files(recorder)
    _reports(recorder)
    for name in LIGHTNING & sys.modules.keys():
        _lightning(recorder, sys.modules[name])
    text = Path(recorder.script).read_text()
    if "deepspeed" in text or "accelerate" in text:
        from workshop.check import recorder_zero

        recorder_zero.install(recorder, text)
    if "transformers" in text:
        from workshop.check import recorder_fsdp

        recorder_fsdp.install(recorder)


def _wrap(owner, name, make):
    original = getattr(owner, name, None)
    if original is not None:
        replacement = make(original)
        replacement.__name__ = getattr(original, "__name__", name)
        replacement.__doc__ = original.__doc__
        setattr(owner, name, replacement)


def _processes(r: Recorder) -> None:
    def init(original):
        def init_process_group(*args, **kwargs):
            master = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
            r.note(
                "joining",
                where=r.where(),
                init_method=str(kwargs.get("init_method") or (args[1] if len(args) > 1 else None)),
                rank=kwargs.get("rank", os.environ.get("RANK")),
                world_size=kwargs.get("world_size", os.environ.get("WORLD_SIZE")),
                given={name: r.environment[name] for name in master},
                **master,
            )
            result = original(*args, **kwargs)
            r.note("joined", rank=dist.get_rank(), world_size=dist.get_world_size(), where=r.where())
            return result

        return init_process_group

    def destroy(original):
        def destroy_process_group(*args, **kwargs):
            r.note("destroyed", where=r.where())
            return original(*args, **kwargs)

        return destroy_process_group

    def store(original):
        def TCPStore(host_name, port, *args, **kwargs):
            r.note("store", port=port, master=bool(kwargs.get("is_master", args[1] if len(args) > 1 else False)))
            return original(host_name, port, *args, **kwargs)

        return TCPStore

    for module in (dist, c10d):
        _wrap(module, "init_process_group", init)
        _wrap(module, "destroy_process_group", destroy)
    _wrap(dist, "TCPStore", store)

    def index(original):
        def set_index(device, *args, **kwargs):
            r.note("device", index=_device_index(device), where=r.where())
            return original(device, *args, **kwargs)

        return set_index

    _wrap(torch.accelerator, "set_device_index", index)
    _wrap(torch.accelerator, "set_device_idx", index)
    _wrap(torch.cuda, "set_device", index)
    os.register_at_fork(after_in_child=r.open)

    # What a process that the program starts raises: multiprocessing prints it, torch hands it to the parent.
    def run(original):
        def run(self):
            try:
                original(self)
            except SystemExit:
                raise
            except BaseException as error:
                note_exception(r, error)
                raise
            finally:
                flush(r)
                r.note("end", status=0)

        return run

    def wrap(original):
        def _wrap(function, index, arguments, *rest):
            def noting(*given):
                try:
                    function(*given)
                except SystemExit:
                    raise
                except BaseException as error:
                    note_exception(r, error)
                    raise

            return original(noting, index, arguments, *rest)

        return _wrap

    _wrap(multiprocessing.process.BaseProcess, "run", run)
    # (torch.multiprocessing.spawn is the function; the module of that name lies behind it)
    _wrap(sys.modules["torch.multiprocessing.spawn"], "_wrap", wrap)


def _device_index(device):
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return device.index


def _collectives(r: Recorder) -> None:
    def make(name):
        def wrapper(original):
            def collective(*args, **kwargs):
                if r.in_collective or threading.current_thread() is not threading.main_thread():
                    return original(*args, **kwargs)
                if r.quiet:
                    tensor = first_tensor([*args, *kwargs.values()]) if r.in_backward else None
                    if tensor is not None:  # FSDP's: layers come for the backward, and their gradients go
                        r.note("travels", name=name, dtype=str(tensor.dtype))
                    return original(*args, **kwargs)
                tensor = first_tensor(list(args) + list(kwargs.values()))
                scalar = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
                tensor = scalar if tensor is None else tensor
                r.note(
                    "collective",
                    name=name,
                    shape=None if tensor is None or name.endswith(("object", "list")) else tuple(tensor.shape),
                    dtype="" if tensor is None else str(tensor.dtype),
                    where=r.where(),
                )
                r.in_collective += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    r.in_collective -= 1

            return collective

        return wrapper

    for name in COLLECTIVES:
        for module in (dist, c10d):
            _wrap(module, name, make(name))


def _models(r: Recorder) -> None:
    def call(original):
        def __call__(module, *args, **kwargs):
            if r.quiet or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if r.depth == 0 and next(module.parameters(), None) is not None:
                _forward(r, module, args, kwargs)
            r.depth += 1
            try:
                with r.around(module) if r.depth == 1 else NOTHING:
                    output = original(module, *args, **kwargs)
            finally:
                r.depth -= 1
            if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(output, torch.Tensor) and output.requires_grad:
                r.dtypes.add(str(output.dtype))
                if isinstance(module, nn.Conv2d) and not r.steps:
                    r.convolved.append(tuple(output.shape[-2:]))
            r.batchnorm = r.batchnorm or isinstance(module, nn.modules.batchnorm._BatchNorm)
            return output

        return __call__

    nn.Module.__call__ = call(nn.Module.__call__)

    def wrap(original):
        def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):
            r.note("wrapped", where=r.where())
            on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
            if on_cpu:  # the device that the program meant is not here: on the CPU both have to be None
                device_ids = output_device = None
            r.quiet += 1
            try:
                original(self, module, device_ids, output_device, *args, **kwargs)
            finally:
                r.quiet -= 1

        return __init__

    _wrap(DistributedDataParallel, "__init__", wrap)

    def backward(original):
        def run(*args, **kwargs):
            if r.quiet:
                return original(*args, **kwargs)
            loss = args[0] if isinstance(args[0], torch.Tensor) else first_tensor(args[0])
            _backward(r, loss)
            r.quiet, r.in_backward = r.quiet + 1, True
            try:
                return original(*args, **kwargs)
            finally:
                r.quiet, r.in_backward = r.quiet - 1, False

        return run

    torch.Tensor.backward = backward(torch.Tensor.backward)
    torch.autograd.backward = backward(torch.autograd.backward)

    from torch.distributed.algorithms.join import Join

    def enter(original):
        def __enter__(self):
            r.note("join")
            return original(self)

        return __enter__

    Join.__enter__ = enter(Join.__enter__)


def _forward(r: Recorder, module, args, kwargs) -> None:
    wrapped = isinstance(module, DistributedDataParallel)
    model = module.module if wrapped else module
    if r.model is not model:
        r.model = model
        r.names.update({id(parameter): name for name, parameter in model.named_parameters()})
    tensor = first_tensor([*args, *kwargs.values()])
    learning = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
    keys, content, batch = [], [], None
    if tensor is not None:
        batch = _take_batch(r, tensor)
        content = rows(tensor)
        keys = batch["keys"] if batch and len(batch["keys"]) == len(tensor) else content
    event = {
        "wrapped": wrapped,
        "sync": module.require_backward_grad_sync if wrapped else None,
        "keys": keys,
        "rows": content,
        "shape": None if tensor is None else tuple(tensor.shape[1:]),
        "loader": batch["loader"] if batch else None,
        "where": r.where(),
    }
    if learning:  # for training, if a backward follows
        r.untrained.append(event)
    else:
        r.note("evaluated", **event)


def _take_batch(r: Recorder, tensor):
    """The batch of a loader that this input came from: the same content, else the same memory, else the one loaded last.

    Content first: a loader may load ahead and hand out copies (Accelerate's, to "cpu:0"), and memory is used again.
    """
    if not r.pending:
        return None
    row = rows(tensor[:1])

    def likeness(number):
        batch = r.pending[number]
        return batch["row"] == row, batch["pointer"] == tensor.data_ptr(), number

    likest = max(range(len(r.pending)), key=likeness)
    batch = r.pending[likest]
    del r.pending[likest]
    return batch


def _backward(r: Recorder, loss) -> None:
    forward = r.untrained.pop() if r.untrained else None
    flush(r)
    leftover = False
    if r.optimizers:
        for group in r.optimizers[-1].param_groups:
            for parameter in (*group["params"][:1], *group["params"][-1:]):
                leftover = leftover or (parameter.grad is not None and bool(own_part(parameter.grad).any()))
    ddp = forward is not None and forward["wrapped"]
    r.note(
        "backward",
        forward=forward,
        loss=float(loss.detach().float().mean()) if loss is not None else None,
        sync=forward["sync"] if ddp else None,
        leftover=leftover,
        where=r.where(),
        random=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    )


def flush(r: Recorder) -> None:
    """Forwards with gradients that no backward followed were evaluations."""
    for event in r.untrained:
        r.note("evaluated", **event)
    r.untrained.clear()


def _data(r: Recorder) -> None:
    base = dataloader._BaseDataLoaderIter

    def next_index(original):
        def _next_index(self):
            indices = original(self)
            try:
                self._asked.append(indices)
            except AttributeError:
                self._asked = deque([indices])
            return indices

        return _next_index

    def next_batch(original):
        def __next__(self):
            start = time.monotonic()
            data = original(self)
            seconds = time.monotonic() - start
            asked = getattr(self, "_asked", None)
            indices = asked.popleft() if asked else None
            loader, iteration = getattr(self, "_workshop", (0, 0))
            _note_batch(r, data, getattr(self, "_dataset", None), indices, (loader, iteration), seconds)
            return data

        return __next__

    base._next_index = next_index(base._next_index)
    base.__next__ = next_batch(base.__next__)

    def iterate(original):
        def __iter__(self):
            self._iterations = getattr(self, "_iterations", 0) + 1
            iterator = original(self)
            iterator._asked = (
                deque()
                if not isinstance(iterator, dataloader._MultiProcessingDataLoaderIter)
                else (getattr(iterator, "_asked", deque()))
            )
            iterator._workshop = (id(self), self._iterations)
            r.note("iterate", loader=id(self), iteration=self._iterations, length=_length(self), where=r.where())
            return iterator

        return __iter__

    DataLoader.__iter__ = iterate(DataLoader.__iter__)

    sampler = torch.utils.data.DistributedSampler

    def set_epoch(original):
        def set_epoch(self, epoch):
            r.note("set_epoch", epoch=epoch)
            return original(self, epoch)

        return set_epoch

    _wrap(sampler, "set_epoch", set_epoch)


def _length(loader):
    try:
        return len(loader)
    except TypeError:
        return None


def _note_batch(r: Recorder, data, dataset, indices, loader, seconds) -> None:
    tensor = first_tensor(data)
    keys = []
    if indices is not None and dataset is not None:
        try:
            listed = indices if isinstance(indices, (list, tuple)) else list(indices)
            base, numbers = base_indices(dataset, listed)
            keys = [(type(base).__name__, len(base), number) for number in numbers]
        except (TypeError, AttributeError, KeyError, IndexError, ValueError):
            keys = []
    if not keys and tensor is not None:
        keys = rows(tensor)
    batch = {"row": None, "pointer": 0, "keys": keys, "loader": loader}
    if tensor is not None:
        batch |= {"row": rows(tensor[:1]), "pointer": tensor.data_ptr()}
    r.pending.append(batch)
    r.note("batch", loader=loader, size=len(keys), seconds=seconds)


def _optimizers(r: Recorder) -> None:
    def init(original):
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            r.optimizers.append(self)

        return __init__

    Optimizer.__init__ = init(Optimizer.__init__)

    def before(optimizer, args, kwargs):
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            note_step(optimizer)
            return None

        def noting():  # the gradients come about inside the step (Lightning, LBFGS): they are there when it has been called
            result = closure()
            note_step(optimizer)
            return result

        return (args[0], noting), {name: value for name, value in kwargs.items() if name != "closure"}

    def note_step(optimizer):
        r.saved = r.saved or (r.dies and any(r.scratch.rglob("step-*/.metadata")))  # DCP's, once a checkpoint is whole
        if r.dies and r.saved:
            os.kill(os.getpid(), signal.SIGKILL)
        if not r.steps and r.model is not None:
            r.spread(r.model)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shared = r.model is None or bool({id(p) for p in r.model.parameters()} & {id(p) for p in parameters})
        r.note(
            "step",
            gradients=sketch([parameter.grad for parameter in parameters]),
            weights=sketch(parameters),
            names=[r.names.get(id(parameter), "") for parameter in parameters],
            rates=[float(group.get("lr", 0)) for group in optimizer.param_groups],
            state=len(optimizer.state),
            of_model=shared,
            fitting=r.fitting,
            where=r.where(),
        )
        if r.fails and r.steps == 2:
            raise ZeroDivisionError("the check lets this rank fail")
        if r.steps in (3, 6):
            r.note("graphs", nodes=_graph_nodes())

    def after(optimizer, args, kwargs):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        r.steps += 1
        if r.bf16 is None and parameters:
            r.bf16 = bf16_is_fast(parameters[0].device)
        r.note(
            "stepped",
            weights=sketch(parameters),
            prepared=r.prepared,
            values=r.values,
            value_at=getattr(r, "last_value", ""),
            dtypes=sorted(r.dtypes),
            bf16=r.bf16,
            convolved=r.convolved,
            batchnorm=r.batchnorm,
        )

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _graph_nodes() -> int:
    """The size of the largest autograd graph under a tensor that somebody still holds."""
    largest = 0
    for value in gc.get_objects():
        if type(value) is torch.Tensor:
            try:
                seen, open_nodes = set(), [value.grad_fn]
            except RuntimeError:
                continue  # "undefined tensor": emptied by the garbage collector, and not gone yet; seen with DeepSpeed
            while open_nodes and len(seen) < 3000:
                node = open_nodes.pop()
                if node is not None and node not in seen:
                    seen.add(node)
                    open_nodes.extend(following for following, _ in node.next_functions)
            largest = max(largest, len(seen))
    return largest


def _values(r: Recorder) -> None:
    """Count what makes the program wait for the device: asking a tensor for its value."""

    def make(original):
        def ask(self, *args, **kwargs):
            if not r.quiet and r.called_by_script():
                r.values += 1
                r.last_value = r.where()
            return original(self, *args, **kwargs)

        return ask

    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy"):
        setattr(torch.Tensor, name, make(getattr(torch.Tensor, name)))


def _files(r: Recorder) -> None:
    scratch = os.path.realpath(r.scratch)
    allowed = tuple(os.path.realpath(place) + os.sep for place in (scratch, r.folder, "/dev", "/proc"))

    def audit(event, arguments):
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, (str, bytes, os.PathLike)):
                return
            writing = (
                bool(flags & (os.O_WRONLY | os.O_RDWR)) if flags is not None else any(c in (mode or "") for c in "wax+")
            )
            if not writing:
                return
            _written(os.path.realpath(os.fsdecode(path)), "open")
        elif event == "os.rename":
            source, target = (_entry(*given) for given in zip(arguments[:2], arguments[2:], strict=True))
            r.note("rename", source=source, target=target, where=r.where())
            _written(target, "rename")
        elif event in ("os.remove", "os.mkdir", "os.rmdir"):
            _written(_entry(arguments[0], arguments[-1]), event)
        elif event == "os.truncate" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            _written(os.path.realpath(os.fsdecode(arguments[0])), event)

    def _entry(name, descriptor):
        """The whole path of an entry of a folder, which can be given by its descriptor: shutil.rmtree() does so."""
        folder, name = os.path.split(os.fsdecode(name).rstrip(os.sep))
        if descriptor >= 0:
            folder = os.path.join(_folder(descriptor), folder)
        return os.path.join(os.path.realpath(folder), name)  # the entry itself, and not what it is a link to

    def _folder(descriptor):
        if hasattr(fcntl, "F_GETPATH"):  # macOS
            return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def _written(path, how):
        if not (path + os.sep).startswith(allowed):
            r.note("outside", path=path, where=r.where())
            raise PermissionError(13, "workshop check: writing outside of the run's folder is not allowed", path)
        caches = os.path.join(scratch, "tmp") + os.sep
        is_content = how in ("open", "rename", "os.truncate")  # one process may clear away what the others have written
        if is_content and path.startswith(scratch + os.sep) and not path.startswith(caches) and not r.starting:
            r.note("write", path=path, how=how, where=r.where())

    sys.addaudithook(audit)

    def save(original):
        def save(obj, f, *args, **kwargs):
            if (
                threading.current_thread() is not threading.main_thread()
            ):  # DCP's, that writes while the program trains on
                return original(obj, f, *args, **kwargs)
            path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", "")
            path = os.path.realpath(os.fspath(path)) if isinstance(path, (str, os.PathLike)) and path else ""
            if path and isinstance(f, (str, os.PathLike)):
                _written(path, "save")
            r.saved = True
            r.note(
                "save",
                path=path,
                keys=_state_keys(obj),
                parts=sorted(map(str, obj)) if isinstance(obj, dict) else [],
                where=r.where(),
            )
            r.quiet += 1
            try:
                return original(obj, f, *args, **kwargs)
            finally:
                r.quiet -= 1

        return save

    _wrap(torch, "save", save)

    def load(original):
        def load(f, *args, **kwargs):
            path = os.path.realpath(os.fspath(f)) if isinstance(f, (str, os.PathLike)) else str(getattr(f, "name", ""))
            r.note("load", path=path, where=r.where())
            return original(f, *args, **kwargs)

        return load

    _wrap(torch, "load", load)


def _state_keys(obj) -> list[str]:
    """The keys of the model's weights in what is saved: of the dict with the most tensors."""
    best = []
    if isinstance(obj, dict):
        own = [str(key) for key, value in obj.items() if isinstance(value, torch.Tensor)]
        best = max([own, *(_state_keys(value) for value in obj.values())], key=len)
    return best


def _reports(r: Recorder) -> None:
    from workshop.training.logs import EpochLog

    def write(original):
        def write(self, epoch, losses, accuracy, samples_per_second, **metrics):
            r.note(
                "report",
                epoch=epoch,
                losses=[float(loss) for loss in losses],
                accuracy=None if accuracy is None else float(accuracy),
                samples_per_second=float(samples_per_second),
                metrics={name: float(value) for name, value in metrics.items()},
                truth=_truth(r),
                where=r.where(),
            )
            return original(self, epoch, losses, accuracy, samples_per_second, **metrics)

        return write

    EpochLog.write = write(EpochLog.write)


def _lightning(r: Recorder, package) -> None:
    """What Lightning's Trainer does where the functions of torch do not show it."""

    class Observer(package.Callback):
        def on_sanity_check_start(self, trainer, module):  # a few batches, of which nobody sees a figure
            r.quiet += 1

        def on_sanity_check_end(self, trainer, module):
            r.quiet -= 1

        def on_train_start(self, trainer, module):
            r.fitting = True
            stop, best = (
                [(each.monitor, each.mode) for each in trainer.callbacks if isinstance(each, kind) and each.monitor]
                for kind in (package.callbacks.EarlyStopping, package.callbacks.ModelCheckpoint)
            )
            r.note("watched", stop=stop, best=best)

        def on_train_end(self, trainer, module):
            r.fitting = False

    def init(original):
        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.callbacks.append(Observer())

        return __init__

    def save(original):
        def save_checkpoint(self, filepath, *args, **kwargs):
            if self.is_global_zero:
                r.saved = True
                accuracy = self.callback_metrics.get("accuracy")
                r.note(
                    "save",
                    path=os.path.realpath(filepath),
                    whole=True,
                    keys=[],
                    parts=[],
                    accuracy=None if accuracy is None else float(accuracy),
                    where=r.where(),
                )
            return original(self, filepath, *args, **kwargs)

        return save_checkpoint

    def fit(original):
        def fit(self, *args, **kwargs):
            r.note("fit", devices=self.num_devices, nodes=self.num_nodes, where=r.where())
            return original(self, *args, **kwargs)

        return fit

    def log(original):
        def log_metrics(self, metrics, *args, **kwargs):
            r.note("logged", names=sorted(metrics))
            return original(self, metrics, *args, **kwargs)

        return log_metrics

    for logger in (package.loggers.CSVLogger, package.loggers.TensorBoardLogger):
        _wrap(logger, "log_metrics", log)
    _wrap(package.Trainer, "__init__", init)
    _wrap(package.Trainer, "save_checkpoint", save)
    _wrap(package.Trainer, "fit", fit)


def _truth(r: Recorder) -> dict:
    """Accuracy and macro F1 of the model over the whole test set, computed here and now; or "failed": why there are none."""
    if r.test_set is None or r.model is None:
        return {"failed": "no test set of load_dataset(), or no model, was seen"}
    if any(hasattr(parameter, "ds_id") for parameter in r.model.parameters()):
        return {"failed": "with ZeRO-3 no process can compute alone"}
    r.quiet += 1
    was_training = r.model.training
    try:
        images = torch.stack([r.test_set[i][0] for i in range(len(r.test_set))])
        labels = torch.tensor([r.test_set[i][1] for i in range(len(r.test_set))])
        r.model.eval()
        with torch.no_grad():
            device = next(r.model.parameters()).device
            predictions = r.model(images.to(device)).argmax(dim=1).cpu()
        confusion = (labels * 10 + predictions).bincount(minlength=100).view(10, 10).double()
        f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        return {
            "accuracy": (predictions == labels).double().mean().item(),
            "macro_f1": f1.mean().item(),
            "samples": len(labels),
        }
    except (
        Exception
    ) as error:  # the learner's own model runs here: it may ask for other inputs, and raise what it likes
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        r.model.train(was_training)
        r.quiet -= 1


def run_script(r: Recorder, script: Path, arguments: list[str]) -> int:
    """Run the program as ``__main__``, to its end; return its exit status."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        r.note("exit", status=status)
    except BaseException as error:  # KeyboardInterrupt too: all that ends a program
        note_exception(r, error)
        status = 1
    with suppress(BaseException):
        atexit._run_exitfuncs()  # the program's own: the process will end without them
    flush(r)
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    r.note("end", status=status)
    return status


def note_exception(r: Recorder, error: BaseException) -> None:
    """Note an exception with the last line of the program that it came through."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == r.script]
    where = f"{Path(r.script).name}:{own[-1].lineno}" if own else ""
    if isinstance(error, SyntaxError) and error.filename == r.script:
        where = f"{Path(r.script).name}:{error.lineno}"
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    message = re.sub(r"\s+", " ", str(error)).strip()
    r.note(
        "exception", type=type(error).__name__, message=message[:2000], where=where, traceback=text.getvalue()[-4000:]
    )
    with suppress(BaseException):
        sys.stderr.write(text.getvalue())
