"""NCCL on pretended GPUs: gloo does the communication, after the checks that NCCL makes."""

import os
import sys
import threading
from functools import wraps
from typing import NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from workshop.gloo import as_nccl, ask
from workshop.pretend import devices

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# NCCL compares only the number of elements of input and output, and gloo the shapes as well.
FLAT = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
OBJECTS = ", for the objects of a collective"  # which go through the current GPU, whatever GPU the tensors are on
NODE = "WORKSHOP_PRETEND_NODE"  # the number of the simulated node that a process runs on
declared: dict[str, str] = {}  # name of a group -> the backend that the program asked for
# By the name of a group with gloo for the CPU and NCCL for GPUs: the group that stands for NCCL. A thread, such as that of
# async_save(), may call the one while the program calls the other.
_of_gpus: dict[str, dist.ProcessGroup] = {}
# By the name of a group whose ranks have compared their GPUs: the rank that uses each, which is named by its node and its number.
_met: dict[str, dict[tuple[int, int], int]] = {}
_used: set[int] = set()  # addresses of the lists of used parameters
_models: dict[int, int | None] = {}  # address of a reducer of DDP -> the GPU of its model
# By the address of a tensor on the CPU: the pretended tensor that a collective has got. The future of gloo has the former.
_sent: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_Reducer, _new = dist.Reducer, c10d.new_group
_inside = threading.local()


def check(func, args, flat) -> None:
    """Raise what NCCL raises for a collective that it cannot do.

    Raises:
        RuntimeError: a tensor is on the CPU, and the group has no backend for the CPU.
        torch.distributed.DistBackendError: two ranks of the group use the same GPU.
    """
    group = _group_of(args)
    if group is None or getattr(_inside, "comparing", False):
        return
    backend = declared.get(group.group_name, "gloo")
    if "nccl" not in backend:
        return
    name = func._schema.name
    if "barrier" in name:
        # NCCL need not guess if the group already knows its GPU, or if there is only one.
        if not devices.chosen and devices.count() > 1 and group.group_name not in _met:
            devices.note("barrier")
        return
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    if any(hasattr(each, "data_ptr") and each.data_ptr() in _used for each in tensors):
        return
    on_gpu = [each.gpu for each in tensors if hasattr(each, "gpu")]
    if "cpu:" not in backend and len(on_gpu) < len(tensors):
        devices.note("cpu-tensor", name.removeprefix("c10d::"))
        raise RuntimeError("No backend type associated with device type cpu")
    if on_gpu and "send" not in name and "recv" not in name:
        if group.group_name not in _met:
            _compare_gpus(group, on_gpu[0], OBJECTS if _sends_objects() else "")
        _refuse_gpu_of_other(group, on_gpu[0])


def for_gpus(args: tuple, tensors: list) -> tuple:
    """Return the arguments of a collective: if it has pretended tensors, with the group that stands for NCCL, if there is one."""
    _sent.update({id(each.on_cpu): each for each in tensors})
    group = _group_of(args) if tensors else None
    twin = group and _of_gpus.get(group.group_name)
    if twin is None:
        return args
    return tuple(
        twin.boxed() if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
        else twin.group_name if isinstance(each, str) and each in declared
        else each
        for each in args
    )  # fmt: skip


def _with_gpu_tensors(original):
    """Wrap ``Work.get_future``: its value has the tensors that the program has given to the collective."""

    def given(future):
        value = future.value()
        return [_sent.get(id(each), each) for each in value] if isinstance(value, list) else value

    return wraps(original)(lambda work: original(work).then(given))


def _sends_objects() -> bool:
    """Whether a function such as ``all_gather_object`` calls the present collective."""
    frame = sys._getframe(1)
    while frame:
        if frame.f_code.co_filename == c10d.__file__ and "object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def _group_of(args) -> dist.ProcessGroup | None:
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
        if isinstance(each, str) and each in declared:
            return c10d._resolve_process_group(each)
    return None


def _compare_gpus(group: dist.ProcessGroup, index: int, what: str) -> None:
    """All ranks tell each other their GPUs. NCCL does the same in its first collective."""
    _inside.comparing = True
    try:
        mine = torch.tensor(_place(index), device="cpu")  # the default may be a GPU
        everyone = [torch.zeros_like(mine) for _ in range(group.size())]
        _of_gpus.get(group.group_name, group).allgather([everyone], [mine]).wait()
    finally:
        _inside.comparing = False
    owners = _met[group.group_name] = {}
    for rank, (node, gpu) in enumerate(each.tolist() for each in everyone):
        if (node, gpu) in owners:
            _refuse(rank, owners[node, gpu], gpu, what)
        owners[node, gpu] = rank


def _refuse_gpu_of_other(group: dist.ProcessGroup, index: int, what: str = "") -> None:
    """Refuse a GPU that a different rank has used in this group. NCCL would create a communicator with this GPU twice."""
    node, gpu = _place(index)
    owner = _met.get(group.group_name, {}).get((node, gpu), group.rank())
    if owner != group.rank():
        _refuse(group.rank(), owner, gpu, what)


def _place(index: int) -> tuple[int, int]:
    """The node of this process and the number of a GPU there."""
    return int(os.environ.get(NODE, 0)), devices.visible()[index]


def _refuse(rank: int, owner: int, gpu: int, what: str) -> NoReturn:
    devices.note("same-gpu", f"ranks {owner} and {rank}, GPU {gpu}{what}")
    raise dist.DistBackendError(
        "NCCL error in: pretended GPUs, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
        f"library.\nLast error:\nDuplicate GPU detected : rank {rank} and rank {owner} both on CUDA device {gpu:x}000"
    )


def _on_gpu_of_model(original):
    """Wrap a function of DDP whose C++ code creates tensors: on the GPU of the model, and the list of used parameters on the CPU.

    C++ sees no index of a pretended GPU, and would take the current one. With ``find_unused_parameters`` or ``static_graph`` it
    copies the list from pinned memory, which only real GPUs have.
    """

    @wraps(original)
    def called(*args, **kwargs):
        tensors = next((each for each in args if isinstance(each, list)), [])
        gpus = [each.gpu for each in tensors if hasattr(each, "gpu")] or [_models.get(id(args[0]))]
        _inside.building = True
        try:
            with devices.operation_on(gpus[0]):
                result = original(*args, **kwargs)
        finally:
            _inside.building = False
        if isinstance(result, _Reducer):
            _models[id(result)] = gpus[0]
        return result

    return called


def list_of_used(func, args, kwargs) -> torch.Tensor | None:
    """Return the list of the used parameters, on the CPU, if the reducer of DDP creates it with this operation."""
    if not getattr(_inside, "building", False) or kwargs.get("dtype") is not torch.int32:
        return None
    made = func(*args, **kwargs | {"device": torch.device("cpu")})
    _used.add(made.data_ptr())
    return made


def install() -> None:
    """Let programs ask for NCCL, and give them gloo."""
    changed = {
        "init_process_group": _init_process_group(c10d.init_process_group),
        "new_group": _new_group(c10d.new_group),
        "get_backend": _get_backend(c10d.get_backend),
        "is_nccl_available": lambda: True,
        "_get_pg_default_device": _device_of_group,
        "Reducer": _on_gpu_of_model(_Reducer),
        "_verify_params_across_processes": _on_gpu_of_model(dist._verify_params_across_processes),
        **as_nccl(),
    }
    for name in ("_set_static_graph", "_rebuild_buckets"):
        setattr(_Reducer, name, _on_gpu_of_model(getattr(_Reducer, name)))
    of_fsdp = sys.modules.get("torch.distributed.fsdp._optim_utils")  # it has a name of its own for one of them
    for name, function in changed.items():
        for module in (dist, c10d, device_mesh, of_fsdp):  # the same object in all, as before
            if hasattr(module, name):
                setattr(module, name, function)
    c10d._get_object_coll_device = _device_of_objects
    dist.Work.get_future = _with_gpu_tensors(dist.Work.get_future)


def _device_of_group(group=None) -> torch.device:
    """Return the type of device that a group communicates from: the CPU if it has a backend for it."""
    backend = _backend_of(group)
    return torch.device("cuda" if "nccl" in backend and "cpu:" not in backend else "cpu")


def _device_of_objects(group=None) -> str:
    """Where a group sends objects: on the CPU if it has a backend for it, otherwise on the current GPU."""
    place = _device_of_group(group).type
    if place == "cuda":
        _refuse_gpu_of_other(group or c10d._get_default_group(), devices.current(), OBJECTS)
    return place


def _backend_of(group) -> str:
    name = (group or c10d._get_default_group()).group_name
    return declared.get(name, "gloo")


def _init_process_group(original):
    @wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        if kwargs.pop("device_id", None) is not None:
            devices.chosen = True  # for the group, which then knows the GPU of its barriers
        kwargs.pop("pg_options", None)
        original("gloo", *args, **kwargs)
        if backend != "gloo":
            ask()
        default, asked = c10d._get_default_group(), str(backend or "cpu:gloo,cuda:nccl").lower()
        declared[default.group_name] = asked
        if _both(asked):
            _of_gpus[default.group_name] = _new(backend="gloo")

    return init_process_group


def _both(backend: str) -> bool:
    """Whether a group has one backend for the CPU, and NCCL for GPUs."""
    return "cpu:" in backend and "nccl" in backend


def _new_group(original):
    @wraps(original)
    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        asked = str(backend or _backend_of(None)).lower()
        group = original(ranks, timeout, "gloo", None, *args, **kwargs)
        twin = original(ranks, timeout, "gloo", None, *args, **kwargs) if _both(asked) else None
        if isinstance(group, dist.ProcessGroup):
            declared[group.group_name] = asked
            if twin:
                _of_gpus[group.group_name] = twin
        return group

    return new_group


def _get_backend(original):
    @wraps(original)
    def get_backend(group=None):
        name = (group or c10d._get_default_group()).group_name
        return declared[name].rpartition(":")[2] if name in declared else original(group)

    return get_backend
