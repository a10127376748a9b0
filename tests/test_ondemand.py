"""The Open OnDemand app: rendered with Ruby as the dashboard does, and its job started as a plain process."""

import http.cookiejar
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
import yaml

import runs
from needs import require
from workshop.jupyter.session import copy_workshop

APP = runs.ROOT / "ondemand"
ENTERED = {"auto_accounts": "project_1", "hours": "2", "gpus": "0", "reservation": ""}


@pytest.fixture
def app(tmp_path):
    """A copy of the app; ``set`` changes its settings."""
    require("ruby")

    class App:
        folder = shutil.copytree(APP, tmp_path / "app")
        session = tmp_path / "session"

        def set(self, **settings):
            path = self.folder / "settings.yml"
            text = path.read_text()
            for name, value in settings.items():
                text, count = re.subn(rf"^{name}:.*$", f"{name}: {json.dumps(str(value))}", text, flags=re.MULTILINE)
                assert count == 1
            path.write_text(text)

        def render(self, **asked):
            self.session.mkdir(exist_ok=True)
            command = ["ruby", str(runs.ROOT / "tests/ondemand/render.rb"), str(self.folder), str(self.session)]
            done = subprocess.run([*command, json.dumps(asked)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

    return App()


# ---------------------------------------------------------------- what is rendered


def test_the_app_has_the_files_that_open_ondemand_needs():
    manifest = yaml.safe_load((APP / "manifest.yml").read_text())
    assert manifest["role"] == "batch_connect"
    assert manifest["category"] == "Interactive Apps"
    for name in ("form.yml.erb", "submit.yml.erb", "view.html.erb", "info.md.erb", "completed.md.erb", "settings.yml"):
        assert (APP / name).is_file()
    assert (APP / "template/script.sh.erb").stat().st_mode & stat.S_IXUSR
    # Jupyter Server 2 warns about NotebookApp keys and will remove them.
    assert not [path for path in APP.rglob("*") if path.is_file() and "NotebookApp" in path.read_text()]


def test_the_form_has_all_its_attributes(app):
    form = app.render(values=ENTERED)["form"]
    assert form["cluster"] == "my_cluster"
    assert set(form["form"]) == set(form["attributes"])
    assert form["attributes"]["gpus"]["value"] == 0


def test_the_app_submits_to_slurm(app):
    script = app.render(values=ENTERED)["submit"]["script"]
    assert script == {
        "wall_time": 7200,
        "accounting_id": "project_1",
        "native": ["--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--mem=8G"],
    }
    app.set(account="course", partition="small", gpu_option="--gres=gpu:a100:%d")
    script = app.render(values=ENTERED | {"gpus": "1", "reservation": " day_1 "})["submit"]["script"]
    assert script["accounting_id"] == "course"
    assert script["queue_name"] == "small"
    assert script["reservation_id"] == "day_1"
    assert script["native"][-1] == "--gres=gpu:a100:1"


def test_the_app_submits_to_pbs(app):
    app.set(scheduler="pbs", partition="develop")
    script = app.render(values=ENTERED | {"gpus": "1"})["submit"]["script"]
    assert script["native"] == ["-l", "select=1:ncpus=2:mem=8gb:ngpus=1"]
    assert script["queue_name"] == "develop"
    script = app.render(values=ENTERED | {"reservation": "R123"})["submit"]["script"]
    assert script["queue_name"] == "R123"  # PBS has a queue for each reservation
    assert "reservation_id" not in script


def test_entered_values_cannot_add_keys_or_options(app):
    """Text that a user enters must not become an additional key or option."""
    nasty = 'x"\naccounting_id: other'
    script = app.render(values=ENTERED | {"reservation": nasty})["submit"]["script"]
    assert script["accounting_id"] == "project_1"
    assert script["reservation_id"] == nasty


def test_the_preset_starts_with_one_click(app):
    app.set(account="course")
    assert app.render(values=ENTERED)["preset"] is False
    rendered = app.render(sub_app="preset")
    assert rendered["preset"] is True  # all attributes have fixed values
    assert rendered["submit"]["script"]["accounting_id"] == "course"
    assert rendered["submit"]["script"]["wall_time"] == 4 * 3600
    # If an app has sub-apps, the dashboard lists only these, so the form must be one of them.
    assert app.render(sub_app="choose")["preset"] is False
    assert app.render(sub_app="choose")["form"]["form"] == app.render()["form"]["form"]


def test_the_card_offers_the_board_only_to_those_who_can_read_it(app):
    connection = {"host": "n1", "port": "2000", "password": "secret", "notebook": "x.ipynb"}
    assert "board" not in app.render(connection=connection | {"board": "hidden"})["view"]
    view = app.render(connection=connection | {"board": "offered"})["view"]
    assert view.count("<form") == 2
    assert "/node/n1/2000/login?next=%2Fnode%2Fn1%2F2000%2Fworkshop%2Fboard%2F" in view


def test_the_form_asks_for_a_nickname_only_if_the_class_has_a_board(app):
    assert "nickname" not in app.render()["form"]["form"]
    app.set(**{"class": "/shared/course"})
    form = app.render()["form"]
    assert form["attributes"]["nickname"]["value"] == ""
    assert set(form["form"]) == set(form["attributes"])
    assert app.render(sub_app="preset")["preset"] is True
    assert app.render(sub_app="choose")["form"]["form"] == form["form"]


class Form(HTMLParser):
    """The form of a page: its action, its method and its hidden fields."""

    def __init__(self, page):
        super().__init__()
        self.fields = {}
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "form":
            self.action, self.method = attributes["action"], attributes["method"]
        elif tag == "input":
            self.fields[attributes["name"]] = attributes["value"]


def test_the_button_logs_in_and_opens_the_notebook(app):
    connection = {"host": "n1", "port": "2000", "password": "secret", "notebook": "01_single_gpu/01_single_gpu.ipynb"}
    form = Form(app.render(connection=connection)["view"])
    assert form.method == "post"
    url = urllib.parse.urlparse(form.action)
    assert url.path == "/node/n1/2000/login"
    assert urllib.parse.parse_qs(url.query) == {"next": ["/node/n1/2000/lab/tree/01_single_gpu/01_single_gpu.ipynb"]}
    assert form.fields == {"password": "secret"}


# ---------------------------------------------------------------- what runs


@pytest.fixture
def shared(tmp_path):
    """The workshop as in the shared folder of a course, without its own environment."""
    ignored = shutil.ignore_patterns("runs", "__pycache__", ".git", ".venv*", ".jupyter", ".*_cache")

    def left_out(folder, names):  # leave out the data sets of this machine, but copy workshop/data
        return {*ignored(folder, names), *(["data"] if Path(folder) == runs.ROOT else [])}

    return shutil.copytree(runs.ROOT, tmp_path / "shared", ignore=left_out)


@pytest.fixture
def job(app, shared, tmp_path):
    """A function that starts the job of the app as a plain process, which ends with the test."""
    started = []
    app.set(workshop=shared, python=sys.executable, folder=tmp_path / "learner")

    def start(nickname="", **settings):
        app.set(**settings)
        app.render(values=ENTERED | ({"nickname": nickname} if nickname else {}), stage=True)
        subprocess.run(["bash", "-n", app.session / "job.sh"], check=True)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        # The files with secrets must not depend on the umask of the job.
        started.append(
            runs.Running(
                ["bash", "-c", "umask 022; exec bash job.sh"], app.session, HOME=home, PYTHONPATH=None, SLURM_JOB_ID=1
            )
        )
        return started[-1]

    yield start
    for running in started:
        running.end()


def request(url, opener=None, **fields) -> tuple[int, str, str]:
    """Send a request, follow redirects, and return the status, address and text of the answer."""
    data = urllib.parse.urlencode(fields).encode() if fields else None
    try:
        answer = (opener or urllib.request.build_opener()).open(url, data, timeout=10)
        return answer.status, answer.url, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.url, error.read().decode()


def joined_and_served(folder, state, opener):
    """The learner has joined the board of the class under the nickname, and this user can read the board in the session."""
    [file] = folder.glob("learner-*.jsonl")
    assert json.loads(file.read_text())["name"] == "Ada $(id) 'x'"
    assert "/login?next=" in request(state)[1]
    status, _, answer = request(state, opener)
    assert (status, json.loads(answer)["not_begun"]) == (200, [{"name": "Ada $(id) 'x'", "stage": ""}])


def test_a_session_starts_serves_the_notebook_and_ends(app, job, tmp_path, record_property):
    begun = time.monotonic()
    (tmp_path / "class").mkdir()
    running = job(nickname="Ada $(id) 'x'", **{"class": tmp_path / "class"})
    connection = app.session / "connection.yml"
    while not connection.exists() or "password" not in connection.read_text():
        assert running.process.poll() is None, running.text()
        assert time.monotonic() - begun < 60, running.text()
        time.sleep(0.05)
    record_property("ready", round(time.monotonic() - begun, 1))
    members = psutil.Process(running.process.pid).children(recursive=True)
    values = yaml.safe_load(connection.read_text())
    values = {name: str(value) for name, value in values.items()}
    view = app.render(values=ENTERED, connection=values)["view"]
    form = Form(view.partition("</form>")[0])
    base = f"http://127.0.0.1:{values['port']}"
    root = f"{base}/node/{socket.gethostname()}/{values['port']}"

    # The password is only in files that only the owner can read; the settings have its hash, and no command line has it.
    assert connection.stat().st_mode & 0o077 == 0
    settings = app.session / "jupyter" / "jupyter_server_config.py"
    assert settings.stat().st_mode & 0o077 == 0
    assert "argon2:" in settings.read_text()
    assert values["password"] not in settings.read_text() + running.text()
    assert values["password"] not in runs.command_lines(members)

    assert request(f"{base}/lab")[0] == 404  # it answers only below the path of the proxy
    assert "/login?next=" in request(f"{root}/lab")[1]
    assert request(f"{root}/api/kernelspecs")[0] == 403
    assert request(f"{base}{form.action}", password="wrong")[0] == 401
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    status, url, _ = request(f"{base}{form.action}", opener, **form.fields)
    assert (status, url) == (200, f"{root}/lab/tree/01_single_gpu/01_single_gpu.ipynb")
    kernel = json.loads(request(f"{root}/api/kernelspecs", opener)[2])["kernelspecs"]["python3"]
    assert kernel["spec"]["display_name"] == "Workshop"
    assert kernel["spec"]["env"]["PYTHONPATH"] == str(
        tmp_path / "learner"
    )  # the learner's own copy, not the shared one

    assert "Open the board of the class" in view
    joined_and_served(tmp_path / "class", f"{root}/workshop/board/state", opener)

    # The copy is complete: a run starts from it, with the shared environment.
    learner = tmp_path / "learner"
    done = runs.run([learner / "01_single_gpu/run_single_gpu.sh", "--epochs", 1], tmp_path, WORKSHOP_PYTHON=None)
    assert done.returncode == 0, done.stderr
    done = runs.run([learner / "workshop.sh", "progress"], tmp_path, WORKSHOP_PYTHON=None)
    assert done.returncode == 0, done.stderr
    exercise = learner / "02_pytorch_ddp/exercise1_multigpu.py"
    exercise.write_text("# mine\n")
    done = runs.run([learner / "workshop.sh", "reset", "exercise1_multigpu.py"], tmp_path, WORKSHOP_PYTHON=None)
    assert done.returncode == 0, done.stderr
    assert exercise.read_text() == (runs.ROOT / "02_pytorch_ddp/exercise1_multigpu.py").read_text()

    request(f"{root}/api/shutdown", opener, now="1")
    assert running.wait(20) == 0
    assert "cleaning up" in running.text()
    _, alive = psutil.wait_procs(members, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workshop": "/nowhere"}, "The folder of the workshop, /nowhere, does not exist"),
        ({"python": "/nowhere/python"}, "There is no /nowhere/python"),
        ({"folder": "/proc/nowhere"}, "cannot be written"),
    ],
)
def test_the_card_says_why_a_session_did_not_start(settings, words, app, job):
    running = job(**settings)
    assert running.wait(30) == 1
    assert words in running.text()
    assert "Traceback" not in running.text()
    card = app.render(values=ENTERED)["completed"]
    assert "could not be started" in card
    assert words in card


# ---------------------------------------------------------------- the learner's copy


def copied(shared, target) -> str:
    """Copy with the package of the shared workshop and return its message."""
    done = runs.run(
        [
            *(sys.executable, "-P", "-c"),
            "import sys; from pathlib import Path; from workshop.jupyter.session import copy_workshop; "
            "print(copy_workshop(Path(sys.argv[1])))",
            target,
        ],
        shared.parent,
        PYTHONPATH=shared,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_start_overwrites_no_work(shared, tmp_path):
    learner = tmp_path / "learner"
    assert re.search(r"\d+ files copied, 0 renewed, 0 of yours", copied(shared, learner))
    exercise = Path("02_pytorch_ddp/exercise1_multigpu.py")
    (learner / exercise).write_text("# my work\n")
    (learner / "notes.txt").write_text("mine")
    (learner / "LICENSE").unlink()
    assert "0 files copied, 0 renewed, 1 of yours kept" in copied(shared, learner)
    # The course repairs one file that the learner has not changed, and one that the learner has changed.
    (shared / "workshop/training/launcher.py").write_text("# repaired\n")
    (shared / exercise).write_text("# another exercise\n")
    assert "0 files copied, 1 renewed, 1 of yours kept" in copied(shared, learner)
    assert (learner / "workshop/training/launcher.py").read_text() == "# repaired\n"
    assert (learner / exercise).read_text() == "# my work\n"
    assert (learner / "notes.txt").read_text() == "mine"
    assert not (learner / "LICENSE").exists()
    (learner / ".copied.json").write_text("{broken")  # then each file that differs counts as changed by the learner
    (shared / "workshop/training/launcher.py").write_text("# again\n")
    assert "2 of yours kept" in copied(shared, learner)


def test_the_copy_has_the_programs_without_runs_and_data(shared, tmp_path):
    learner = tmp_path / "learner"
    (shared / "01_single_gpu/runs").mkdir()
    (shared / "01_single_gpu/runs/run.pt").write_text("x")
    (shared / "data").mkdir()
    (shared / "data/large").write_text("x")
    copied(shared, learner)
    assert (learner / "workshop/data/datasets.py").exists()
    assert os.access(learner / "workshop.sh", os.X_OK)
    assert not (learner / "01_single_gpu/runs").exists()
    assert not (learner / "data").exists()
    assert not [path for path in learner.rglob("*") if re.search(r"\.\d+$", path.name)]  # no partly copied files


def test_the_workshop_is_not_copied_onto_itself():
    assert "nothing to copy" in copy_workshop(runs.ROOT)
    assert not (runs.ROOT / ".copied.json").exists()
