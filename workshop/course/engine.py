"""Run a program that trains with the DeepSpeed engine, and the same training without it, as the check needs them."""

import importlib
import importlib.util
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workshop.check.bench import ProgramBench
from workshop.check.evidence.engine import EngineCheckpoint, PlainWeights
from workshop.check.evidence.events import EngineMade
from workshop.check.evidence.run import Asked, Run
from workshop.check.judge import Made
from workshop.check.probes import PROBES
from workshop.check.probes.deepspeed import Engine
from workshop.check.scenarios import (
    ENGINE_CHECKPOINT,
    ENGINE_SPLIT,
    PLAIN_WEIGHTS,
    REFERENCE,
    STARTED,
    UNEVEN,
    WHOLE,
    Scenario,
    Split,
    Unavailable,
)
from workshop.check.subject import Subject
from workshop.course import real
from workshop.course.benches import BATCH, EPOCHS
from workshop.course.digits import TEST_SAMPLES, prepare_digits, small_digits
from workshop.course.exercises import Exercise
from workshop.course.probes import COURSE_PROBES
from workshop.repository import ROOT
from workshop.training.deepspeed import missing_tools, take_own_ninja
from workshop.training.models import SmallCNN

EXPORT = "whole.pt"
CHECKPOINT = "run.pt"  # of the training without the engine
CLOSE = 1e-4  # between parameters of the two trainings


class EngineBench(ProgramBench):
    """Makes the scenarios of a program that trains on images with the DeepSpeed engine."""

    offered_probes = (*PROBES, *COURSE_PROBES)

    def __init__(self, subject: Subject, exercise: Exercise, *, nproc: int, on_cpu: bool, place: Path):
        super().__init__(subject, launch=exercise.launch, nproc=nproc, on_cpu=on_cpu, place=place)
        prepare_digits()
        self.exercise = exercise
        self.before = small_digits(BATCH * nproc * 9 // 2)  # four and a half global batches

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        return (WHOLE, REFERENCE, ENGINE_CHECKPOINT, ENGINE_SPLIT, PLAIN_WEIGHTS, UNEVEN, STARTED)

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Return the function that makes each scenario."""
        return {
            WHOLE: lambda made: self.traced(self._run(scratch=self._whole_folder), self._run),
            REFERENCE: lambda made: self._reference[0],
            ENGINE_CHECKPOINT: lambda made: read_checkpoint(self._whole_folder / "run"),
            ENGINE_SPLIT: self._in_two_parts,
            PLAIN_WEIGHTS: self._plain_weights,
            UNEVEN: lambda made: self._uneven(),
            STARTED: lambda made: real.started(self.script, self.exercise, self.has, self.place),
        }

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario; see ``judge.Bench``."""
        if self.on_cpu and scenario is WHOLE:
            load_extension()
        return super().make(scenario, made)

    @cached_property
    def _whole_folder(self) -> Path:
        """The folder in which the whole run saves its checkpoint."""
        return self.folder()

    @cached_property
    def _second_folder(self) -> Path:
        """The folder in which the second run of the split saves its export."""
        return self.folder()

    @cached_property
    def _reference(self) -> tuple[Run, Path]:
        """The run of the same training without the engine, and its folder."""
        scratch = self.folder()
        arguments = ["--epochs", str(EPOCHS), "--batch-size", str(BATCH), "--checkpoint", CHECKPOINT]
        run = self.launch_program(
            arguments, script=ROOT / self.exercise.reference, scratch=scratch, asked=Asked(EPOCHS)
        )
        return run, scratch

    def _run(
        self,
        *,
        nproc: int | None = None,
        epochs: int = EPOCHS,
        batch: int = BATCH,
        scratch: Path | None = None,
        options: Sequence[str] = (),
        **changes: Any,
    ) -> Run:
        """Run the program with those of these options that it has."""
        given = {"--epochs": epochs, "--batch-size": batch, "--folder": "run"}
        arguments = [str(part) for name, value in given.items() if self.has(name) for part in (name, value)]
        return self.launch_program(
            [*arguments, *self.exercise.options, *options],
            nproc=nproc,
            scratch=scratch,
            asked=Asked(epochs),
            **changes,
        )

    def _in_two_parts(self, made: Made) -> Split:
        """Stop a run one epoch early, and start it again in the same folder; the second run exports its parameters."""
        scratch = self._second_folder
        first = self._run(epochs=EPOCHS - 1, scratch=scratch)
        exports = self.has("--export") and partitions(made[WHOLE])
        return Split(first, self._run(scratch=scratch, options=("--export", EXPORT) if exports else ()))

    def _plain_weights(self, made: Made) -> PlainWeights:
        """Compare the parameters that the second run exported with those of the training without the engine."""
        if not partitions(made[WHOLE]):
            raise Unavailable("the exported parameters: DeepSpeed can export them only with ZeRO stage 1 or higher")
        return read_weights(self._second_folder / EXPORT, self._reference[1] / CHECKPOINT)

    def _uneven(self) -> Run:
        """Run an evaluation in which some processes have one batch more than others."""
        nproc = next(number for number in (3, 4, 5) if TEST_SAMPLES % number)
        return self._run(nproc=nproc, epochs=1, batch=TEST_SAMPLES // nproc, options=self.exercise.uneven_options)


def partitions(run: Run) -> bool:
    """Return whether ZeRO shards anything. DeepSpeed's export only works on a checkpoint with shards."""
    return any(event.stage > 0 for event in run.all(EngineMade))


def read_checkpoint(folder: Path) -> EngineCheckpoint:
    """Describe what the engine has saved in its checkpoint folder."""
    parts = {path.name for path in folder.glob("*/*zero_pp_rank_*_optim_states.pt")}
    files = tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else None
    return EngineCheckpoint((folder / "latest").exists(), len(parts), files)


def read_weights(path: Path, reference: Path) -> PlainWeights:
    """Load an exported file into a plain model, and compare it with a checkpoint of the training without the engine."""
    if not path.is_file():
        return PlainWeights(found=False)
    model = SmallCNN()
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except Exception as error:  # the file may contain anything
        return PlainWeights(found=True, error=f"{type(error).__name__}: {_first_sentence(str(error))}")
    theirs = torch.load(reference, weights_only=True)["model"]
    different = (name for name, own in model.state_dict().items() if not torch.allclose(own, theirs[name], atol=CLOSE))
    return PlainWeights(found=True, different=tuple(different))


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0][:200]


def load_extension() -> None:
    """Load DeepSpeed's extension for CPUs into this process, and build it first if necessary.

    The forked processes inherit it, so none of them waits for the compiler or leaves a lock file behind when it is killed.
    """
    if not importlib.util.find_spec("deepspeed") or missing_tools():
        return
    take_own_ninja()
    # Hides the warning about a CUDA compiler without a GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    Engine.prepare(on_cpu=True)
    builder = importlib.import_module("deepspeed.ops.op_builder.cpu").ShareMemCommBuilder
    with redirect_stdout(io.StringIO()):
        builder().load(verbose=False)
