"""Read the command with which the owner of a program starts it: ``torchrun --nproc-per-node=2 train.py --epochs 1``."""

import contextlib
import io
import itertools
import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop.check.folder import user_cache
from workshop.errors import UserError

# The processes of a run, if the command leaves their number to the machine (torchrun --nproc-per-node=gpu).
USUAL = 2
MOST = 16
LOCAL_RANK = "{local_rank}"  # in the arguments: the number of the process on its node
OF_ACCELERATE = "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"  # variables that accelerate launch sets
# Options with which srun gives each task one GPU.
BOUND = re.compile(
    r"--gpus-per-task=(?:\w+:)?1|--ntasks-per-gpu=1|--gpu-bind=(?:verbose,)?(?:single:1|per_task:1|map_gpu:.*)"
)
# What is in quotes, or what separates two commands of a shell (group 1).
COMMANDS = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|((?:;|&&|\n)\s*)""", re.DOTALL)
USE_ENV = ("--use-env", "--use_env")  # options of torch.distributed.launch: it then passes no --local-rank


@dataclass(frozen=True)
class Start:
    """How a program is started."""

    target: str  # a file, relative to the current folder, or a module
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    launch: str = "python"  # what starts the ranks: a launcher, or "python": the program itself
    nproc: int = 1  # number of ranks that the launcher starts
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict)  # for its environment
    on_cpu: dict[str, str] = field(default_factory=dict)  # further ones, for runs without pretended GPUs
    needs_gpus: bool = False  # a library would train in a different way without GPUs
    shell: str = ""  # what a shell does before it starts the program, in each rank
    bound: bool = False  # the launcher gives each rank one GPU, which the rank sees as its only one

    def at(self, root: Path) -> Path:
        """The file of the program in this folder.

        Raises:
            UserError: there is no such file.
        """
        parts = self.target.split(".")
        names = [f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__main__.py"] if self.is_module else [self.target]
        for name in names:
            if (root / name).is_file():
                return root / name
        kind = f"module {self.target}, as {names[0]}" if self.is_module else self.target
        raise UserError(f"{kind}: no such file in {root}; start the check in the folder in which you start the program")


def read_start(words: Sequence[str]) -> Start:
    """Return how a command starts a program.

    Raises:
        UserError: the command is not understood; the message says which part.
    """
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL)):
        variables[assigned[1]] = assigned[2]
        rest.pop(0)
    if not rest:
        raise UserError("no command after --; for example: -- torchrun --nproc-per-node=2 train.py")
    name = os.path.basename(rest[0])
    read = READERS.get("python" if re.fullmatch(r"python[\d.]*", name) else name)
    if read is None and (rest[0].endswith(".py") or os.access(rest[0], os.X_OK)):
        return Start(rest[0], arguments=tuple(rest[1:]), variables=variables)
    if read is None:
        known = ", ".join(sorted(READERS))
        raise UserError(f"the check does not know how {rest[0]} starts a program; it knows {known}")
    start = read(rest)
    if start.nproc > MOST:
        raise UserError(f"{start.nproc} processes are too many for one machine; use at most {MOST}")
    return _with(start, variables=variables | start.variables)


def _with(start: Start, **changes: Any) -> Start:
    return Start(**{**vars(start), **changes})


def _parsed(parser: ArgumentParser, words: Sequence[str]) -> Namespace:
    """Parse with the parser of a launcher; its message and status become a UserError."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
            return parser.parse_args(list(words))
    except SystemExit:
        last = (text.getvalue().strip().splitlines() or ["the options are not understood"])[-1]
        raise UserError(last) from None


def _python(words: list[str]) -> Start:
    options = list(words[1:])
    while options and options[0].startswith("-") and options[0] not in ("-m", "-c", "-"):
        taken = 2 if options[0] in ("-W", "-X") else 1
        del options[:taken]
    if not options or options[0] in ("-c", "-"):
        raise UserError(f"{words[0]} without a file; for example: python train.py")
    if options[0] != "-m":
        return Start(options[0], arguments=tuple(options[1:]))
    module, rest = options[1] if len(options) > 1 else "", options[2:]
    launcher = {
        "torch.distributed.run": "torchrun",
        "accelerate.commands.launch": "accelerate",
        "deepspeed.launcher.runner": "deepspeed",
    }.get(module)
    if launcher == "accelerate":
        return _accelerate([launcher, "launch", *rest])
    if module == "torch.distributed.launch":
        start = _torchrun([module, *(word for word in rest if word not in USE_ENV)])
        given = () if set(USE_ENV) & set(rest) else (f"--local-rank={LOCAL_RANK}",)
        return _with(start, arguments=(*given, *start.arguments))
    if launcher:
        return READERS[launcher]([launcher, *rest])
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        raise UserError(f"{words[0]} -m without a module; for example: python -m package.train")
    return Start(module, is_module=True, arguments=tuple(rest))


def _torchrun(words: list[str]) -> Start:
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    args = _parsed(get_args_parser(), words[1:])
    if args.no_python:
        raise UserError("torchrun --no-python: the check runs Python programs only")
    local = int(args.nproc_per_node) if args.nproc_per_node.isdigit() else USUAL
    _, nodes = parse_min_max_nnodes(args.nnodes)
    return Start(
        args.training_script,
        is_module=args.module,
        arguments=tuple(args.training_script_args),
        launch="torchrun",
        nproc=max(1, local) * nodes,
        nodes=nodes,
    )


def _accelerate(words: list[str]) -> Start:
    if words[1:2] != ["launch"]:
        raise UserError(f"accelerate {' '.join(words[1:2])}: only accelerate launch starts a program")
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
    except ImportError as error:
        raise UserError(f"accelerate launch: the package accelerate cannot be imported: {error}") from None
    args = _parsed(launch_command_parser(), words[2:])
    config = os.environ.get("HF_HOME") or os.path.join(user_cache(), "huggingface")
    if (
        not args.config_file
        and not args.num_processes
        and not os.path.isfile(f"{config}/accelerate/default_config.yaml")
    ):
        args.num_processes = USUAL  # Accelerate would take the number of GPUs
    args.main_process_port = 0
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args, given, _ = _validate_launch_command(args)
            args.num_processes = args.num_processes or USUAL
            if args.use_deepspeed:
                args.deepspeed_fields_from_accelerate_config = ",".join(given.deepspeed_config if given else ())
                _, found = prepare_deepspeed_cmd_env(args)
            else:
                found = prepare_multi_gpu_env(args)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"accelerate launch: {error}") from None
    variables = {name: value for name, value in found.items() if name.startswith(OF_ACCELERATE)}
    on_cpu = {} if args.use_deepspeed else {"ACCELERATE_USE_CPU": "true"}
    if args.cpu:
        variables |= on_cpu
    if args.gradient_accumulation_steps:
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(args.gradient_accumulation_steps)
    nproc = max(1, int(args.num_processes))
    return Start(
        args.training_script,
        is_module=bool(args.module),
        arguments=tuple(args.training_script_args),
        launch="torchrun" if nproc > 1 else "python",
        nproc=nproc,
        nodes=max(1, int(args.num_machines or 1)),
        variables=variables,
        on_cpu=on_cpu,
        needs_gpus=bool(args.use_fsdp) and not args.cpu,
    )


def _deepspeed(words: list[str]) -> Start:
    """Options of the launcher of DeepSpeed that take a value are skipped together with it."""
    options, count, module, launch = list(words[1:]), USUAL, False, "deepspeed"
    flags = (
        "--no_python",
        "--no_ssh",
        "--no_ssh_check",
        "--force_multi",
        "--bind_cores_to_rank",
        "--quiet",
    )
    while options and options[0].startswith("-"):
        option, _, value = options.pop(0).partition("=")
        option = option.replace("--num_accelerators", "--num_gpus")
        if option == "--module":
            module = True
        elif option == "--no_local_rank":
            launch = "torchrun"
        elif option not in flags:
            value = value or (options.pop(0) if options else "")
            count = int(value) if option == "--num_gpus" and value.isdigit() else count
    if not options:
        raise UserError("deepspeed without a file; for example: deepspeed --num_gpus=2 train.py")
    return Start(options[0], is_module=module, arguments=tuple(options[1:]), launch=launch, nproc=count)


def _tasks(launch: str, number: Sequence[str], single: Sequence[str]) -> Callable[[list[str]], Start]:
    """Return a reader for a launcher of tasks: ``srun -n 2 python train.py``.

    Args:
        launch: the name of the launcher.
        number: its options for the number of tasks; on one node, tasks per node count as well.
        single: its options without a value.
    """

    def read(words: list[str]) -> Start:
        options, counts, bound = list(words[1:]), {}, False
        while options and options[0].startswith("-"):
            option, equals, value = options.pop(0).partition("=")
            short = re.fullmatch(r"(-[a-zA-Z])(\d+)", option)
            if short:
                option, value, equals = short[1], short[2], "="
            if option not in single and not equals and options:
                value = options.pop(0)
            if option in number and value.isdigit():
                counts[option] = int(value)
            bound = bound or (launch == "srun" and BOUND.fullmatch(f"{option}={value}") is not None)
        if not options:
            raise UserError(f"{words[0]} without a program; for example: {words[0]} {number[0]} 2 python train.py")
        inner = read_start(options)
        return (
            _with(inner, launch=launch, nproc=max(counts.values(), default=USUAL), bound=bound)
            if inner.launch == "python"
            else inner
        )

    return read


def _shell(words: list[str]) -> Start:
    """Read what starts a program at the end of the commands of a shell: ``bash -c "source variables.sh; python train.py"``."""
    if len(words) < 3 or not re.fullmatch(r"-\w*c", words[1]):
        raise UserError(
            f"the check reads only this form of {words[0]}: {words[0]} -c 'source variables.sh; python train.py'"
        )
    text, begins = words[2].strip().rstrip(";"), 0
    for found in COMMANDS.finditer(text):
        begins = found.end() if found[1] else begins
    lexer = shlex.shlex(text[begins:].removeprefix("exec "), posix=True, punctuation_chars="|<>&")
    lexer.whitespace_split = True
    try:
        last = list(itertools.takewhile(lambda word: not set(word) <= set("|<>&"), lexer))  # without "2>&1 | tee log"
    except ValueError as error:
        raise UserError(f"{words[0]} -c: {error} in {text[begins:]!r}") from None
    start = read_start(last[:-1] if last[-1:] == ["2"] else last)
    return _with(start, shell="\n".join(filter(None, (text[:begins].strip(" ;&\n"), start.shell))))


READERS: dict[str, Callable[[list[str]], Start]] = {
    "python": _python,
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "srun": _tasks(
        "srun",
        ("-n", "--ntasks", "--ntasks-per-node"),
        (
            "-l",
            "--label",
            "-u",
            "--unbuffered",
            "--exclusive",
            "--overlap",
            "-v",
            "--verbose",
            "-Q",
            "-K",
            "--kill-on-bad-exit",
        ),
    ),
    "mpirun": _tasks(
        "mpirun", ("-n", "-np", "--np"), ("--oversubscribe", "--allow-run-as-root", "-v", "--verbose", "-q")
    ),
}
READERS["mpiexec"] = READERS["mpirun"]
READERS["bash"] = READERS["sh"] = _shell
READERS["env"] = lambda words: read_start(words[1:])
READERS["accelerate-launch"] = lambda words: _accelerate(["accelerate", "launch", *words[1:]])
