"""Find the files of a learner's exercises, and read them into memory, so that no program can change them later."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workshop.check.folder import ENTRIES, SKIPPED
from workshop.course.exercises import Exercise, exercises
from workshop.course.learning import delivered_files
from workshop.errors import UserError
from workshop.repository import ROOT

LARGEST = 1_000_000  # bytes of a file of an exercise
NOT_SEARCHED = SKIPPED | {"solutions", "runs", "__MACOSX"}  # in a copy of the course or in an archive


@dataclass(frozen=True)
class Submitted:
    """The files of one exercise, by name; ``problem``: why they cannot be taken."""

    files: dict[str, bytes]
    problem: str = ""


def read_submission(paths: Sequence[Path]) -> dict[str, Submitted]:
    """Read the files of all exercises that are in these folders, or that are these files.

    Args:
        paths: folders, which are searched, and files; empty: the folder of this course.

    Returns:
        The files of each exercise of which there is at least one file, by the name of the exercise.

    Raises:
        UserError: a path does not exist or cannot be read, or belongs to no exercise.
    """
    found: list[Path] = []
    known = {name for exercise in exercises() for name in own_names(exercise)}
    for path in paths or [ROOT]:
        if path.is_dir():
            inside = [file for file in _files(path) if file.name in known]
            if not inside:
                example = exercises()[0].file
                raise UserError(f"{path} contains no file of an exercise; such a file has a name like {example}")
            found += inside
        elif not os.path.lexists(path):
            raise UserError(f"{path}: no such file or folder")
        elif path.name not in known:
            raise UserError(f"{path} is not a file of an exercise; such a file has a name like {exercises()[0].file}")
        else:
            found.append(path)
    return {exercise.name: taken for exercise in exercises() if (taken := _take(exercise, found))}


def own_names(exercise: Exercise) -> tuple[str, ...]:
    """Return the names of the files that the learner writes: without the runner, if the solution has the same one."""
    original = original_files(exercise)
    names = [exercise.file, *exercise.beside]
    if runner := exercise.runner:
        theirs = original.get(runner.name, b"").replace(b"/../../workshop/", b"/../workshop/")
        solution = exercise.solution.with_name(runner.name)
        if solution.exists() and solution.read_bytes().replace(b"/../../workshop/", b"/../workshop/") != theirs:
            names.append(runner.name)
    return tuple(names)


_originals: dict[str, dict[str, bytes]] = {}


def original_files(exercise: Exercise) -> dict[str, bytes]:
    """Return the files of an exercise as delivered, by name: from git, or else those of this course."""
    if exercise.name not in _originals:
        try:
            contents = delivered_files(exercise)[1]
        except UserError:  # the course was copied without git
            contents = {path: path.read_bytes() for path, _ in exercise.pairs if path.is_file()}
        _originals[exercise.name] = {path.name: content for path, content in contents.items()}
    return _originals[exercise.name]


def is_untouched(exercise: Exercise, files: dict[str, bytes]) -> bool:
    """Return whether the files of an exercise are as delivered, apart from the ends of lines."""
    original = original_files(exercise)
    return all(_plain(content) == _plain(original.get(name, b"")) for name, content in files.items())


def _plain(content: bytes) -> bytes:
    return content.replace(b"\r\n", b"\n").rstrip()


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without links to folders, environments and solutions."""
    entries = 0
    try:
        os.scandir(folder).close()
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_SEARCHED and not name.startswith(".")]
        if "pyvenv.cfg" in files:
            folders[:] = files[:] = []
        entries += len(folders) + len(files)
        if entries > ENTRIES:
            raise UserError(f"{folder} contains more than {ENTRIES:,} files; name the folder of the submission")
        yield from (Path(place, name) for name in files)


def _take(exercise: Exercise, found: Iterable[Path]) -> Submitted | None:
    """Read the files of an exercise from the folder of the first one that is there; None: there is none."""
    names = own_names(exercise)
    for name in names:
        same = [path for path in found if path.name == name and _may_belong(path, exercise)]
        same = [path for path in same if path.parent.name == exercise.stage] or same
        depth = min((len(path.parts) for path in same), default=0)
        nearest = sorted({path for path in same if len(path.parts) == depth})
        if len(nearest) > 1:
            return Submitted({}, f"there are several files {name}: {', '.join(map(str, nearest))}; keep one of them")
        if nearest:
            break
    else:
        return None
    files = {}
    for name in names:
        path = nearest[0].with_name(name)
        if not os.path.lexists(path) or (path not in found):
            continue
        try:
            files[name] = _read(path)
        except OSError as error:
            return Submitted({}, f"{name} cannot be read: {error.strerror}")
        except UserError as error:
            return Submitted({}, str(error))
    return Submitted(files)


def _may_belong(path: Path, exercise: Exercise) -> bool:
    """Return whether a file can belong to this exercise, because no other stage has a file of this name, or by its folder."""
    owners = {each.stage for each in exercises() if path.name in (each.file, *each.beside)}
    return len(owners) < 2 or path.parent.name == exercise.stage


def _read(path: Path) -> bytes:
    """Read a regular file. A link could name a file that only the instructor can read, and a pipe would block the report."""
    if path.is_symlink():
        raise UserError(f"{path.name} is a link; submit the file itself")
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise UserError(f"{path.name} is not a regular file")
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UserError(f"{path.name} is larger than {LARGEST:,} bytes")
    return content
