"""JupyterLab in a browser, cells that run in several processes, and runners inside a batch job."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings

import nbformat
import psutil
import pytest

import runs
from needs import require
from test_notebooks import exercises, goals_left, judge_01
from workshop.jupyter.ranks import Ranks

LAB = [sys.executable, "-P", "-m", "workshop", "lab", "--no-browser"]


@pytest.fixture
def copy(tmp_path):
    """A copy of the workshop in a separate folder."""
    ignored = shutil.ignore_patterns("runs", "__pycache__", ".git", ".venv*", ".jupyter", "tests", ".*_cache")
    return shutil.copytree(runs.ROOT, tmp_path / "workshop", ignore=ignored)


@pytest.fixture
def lab(copy):
    """A function that starts ``workshop lab`` in the copy; all its processes end with the test."""
    started = []

    def start(*options, **env):
        home = copy.parent / "home"
        home.mkdir(exist_ok=True)
        changes = {
            "PYTHONPATH": copy,
            "HOME": home,
            "WORKSHOP_PYTHON": None,
            "WORKSHOP_PROGRESS": copy / "p.json",
        } | env
        started.append(runs.Running([*LAB, *options], copy, **changes))
        return started[-1]

    yield start
    for running in started:
        running.end()


def address(running) -> tuple[str, str]:
    """Wait until a lab answers; return its address and its token."""
    running.wait_for("token=", timeout=20)
    url, token = re.search(r"(http://[^/]+)/lab/\S*\?token=(\w+)", running.text()).groups()
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"{url}/api", timeout=5)
            return url, token
        except OSError:
            assert time.monotonic() < deadline, running.text()
            time.sleep(0.05)


def status(url) -> int:
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


# ---------------------------------------------------------------- workshop lab


def test_lab_requires_its_token_despite_settings_in_the_home_folder(lab, copy):
    settings = copy.parent / "home" / ".jupyter"
    settings.mkdir(parents=True)
    (settings / "jupyter_server_config.py").write_text(
        'c = get_config()\nc.IdentityProvider.token = ""\nc.ServerApp.ip = "0.0.0.0"\n'
    )
    running = lab()
    url, token = address(running)
    assert url.startswith("http://127.0.0.1:")
    assert len(token) >= 32
    assert status(f"{url}/api/kernelspecs") == 403
    assert status(f"{url}/api/kernelspecs?token=wrong") == 403
    kernel = json.load(urllib.request.urlopen(f"{url}/api/kernelspecs?token={token}"))["kernelspecs"]["python3"]
    assert kernel["spec"]["display_name"] == "Workshop"
    assert kernel["spec"]["argv"][0] == sys.executable
    assert kernel["spec"]["env"]["PYTHONPATH"] == str(copy)
    # Other users of the machine cannot read the token in the list of processes or in a file.
    family = [psutil.Process(running.process.pid), *psutil.Process(running.process.pid).children(recursive=True)]
    assert token not in runs.command_lines(family)
    assert (copy / ".jupyter").stat().st_mode & 0o077 == 0
    listening = {each.laddr.ip for process in family for each in process.net_connections() if each.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_lab_refuses_a_taken_port_and_by_default_finds_a_free_one(lab):
    url, _ = address(lab())
    port = url.rpartition(":")[2]
    second = lab("--port", port)
    assert second.wait(20) == 2
    assert second.text().count("\n") == 1
    assert f"port {port} is taken" in second.text()
    other, _ = address(lab())  # without --port it uses the next free port
    assert other != url


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ip", "192.0.2.1"], "no such address"),
        (["--ip", "nowhere.invalid"], "no such address"),
        (["--port", "0"], "0"),
    ],
)
def test_lab_reports_impossible_options_in_one_line(options, words, lab):
    running = lab(*options)
    assert running.wait(20) == 2
    assert words in running.text()
    assert running.text().count("\n") == 1


def test_lab_names_the_packages_that_are_missing(monkeypatch):
    from workshop.errors import UserError
    from workshop.jupyter import lab

    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"jupyterlab and ipykernel missing: .* -m pip install -e '.*\[notebooks\]'"):
        lab.run_lab(None, "127.0.0.1", browser=False)


def test_lab_reports_a_full_disk(lab, copy):
    (copy / "sitecustomize.py").write_text(
        "import shutil\nusage = shutil.disk_usage\nshutil.disk_usage = lambda path: usage(path)._replace(free=1000)\n"
    )
    running = lab()
    assert running.wait(20) == 2
    assert "is full" in running.text()


def browser():
    """Return the path of Chrome, or of the Chromium of Debian, for Playwright."""
    if path := shutil.which("google-chrome"):
        return path
    require("chromium")
    return shutil.which("chromium")


def run_all_cells(page, address, notebook, seconds, seconds_for_first) -> nbformat.NotebookNode | None:
    """Run all cells of a notebook; return what JupyterLab saved, or None if no cell has run after ``seconds_for_first``."""
    page.goto(address)
    kernel = page.locator(".jp-NotebookPanel-toolbar .jp-Notebook-ExecutionIndicator")
    page.get_by_role("heading", name="01 One device").wait_for(timeout=60_000)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=120_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    begun = time.monotonic()
    while True:
        page.keyboard.press("Control+s")
        time.sleep(2)
        # A cell that has run has an execution count; the notebook is complete when all cells have one.
        saved = nbformat.read(notebook, as_version=4)
        cells = [cell for cell in saved.cells if cell.cell_type == "code"]
        if all(cell.execution_count for cell in cells) and cells[-1].outputs:
            return saved
        failed = [cell["id"] for cell in cells for output in cell.outputs if output.output_type == "error"]
        assert not failed, failed
        missing = [cell["id"] for cell in cells if not cell.execution_count]
        took = time.monotonic() - begun
        lost = len(missing) == len(cells) and took > seconds_for_first
        if lost or took > seconds:
            prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()
            dialogs = page.locator(".jp-Dialog").all_inner_texts()
            state = f"kernel {kernel.get_attribute('data-status')}, prompts {prompts}, dialogs {dialogs}"
            assert lost, f"after {took:.0f} s not run or not saved: {missing}; {state}"
            warnings.warn(f"no cell has run and been saved after {took:.0f} s; {state}", stacklevel=1)
            return None


@pytest.mark.full
def test_notebook_01_runs_in_a_browser(lab, copy, record_property):
    from playwright.sync_api import sync_playwright

    path = browser()
    notebook = copy / "01_single_gpu" / "01_single_gpu.ipynb"
    count = sum(cell.cell_type == "code" for cell in nbformat.read(notebook, as_version=4).cells)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        # On an overloaded machine JupyterLab once ran no cell at all. A user would start it again, so try twice.
        for _ in range(2):
            begun = time.monotonic()
            running = lab()
            url, token = address(running)
            record_property("ready", round(time.monotonic() - begun, 1))
            page = chromium.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="dark")
            begun = time.monotonic()
            opened = f"{url}/lab/tree/01_single_gpu/01_single_gpu.ipynb?token={token}"
            saved = run_all_cells(page, opened, notebook, seconds=600, seconds_for_first=120)
            if saved is not None:
                break
            page.close()
            running.end()
        assert saved is not None, "no cell ran in two attempts"
        record_property("seconds", round(time.monotonic() - begun))
        pictures = page.locator("img[alt^='Bars']")
        pictures.last.scroll_into_view_if_needed()
        assert pictures.last.evaluate("picture => picture.naturalWidth") > 300
        screenshots = runs.ROOT / "runs" / "screenshots"  # for a person to look at
        screenshots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=screenshots / "notebook-01.png")
        chromium.close()
    cells = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert len(cells) == count
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    judge_01(saved)
    assert goals_left(saved) == exercises("01_single_gpu")


# ---------------------------------------------------------------- cells in several processes


@pytest.fixture
def ranks():
    started = Ranks(3)
    yield started
    started.end()


def test_ranks_keep_their_variables_and_communicate(ranks):
    first = ranks.run("x = torch.ones(2) * rank\nprint(world_size)")
    assert [result["output"] for result in first] == ["3\n"] * 3
    second = ranks.run("dist.all_reduce(x)\nshow('sum', x)")
    assert [result["shown"] for result in second] == [[["sum", [3.0, 3.0]]]] * 3
    assert [result["error"] for result in second] == [""] * 3


@pytest.mark.parametrize(
    ("cell", "errors"),
    [
        ("1 / 0", ["line 1: ZeroDivisionError: division by zero"] * 3),
        ("def f(:", ["line 1: SyntaxError"] * 3),
        ("import sys\nsys.exit(4)", ["line 2: SystemExit: 4"] * 3),
        ("if rank:\n    dist.barrier()", ["", "line 2: RuntimeError: ", "line 2: RuntimeError: "]),
    ],
)
def test_an_error_is_reported_and_the_next_cell_runs(cell, errors, ranks):
    start = time.monotonic()
    for result, error in zip(ranks.run(cell), errors, strict=True):
        assert result["error"].startswith(error)
        assert bool(result["error"]) == bool(error)
    assert time.monotonic() - start < 30
    after = ranks.run("y = torch.ones(1)\ndist.all_reduce(y)\nprint(int(y))")
    assert [result["output"] for result in after] == ["3\n"] * 3


def test_a_rank_that_died_is_reported(ranks):
    with pytest.raises(RuntimeError, match="the process of rank 1 has died"):
        ranks.run("import os\nif rank == 1:\n    os._exit(1)")


def test_ranks_end_with_the_kernel():
    program = (
        "from workshop.jupyter.ranks import Ranks\nranks = Ranks(2)\nranks.run('1')\n"
        "print(*(process.pid for process in ranks.processes), flush=True)\ninput()"
    )
    kernel = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=runs.environment(),
    )
    members = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
    assert len(members) == 2
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    _, left = psutil.wait_procs(members, timeout=5)
    # A zombie has ended; the test cannot control when its new parent collects its status.
    assert [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []


# ---------------------------------------------------------------- inside a batch job


@pytest.mark.full
def test_a_runner_ignores_the_job_variables_of_the_session(tmp_path):
    """Programs that a cell starts inherit the variables of the batch job in which the notebook runs."""
    job = {
        "SLURM_JOB_ID": 1, "SLURM_NTASKS": 1, "SLURM_PROCID": 0, "SLURM_EXPORT_ENV": "NONE", "SLURM_MEM_PER_NODE": 100,
        "SBATCH_ACCOUNT": "a", "PBS_JOBID": 1, "PBS_NODEFILE": "/nowhere", "PALS_RANKID": 0, "PMI_RANK": 0, "PMI_SIZE": 1,
        "PMIX_RANK": 0, "OMPI_COMM_WORLD_RANK": 0, "MASTER_ADDR": "nowhere", "MASTER_PORT": 1, "RANK": 5, "LOCAL_RANK": 5,
        "WORLD_SIZE": 9, "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    python = tmp_path / "python"
    seen = tmp_path / "seen.txt"
    python.write_text(f'#!/bin/sh\nenv >> "{seen}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = {
        **runs.environment(WORKSHOP_PYTHON=python, NPROC=2),
        **{name: str(value) for name, value in job.items()},
    }
    done = subprocess.run(
        [runs.TORCHRUN_RUNNER, "--epochs", "1", "--checkpoint", "run.pt"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    inherited = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert "NPROC" in inherited
    assert inherited & job.keys() == set()
