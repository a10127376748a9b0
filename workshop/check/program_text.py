"""What the text of a program says: its modules and settings, the numbers in them, and options for the number of processes."""

import ast
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

SOURCES = 200  # modules of the program that are read, to see which libraries it uses
# The number of processes that mp.spawn starts: an option, or a variable that has its value.
NPROCS = re.compile(r"\bnprocs\s*=\s*(\w+\.)?(\w+)")
# A number of epochs or steps: ``--epochs", type=int, default=12``, ``max_iters: int = 60``, ``epochs: 3``, ``--steps 12``.
PLANNED = re.compile(
    r"(epochs?|steps|iters|iterations)\b[\"']?(?:[^)\n]*?default\s*=|\s*:\s*int\s*=|\s*[:=]|\s)\s*(\d[\d_]*)"
)
# An option whose value is the number of processes.
WORLD = re.compile(r"--(?:world[_-]?size|n[_-]?procs?|n[_-]?gpus?|num[_-](?:gpus|procs|processes))")
# An option with the number of the first epoch or step.
START = re.compile(r"""["'](--(?:start|begin|initial|first)[_-](?:epoch|step|iter(?:ation)?)s?)["']""")
# An option with which programs resume, by its name or its help: its name, and the rest of the call of add_argument().
NAMES = r"""(?:resume|restore|continue|load)[\w-]*|[\w-]*(?:checkpoint|ckpt)[\w-]*(?=["'][^()]*\bresum)"""
RESUME = re.compile(rf"""["'](--(?:{NAMES}))["']([^()]*(?:\([^()]*\)[^()]*)*)""")
# An option with a checkpoint, if the program also loads the state of its optimizer; otherwise it may be of a model to start from.
CHECKPOINT = re.compile(r"""["'](--(?:checkpoint|ckpt)(?:[_-](?:path|file))?)["']([^()]*(?:\([^()]*\)[^()]*)*)""")
OPTIMIZER_LOADED = re.compile(r"\bopt\w*(?:\[[^\]]*\])?\.load_state_dict\(")
# A setting that can be "resume", as in nanoGPT, where ``--init_from=resume`` sets it.
RESUME_CHOICE = re.compile(r"""\b(\w+)\s*==\s*["']resume["']""")
# The same in a dataclass of options.
RESUME_FIELD = re.compile(r"^\s+(resume\w*)\s*:\s*(bool|int|str)", re.MULTILINE)
# A setting in a program whose arguments are key=value, and how such a program reads them.
RESUME_KEY = re.compile(r"""\b(resume\w*)["']?\s*[:=]\s*(False|None|false|null|""|'')""")
KEYS = re.compile(r"""(?:split|partition)\(["']=["']|from_cli|from_dotlist|hydra\.main""")


def sources(script: Path, original: Path) -> str:
    """The text of the program: of its file, and of the modules that it imports from its folder, or below it from PYTHONPATH."""
    texts: dict[Path, str] = {}
    pending = [script]
    given = [original / each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    given = [each for each in given if each.resolve().is_relative_to(original.resolve())]
    while pending and len(texts) < SOURCES:
        file = pending.pop()
        with suppress(OSError, UnicodeDecodeError, SyntaxError, ValueError):
            if file not in texts:
                texts[file] = file.read_text()
                pending += _imported(ast.parse(texts[file]), file, (script.parent, original, original / "src", *given))
    return "\n".join(texts.values())


def _imported(tree: ast.Module, file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Yield the files in these folders that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, bases = [each.name for each in node.names], folders
        elif isinstance(node, ast.ImportFrom):
            bases = [file.parents[node.level - 1]] if node.level else folders
            module = node.module or ""
            names = [module, *(f"{module}.{each.name}".strip(".") for each in node.names)]
        else:
            continue
        for base, name in itertools.product(bases, filter(None, names)):
            path = base.joinpath(*name.split("."))
            yield from filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))


def settings(arguments: Sequence[str], original: Path) -> Iterator[str]:
    """Yield the text of the files of settings that the arguments name."""
    for argument in arguments:
        if argument.endswith((".yaml", ".yml", ".toml", ".json")):
            with suppress(OSError, UnicodeDecodeError):
                yield (original / argument).read_text()


def planned(texts: Iterable[str], arguments: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of epochs and steps that options, settings and arguments name, and their sums, as for several stages."""
    for text in (*texts, " ".join(arguments)):
        sums: Counter[str] = Counter()
        for name, number in PLANNED.findall(text):
            sums[name] += int(number.replace("_", ""))
            yield int(number.replace("_", ""))
        yield from sums.values()


def one_process(text: str) -> list[str]:
    """The arguments with which a program that calls mp.spawn starts one process; empty if it has no such option."""
    for owner, name in NPROCS.findall(text):
        names = [name] if owner else re.findall(rf"\b{name}\s*=[^=\n]*\.(\w+)$", text, re.MULTILINE)
        options = [f"--{each}" for name in names for each in (name, name.replace("_", "-"))]
        if given := [option for option in options if re.search(rf"[\"']{option}[\"']", text)]:
            return [given[0], "1"]
    return []


def resized(arguments: Sequence[str], nproc: int, other: int) -> list[str]:
    """Return the arguments with another number of processes in the options that have this number: ``--world_size=2``."""
    changed: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if WORLD.fullmatch(name) and value == str(nproc):
            argument = f"{name}={other}"
        elif argument == str(nproc) and changed and WORLD.fullmatch(changed[-1]):
            argument = str(other)
        changed.append(argument)
    return changed


def start_of_its_own(text: str, arguments: Sequence[str]) -> str:
    """The option with the number of the first epoch or step, if the program does not read that from a checkpoint; else ""."""
    for option in START.findall(text):
        restored = re.search(rf"\b{option.strip('-').replace('-', '_')}\s*[:+]?=(?!=)[^\n]*[\[.(]", text)
        if option not in arguments and not restored:
            return str(option)
    return ""


def resume_arguments(text: str, given: Sequence[str], latest: str) -> Iterator[list[str]]:
    """Yield arguments with which a program may resume.

    Args:
        text: that of the program.
        given: the arguments of its first start.
        latest: the path of its latest checkpoint, or "".
    """
    options = sorted(RESUME.findall(text), key=lambda each: not each[0].startswith("--resume"))[:2]
    if not options and OPTIMIZER_LOADED.search(text):
        options = CHECKPOINT.findall(text)[:1]
    for name in dict.fromkeys(RESUME_CHOICE.findall(text)):
        yield [f"--{name.replace('_', '-') if '--' + name.replace('_', '-') in text else name}=resume"]
    for option, more in options:
        if option in given:
            continue
        number = re.findall(r"\d+", Path(latest).stem) if re.search(r"type\s*=\s*int\b", more) else []
        if "store_true" in more or "BooleanOptional" in more:
            yield [option]
        elif number:
            yield [option, str(int(number[-1]))]  # that of the step or epoch, as in step-000030.pt
        elif latest:
            yield [option, latest]
            yield [option, str(Path(latest).parent)]
            if Path(latest).parent != Path():  # some programs know the folder
                yield [option, Path(latest).name]
    for name, kind in RESUME_FIELD.findall(text)[:1]:
        yield [f"--{name}", *{"bool": [], "int": ["1"], "str": [latest]}[kind]]
    for name, value in RESUME_KEY.findall(text)[:1] if KEYS.search(text) else ():
        yield [f"{name}={'True' if value.lower() == 'false' else latest}"]
