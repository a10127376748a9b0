"""Serve the board as a page on the loopback address of this machine, behind a random token."""

import hmac
import importlib.util
import os
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from workshop.board.board import Board
from workshop.errors import UserError

PAGE = Path(__file__).with_name("page.html")
IN_JUPYTER = "workshop/board/"  # the path of the page below that of a JupyterLab that the course has started
STALE = 10.0  # seconds without a look after which the page says that the folder does not answer


def page(nonce: str) -> bytes:
    """Return the page. Its style and its script have a number that the policy below names, so nothing else can run."""
    return PAGE.read_text().replace("NONCE", nonce).encode()


def headers(nonce: str) -> dict[str, str]:
    """Return the headers of each answer: the page loads nothing from another host, and no browser keeps it."""
    policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    return {
        "Content-Security-Policy": policy + "base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


def answer(board: Board, known: str) -> tuple[int, bytes, dict[str, str]]:
    """Return the status, the body and the headers of the answer to a request for the state.

    Args:
        board: the board.
        known: the version that the page has.
    """
    version = str(board.version)
    said = {"Board-Version": version, "Board-Stale": str(int(time.time() - board.looked > STALE))}
    return (304, b"", said) if known == version else (200, board.body, said)


class Server(ThreadingHTTPServer):
    """The server of the page; it answers in threads of its own, with what the board has found in its last look."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, board: Board, port: int) -> None:
        self.board, self.token, self.nonce = board, secrets.token_urlsafe(24), secrets.token_urlsafe(16)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"port {port} cannot be used ({error.strerror}): choose a different one with --port"
            ) from error
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """The address of the page on this machine."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    """Answers requests for the page and for its state; everything else does not exist."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 20

    def do_GET(self) -> None:
        """Answer a request."""
        token, _, name = urlsplit(self.path).path.lstrip("/").partition("/")
        own = hmac.compare_digest(token.encode(), self.server.token.encode())
        if own and name == "":
            self._send(200, page(self.server.nonce), {"Content-Type": "text/html; charset=utf-8"})
        elif own and name == "state":
            status, body, more = answer(self.server.board, self.headers.get("Board-Version", ""))
            self._send(status, body, {"Content-Type": "application/json"} | more)
        else:
            self._send(404, b"", {})

    def _send(self, status: int, body: bytes, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers(self.server.nonce) | more | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the addresses contain the token."""


def how_to_open(address: str) -> str:
    """Return, in one or two lines, how to open the page from here."""
    port, token = urlsplit(address).port, urlsplit(address).path
    here = f"page: {address}"
    if lab := os.environ.get("WORKSHOP_LAB"):  # in the sessions of the course, jupyter/board.py also serves the page
        return f"page: write {lab}{IN_JUPYTER} after the host in the address of this JupyterLab; on this machine: {address}"
    base = os.environ.get("JUPYTERHUB_SERVICE_PREFIX") or urlsplit(os.environ.get("JUPYTER_SERVER_URL", "")).path
    if base and importlib.util.find_spec("jupyter_server_proxy"):
        place = f"{base.rstrip('/')}/proxy/{port}{token}"
        return f"page: write {place} after the host in the address of this JupyterLab; on this machine: {address}"
    if os.environ.get("SSH_CONNECTION") or os.environ.get("SLURM_JOB_ID"):
        return f"{here} after this on your laptop: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}"
    return here
