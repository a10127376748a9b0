"""Each step adds one idea: few lines change from one script to the next, and no script is long."""

import ast
from pathlib import Path

import pytest

import runs
from workshop.course.exercises import stage_files
from workshop.demo.strategies import changed_lines

FILES = stage_files()
STEPS = [step for file in FILES.values() for step in file.step]
SCRIPTS = sorted({script for step in STEPS for script in (step.before, step.after)})
# The other steps train a language model or use a library. They need a second group for CPUs, or start from new code.
PLAIN_STEPS = [step for step in STEPS if step.keeps_comments]
PLAIN = sorted({script for step in PLAIN_STEPS for script in (step.before, step.after)})


def name(step):
    return f"{Path(step.before).stem}-{Path(step.after).stem}"


@pytest.mark.parametrize("step", STEPS, ids=name)
def test_each_step_changes_only_a_few_lines(step, record_property):
    changed = changed_lines(runs.ROOT / step.before, runs.ROOT / step.after)
    record_property("changed_lines", changed)
    print(f"\n{step.before} -> {step.after}: {changed} changed lines")
    assert 10 <= changed <= step.most


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: Path(script).stem)
def test_a_script_is_short(script):
    stage = FILES[Path(script).parent.name]
    lines = (runs.ROOT / script).read_text().splitlines()
    assert len(lines) <= stage.lines
    assert max(map(len, lines)) <= stage.columns


@pytest.mark.parametrize("step", PLAIN_STEPS, ids=name)
def test_each_step_keeps_the_earlier_comments(step):
    earlier = [
        line.strip() for line in (runs.ROOT / step.before).read_text().splitlines() if line.strip().startswith("#")
    ]
    later = (runs.ROOT / step.after).read_text()
    gone = [line for line in earlier if line not in later]
    # torchrun creates the store, so this comment disappears.
    assert [line for line in gone if "find each other through this store" not in line] == []


@pytest.mark.parametrize("script", [*PLAIN, "slurm-multinode/train_at_scale.py"], ids=lambda script: Path(script).stem)
def test_a_script_names_no_device_and_no_backend(script):
    """The machine determines device and backend, so the code has no literal for them (comments may name them)."""
    nodes = list(ast.walk(ast.parse((runs.ROOT / script).read_text())))
    words = [
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]  # also the constant parts of f-strings
    words += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assert not [
        word for word in words if any(kind in word.lower() for kind in ("cuda", "nccl", "gloo", "rocm", "rccl"))
    ]
