"""One step is one idea: how many lines change from each script to the next, and how long each is."""

import ast

import pytest

import runs
from workshop.demo.strategies import changed_lines

FAST = runs.ROOT / "solutions" / "01_single_gpu" / "exercise1_fast_single_gpu.py"
STEPS = [
    (runs.SINGLE, runs.SPAWN),
    (runs.SPAWN, runs.TORCHRUN),
    (runs.TORCHRUN, runs.METRICS),
    (runs.SINGLE, FAST),
]
SCRIPTS = [runs.SINGLE, runs.SPAWN, runs.TORCHRUN, runs.METRICS, FAST]


GIVEN, SOLUTIONS = runs.ROOT / "04_model_parallel_with_fsdp", runs.ROOT / "solutions" / "04_model_parallel_with_fsdp"
ZERO = runs.ROOT / "solutions" / "05_deepspeed"
FSDP = SOLUTIONS / "exercise1_fsdp_codellama.py"
# A language model brings a tokenizer, a schedule, clipping and its completions along.
LATER_STEPS = [
    (GIVEN / "finetune_ddp.py", FSDP, 42),
    (FSDP, SOLUTIONS / "exercise2_sharded_checkpoint.py", 42),
    (FSDP, SOLUTIONS / "exercise3_fit_the_model.py", 42),
    (GIVEN / "finetune_ddp.py", GIVEN / "lora.py", 25),
    # A library that takes over launcher, device, averaging, loaders and checkpoints: mostly lines that go.
    (runs.TORCHRUN, ZERO / "exercise1_deepspeed.py", 66),
    (runs.TORCHRUN, ZERO / "exercise2_accelerate.py", 76),
    (GIVEN / "finetune_ddp.py", runs.ROOT / "05_deepspeed" / "zero_codellama.py", 42),
]


@pytest.mark.parametrize(("before", "after"), STEPS, ids=lambda path: path.stem)
def test_changed_lines(before, after, record_property):
    changed = changed_lines(before, after)
    record_property("changed_lines", changed)
    print(f"\n{before.name} -> {after.name}: {changed} changed lines")
    assert 10 <= changed <= 48


@pytest.mark.parametrize(("before", "after", "most"), LATER_STEPS, ids=lambda value: getattr(value, "stem", None))
def test_changed_lines_of_stages_04_and_05(before, after, most, record_property):
    changed = changed_lines(before, after)
    record_property("changed_lines", changed)
    assert 10 <= changed <= most


@pytest.mark.parametrize(
    "script", [*SCRIPTS, *sorted(GIVEN.glob("*.py")), *sorted(SOLUTIONS.glob("*.py"))], ids=lambda path: path.stem
)
def test_length(script):
    longest = 242 if script.parent in (GIVEN, SOLUTIONS) else 165
    assert len(script.read_text().splitlines()) <= longest
    assert max(map(len, script.read_text().splitlines())) <= (130 if script.parent in (GIVEN, SOLUTIONS) else 120)


@pytest.mark.parametrize(("before", "after"), STEPS, ids=lambda path: path.stem)
def test_comments_of_the_earlier_step_stay(before, after):
    earlier = [line.strip() for line in before.read_text().splitlines() if line.strip().startswith("#")]
    later = after.read_text()
    gone = [line for line in earlier if line not in later]
    # The store and its port are what torchrun takes over.
    assert [line for line in gone if "The store is where" not in line] == []


@pytest.mark.parametrize(
    "script", [*SCRIPTS, runs.ROOT / "slurm-multinode" / "train_at_scale.py"], ids=lambda path: path.stem
)
def test_nothing_names_one_kind_of_device(script):
    """Device and backend come from the machine: no literal of one of them in the code (a comment may name them)."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    words = [
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # f-strings' too
    words += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assert not [
        word for word in words if any(kind in word.lower() for kind in ("cuda", "nccl", "gloo", "rocm", "rccl"))
    ]
