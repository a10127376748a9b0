"""Run ``workshop board``: look into the folder of the class twice per second, and show what has changed."""

import re
import shutil
import sys
import time
from contextlib import suppress

from workshop.board.board import EVERY, open_board
from workshop.board.page import Server, how_to_open
from workshop.board.terminal import ENTER, LEAVE, board_lines, screen

STYLE = re.compile(r"\033\[\d+m")


def run_once() -> int:
    """Print the board once, and return 0.

    Raises:
        UserError: no folder of a class is set, or it cannot be read.
    """
    board = open_board()
    for line in board_lines(board.state, shutil.get_terminal_size().columns):
        print(line if sys.stdout.isatty() else STYLE.sub("", line))
    return 0


def run_live(port: int) -> int:
    """Show the board until Ctrl-C, on a page and, if there is one, in the terminal; return 0.

    Args:
        port: the port of the page; 0: a free one.

    Raises:
        UserError: no folder of a class is set, it cannot be read, or the port is taken.
    """
    board = open_board()
    server = Server(board, port)
    address = how_to_open(server.address)
    terminal = sys.stdout.isatty()
    print(address, flush=True)
    size = None
    try:
        if terminal:
            _write(ENTER)
        while True:
            changed = board.look()
            if terminal and (changed or size != shutil.get_terminal_size()):
                size = shutil.get_terminal_size()
                _write(screen(board.state, address))
            time.sleep(EVERY)
    except (KeyboardInterrupt, OSError):  # Ctrl-C, or the terminal was closed
        return 0
    finally:
        server.shutdown()
        server.server_close()
        if terminal:
            with suppress(OSError):
                _write(LEAVE)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
