"""The page and the terminal of the board: who may open the page, what it loads, and that no text of a learner runs in it."""

import http.client
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

import runs
from board.learners import NAMES, write, write_class
from needs import require
from workshop.board.board import Board
from workshop.board.page import Server, how_to_open
from workshop.board.terminal import board_lines, screen
from workshop.course.sharing import clean_name

BOARD = [sys.executable, "-P", "-m", "workshop", "board"]
SPAWN = "02_pytorch_ddp/exercise1_multigpu.py"
ATTACKS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=hacked=1>",
    "\"><svg onload='hacked=1'>",
    "</title><b id=broken>x",
    "{{7*7}} ${7*7} `x`",
    "\x1b]0;owned\x07\x1b[2J",
]


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o3773)
    return tmp_path


@pytest.fixture
def served(folder):
    """A function that serves the board of the folder, and returns it with its server."""
    servers = []

    def serve():
        board = Board(folder)
        board.look()
        servers.append(Server(board, 0))
        return board, servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def get(address: str, **headers) -> tuple[int, dict, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


# ---------------------------------------------------------------- the server


def test_the_page_is_on_loopback_only_and_needs_the_token(folder, served):
    write_class(folder, time.time())
    _, server = served()
    assert server.server_address[0] == "127.0.0.1"
    root = f"http://127.0.0.1:{server.server_port}"
    wrong = (
        "/",
        "/state",
        "/x/",
        f"/{server.token[:-1]}/",
        f"/{server.token}x/state",
        "/%2e%2e/",
        "/é/",
    )
    for path in wrong:
        status, _, body = get(root + urllib.request.quote(path, safe="/%"))
        assert (status, body) == (404, b""), path
    assert get(server.address)[0] == 200
    assert get(server.address + "../../etc/passwd")[0] == 404
    assert len(server.token) >= 32


def test_the_headers_forbid_everything_that_the_page_does_not_need(folder, served):
    _, headers, body = get(served()[1].address)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert re.search(r"script-src 'nonce-([\w-]+)'", policy)[1] in body.decode()
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_an_unchanged_state_is_not_sent_again(folder, served):
    write_class(folder, time.time())
    board, server = served()
    status, headers, body = get(server.address + "state")
    assert (status, json.loads(body)["learners"]) == (200, 30)
    version = headers["Board-Version"]
    assert get(server.address + "state", **{"Board-Version": version})[0] == 304
    (folder / "learner-new.jsonl").write_text('{"event": "join", "at": 1, "name": "New"}\n')
    board.look()
    assert json.loads(get(server.address + "state", **{"Board-Version": version})[2])["learners"] == 31


def test_a_client_that_sends_nonsense_does_not_stop_the_server(folder, served):
    import socket

    _, server = served()
    for content in (b"\x00\xff" * 100, b"GET " + b"x" * 100_000, b"POST / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(server.server_address) as client:
            client.settimeout(10)
            try:  # the server may close the connection at any of these calls
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass
            except OSError:
                pass
    connection = http.client.HTTPConnection(*server.server_address, timeout=10)
    for _ in range(3):  # one connection, as a browser uses it
        connection.request("GET", f"/{server.token}/state")
        answer = connection.getresponse()
        assert (answer.status, answer.read()[:1]) == (200, b"{")
    connection.close()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "page: http://127.0.0.1:4000/token/"),
        ({"WORKSHOP_LAB": "/node/n1/80/"}, "write /node/n1/80/workshop/board/ after the host"),
        ({"SSH_CONNECTION": "1"}, "after this on your laptop: ssh -L 4000:127.0.0.1:4000"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}, "page: http://127.0.0.1:4000/token/"),
    ],
)
def test_the_address_that_works_from_here_is_printed(variables, words, monkeypatch):
    for name in ("WORKSHOP_LAB", "SSH_CONNECTION", "SLURM_JOB_ID", "JUPYTERHUB_SERVICE_PREFIX", "JUPYTER_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in how_to_open("http://127.0.0.1:4000/token/")


def test_the_proxy_of_jupyter_is_named_where_it_is_installed(monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    monkeypatch.delenv("WORKSHOP_LAB", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "jupyter_server_proxy")
    assert "write /user/ada/proxy/4000/token/ after the host" in how_to_open("http://127.0.0.1:4000/token/")


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def chromium():
    require("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


@pytest.fixture
def opened(chromium, served):
    """A function that opens the page. The test fails if it asks a different host, or if anything is refused or fails."""
    pages, wrong = [], []

    def open_page(theme="light", width=1300):
        board, server = served()
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        pages.append(page)
        page.on("request", lambda asked: asked.url.startswith((server.address, "data:")) or wrong.append(asked.url))
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(server.address)
        page.locator("#total").get_by_text("learner").wait_for()
        return board, server, page

    yield open_page
    for page in pages:
        page.close()
    assert [text for text in wrong if "ERR_INTERNET_DISCONNECTED" not in text] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_the_page_shows_thirty_learners_in_both_themes_and_on_a_phone(theme, width, folder, opened):
    write_class(folder, time.time())
    board, _, page = opened(theme, width)
    rows = page.locator("tbody tr")
    assert rows.count() == sum(len(each["rows"]) for each in board.state["exercises"])
    for name in NAMES:
        assert page.get_by_text(name, exact=True).count() + page.get_by_text(f"{name} (02").count(), name
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.get_by_text("Show on the screen next").is_visible()
    dark = sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) < 200
    assert dark is (theme == "dark")
    page.get_by_text("What to do").first.click()
    assert page.locator("details[open]").get_by_text("Taught in notebook 02").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_texts_have_enough_contrast(theme, folder, opened):
    """At least 4.5 to 1, as the guidelines for accessible pages (WCAG) ask for."""
    write_class(folder, time.time())
    _, _, page = opened(theme)
    low = page.evaluate(
        """() => {
        const parse = text => text.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const found = [];
        for (const element of document.querySelectorAll("body *")) {
            const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
            if (!own || ["SCRIPT", "STYLE"].includes(element.tagName) || !element.offsetParent) continue;
            let under = element;
            const color = () => parse(getComputedStyle(under).backgroundColor);
            while (color()[3] === 0) under = under.parentElement;
            const back = color();
            const one = light(parse(getComputedStyle(element).color)), two = light(back);
            const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
            if (ratio < 4.5) found.push(element.className + " " + element.textContent.slice(0, 20) + " " + ratio.toFixed(2));
        }
        return found;
    }"""
    )
    assert low == []


def test_no_text_of_a_learner_runs_in_the_page(folder, opened):
    now = time.time()
    for number, attack in enumerate(ATTACKS):
        event = {
            "event": "check",
            "at": now,
            "exercise": SPAWN,
            "goals": {"1": False},
            "rule": "no-group",
            "seconds": 1,
        }
        lines = [{"event": "join", "at": now, "name": attack}, event | {"at": now + 1}]
        write(folder / f"learner-{number}.jsonl", lines if number % 2 else lines[:1])
    _, _, page = opened()
    page.wait_for_timeout(1500)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#broken, svg, img").count() == 0
    text = page.locator("body").inner_text()
    assert all(clean_name(attack) in text for attack in ATTACKS)


def test_the_page_follows_the_folder_and_says_when_the_board_has_ended(folder, opened):
    write_class(folder, time.time())
    board, _, page = opened()
    path = folder / "learner-0000000000000000.jsonl"
    with path.open("a") as file:
        file.write('{"event": "join", "at": 1, "name": "Renamed"}\n')
    board.look()
    page.get_by_text("Renamed").first.wait_for(timeout=5000)
    page.context.set_offline(True)  # as if the board had ended
    page.get_by_text("The board does not answer.").wait_for(timeout=30_000)


# ---------------------------------------------------------------- the terminal


def test_the_terminal_shows_no_control_characters_of_learners_and_keeps_its_width(folder):
    for number, attack in enumerate([*ATTACKS, "漢字の名前", "e\u0301" * 20]):
        write(folder / f"learner-{number}.jsonl", [{"event": "join", "at": 1.0, "name": attack}])
    write_class(folder, time.time())
    board = Board(folder)
    board.look()
    from rich.cells import cell_len

    for width in (60, 80, 120):
        for line in board_lines(board.state, width):
            plain = re.sub(r"\033\[\d+m", "", line)
            assert "\033" not in plain
            assert cell_len(plain) <= width, plain
    assert screen(board.state, "x").count("\n") < shutil.get_terminal_size().lines


def test_once_prints_the_board_without_colors(folder):
    write_class(folder, time.time())
    done = runs.run([*BOARD, "--once"], folder, WORKSHOP_CLASS=folder)
    assert done.returncode == 0, done.stderr
    assert "\033" not in done.stdout
    assert all(name in done.stdout for name in NAMES)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_board_runs_in_a_terminal_until_it_is_stopped(number, status, folder):
    write_class(folder, time.time())
    reading, writing = pty.openpty()
    environment = runs.environment(WORKSHOP_CLASS=folder)
    process = subprocess.Popen(BOARD, stdin=writing, stdout=writing, stderr=subprocess.PIPE, env=environment)
    os.close(writing)
    text, deadline = "", time.monotonic() + 60
    while "30 learners" not in text and time.monotonic() < deadline:
        text += os.read(reading, 1 << 16).decode(errors="replace")
    address = re.search(r"http://127.0.0.1:\d+/[\w-]+/", text)[0]
    assert get(address + "state")[0] == 200
    assert address.split("/")[-2] not in " ".join(psutil.Process(process.pid).cmdline())
    process.send_signal(number)
    while True:
        try:
            text += os.read(reading, 1 << 16).decode(errors="replace")
        except OSError:
            break
    os.close(reading)
    assert (process.wait(20), process.stderr.read()) == (status, b"")
    process.stderr.close()
    assert text.endswith("\033[?25h\033[?1049l")  # the terminal is as before


def test_a_user_who_cannot_read_the_folder_gets_one_sentence(folder):
    command = BOARD
    if os.geteuid() == 0:
        require("setpriv")
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *BOARD]
    folder.chmod(0o333)
    done = runs.run(command, "/", WORKSHOP_CLASS=folder)
    folder.chmod(0o755)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "only the instructors of the class can read it" in done.stderr
