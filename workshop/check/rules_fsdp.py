"""The check of stage 04: the runs that it makes of a program with a sharded model, and what it concludes from them.

The programs are given a model of CodeLlama's architecture with two layers, made for the purpose, and a few pages of text.
"""

import gc
import json
import math
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workshop.check import rules
from workshop.check.evidence import Run, is_echo
from workshop.check.findings import Finding

STEPS = 6
LENGTH = 32  # tokens of a sequence
BATCH = 2  # sequences on each of two processes
CLOSE = 0.02  # nats: what bfloat16's rounding may make of a loss
FIRST_STEPS = 4  # in which rounding has not yet grown


@dataclass
class Text:
    """What the programs are to train, and on what.

    Attributes:
        model: the folder of the model.
        data: the file with the documents.
        folder: the data folder.
        loss: of the untrained model on the sequences to validate with, in nats: from plain transformers.
    """

    model: Path
    data: Path
    folder: Path
    loss: float


def make_text(place: Path) -> Text:
    """Make the model and the documents in a folder."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    from workshop.data.code import library_files, load_blocks
    from workshop.data.codellama import make_tiny

    documents = [path.read_text(errors="replace")[:1500] for path in library_files()[:60]]
    model = make_tiny(place / "models" / "small", layers=2, width=64, vocabulary=400, documents=documents)
    # Random scores are all alike; these are not, so that a model with other weights has another loss.
    whole = load_file(model / "model.safetensors")
    whole["lm_head.weight"] *= 8
    save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
    data = place / "text.jsonl"
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    load_blocks(str(data), AutoTokenizer.from_pretrained(model), LENGTH)  # the program finds the tokens there
    return Text(model, data, place, plain_loss(model, data))


def plain_loss(model: Path, data: Path) -> float:
    """The loss of a model on the sequences that the programs validate with: of transformers alone, in one process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from workshop.data.code import load_blocks

    _, validation_set = load_blocks(str(data), AutoTokenizer.from_pretrained(model), LENGTH)
    batch = torch.stack([validation_set[index] for index in range(min(len(validation_set), 64))])
    with torch.inference_mode():
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return plain.eval()(input_ids=batch, labels=batch, use_cache=False).loss.item()


@contextmanager
def environment(**settings: str):
    """Set environment variables in a with-block: for this process, and for those that it forks."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class TextRuns:
    """Makes the runs; ``runs``: the judge's."""

    def __init__(self, runs):
        self.runs, self.text = runs, make_text(runs.place / "data")

    def run(self, *options, nproc=2, batch=BATCH, steps=STEPS, scratch=None, dies=False) -> Run:
        """Run the program with its model and text, and these options as far as it has them."""
        from workshop.check import launching

        given = {
            "--model": self.text.model,
            "--data": self.text.data,
            "--sequence-length": LENGTH,
            "--steps": steps,
            "--batch-size": batch,
            "--folder": "run",
            "--save-every": 2,
        }
        arguments = [str(part) for name, value in given.items() if self.runs.has(name) for part in (name, value)]
        return launching.run_program(
            self.runs.script,
            [*arguments, *map(str, options)],
            launch="torchrun",
            nproc=nproc,
            scratch=scratch or self.runs.folder(),
            on_cpu=self.runs.on_cpu,
            dies=dies,
            patience=launching.Patience(idle=5, busy=20, total=90),
        )


def check_sharded(verdict, runs) -> None:
    """The goals of an exercise of stage 04.

    Args:
        verdict: takes the findings.
        runs: the judge's runs.
    """
    # (Tokenizers warn at each fork if they have computed in several threads.)
    with environment(WORKSHOP_DATA=str(runs.place / "data"), TOKENIZERS_PARALLELISM="false"):
        _check(verdict, runs)
    gc.collect()


def _check(verdict, runs) -> None:
    from workshop.check.judge import BLOCKING, ordered  # here: the judge imports this module

    exercise = verdict.exercise
    text = TextRuns(runs)
    scratch = runs.folder()
    whole = text.run(scratch=scratch)
    found = general(whole) + sharding(whole)
    if "not-saved" in exercise.kinds:
        found += saved(whole, scratch)
    verdict.findings = ordered(verdict, found)
    if rules.ending(whole) or any(finding.kind in BLOCKING for finding in found):
        return
    found += weights(whole, text.text.loss) + clipping(whole)
    if rules.bf16_is_fast(whole):
        found += precision(whole)
    elif "precision" in exercise.kinds:
        verdict.unjudged.add(exercise.goal("precision"))
        verdict.unchecked.append("bfloat16: the device that it trains on here is not fast at it")
    if not found:
        found += one_process(whole, text.run(nproc=1, batch=2 * BATCH))
    if "not-saved" in exercise.kinds:
        found += carried_on(text, whole) + exported(text, whole, scratch)
    if "activations-kept" in exercise.kinds:
        found += options(text, whole)
    verdict.findings = ordered(verdict, found)


# ---------------------------------------------------------------- what every exercise has


def general(run: Run) -> list[Finding]:
    """How it ended, its group, its samples, its files and what it prints."""
    run.settle_identity()
    found = rules.address(run) + rules.ending(run)
    if found and run.first_exception() and is_echo(run.first_exception()[1]):
        # Who has gone, and where the others wait, says more than that they noticed.
        found = rules.collectives(run) + found
    found += rules.group(run) if not found or any(process.rank is not None for process in run.processes) else []
    if not run.trained:
        return found or [Finding("no-training", "the run ended well and took no step")]
    if not run.hung:
        found += rules.collectives(run) if not found else []
    found += rules.writers(run) + rules.printing(run) + rules.learning(run) + rules.shares(run, whole=False)
    return found


def layout(run: Run) -> dict | None:
    """How the model was spread in the first step, on rank 0."""
    return next((what for process in run.trained[:1] for what in process.of("layout")), None)


def sharding(run: Run) -> list[Finding]:
    """Whether each process holds a part, and each layer is a group of its own."""
    if not any(process.of("fully_shard") for process in run.processes):
        wrapped = next((what["where"] for process in run.processes for what in process.of("wrapped")), "")
        there = layout(run)
        size = f": {there['whole'] / 1e6:.2f} MB of weights on every process" if there else ""
        return [Finding("not-sharded", f"the model is whole in each process{size}", wrapped)]
    there, event = layout(run), next(what for process in run.processes for what in process.of("fully_shard"))
    found = []
    held = max(what["held"] for process in run.processes for what in process.of("fully_shard"))
    loaded = [what for process in run.processes for what in process.of("loaded_whole")]
    if held:
        found.append(
            Finding(
                "whole-model", f"before it is cut, each process holds {held / 1e6:.2f} MB of the model", event["where"]
            )
        )
    elif loaded:
        found.append(
            Finding(
                "whole-model",
                f"each process reads all {loaded[0]['bytes'] / 1e6:.2f} MB of the weights to keep its part",
                loaded[0]["where"],
            )
        )
    if there is None:
        return found
    share = there["own"] / there["whole"]
    if run.nproc > 1 and share > 0.5 / run.nproc + 0.5:
        names = [name for name in there["whole_here"] if not name.endswith("norm.weight")]
        which = f" ({rules._names(names)} among them)" if 0 < len(names) < 20 else ""
        seen = f"each of {run.nproc} processes holds {share:.0%} of the weights{which}"
        found.append(Finding("not-sharded", seen, event["where"]))
    elif there["layer_groups"] < there["layers"]:
        seen = f"{there['groups']} group{'s' * (there['groups'] > 1)}, and {there['layers']} layers"
        seen += ": all weights are gathered at once" if there["groups"] == 1 else ""
        found.append(Finding("one-group", seen, event["where"]))
    return found


def precision(run: Run) -> list[Finding]:
    """Whether it computes in bfloat16, with weights that stay, and sums that are made, in float32."""
    there, found = layout(run), []
    where = run.trained[0].of("fully_shard")[0]["where"]
    if there and there["dtypes"] != ["torch.float32"]:
        kinds = ", ".join(name.removeprefix("torch.") for name in there["dtypes"])
        found.append(Finding("master-rounded", f"the weights that the optimizer changes are {kinds}", where))
    found += rules.dtypes(run)
    for process in run.trained[:1]:
        dtypes = {}
        for what in _first_step(process):
            dtypes.setdefault(what["name"].split("_")[0], set()).add(what["dtype"])
        if not found and "torch.float32" in dtypes.get("all", set()) and "torch.bfloat16" not in dtypes["all"]:
            found.append(
                Finding("gathers-float32", "the weights travel in float32, and the layers compute in bfloat16", where)
            )
        if "torch.bfloat16" in dtypes.get("reduce", set()):
            found.append(Finding("reduce-rounded", "the gradients of the processes are summed in bfloat16", where))
    return found


def _first_step(process) -> list[dict]:
    """The collectives of FSDP's own in the first training step: all_gather and reduce_scatter."""
    found = []
    for _, kind, what in process.events:
        if kind == "step":
            return found
        if kind in ("evaluated", "begin"):
            found = []
        if kind in ("collective", "travels") and what["name"].startswith(("all_gather", "reduce_scatter")):
            found.append(what)
    return found


def weights(run: Run, loss: float) -> list[Finding]:
    """Whether the model begins with the checkpoint's weights, and its buffers."""
    there = layout(run)
    if there and there["buffers"]:
        seen = f"{rules._names(there['buffers'])} does not hold the frequencies of the positions"
        return [Finding("buffers-empty", seen, there["where"])]
    for process in run.processes:
        for what in process.of("begin"):
            if not abs(what["validation_loss"] - loss) < CLOSE:  # NaN too
                seen = (
                    f"before the first step the validation loss is {what['validation_loss']:.4f}; "
                    f"transformers alone has {loss:.4f} with this checkpoint"
                )
                return [Finding("weights-not-loaded", seen, what["where"])]
    return []


def clipping(run: Run) -> list[Finding]:
    """Whether the norm of the whole gradient, over all processes, is at most 1 in every step."""
    ranks = run.trained
    for index, steps in enumerate(zip(*(process.steps for process in ranks), strict=False), 1):
        own = [math.sqrt(sum(gradient[0] ** 2 for gradient in step.before["gradients"] if gradient)) for step in steps]
        norm, where = math.hypot(*own), steps[0].before["where"]
        if norm > 1.01:
            parts = " and ".join(f"{part:.2f}" for part in own)
            clipped = all(part < 1.01 for part in own) and len(own) > 1
            why = "each process has clipped its own part" if clipped else "it is not clipped to 1"
            seen = f"in step {index} the norm of the gradient is {norm:.2f} ({parts} in the processes): {why}"
            return [Finding("clip-local" if clipped else "clip-missing", seen, where)]
    return []


def losses(run: Run) -> list[float]:
    """The losses of the steps as rank 0 has reported them."""
    return [loss for process in run.ranks[:1] for what in process.of("tokens") for loss in what["losses"]]


def _unequal(one: list[float], other: list[float], tolerance: float = CLOSE) -> int | None:
    """The index of the first pair that differs, or None."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if not abs(a - b) < tolerance), None)


def one_process(run: Run, single: Run) -> list[Finding]:
    """Whether two processes compute what one computes with the same global batches."""
    if rules.ending(single):
        return [Finding("differs-from-one-process", f"with one process: {rules.ending(single)[0].seen}")]
    together, alone = losses(run), losses(single)
    bad = _unequal(together[:FIRST_STEPS], alone)
    if bad is not None:
        seen = f"the loss of step {bad + 1} is {together[bad]:.4f} with two processes and {alone[bad]:.4f} with one"
        return [Finding("differs-from-one-process", seen)]
    return []


# ---------------------------------------------------------------- exercise 2: checkpoints


def saved(run: Run, scratch: Path) -> list[Finding]:
    """Whether each process saves its part, and goes on training meanwhile."""
    calls = [what for process in run.processes for what in process.of("dcp") if not what["writer"]]
    saves = [what for what in calls if what["name"] in ("save", "async_save")]
    if not saves:
        others = [what for process in run.processes for what in process.of("save")]
        if others:
            return [Finding("whole-saved", "the state goes into one file, through one process", others[0]["where"])]
    if run.hung or run.status:  # which says more
        return []
    if not saves:
        return [Finding("not-saved", "no checkpoint is saved")]
    whole = list(scratch.rglob("step-*/.metadata"))
    if not whole:
        return [Finding("not-saved", "no checkpoint is whole when the run has ended", saves[0]["where"])]
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(whole[0].parent).read_metadata().state_dict_metadata
    if not any("embed_tokens" in name for name in names):
        return [Finding("not-saved", "there are no weights in the checkpoint", saves[0]["where"])]
    if not any("exp_avg" in name for name in names):
        return [Finding("optimizer-lost", "the state of the optimizer is not in the checkpoint", saves[0]["where"])]
    parts = {path.name.split("_")[2] for path in whole[0].parent.glob("__*.distcp")}
    if len(parts) < run.nproc:
        return [Finding("whole-saved", "one process writes all of the checkpoint", saves[0]["where"])]
    if not any(what["name"] == "async_save" for what in saves):
        return [Finding("saves-waiting", "no step is taken until the files are written", saves[0]["where"])]
    return []


def carried_on(text: TextRuns, whole: Run) -> list[Finding]:
    """What shows when a run is killed after a checkpoint and started again, with as many processes and with others."""
    scratch = text.runs.folder()
    first = text.run(scratch=scratch, dies=True)
    done = len(first.trained[0].steps) if first.trained else 0
    kept = text.runs.folder()
    shutil.copytree(scratch, kept, dirs_exist_ok=True)
    again = text.run(scratch=scratch)
    final = rules.ending(again)
    if final:
        return [Finding("resume-fails", f"started again: {final[0].seen}", final[0].where, final[0].detail)]
    found = _same_tail(whole, again)
    if found or done == 0:
        return found
    for nproc, batch in ((1, 2 * BATCH), (4, BATCH // 2)):
        place = text.runs.folder()
        shutil.copytree(kept, place, dirs_exist_ok=True)
        other = text.run(nproc=nproc, batch=batch, scratch=place)
        final = rules.ending(other)
        if final:
            seen = f"started again with {nproc} process{'es' * (nproc > 1)}: {final[0].seen}"
            return [Finding("reshard-fails", seen, final[0].where, final[0].detail)]
        number = len(losses(other))
        bad = _unequal(losses(whole)[-number:], losses(other))
        if bad is not None:
            seen = (
                f"started again with {nproc} process{'es' * (nproc > 1)} the loss of step {STEPS - number + bad + 1} is "
                f"{losses(other)[bad]:.4f}, and {losses(whole)[-number:][bad]:.4f} without the break"
            )
            return [Finding("reshard-fails", seen)]
    return []


def _same_tail(whole: Run, again: Run) -> list[Finding]:
    """Whether the steps of a run that was started again are the last ones of the run without a break."""
    one, other = whole.trained[0].steps, again.trained[0].steps if again.trained else []
    if len(other) >= len(one):
        where = next((event["where"] for event in again.trained[0].of("dcp") if event["name"] == "load"), "")
        seen = f"started again, it takes {len(other)} steps, as many as without a checkpoint"
        return [Finding("never-resumes", seen, where)]
    tail = one[len(one) - len(other) :]
    first, second = tail[0].before, other[0].before
    where = second["where"]
    number = len(one) - len(other) + 1
    if rules.difference(first["weights"], second["weights"]) > 1e-6:
        return [Finding("resume-differs", f"before step {number} the weights are not those that were saved", where)]
    if tail[0].keys != other[0].keys:
        return [
            Finding("data-repeated", f"step {number} gets other samples than it would have without the break", where)
        ]
    for index, (before, after) in enumerate(zip(tail, other, strict=False), number):
        rates = [step.before["rates"][0] for step in (before, after)]
        if abs(rates[0] - rates[1]) > 1e-9:
            seen = f"in step {index} the learning rate is {rates[1]:.2e}, and {rates[0]:.2e} without the break"
            return [Finding("schedule-lost", seen, where)]
    after, others = tail[0].after["weights"], other[0].after["weights"]
    if rules.difference(after, others) > 1e-6:
        seen = f"after step {number} the weights differ, though gradients and learning rate are the same"
        return [Finding("optimizer-lost", seen, where)]
    return []


def exported(text: TextRuns, run: Run, scratch: Path) -> list[Finding]:
    """Whether plain transformers loads what the program beside it makes of the last checkpoint, with the sharded model's loss."""
    from workshop.check import launching

    (name,) = text.runs.exercise.beside
    script, folder = text.runs.script.with_name(name), scratch / "export"
    if not script.is_file():
        return [Finding("not-exported", f"{name}, which is to export the model, is not beside {text.runs.script.name}")]
    arguments = ["--model", str(text.text.model), "--folder", "run", "--export", folder.name]
    export = launching.run_program(
        script, arguments, launch="single", nproc=1, scratch=scratch, on_cpu=text.runs.on_cpu
    )
    if ending := rules.ending(export):
        return [Finding("not-exported", f"{name}: {ending[0].seen}", ending[0].where, ending[0].detail)]
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no such folder"
        return [Finding("not-exported", f"{name} leaves no model that transformers could load ({there})")]
    if not (folder / "tokenizer.json").is_file():
        return [Finding("not-exported", f"{name} leaves no tokenizer")]
    try:
        loss = plain_loss(folder, text.text.data)
    except Exception as error:  # whatever transformers says of it
        return [
            Finding("not-exported", f"transformers cannot load the export: {type(error).__name__}: {str(error)[:200]}")
        ]
    last = [what["validation_loss"] for process in run.processes for what in process.of("tokens")][-1]
    if not abs(loss - last) < CLOSE:
        seen = f"transformers finds a validation loss of {loss:.4f} with the export; the trained model had {last:.4f}"
        return [Finding("export-differs", seen)]
    return []


# ---------------------------------------------------------------- exercise 3: options


def options(text: TextRuns, plain: Run) -> list[Finding]:
    """Whether each option does what it is for, and changes nothing that is computed."""
    found = []
    base = plain.trained[0]

    def run(*given, **settings):
        done = text.run(*given, steps=3, **settings)
        final = rules.ending(done)
        if final:
            return None, [Finding(final[0].kind, f"with {given[0]}: {final[0].seen}", final[0].where, final[0].detail)]
        return done, []

    short = text.run(steps=3)
    for option, kind, judge in (
        ("--activation-checkpointing", "activations-kept", _keeps_less),
        ("--keep-gathered", "gathers-again", _gathers_less),
        ("--offload", "not-offloaded", _offloads),
        ("--compile", "not-compiled", _compiles),
    ):
        done, failed = run(option)
        found += failed or judge(kind, base, done.trained[0])
        if not failed and _unequal(losses(short), losses(done)) is not None:
            found.append(
                Finding(kind, f"with {option} the losses are others: {losses(done)[0]:.4f}, not {losses(short)[0]:.4f}")
            )
    done, failed = run("--accumulate", 2, batch=BATCH // 2)
    found += failed or _accumulates(short, done)
    return found


def _keeps_less(kind, base, process) -> list[Finding]:
    before, after = (each.of("kept")[0]["bytes"] for each in (base, process))
    if after < 0.75 * before:
        return []
    seen = f"with --activation-checkpointing a forward keeps {after / 1e6:.2f} MB for the backward, without {before / 1e6:.2f}"
    return [Finding(kind, seen)]


def _gathers(process) -> int:
    return sum(what["name"].startswith("all_gather") for what in _first_step(process))


def _gathers_less(kind, base, process) -> list[Finding]:
    before, after = _gathers(base), _gathers(process)
    if after < before:
        return []
    return [Finding(kind, f"a step gathers weights {after} times with --keep-gathered, and {before} times without")]


def _offloads(kind, base, process) -> list[Finding]:
    events = process.of("fully_shard")
    without = [what for what in events if what["offload"] != "CPUOffloadPolicy"]
    if not without:
        return []
    seen = f"with --offload {len(without)} of {len(events)} groups keep their weights on the device"
    return [Finding(kind, seen, without[0]["where"])]


def _compiles(kind, base, process) -> list[Finding]:
    if process.of("compile"):
        return []
    return [Finding(kind, "with --compile nothing is compiled")]


def _accumulates(short: Run, done: Run) -> list[Finding]:
    one, process = short.trained[0], done.trained[0]
    batches = [len(step.backwards) for step in process.steps]
    if set(batches) != {2}:
        seen = f"with --accumulate 2 the steps have {', '.join(map(str, batches))} batches"
        return [Finding("accumulation-uneven", seen, process.steps[0].before["where"])]
    bad = _unequal(losses(short), losses(done))
    if bad is not None:
        seen = (
            f"with half the batch and --accumulate 2 the loss of step {bad + 1} is {losses(done)[bad]:.4f}, "
            f"and {losses(short)[bad]:.4f} with the whole batch"
        )
        return [Finding("accumulation-scale", seen, process.steps[0].before["where"])]
    norms = [_norm(each, 0) for each in (short, done)]
    if norms[0] and abs(norms[1] / norms[0] - 1) > 0.1:
        seen = (
            f"the gradient of step 1 has a norm of {norms[1]:.3f} with half the batch and --accumulate 2, "
            f"and {norms[0]:.3f} with the whole batch"
        )
        return [Finding("accumulation-scale", seen, process.steps[0].backwards[0]["where"])]
    counts = [sum(what["name"].startswith("reduce_scatter") for what in _first_step(each)) for each in (one, process)]
    if counts[1] > counts[0]:
        seen = f"a step of 2 batches reduces gradients {counts[1]} times, one of a single batch {counts[0]} times"
        return [Finding("accumulation-traffic", seen, process.steps[0].backwards[0]["where"])]
    return []


def _norm(run: Run, index: int) -> float:
    """The norm of the gradient over all processes before it was clipped, in one of the steps; 0.0 if that is not known."""
    clips = [process.of("clip") for process in run.trained]
    if not all(len(each) > index for each in clips):
        return 0.0
    return math.hypot(*(norm for each in clips for norm in each[index]["norms"]))
