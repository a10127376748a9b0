"""``workshop dev``: skeletons, and what a change has forgotten. Each test works in a copy of the repository."""

import json
import shutil
import subprocess
import sys

import pytest

import runs

IGNORED = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository, with what is in it committed."""
    root = tmp_path / "copy"
    shutil.copytree(runs.ROOT, root, ignore=IGNORED, symlinks=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", "-C", root, *command], check=True)
    return root


def dev(root, *words, status=0):
    """Run ``workshop dev`` of a copy; return what it prints."""
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", *words], root, PYTHONPATH=root)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_nothing_is_missing():
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", "check", "01_single_gpu"], runs.ROOT)
    assert done.stdout.endswith("nothing is missing\n"), done.stdout + done.stderr


def test_a_new_exercise_until_the_check_is_content(copy):
    said = dev(copy, "new", "exercise", "02_pytorch_ddp/exercise5_norm", "--launch", "torchrun")
    assert "solutions/02_pytorch_ddp/exercise5_norm.py" in said
    said = dev(copy, "check", status=1)
    assert "02_pytorch_ddp/exercise5_norm.py: it passes the check unsolved" in said
    # The idea of the exercise: without the sampler all ranks see the same samples.
    exercise = copy / "02_pytorch_ddp" / "exercise5_norm.py"
    text = exercise.read_text()
    assert text.count("sampler = DistributedSampler(") == 1
    exercise.write_text(
        text.replace("sampler = DistributedSampler(", "sampler = DistributedSampler(num_replicas=1, rank=0, dataset=")
    )
    toml = copy / "02_pytorch_ddp" / "exercises.toml"
    toml.write_text(toml.read_text().replace("rules = []\n", 'rules = ["same-samples"]\n'))
    for path in copy.glob("**/exercise5_*"):
        path.write_text(path.read_text().replace("TODO: what it", "What it"))
    assert dev(copy, "check").endswith("nothing is missing\n")


def test_a_new_stage_is_discovered(copy):
    dev(copy, "new", "stage", "07_inference")
    changed = subprocess.run(["git", "-C", copy, "status", "--short"], capture_output=True, text=True).stdout
    assert changed.splitlines() == ["?? 07_inference/", "?? solutions/07_inference/"]
    done = runs.run([sys.executable, "-P", "-m", "workshop", "progress"], copy, PYTHONPATH=copy)
    assert "07_inference/exercise1_inference.py" in done.stdout
    assert "it passes the check unsolved" in dev(copy, "check", status=1)


def test_a_new_rule_and_a_new_site(copy):
    for family in ("samples", "jobs", "files"):  # they import different things
        assert f"tests/check/rules/test_{family}.py" in dev(copy, "new", "rule", f"{family}/late-{family}")
    assert "rule late-jobs: no mistake in tests/check/rules/test_jobs.py" in dev(copy, "check", status=1)
    dev(copy, "new", "site", "elsewhere")
    assert (copy / "slurm-multinode" / "sites" / "elsewhere.toml").exists()


def test_what_a_change_has_forgotten(copy):
    stage = copy / "02_pytorch_ddp"
    (stage / "exercise9_stray.py").write_text("")
    notebook = stage / "02_pytorch_ddp.ipynb"
    content = json.loads(notebook.read_text())
    next(cell for cell in content["cells"] if cell["cell_type"] == "code")["execution_count"] = 1
    notebook.write_text(json.dumps(content))
    toml = stage / "exercises.toml"
    line = "sampler = DistributedSampler(train_set, seed=SEED, drop_last=True)"
    toml.write_text(toml.read_text().replace('hints = [\n    """', f'hints = [\n    """Write {line}. ', 1))
    (copy / "SECURITY.md").write_text("# Security\n\n[A page](docs/nowhere.md)\n")
    solution = copy / "solutions" / "02_pytorch_ddp" / "exercise1_multigpu.py"
    solution.write_text(solution.read_text().replace("ddp_model = DDP(model)", "ddp_model = model  # TODO"))
    said = dev(copy, "check", status=1)
    for problem in (
        "02_pytorch_ddp/exercise9_stray.py: no entry of 02_pytorch_ddp/exercises.toml names it",
        "02_pytorch_ddp/02_pytorch_ddp.ipynb: it has outputs",
        f"a hint of goal 1 holds a line of the solution: {line}",
        "solutions/02_pytorch_ddp/exercise1_multigpu.py: a TODO is left in the solution",
        "the check of the solution finds gradients-differ",
        "SECURITY.md:3: docs/nowhere.md is not there",
    ):
        assert problem in said, said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rule", "late"], "a rule is named FAMILY/rule-name"),
        (["rule", "samples/leak"], "there is a rule leak already"),
        (["rule", "weather/late"], "there is no family weather"),
        (["exercise", "02_pytorch_ddp/five"], "an exercise is named STAGE/exerciseK_topic"),
        (["exercise", "09_no/exercise1_topic"], "make the stage with: workshop dev new stage 09_no"),
        (["stage", "seven"], "a stage is named NN_topic"),
        (["stage", "01_single_gpu"], "there is a folder 01_single_gpu already"),
        (["site", "lumi"], "exists already"),
        (["site", "My Site"], "small letters and digits only"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_status_2(words, message):
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", "new", *words], runs.ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
