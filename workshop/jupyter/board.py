"""Serve the board of the class in JupyterLab: an extension of the server, which ``lab.py`` and ``session.py`` enable.

The page is below the address of JupyterLab and needs the same login, so it also works through the proxy of Open OnDemand. A
user who cannot read the folder of the class gets a sentence instead.
"""

import asyncio
import secrets
import time
from typing import Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado import web

from workshop.board.board import EVERY, Board, open_board
from workshop.board.page import IN_JUPYTER, answer, headers, page
from workshop.errors import UserError


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "workshop.jupyter.board"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the page to the addresses of the server; nothing is read before it is opened."""
    base = url_path_join(server.web_app.settings["base_url"], IN_JUPYTER)
    server.web_app.add_handlers(".*$", [(f"{base}(state)?", BoardHandler, {"reader": Reader()})])


class Reader:
    """The board, which looks into the folder only while a page asks for it."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.nonce = secrets.token_urlsafe(16)
        self._lock = asyncio.Lock()

    async def read(self) -> Board:
        """Return the board after a look. A thread reads, so a slow file system does not block JupyterLab.

        Raises:
            UserError: no folder of a class is set, or this user cannot read it.
        """
        async with self._lock:
            if self.board is None:
                self.board = await asyncio.to_thread(open_board)
            elif time.time() - self.board.looked > EVERY:
                await asyncio.to_thread(self.board.look)
            return self.board


class BoardHandler(JupyterHandler):
    """Answers requests for the page and for its state."""

    def initialize(self, reader: Reader) -> None:
        """Take the reader that all requests share."""
        self.reader = reader

    @web.authenticated
    async def get(self, state: str | None) -> None:
        """Answer a request of a user who is logged in."""
        for name, value in headers(self.reader.nonce).items():
            self.set_header(name, value)
        try:
            board = await self.reader.read()
        except UserError as error:
            self.set_status(404)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(str(error))
            return
        if not state:
            self.set_header("Content-Type", "text/html; charset=utf-8")
            self.finish(page(self.reader.nonce))
            return
        status, body, more = answer(board, self.request.headers.get("Board-Version", ""))
        self.set_status(status)
        for name, value in {"Content-Type": "application/json", **more}.items():
            self.set_header(name, value)
        self.finish(body)
