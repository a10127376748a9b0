"""Starting programs, watching them, and what they leave: the environment, files, failures, runs that stand still."""

import os

import pytest

from workshop.files import write_atomically


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "figures.json"
    write_atomically(path, "{}")
    path.chmod(0o640)
    write_atomically(path, b"\xe2\x82\xac")
    assert path.read_text(encoding="utf-8") == "€"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["figures.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    write_atomically(path, "old")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["figures.json"]
