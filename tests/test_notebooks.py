"""The notebooks run from top to bottom, as delivered and solved; the solution notebooks show a solved run."""

import json
import re
import shutil
import statistics
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

import runs
from needs import require
from workshop.course import exercises as course
from workshop.jupyter import solutions

STAGES = pytest.mark.parametrize("stage", solutions.STAGES)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@STAGES
def test_notebooks_are_delivered_without_outputs(stage):
    notebook, _ = solutions.paths(stage)
    for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells, start=1):
        if cell.cell_type == "code":
            assert not cell.outputs, f"{notebook}, cell {number} has outputs"
            assert cell.execution_count is None, f"{notebook}, cell {number} has an execution count"


@STAGES
def test_the_links_of_a_notebook_exist(stage):
    for path in solutions.paths(stage):
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                for link in re.findall(r"\]\(([^):#]+)[)#]", cell.source):
                    assert (path.parent / link).exists(), f"{path}: {link}"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the stages, so that the cells write nothing to the repository."""
    folders = {solutions.paths(stage)[0].parent.name for stage in solutions.STAGES}
    for name in (*folders, "solutions", "workshop"):
        shutil.copytree(runs.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    for name in ("workshop.sh", "pyproject.toml"):
        shutil.copy2(runs.ROOT / name, tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("which-2-cores.md", "plan-validation.json"):
        shutil.copy2(runs.ROOT / "results" / name, tmp_path / "results")
    changes = {"PYTHONPATH": tmp_path, "JUPYTER_PLATFORM_DIRS": 1, "IPYTHONDIR": tmp_path / "ipython"}
    changes |= {"WORKSHOP_PROGRESS": tmp_path / "progress.json", "WORKSHOP_PYTHON": None, "OMP_NUM_THREADS": None}
    environment = runs.environment(**changes)
    for name in {"WORKSHOP_PYTHON", "OMP_NUM_THREADS"} - environment.keys():
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def execute(path):
    """Run a notebook and return it; if a cell fails, name it."""
    notebook = nbformat.read(path, as_version=4)
    try:
        solutions.execute(notebook, path.parent)
    except CellExecutionError as error:
        failed = next(
            number
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
        )
        pytest.fail(f"{path.name}, cell {failed} failed:\n{error}")
    return notebook


def text(notebook, name=None) -> str:
    """Return the output of all cells, or of the cell with this name."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and name in (None, cell["id"])]
    assert cells
    return COLOURS.sub("", "".join(output.get("text", "") for cell in cells for output in cell.outputs))


def pictures(notebook) -> list[str]:
    """Return the alternative texts of the pictures; fail if a picture has none."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pages = [output.get("data", {}).get("text/html", "") for cell in cells for output in cell.outputs]
    assert all(page.count("<img") == page.count('<img alt="') for page in pages)
    return [alt for page in pages for alt in re.findall(r'<img alt="([^"]+)"', page)]


def checks(notebook) -> dict[str, str]:
    """Return the output of the last check of each exercise, by file."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and (call := re.fullmatch(r'check\("(.+)"\)', cell.source)):
            found[call[1]] = text(notebook, cell["id"])
    return found


def goals_left(notebook) -> set[str]:
    """Return the exercises with open goals."""
    outputs = {file: said.replace("✗ not met", "") for file, said in checks(notebook).items()}  # without the legend
    return {file for file, said in outputs.items() if "✗" in said or not re.search(r"(\d+) of \1 goals met", said)}


def solve(copy):
    """Replace the exercises with the solutions."""
    for exercise in course.exercises():
        for path, _ in exercise.pairs:
            name = path.relative_to(runs.ROOT)
            content = (copy / "solutions" / name).read_text().replace("/../../workshop/", "/../workshop/")
            (copy / name).write_text(content)


def exercises(name):
    """Return the files of the exercises in a notebook."""
    folder = solutions.paths(name)[0].parent.name
    own = {exercise.file for exercise in course.exercises() if exercise.stage == folder}
    elastic = {file for file in own if file.startswith("exercise4_elastic")}  # this one is in the notebook surviving
    return elastic if name == "surviving" else own - elastic


def judge_01(notebook):
    said = text(notebook)
    for epoch in ("1/4", "4/4", "5/6", "6/6"):
        assert said.count(f"epoch {epoch} ") == 1
    assert "already holds 6 epochs of the 4 asked for" in " ".join(said.split())
    profile = text(notebook, "run-profile")
    assert re.search(r"\d% █+ +\d+ +loss.backward\(\)", profile)
    assert re.search(r"\d% .* calls +aten::", profile)
    assert len(pictures(notebook)) == 4


def judge_02(notebook):
    said = text(notebook)
    assert "rank 3 | I am rank 3 of 4" in said
    assert "rank 2 | line 3: RuntimeError: waited 5 s for the other ranks, and gave up" in said
    assert "rank 3 | done" in said
    assert float(said.split("gradient of the whole batch: ")[1].split()[0]) < 1e-6
    assert "mean of the ranks' scores: 0.250; score of all samples: 0.750" in said
    assert "killed the newest process" in said
    assert "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2" in said
    shown = pictures(notebook)
    assert len(shown) == 9
    assert "rank 0: before [0, 1, 2], after all_reduce [60, 64, 68]" in shown[1]
    assert "rank 1: before [10, 11, 12, 13, 14, 15, 16, 17], after reduce_scatter [68, 72]" in shown[3]


def judge_03(notebook):
    assert "mean of rank 0's batches 0.500; mean of the ranks' means 0.625; the object 0.778" in text(notebook)
    assert "run_training_batch" in text(notebook, "run-profile")
    assert "fully_shard(self.model, mesh=mesh)" in text(notebook, "run-fsdp2")
    shown = pictures(notebook)
    assert "rank 1: of 0 1 2 3 4 [1, 3, 0], dealt out by hand [1, 3]" in shown[2]


def judge_04(notebook):
    measured = text(notebook, "run-measure")
    assert re.search(r"FSDP +│ +8\.4 / 8\.4", measured), measured
    before, after, stored = text(notebook, "run-buffers").splitlines()[-3:]
    assert "'1'" in before
    assert "'1'" not in after
    assert stored == "in the checkpoint: False"
    for cell in ("run-ddp", "run-same", "run-kill", "run-options", "run-job", "run-lora"):
        assert re.search(r"step (\d+)/\1 ", text(notebook, cell)), cell
    assert float(re.search(r"apart by at most (\S+) in the first", text(notebook, "plot-same"))[1]) < 0.02
    assert float(text(notebook, "run-tensor").split()[-1]) < 2e-5
    shown = pictures(notebook)
    assert len(shown) == 8
    assert any("rank 2: shares a copy with [2, 3], holds the same as [0, 2]" in picture for picture in shown), shown


def judge_05(notebook):
    for cell, epochs in (
        ("run-same", 3),
        ("run-silent", 3),
        ("run-parts", 1),
        ("run-deepspeed", 1),
        ("run-accelerate", 3),
    ):
        assert f"epoch {epochs}/{epochs} |" in text(notebook, cell), cell
    assert "DeepSpeed has no key 'zero_optimisation'" in text(notebook, "run-unknown")
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in text(notebook, "run-parts")
    assert "All keys matched" in text(notebook, "load-whole")
    assert sorted(re.findall(r"process \d of \d", text(notebook, "run-launch-trap"))) == [
        "process 0 of 1",
        "process 0 of 2",
        "process 1 of 2",
    ]
    if not runs.NO_CLUSTER:
        assert "training on cpu from epoch 1: 4 processes" in text(notebook, "run-job")
    assert len(pictures(notebook)) == 4


def judge_06(notebook):
    assert "219,520 numbers in 52 parameters: 0.84 MiB" in text(notebook, "run-size")
    differences = re.findall(r"gradient of the global batch: (\S+)", text(notebook, "ranks-average"))
    assert len(differences) == 2
    assert all(float(each) < 1e-6 for each in differences)
    hooks = text(notebook, "ranks-hooks")
    assert "rank 0 | ready: middle.weight" in hooks
    assert "rank 1 | ready: middle.weight" not in hooks
    end = "rank 1 | the end: without gradients are ['middle.weight', 'middle.bias']\nrank 1 | backward() returns"
    assert end in text(notebook, "ranks-callback")
    assert "rank 0 holds 2.92 MiB and sends 0.84 MiB in each step: " in text(notebook, "run-naive")
    assert text(notebook, "run-saved").splitlines()[-1] == "unpack  a different tensor of shape (4, 3)"
    for cell, count in (("run-ddp", 2), ("run-zero", 2), ("run-fsdp", 2), ("run-bfloat16", 1)):
        assert text(notebook, cell).count("step 60/60: loss ") == count, cell
    for cell, count in (
        ("run-tensor", 2),
        ("run-pipeline", 3),
        ("run-schedules", 2),
        ("run-ring", 2),
        ("run-experts", 3),
    ):
        assert text(notebook, cell).count("step 60/60: loss ") == count, cell
    assert text(notebook, "run-all").count("step 20/20: loss ") == 4
    limits = {"plot-ddp": 1e-5, "plot-zero": 1e-5, "plot-fsdp": 1e-4, "plot-bfloat16": 0.2, "plot-tensor": 1e-3}
    limits |= dict.fromkeys(("plot-pipeline", "compare-schedules", "plot-ring", "plot-experts", "plot-all"), 1e-3)
    for cell, limit in limits.items():
        apart = re.findall(r"differ by at most (\S+) in [26]0 steps", text(notebook, cell))
        assert apart, cell
        assert all(float(each) < limit for each in apart), cell
    ideas = text(notebook, "run-online") + text(notebook, "run-mesh") + text(notebook, "ranks-norm")
    assert "factor 0.5, output 3, exp(total) 8" in ideas
    assert "cp: rank 5 has index 0 in the group [5, 7]" in ideas
    assert ideas.count("each parameter once: 5.00") == 2
    assert text(notebook, "ranks-cross").count("waited 5 s for the other ranks, and gave up") == 1
    assert text(notebook, "ranks-batch").count("received 100000.0") == 2
    shown = pictures(notebook)
    assert len(shown) == 16
    assert any("rank 1 computes F0 B0 F1 B1 F2 B2 F3 B3" in picture for picture in shown)


def judge_scale(notebook):
    assert re.search(r"this machine needs an intensity of \d", text(notebook, "run-own"))
    assert re.search(r"alpha = [\d,]+ us, 1/beta = \d", text(notebook, "fit-collectives"))
    for cell in ("run-plan", "run-bill"):
        assert "GPU-hours" in text(notebook, cell)
        assert "each predicted without the runs of its own project" in text(notebook, cell)  # never without its error
    assert text(notebook, "compare-days").startswith("57.9 billion operations per token; the plan has an MFU of ")
    by_hand = ["TP  8: computes 9.6 ms, communicates 2.1 ms", "TP 16: computes 4.8 ms, communicates 2.5 ms"]
    assert text(notebook, "run-tensor").splitlines() == by_hand
    assert re.search(r"\d+ runs of \d+ projects: median error \d", text(notebook, "plot-validate"))
    assert "16,384 GPUs: " in text(notebook, "plot-bends")
    assert "8 collectives in each layer" in text(notebook, "compare-count")
    assert len(pictures(notebook)) == 16


def judge_surviving(notebook):
    lost = text(notebook, "run-kill")
    answers = "restart from the epoch", "start the job again", "checkpoint every 4 steps", "per-step tolerance"
    assert all(f"{answer}: Loss(killed=" in lost for answer in (*answers, "elastic, checkpoint every 4 steps"))
    steps = {answer: int(re.search(rf"^{answer}: Loss.* steps=(\d+)", lost, re.MULTILINE)[1]) for answer in answers}
    assert steps["per-step tolerance"] <= 1
    assert steps["checkpoint every 4 steps"] <= 16  # a checkpoint that is being written does not count
    assert steps["restart from the epoch"] <= 59
    assert "class StatefulLoader" in text(notebook, "show-steps")
    assert "form_group(" in text(notebook, "show-tolerance")
    killed = text(notebook, "run-tolerance")
    assert killed.count("was killed; replica") == 2
    assert re.search(r"step 150: accuracy 0\.9\d+", killed)
    said = text(notebook, "plot-tolerance")
    assert said.startswith("each step once: True; ")
    assert float(re.search(r"differ by at most (\S+)", said)[1]) < 1e-2
    assert " 2 " in said.partition("replicas:")[2]
    assert re.search(r"error of the model: median \d+%", text(notebook, "run-goodput"))
    assert "16,384 GPUs: an interruption every 167 minutes" in text(notebook, "run-thousand")
    assert "8,000 GPUs: an interruption every 342 minutes" in text(notebook, "run-thousand")
    assert [int(share) for share in re.findall(r"goodput is (\d+)%", text(notebook, "run-plan"))] == [86, 92]
    assert len(pictures(notebook)) == 8


JUDGES = {
    "01_single_gpu": judge_01,
    "02_pytorch_ddp": judge_02,
    "03_pytorch_lightning": judge_03,
    "04_model_parallel_with_fsdp": judge_04,
    "05_deepspeed": judge_05,
    "06_build_your_own": judge_06,
    "strategies": judge_scale,
    "surviving": judge_surviving,
}  # the judge of slurm-multinode is in test_slurm_notebook.py


def test_every_notebook_has_a_judge():
    assert JUDGES.keys() == {stage for stage in solutions.STAGES if stage != "slurm-multinode"}


@pytest.mark.full  # .ci/run runs the notebook of stage 01 daily
@pytest.mark.parametrize("stage", JUDGES)
def test_a_notebook_runs_as_delivered(stage, copy):
    """Run the notebook while all exercises are unsolved."""
    if stage == "02_pytorch_ddp":
        require("pkill")
    notebook = execute(copy / solutions.paths(stage)[0].relative_to(runs.ROOT))
    JUDGES[stage](notebook)
    assert goals_left(notebook) == exercises(stage)
    # The notebook must not change the exercises.
    folder = solutions.paths(stage)[0].parent.name
    for name in exercises(stage):
        assert (copy / folder / name).read_text() == (runs.ROOT / folder / name).read_text()


@pytest.mark.full
@pytest.mark.parametrize("stage", JUDGES)
def test_a_notebook_runs_with_the_solutions(stage, copy):
    solve(copy)
    notebook = execute(copy / solutions.paths(stage)[0].relative_to(runs.ROOT))
    JUDGES[stage](notebook)
    assert checks(notebook).keys() == exercises(stage)
    assert goals_left(notebook) == set()
    if stage == "02_pytorch_ddp":
        for name in ("one", "two"), ("large", "accumulated"):
            first, second = (runs.losses(runs.read_log(copy / stage / "runs" / f"{each}.pt")) for each in name)
            assert first == pytest.approx(second, abs=1e-3)
        assert "largest difference between any two parameters: 0.0\n" in text(notebook, "compare-kill")
    if stage == "03_pytorch_lightning":
        logs = [runs.read_log(copy / stage / "runs" / name) for name in ("by_hand.pt", "lightning.ckpt", "fsdp2.ckpt")]
        by_hand, lightning, fsdp2 = map(runs.losses, logs)
        assert lightning == pytest.approx(by_hand, abs=1e-3)
        assert fsdp2 == pytest.approx(by_hand[: len(fsdp2)], abs=1e-3)
        assert text(notebook, "run-session").startswith("status 0\n")
        if not runs.NO_CLUSTER:
            assert "training on cpu from epoch 1: 4 processes" in text(notebook, "run-job")
    if stage == "05_deepspeed":
        logs = [runs.read_log(copy / stage / "runs" / name) for name in ("by_hand.pt", "engine/log", "zero3/log")]
        by_hand, engine, zero3 = map(runs.losses, logs)
        assert by_hand == engine == zero3
        accelerated = runs.losses(runs.read_log(copy / stage / "runs" / "accelerated" / "log"))
        assert accelerated == pytest.approx(by_hand, abs=5e-5)


@STAGES
def test_the_solution_notebook_has_the_same_cells_and_shows_a_solved_run(stage):
    _, path = solutions.paths(stage)
    there, expected = nbformat.read(path, as_version=4), solutions.twin(stage)
    assert [(cell["id"], cell.source) for cell in there.cells] == [(cell["id"], cell.source) for cell in expected.cells]
    for cell in there.cells:
        if cell.cell_type == "code":
            assert cell.execution_count, cell["id"]
            assert not [output for output in cell.outputs if output.output_type == "error"], cell["id"]
    if stage in JUDGES:
        JUDGES[stage](there)
    assert goals_left(there) == set()
    assert checks(there).keys() == exercises(stage)
    assert re.search(r"Python [\d.]+, torch [\d.]+\S*, \d+ CPU cores, ", text(there, "start"))  # its machine
    assert "/home" not in path.read_text()
    assert path.stat().st_size < 1_000_000


PLANNED = ("plot-tensor", "plot-validate", "show-worst", "plot-scaling", "plot-bends", "plot-bill")


def test_the_cells_of_scale_that_call_the_planner_run():
    """Run them here, without a kernel, because the whole notebook runs only with --full."""
    cells = {cell["id"]: cell.source for cell in nbformat.read(solutions.paths("strategies")[0], as_version=4).cells}
    shown = []
    names = {"json": json, "statistics": statistics, "ROOT": runs.ROOT}
    names |= dict.fromkeys(("show_bars", "show_parts", "show_plot"), lambda *arguments: shown.append(arguments))
    for name, source in cells.items():
        if name.startswith("guess-") or name in PLANNED:
            exec(source, names)
    parts, _, _, within, speeds, lost, shares, *_ = shown
    assert parts[0]["TP 16: 40 GB"]["TP"] > 2 * parts[0]["TP 8: 69 GB"]["TP"]
    assert 40 < within[0]["within 10 %"] < within[0]["within 25 %"] < 100
    assert speeds[3]["published"]
    assert 0 < lost[0]["1,024 to 16,384 GPUs"] < 50
    assert shares[0]["16,384 GPUs"]["bubble"] > 2 * shares[0]["4,096 GPUs"]["bubble"]


def test_the_cells_of_surviving_that_only_calculate_run(tmp_path, monkeypatch, capsys):
    """Run them here, without a kernel and with made-up measurements, because the whole notebook runs only with --full."""
    cells = {cell["id"]: cell.source for cell in nbformat.read(solutions.paths("surviving")[0], as_version=4).cells}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    steps = [json.dumps({"step": step, "loss": 2 / step, "replicas": 3}) + "\n" for step in range(1, 151)]
    for name in ("undisturbed", "tolerate"):
        (tmp_path / "runs" / f"{name}.jsonl").write_text("".join(steps))
    lost = {"restart from the epoch": {"steps": 30, "seconds": 5.0}, "per-step tolerance": {"steps": 1, "seconds": 0.1}}
    (tmp_path / "runs" / "surviving.json").write_text(json.dumps({"median": lost}))
    costs = {"training": 5.0, "steps": 179, "step": 5 / 179, "checkpoint": 0.05, "restart": 0.4}
    rows = {every: {"goodput": 0.5, "runs": [{"goodput": 0.4}, {"goodput": 0.6}]} for every in (2, 20, 100)}
    (tmp_path / "runs" / "goodput.json").write_text(json.dumps({"costs": costs, "between": 2.0, "every": rows}))
    shown = []
    names = {"Path": Path}
    names |= dict.fromkeys(("show_bars", "show_curves", "show_plot"), lambda *arguments: shown.append(arguments))
    for name, source in cells.items():
        if name.startswith(("guess-", "plot-")) or name == "run-thousand":
            exec(source, names)
    said = capsys.readouterr().out
    assert "each step once: True; the losses differ by at most 0.0e+00" in said
    assert (
        "16,384 GPUs: an interruption every 167 minutes; best interval 18.3 minutes (Young), 17.6 minutes (Daly)"
        in said
    )
    shares, improved = shown[-2][0], shown[-1][2]
    assert shares["16,384 GPUs"] == pytest.approx(84.2, abs=0.1)  # the answers of the notebook have these values
    by_stop = {name: dict(line) for name, line in improved.items()}
    assert by_stop["restart 10 minutes"][5] == pytest.approx(91.3, abs=0.2)
    assert by_stop["restart 5 minutes"][5] == pytest.approx(94.1, abs=0.2)


def test_a_cell_that_fails_is_named(copy):
    path = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(notebook, path)
    with pytest.raises(pytest.fail.Exception, match=r"01_single_gpu.ipynb, cell 3 failed"):
        execute(path)


# ---------------------------------------------------------------- sessions in which a notebook cannot run


def first_cell(path, folder):
    """Run the first cell of a notebook in ``folder`` and return its error, or "" if it succeeds."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = notebook.cells[:2]
    try:
        solutions.execute(notebook, folder)
    except CellExecutionError as error:
        return error.evalue if error.ename == "SystemExit" else f"{error.ename}, with a traceback"
    return ""


def test_a_notebook_in_the_wrong_folder_says_what_to_do(copy, tmp_path):
    path = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    assert first_cell(path, copy) == ""  # within the repository the cell changes to the folder of the notebook
    said = first_cell(path, runs.ROOT / "02_pytorch_ddp")
    assert f"its kernel belongs to the workshop in {copy}" in said
    shutil.rmtree(copy / "01_single_gpu")
    assert "complete copy of the workshop" in first_cell(runs.ROOT / "01_single_gpu" / "01_single_gpu.ipynb", copy)


def test_a_kernel_without_the_workshop_is_reported(copy, monkeypatch):
    path = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    hidden = copy / "hidden"
    hidden.mkdir()
    (hidden / "workshop.py").write_text("")  # such a kernel imports this file instead
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    said = first_cell(path, path.parent)
    assert "choose the kernel 'Workshop'" in said
    assert "./workshop.sh lab" in said


def test_a_full_disk_is_reported(copy, monkeypatch):
    (copy / "sitecustomize.py").write_text(
        "import shutil\nusage = shutil.disk_usage\nshutil.disk_usage = lambda path: usage(path)._replace(free=1000)\n"
    )
    path = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    assert re.search(r"The disk that holds .* is full: free at least \d+ MB\.", first_cell(path, path.parent))
