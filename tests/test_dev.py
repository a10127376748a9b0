"""``workshop dev`` creates skeletons and names what a change forgot. Each test uses a copy of the repository."""

import json
import shutil
import subprocess
import sys

import pytest

import runs

IGNORED = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository in which everything is committed."""
    root = tmp_path / "copy"
    shutil.copytree(runs.ROOT, root, ignore=IGNORED, symlinks=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", "-C", root, *command], check=True)
    return root


def dev(root, *words, status=0):
    """Run ``workshop dev`` in a copy and return its output."""
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", *words], root, PYTHONPATH=root)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_dev_check_finds_nothing_missing():
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", "check", "01_single_gpu"], runs.ROOT)
    assert done.stdout.endswith("nothing is missing\n"), done.stdout + done.stderr


def test_dev_check_says_what_a_new_exercise_still_needs(copy):
    said = dev(copy, "new", "exercise", "02_pytorch_ddp/exercise5_norm", "--launch", "torchrun")
    assert "solutions/02_pytorch_ddp/exercise5_norm.py" in said
    said = dev(copy, "check", status=1)
    assert "02_pytorch_ddp/exercise5_norm.py: the unsolved exercise passes the check" in said
    # The mistake of the exercise: with num_replicas=1 all ranks see the same samples.
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
    assert "the unsolved exercise passes the check" in dev(copy, "check", status=1)


def test_new_creates_the_files_of_a_rule_and_of_a_site(copy):
    for family in ("samples", "jobs", "files"):  # the rules of these families have different imports
        assert f"tests/check/rules/test_{family}.py" in dev(copy, "new", "rule", f"{family}/late-{family}")
    assert "late-jobs: add a mistake of this kind to tests/check/rules/test_jobs.py" in dev(copy, "check", status=1)
    dev(copy, "new", "site", "elsewhere")
    assert (copy / "slurm-multinode" / "sites" / "elsewhere.toml").exists()


def test_dev_check_names_everything_that_a_change_forgot(copy):
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
        "02_pytorch_ddp/exercise9_stray.py: 02_pytorch_ddp/exercises.toml has no entry for it",
        "02_pytorch_ddp/02_pytorch_ddp.ipynb: it has outputs",
        f"a hint of goal 1 contains a line of the solution: {line}",
        "solutions/02_pytorch_ddp/exercise1_multigpu.py: a TODO is left in the solution",
        "the check of the solution finds gradients-differ",
        "SECURITY.md:3: docs/nowhere.md does not exist",
    ):
        assert problem in said, said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rule", "late"], "a rule is named FAMILY/rule-name"),
        (["rule", "samples/leak"], "rule leak already exists"),
        (["rule", "weather/late"], "there is no family weather"),
        (["exercise", "02_pytorch_ddp/five"], "an exercise is named STAGE/exerciseK_topic"),
        (["exercise", "09_no/exercise1_topic"], "create the stage with: workshop dev new stage 09_no"),
        (["stage", "seven"], "a stage is named NN_topic"),
        (["stage", "01_single_gpu"], "folder 01_single_gpu already exists"),
        (["site", "lumi"], "already exists"),
        (["site", "My Site"], "only lowercase letters and digits"),
    ],
)
def test_a_wrong_name_for_something_new_is_refused_in_one_line(words, message):
    done = runs.run([sys.executable, "-P", "-m", "workshop", "dev", "new", *words], runs.ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
