"""List the programs that ``workshop gpu-day`` runs: tests, training programs and benchmarks, the most valuable first."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workshop.repository import ROOT
from workshop.run.environment import torchrun
from workshop.training.memory import estimate
from workshop.training.transformer import GIB, MODELS

STILL = "slurm-multinode/exercise5_stands_still"
SINGLE, DDP, LIGHTNING = "01_single_gpu", "02_pytorch_ddp", "03_pytorch_lightning"
FSDP, ZERO, BUILT = "04_model_parallel_with_fsdp", "05_deepspeed", "06_build_your_own"
SURVIVING = "slurm-multinode/surviving"
ON_GPU, MODEL_ON_GPU = "training on cuda", "parameters on cuda"
# The losses of a GPU differ a little from run to run, because it adds numbers in a different order.
EQUAL = r"differ by at most (0\.0e\+00|\d\.\de-(0[4-9]|1\d))"
LARGE = 75e9  # bytes of a GPU that has room for large batches


@dataclass(frozen=True)
class Item:
    """Something to run on the GPUs.

    Attributes:
        name: its name in the table.
        commands: they run one after the other, until one fails.
        shows: a regular expression that the output must match. It shows, for example, that the program has used a GPU.
        seconds: the time limit for all commands together.
        alone: whether it measures time, so nothing else may run at the same time.
        package: the module that it needs in addition to torch.
        until: a pattern for files, relative to the working folder. As soon as one exists, the first command is ended. The second
            command then has something to resume from.
        obstacle: why it cannot run on this machine; "": it can.
    """

    name: str
    commands: tuple[list[str], ...]
    shows: str
    seconds: float = 120
    alone: bool = False
    package: str = "torch"
    until: str = ""
    obstacle: str = ""


def group_size(gpus: int) -> int:
    """Return the number of processes for several GPUs: the largest power of two, up to 8, because it divides all batches."""
    return max(size for size in (1, 2, 4, 8) if size <= gpus)


def all_items(gpus: int, memory: int, float8: bool = True) -> list[Item]:
    """Return all items in their order: correctness, then timings, then the remaining programs of the stages.

    Args:
        gpus: the number of visible GPUs.
        memory: the bytes of a GPU.
        float8: whether the GPU multiplies in float8.
    """
    many = group_size(gpus)
    counts = sorted({1, many})
    correctness = [
        item for count in counts for item in (*_images(count), *_language(count), *_strategies(count), *_built(count))
    ]
    rest = [item for count in counts for item in _rest(count)]
    return [_tests(), *_once(), *correctness, *_image_timings(many), *_language_timings(many, memory, float8), *rest]


def _python(script: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *options]


def _launched(count: int, script: str, *options: str) -> list[str]:
    return [*torchrun(count), str(ROOT / script), *options]


def _module(count: int, module: str, *options: str) -> list[str]:
    return [*torchrun(count), "-m", module, *options]


def _workshop(*options: str) -> list[str]:
    return [sys.executable, "-P", "-m", "workshop", *options]


def _named(name: str, count: int) -> str:
    return name if count == 1 else f"{name}, {count} processes"


def _tests() -> Item:
    words = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    parallel = ["-n", "2"] if importlib.util.find_spec("xdist") else []
    return Item("tests -m gpu", ([*words, *parallel, str(ROOT / "tests")],), r"\d passed", 300, package="pytest")


def _once() -> list[Item]:
    """Return the programs that always run in one process."""
    fast = f"solutions/{SINGLE}/exercise1_fast_single_gpu.py"
    return [
        Item("01 plain", (_python(f"{SINGLE}/single_gpu.py", "--epochs=2"),), ON_GPU),
        Item("01 fast", (_python(fast, "--epochs=2"),), ON_GPU),
    ]


def _images(count: int) -> list[Item]:
    """Return the solutions of stages 02, 03 and 05 that train on images."""
    ddp, lightning, zero = (f"solutions/{stage}" for stage in (DDP, LIGHTNING, ZERO))
    restart = f"{ddp}/exercise2_multigpu_torchrun.py"
    devices = (f"--devices={count}", "--epochs=1")
    found = [
        ("02 spawn", [_python(f"{ddp}/exercise1_multigpu.py", f"--nproc={count}", "--epochs=2")], ON_GPU, "torch"),
        (
            "02 torchrun, resumed",
            [_launched(count, restart, f"--epochs={epochs}") for epochs in (1, 2)],
            "training on cuda.* from epoch 2",
            "torch",
        ),
        (
            "02 metrics, accumulation",
            [_launched(count, f"{ddp}/exercise3_global_metrics.py", "--epochs=1", "--accumulate=2")],
            ON_GPU,
            "torch",
        ),
        ("03 Lightning", [_python(f"{lightning}/exercise1_lightning_mnist.py", *devices)], ON_GPU, "lightning"),
        ("03 Lightning bf16", [_python(f"{lightning}/exercise2_lightning_cifar10.py", *devices)], ON_GPU, "lightning"),
        ("03 Lightning FSDP2", [_python(f"{LIGHTNING}/lightning_fsdp2.py", *devices)], ON_GPU, "lightning"),
        (
            "05 Accelerate",
            [_launched(count, f"{zero}/exercise2_accelerate.py", "--epochs=1")],
            ON_GPU,
            "accelerate",
        ),
        *(
            (
                f"05 DeepSpeed {name}",
                [
                    _launched(
                        count, f"{zero}/exercise1_deepspeed.py", "--epochs=1", f"--config={ROOT / ZERO / name}.json"
                    )
                ],
                ON_GPU,
                "deepspeed",
            )
            for name in ("zero2", "zero3")
        ),
    ]
    return [
        Item(_named(name, count), tuple(commands), shows, package=package) for name, commands, shows, package in found
    ]


def _language(count: int) -> list[Item]:
    """Return the programs of stages 04 and 05 that train a language model."""
    solutions = f"solutions/{FSDP}"
    fit = f"{solutions}/exercise3_fit_the_model.py"
    sharded = f"{solutions}/exercise2_sharded_checkpoint.py"
    resumed = [_launched(count, sharded, "--steps=60", "--save-every=5")] * 2
    export = _python(f"{solutions}/exercise2_export.py")
    shards = min(2, count)  # with 4 processes there are 2 groups of 2
    found = [
        ("04 DDP", f"{FSDP}/finetune_ddp.py", ["--steps=20"], MODEL_ON_GPU),
        ("04 LoRA", f"{FSDP}/lora.py", ["--steps=20"], MODEL_ON_GPU),
        ("04 FSDP2", f"{solutions}/exercise1_fsdp_codellama.py", ["--steps=20"], MODEL_ON_GPU),
        ("04 recomputation, accumulation", fit, ["--steps=10", "--activation-checkpointing", "--accumulate=2"], MODEL_ON_GPU),
        ("04 offload", fit, ["--steps=10", "--offload"], MODEL_ON_GPU),
        ("04 compile", fit, ["--steps=10", "--compile"], MODEL_ON_GPU),
        ("04 tensor parallel", f"{FSDP}/tensor_parallel.py", [], EQUAL),
        ("04 HSDP", f"{FSDP}/hsdp.py", [f"--shards={shards}"], EQUAL),
        ("04 FSDP2 and tensor parallel", f"{FSDP}/fsdp_tensor_parallel.py", [f"--cuts={shards}"], EQUAL),
    ]  # fmt: skip
    items = [
        Item(
            _named(name, count),
            (_launched(count, script, *options),),
            shows,
            package="peft" if name == "04 LoRA" else "transformers",
        )
        for name, script, options, shows in found
    ]
    items.append(
        Item(
            _named("04 sharded checkpoint, resumed, exported", count),
            (*resumed, export),
            r"parameters on cuda\S* from step ([2-9]|\d\d)(.|\n)*is now a model for transformers",
            package="transformers",
            until="runs/sharded_checkpoint/step-*/.metadata",
        )
    )
    zero = [
        ("05 DeepSpeed CodeLlama", _launched(count, f"{ZERO}/zero_codellama.py", "--steps=10"), MODEL_ON_GPU),
        ("05 DeepSpeed ViT", _launched(count, f"{ZERO}/zero_vit.py", "--steps=2", "--output=vit.json"), "images/s"),
    ]
    return items + [Item(_named(name, count), (command,), shows, package="deepspeed") for name, command, shows in zero]


def _strategies(count: int) -> list[Item]:
    """Return the programs in ``strategies/``."""
    found = [
        ("ddp_torchrun", [], "transformers"),
        ("ddp_lightning", [], "lightning"),
        ("ddp_accelerate", [], "accelerate"),
        ("fsdp", [], "transformers"),
        ("tensor_parallel", [], "transformers"),
        ("pipeline", [], "transformers"),
        ("context_parallel", [], "transformers"),
        ("expert_parallel", [], "transformers"),
        *(("zero", [f"--stage={stage}"], "deepspeed") for stage in (1, 2, 3)),
    ]
    short = ["--steps=5", "--output=run"]
    spawn = _python("strategies/ddp_spawn.py", f"--nproc={count}", *short)
    commands = [("ddp_spawn", spawn, "transformers")]
    if count == 1:
        commands.insert(0, ("one_process", _python("strategies/one_process.py", *short), "transformers"))
    for script, options, package in found:
        name = " ".join([script, *(option.lstrip("-").replace("=", " ") for option in options)])
        commands.append((name, _launched(count, f"strategies/{script}.py", *options, *short), package))
    return [
        Item(_named(f"strategies {name}", count), (command,), "step 5/5", package=package)
        for name, command, package in commands
    ]


def _built(count: int) -> list[Item]:
    """Return the solutions of stage 06. The model has 4 layers and 4 heads, which more than 4 processes cannot divide."""
    few = min(count, 4)
    mesh = [f"--tp={min(count, 2)}", f"--dp={count // min(count, 2)}"]
    found = [
        ("DDP", "exercise1_ddp", count, []),
        ("ZeRO-1", "exercise2_zero1", count, []),
        ("FSDP", "exercise3_fsdp", count, []),
        ("tensor parallel", "exercise4_tensor", few, []),
        ("pipeline", "exercise5_pipeline", few, []),
        ("ring attention", "exercise6_ring", count, []),
        ("experts", "exercise7_experts", few, []),
        ("mesh", "exercise8_all", count, mesh),
        ("bug in a ring", "exercise9_find_the_bug_ring", count, []),
        ("bug in a pipeline", "exercise9_find_the_bug_pipeline", few, []),
        ("bug on a mesh", "exercise9_find_the_bug_norm", count, mesh),
    ]
    commands = [
        (name, processes, _launched(processes, f"solutions/{BUILT}/{script}.py", "--steps=5", *options))
        for name, script, processes, options in found
    ]
    return [Item(_named(f"06 {name}", processes), (command,), ON_GPU) for name, processes, command in commands]


def _rest(count: int) -> list[Item]:
    """Return the programs that show the least about GPUs."""
    scale = [
        "--image-size=64",
        "--batch-size=8",
        "--steps=4",
        "--accumulate=2",
        "--strategy=fsdp",
        "--output=scale.json",
    ]
    found = [
        ("02 minimal_ddp", _launched(count, f"{DDP}/minimal_ddp.py"), "on cuda"),
        ("slurm-multinode DDP", _launched(count, "slurm-multinode/multigpu_torchrun.py", "--epochs=1"), ON_GPU),
        ("slurm-multinode elastic", _launched(count, "slurm-multinode/surviving/elastic.py", "--epochs=1"), "epoch"),
        (
            "slurm-multinode 4",
            _launched(count, "solutions/slurm-multinode/exercise4_elastic.py", "--epochs=1"),
            "epoch",
        ),
        ("slurm-multinode, step-wise", _launched(count, f"{SURVIVING}/checkpoint_steps.py", "--epochs=1"), ON_GPU),
        ("slurm-multinode FSDP2", _launched(count, "slurm-multinode/train_at_scale.py", *scale), "on cuda"),
        *(
            (f"02 find the bug: {bug}", _launched(count, f"solutions/{DDP}/exercise4_find_the_bug_{bug}.py"), "epoch")
            for bug in ("accumulation", "hang", "leak", "no_learning", "restart")
        ),
        *(
            (f"slurm-multinode stands still: {cause}", _launched(count, f"solutions/{STILL}_{cause}.py"), "epoch 3/3")
            for cause in ("shards", "workers", "scans")
        ),
    ]
    if count == 1:
        found.append(("02 DataParallel", _python(f"{DDP}/data_parallel.py", "--epochs=1"), ON_GPU))
    return [Item(_named(name, count), (command,), shows) for name, command, shows in found]


def _image_timings(count: int) -> list[Item]:
    """Return the benchmarks with images."""
    mnist = ["--epochs=3", "--dataset=mnist"]
    fast = _python(f"solutions/{SINGLE}/exercise1_fast_single_gpu.py", *mnist)
    found = [
        ("MNIST, plain", _python(f"{SINGLE}/single_gpu.py", *mnist), "training on cuda(.|\n)*epoch 3/3"),
        ("MNIST, fast", fast, "training on cuda(.|\n)*epoch 3/3"),
    ]
    for model, title, batch in (("resnet50", "ResNet-50", 256), ("vit_b_16", "ViT-B/16", 128)):
        options = [f"--model={model}", f"--batch-size={batch}", "--steps=50", "--output=scale.json"]
        program = _launched(count, "slurm-multinode/train_at_scale.py", *options)
        found.append((_named(f"speed of {title}", count), program, r"on cuda(.|\n)*images/s;"))
    if count > 1:
        exercise = str(ROOT / f"solutions/{DDP}/exercise2_multigpu_torchrun.py")
        bench = _workshop("bench", exercise, f"--processes=1,{count}", "--output=.")
        found += [
            (
                "speed of collectives",
                _module(count, "workshop.measure.collectives", "--output=collectives.json"),
                "GB/s",
            ),
            ("scaling of DDP", bench, r"\d"),
            ("efficiency of DDP", _module(count, "workshop.measure.efficiency", "--rounds=20"), r"\d"),
        ]
    return [Item(name, (command,), shows, alone=True) for name, command, shows in found]


def _language_timings(count: int, memory: int, float8: bool) -> list[Item]:
    """Return the benchmarks with language models."""
    batches = ["4", "8"] if memory > LARGE else ["1", "2"]
    plain, compiled = ["ddp", "fsdp", "fsdp+checkpointing"], ["fsdp+compile", "fsdp+checkpointing+compile"]
    estimated = _workshop(
        "memory", "tinyllama-1.1b", "--batch-size=4", "--sequence-length=2048", "--measure", "--output=."
    )
    found = [
        _model_timing("tinyllama-1.1b", count, batches, plain, 180),
        _model_timing("tinyllama-1.1b", count, batches[-1:], compiled, 150, "compiled"),
        Item("memory of tinyllama-1.1b", (estimated,), "figures and picture", alone=True, package="transformers"),
    ]
    sizes = {"batch_size": 1, "sequence_length": 2048}
    needed = estimate(MODELS["codellama-7b"], "fsdp", count, checkpointing=True, **sizes).total
    obstacle = ""
    if needed > memory:
        obstacle = f"it needs {needed / GIB:.0f} GiB on each GPU, and this GPU has {memory / GIB:.0f} GiB"
    ways = ["fsdp+checkpointing", "fsdp+checkpointing+compile"]
    found.append(_model_timing("codellama-7b", count, ["1", "4"], ways, 180, obstacle=obstacle))
    obstacle = obstacle or ("" if float8 else "this GPU does not multiply in float8")
    quick = _model_timing("codellama-7b", count, ["4"], [f"{ways[1]}+float8"], 150, "float8", obstacle)
    found.append(replace(quick, package="torchao"))
    if count > 1:
        compared = _workshop("strategies", f"--processes={count}", "--steps=10", "--output=.")
        found.append(Item("strategies compared", (compared,), "tokens/s", 300, alone=True, package="transformers"))
    return found


def _model_timing(
    model: str, count: int, batches: Sequence[str], ways: list[str], seconds: float, note: str = "", obstacle: str = ""
) -> Item:
    """Return the benchmark that prints the tokens per second and the MFU of a language model."""
    options = [f"--model={model}", "--sequence-length=2048", "--output=."]
    options += ["--batch-sizes", *batches, "--ways", *ways]
    return Item(
        _named(" ".join(filter(None, (f"speed of {model}", note))), count),
        (_module(count, "workshop.measure.language_model", *options),),
        "tokens/s",
        seconds,
        alone=True,
        package="transformers",
        obstacle=obstacle,
    )
