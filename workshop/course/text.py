"""Run a program that trains a sharded language model, as the check needs it.

The programs train a model with the architecture of CodeLlama and only two layers on a few pages of text.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from workshop.check.bench import ProgramBench
from workshop.check.evidence.run import Asked, Run
from workshop.check.evidence.text import Checkpoint, Exported, OptionRuns, Restarted
from workshop.check.judge import Made
from workshop.check.launching import prepare
from workshop.check.probes import PROBES
from workshop.check.scenarios import CHECKPOINT, EXPORTED, ONE_PROCESS_TEXT, OPTIONS, RESTARTED, SOLVED, WHOLE, Scenario
from workshop.check.subject import Subject
from workshop.course.exercises import Exercise
from workshop.course.probes import COURSE_PROBES
from workshop.run.stillness import Patience

STEPS = 6
LENGTH = 32  # tokens per sequence
BATCH = 2  # sequences per step and process


@dataclass(frozen=True)
class Task:
    """The model and the data that the programs train with.

    Attributes:
        model: the folder of the model.
        data: the file with the documents.
        loss: the validation loss of the untrained model in nats, computed with transformers alone.
    """

    model: Path
    data: Path
    loss: float


def make_task(place: Path) -> Task:
    """Write the model and the documents into a folder."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    from workshop.data.code import library_files, load_blocks
    from workshop.data.codellama import make_tiny

    documents = [path.read_text(errors="replace")[:1500] for path in library_files()[:60]]
    model = make_tiny(place / "models" / "small", layers=2, width=64, vocabulary=400, documents=documents)
    # Untrained models all have nearly the same loss. Larger logits make the loss depend on the parameters.
    parameters = load_file(model / "model.safetensors")
    parameters["lm_head.weight"] *= 8
    save_file(parameters, model / "model.safetensors", metadata={"format": "pt"})
    data = place / "text.jsonl"
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    load_blocks(str(data), AutoTokenizer.from_pretrained(model), LENGTH)  # caches the tokens for the programs
    return Task(model, data, plain_loss(model, data))


def plain_loss(model: Path, data: Path) -> float:
    """Compute the validation loss of a model with transformers alone, in one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from workshop.data.code import load_blocks

    _, validation_set = load_blocks(str(data), AutoTokenizer.from_pretrained(model), LENGTH)
    batch = torch.stack([validation_set[index] for index in range(min(len(validation_set), 64))])
    with torch.inference_mode():
        plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return float(plain.eval()(input_ids=batch, labels=batch, use_cache=False).loss)


@contextmanager
def _variables(**changes: str) -> Iterator[None]:
    """Set environment variables temporarily, also for the processes that are forked in the meantime."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class StepsBench(ProgramBench):
    """Makes the scenarios of a program that trains a language model for a number of steps."""

    offered_probes = (*PROBES, *COURSE_PROBES)

    def __init__(self, subject: Subject, exercise: Exercise, *, nproc: int, on_cpu: bool, place: Path):
        super().__init__(subject, launch=exercise.launch, nproc=nproc, on_cpu=on_cpu, place=place)
        self.exercise = exercise

    @property
    def offers(self) -> tuple[Scenario[Any], ...]:
        """The scenarios that this bench can make, in the order in which it makes them."""
        solves = self.script != self.exercise.solution.resolve()
        return (WHOLE, CHECKPOINT, ONE_PROCESS_TEXT, RESTARTED, EXPORTED, OPTIONS, *([SOLVED] if solves else []))

    def makers(self) -> dict[Scenario[Any], Callable[[Made], object]]:
        """Return the function that makes each scenario."""
        return {
            WHOLE: lambda made: self.traced(self._run(scratch=self._whole_folder), self._run),
            CHECKPOINT: lambda made: read_checkpoint(self._whole_folder),
            ONE_PROCESS_TEXT: lambda made: self._run(nproc=1, batch=self.nproc * BATCH),
            RESTARTED: lambda made: self._restarted(),
            EXPORTED: lambda made: self._exported(),
            OPTIONS: lambda made: self._with_options(),
            SOLVED: lambda made: self._run(script=self.exercise.solution),
        }

    def make(self, scenario: Scenario[Any], made: Mapping[Scenario[Any], Any]) -> Any:
        """Make a scenario; see ``judge.Bench``."""
        # Tokenizers that have used several threads print a warning at each fork.
        with _variables(WORKSHOP_DATA=str(self.place / "data"), TOKENIZERS_PARALLELISM="false"):
            return super().make(scenario, made)

    @cached_property
    def _task(self) -> Task:
        prepare(self.probes, self.on_cpu, self.text)  # before torch starts threads, and transformers prints
        return make_task(self.place / "data")

    @cached_property
    def _whole_folder(self) -> Path:
        """The folder in which the whole run saves its checkpoint."""
        return self.folder()

    def _run(
        self,
        *options: str,
        nproc: int | None = None,
        batch: int = BATCH,
        steps: int = STEPS,
        scratch: Path | None = None,
        dies: bool = False,
        **changes: Any,
    ) -> Run:
        """Run the program with its model and text, and with those of these options that it has."""
        given = {
            "--model": self._task.model,
            "--data": self._task.data,
            "--sequence-length": LENGTH,
            "--steps": steps,
            "--batch-size": batch,
            "--folder": "run",
            "--save-every": 2,
        }
        arguments = [str(part) for name, value in given.items() if self.has(name) for part in (name, value)]
        return self.launch_program(
            [*arguments, *self.exercise.options, *options],
            nproc=nproc,
            scratch=scratch,
            dies=dies,
            patience=Patience(idle=5, busy=20, total=90),
            asked=Asked(validation_loss=self._task.loss),
            **changes,
        )

    def _restarted(self) -> Restarted:
        """Kill a run after its first checkpoint; start it again with the same and with different numbers of processes."""
        scratch, kept = self.folder(), self.folder()
        first = self._run(scratch=scratch, dies=True)
        shutil.copytree(scratch, kept, dirs_exist_ok=True)
        again = self._run(scratch=scratch)
        if again.failed or not first.trained:
            return Restarted(first, again)
        others = []
        for nproc, batch in ((1, self.nproc * BATCH), (2 * self.nproc, BATCH // 2)):
            place = self.folder()
            shutil.copytree(kept, place, dirs_exist_ok=True)
            others.append(self._run(nproc=nproc, batch=batch, scratch=place))
        return Restarted(first, again, tuple(others))

    def _exported(self) -> Exported:
        """Export the last checkpoint of the whole run with the exercise's export program; load it with transformers alone."""
        (name,) = self.exercise.beside
        script, folder = self.script.with_name(name), self._whole_folder / "export"
        if not script.is_file():
            return Exported(name)
        arguments = ["--model", str(self._task.model), "--folder", "run", "--export", folder.name]
        run = self.launch_program(arguments, script=script, launch="single", nproc=1, scratch=self._whole_folder)
        files = tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else None
        exported = Exported(name, run, files)
        if run.failed or not files or "config.json" not in files:
            return exported
        try:
            return replace(exported, loss=plain_loss(folder, self._task.data))
        except Exception as error:  # transformers may raise anything
            return replace(exported, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _with_options(self) -> OptionRuns:
        """Make a short run with each option, and one without options."""
        run = partial(self._run, steps=3)
        return OptionRuns(
            plain=run(),
            checkpointing=run("--activation-checkpointing"),
            keeping=run("--keep-gathered"),
            offloading=run("--offload"),
            compiling=run("--compile"),
            accumulating=run("--accumulate", "2", batch=BATCH // 2),
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Describe the first complete DCP checkpoint below the folder of a run."""
    complete = sorted(folder.rglob("step-*/.metadata"))
    if not complete:
        return Checkpoint(complete=False)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = complete[0].parent
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    writers = {path.name.split("_")[2] for path in saved.glob("__*.distcp")}  # __RANK_NUMBER.distcp
    return Checkpoint(True, tuple(names), len(writers))
