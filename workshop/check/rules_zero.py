"""The check of stage 05: whether DeepSpeed or Accelerate does the work, and whether it still is the training of stage 02."""

import io
from contextlib import redirect_stdout
from pathlib import Path

from workshop.check import rules
from workshop.check.evidence import Run
from workshop.check.findings import Finding
from workshop.check.rules_fsdp import general
from workshop.repository import ROOT

REFERENCE = ROOT / "solutions" / "02_pytorch_ddp" / "exercise2_multigpu_torchrun.py"
RESUME = ("never-resumes", "epoch-repeated", "epoch-skipped", "resume-differs")
SAME = 1e-4  # nats: what another order of sums may make of a loss


def check_zero_program(verdict, runs) -> None:
    """The goals of the exercise with DeepSpeed.

    Args:
        verdict: takes the findings.
        runs: the judge's runs.
    """
    if runs.on_cpu:
        load_extension()
    _check(verdict, runs)


def load_extension() -> None:
    """Load DeepSpeed's extension for CPUs into this process, and build it first where that has not been done.

    The processes that are forked have it then: none waits for a compiler, and none that is killed leaves a lock beside it.
    """
    from workshop.training import deepspeed as zero

    if zero.missing_tools():
        return
    zero.take_own_ninja()
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    with redirect_stdout(io.StringIO()):
        ShareMemCommBuilder().load(verbose=False)


def _check(verdict, runs) -> None:
    from workshop.check.judge import BLOCKING, EPOCHS, ordered

    scratch = runs.folder()
    whole = runs.run(scratch=scratch)
    # (What ZeRO's optimizer changes are its own copies of the weights: that they are no layer's says nothing.)
    found = [finding for finding in general(whole) if finding.kind != "wrong-parameters"]
    found = without_step(whole) + found + engine(whole)
    verdict.findings = ordered(verdict, found)
    if rules.ending(whole) or any(finding.kind in BLOCKING for finding in found):
        return
    shared_out = not found
    found += scaled(whole) + spread(whole)
    reference, plain = runs.folder(), runs.of(REFERENCE)
    theirs = plain.run(scratch=reference)
    if shared_out:  # else the losses are others for a reason that has been found
        found += same_losses(whole, theirs)
    found += saved(whole, scratch / "run")
    kinds = {finding.kind for finding in found}
    if not shared_out:
        kinds.add("differs-from-ddp")
    if "not-saved" not in kinds:
        place = runs.folder()
        first = runs.run(epochs=EPOCHS - 1, scratch=place)
        # (What is not spread, DeepSpeed cannot put together.)
        second = runs.run(scratch=place, options=() if "optimizer-whole" in kinds else ("--export", "whole.pt"))
        found += carried_on(whole, first, second)
        if not rules.ending(second) and "optimizer-whole" not in kinds:
            found += exported(place / "whole.pt", reference / "run.pt", kinds | {finding.kind for finding in found})
    found += uneven(runs)
    verdict.findings = ordered(verdict, found)


def accelerator(run: Run) -> list[Finding]:
    """Whether an Accelerator does what it is for."""
    calls = {}
    for process in run.processes:
        for what in process.of("accelerator_call"):
            calls.setdefault(what["name"], []).extend(what["of"])
    if calls and rules.ending(run):
        return []  # what has not been called may have come later
    found = []
    where = next((step.before["where"] for process in run.trained for step in process.steps), "")
    prepared = calls.get("prepare", [])
    if not prepared or not any(name.endswith("AdamW") for name in prepared):
        found.append(Finding("accelerator-idle", "model and optimizer are not prepared by an Accelerator", where))
        if not run.trained:
            return found
    elif "backward" not in calls:
        found.append(Finding("accelerator-idle", "backward() is not the Accelerator's", where))
    if "RandomSampler" not in prepared:
        found.append(Finding("loader-by-hand", "no loader that shuffles is prepared by an Accelerator", where))
    if "gather_for_metrics" not in calls:
        found.append(Finding("gathered-by-hand", "gather_for_metrics() is never called", where))
    if "save_state" not in calls:
        found.append(Finding("state-by-hand", "save_state() is never called", where))
    return found + saved_by_all(run)


def saved_by_all(run: Run) -> list[Finding]:
    """Whether each process has called ``save_state()``."""
    places = {
        process.rank: [what["where"] for what in process.of("accelerator_call") if what["name"] == "save_state"]
        for process in run.trained
    }
    if any(places.values()) and not all(places.values()):
        who = " and ".join(str(rank) for rank, where in places.items() if where)
        return [Finding("saved-by-some", f"only rank {who} calls save_state()", next(filter(None, places.values()))[0])]
    return []


def scaled(run: Run) -> list[Finding]:
    """Whether the engine's backward() gets the losses as they are."""
    own = [process.of("engine_loss") for process in run.trained]
    for number, (loss, *values) in enumerate(zip(reported(run), *own, strict=False), 1):
        mean = sum(what["loss"] for what in values) / len(values)
        if abs(mean - loss) > 1e-3 * max(abs(loss), 1e-3):
            seen = f"in step {number} the engine's backward() gets losses of {mean:.4f} on average, and {loss:.4f} are reported"
            return [Finding("scaled-twice", seen, values[0]["where"])]
    return []


def without_step(run: Run) -> list[Finding]:
    """Whether the engine's second backward() failed for want of a step(): DeepSpeed 0.18 ends in a TypeError of its own there."""
    for crash in rules.crash(run):
        for process in run.ranks:
            calls = process.of("engine_call")
            if [what["name"] for what in calls] == ["backward", "backward"] and calls[-1]["where"] == crash.where:
                seen = "the engine's backward() is called a second time, and its step() never"
                return [Finding("engine-idle", seen, crash.where)]
    return []


def engine(run: Run) -> list[Finding]:
    """Whether an engine of DeepSpeed's does the work."""
    trained = run.trained
    if not trained:
        return []
    if not any(process.of("engine") for process in trained):
        where = next((what["where"] for process in trained for what in process.of("wrapped")), "")
        return [
            Finding("engine-idle", "no engine is made: DDP averages, and every process has the whole optimizer", where)
        ]
    for process in trained:
        calls = {what["name"] for what in process.of("engine_call")}
        for name, instead in (("backward", "loss.backward()"), ("step", "optimizer.step()")):
            if name not in calls:
                where = process.steps[0].before["where"]
                return [Finding("engine-idle", f"the engine's {name}() is never called, but {instead}", where)]
    made = trained[0].of("engine")[0]
    sizes = {
        len(backward["forward"]["rows"])
        for process in trained
        for step in process.steps
        for backward in step.backwards
        if backward["forward"]
    }
    if sizes and made["batch"] not in sizes:
        seen = (
            f"the engine is told of batches of {made['batch']}, and gets {', '.join(map(str, sorted(sizes)))} samples"
        )
        return [Finding("batch-differs", seen, made["where"])]
    return []


def spread(run: Run) -> list[Finding]:
    """Whether each process holds its part of the optimizer's moments."""
    for process in run.trained:
        for what in process.of("moments")[-1:]:
            if what["own"] > what["whole"] * (0.5 / run.nproc + 0.5):
                share = what["own"] / what["whole"]
                made = process.of("engine")[0]
                seen = f"each of {run.nproc} processes holds {share:.0%} of AdamW's moments: ZeRO's stage is {made['stage']}"
                return [Finding("optimizer-whole", seen, made["where"])]
    return []


def reported(run: Run) -> list[float]:
    """The losses of the steps, as rank 0 has reported them."""
    return [loss for process in run.processes for what in process.of("report") for loss in what["losses"]]


def same_losses(run: Run, reference: Run) -> list[Finding]:
    """Whether the training is that of stage 02."""
    own, theirs = reported(run), reported(reference)
    if not own:
        return [Finding("no-learning", "no losses are reported")]
    for number, (one, other) in enumerate(zip(own, theirs, strict=False), 1):
        if not abs(one - other) < SAME:
            made = run.trained[0].of("engine")[0]
            clips = f"; the norm of the gradients is clipped at {made['clipping']:g}" if made["clipping"] else ""
            seen = f"the loss of step {number} is {one:.4f}, and {other:.4f} with stage 02's solution{clips}"
            return [Finding("differs-from-ddp", seen, made["where"])]
    return []


def saved(run: Run, folder: Path) -> list[Finding]:
    """Whether each process has saved its part."""
    calls = [what for process in run.trained for what in process.of("engine_call") if what["name"] == "save_checkpoint"]
    if not calls:
        other = next((what["where"] for process in run.processes for what in process.of("save")), "")
        return [Finding("not-saved", "the engine saves no checkpoint", other)]
    parts = list(folder.glob("*/*zero_pp_rank_*_optim_states.pt"))
    spread_out = run.trained[0].of("engine")[0]["stage"] > 0  # else rank 0's part is all there is
    if not list(folder.glob("latest")) or (spread_out and len({path.name for path in parts}) < run.nproc):
        there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "nothing"
        return [
            Finding(
                "not-saved", f"not every process's part is there when the run has ended ({there})", calls[0]["where"]
            )
        ]
    return []


def carried_on(whole: Run, first: Run, second: Run) -> list[Finding]:
    """Whether a run that was started again carries on exactly."""
    load = next(
        (
            what["where"]
            for process in second.trained
            for what in process.of("engine_call")
            if what["name"] == "load_checkpoint"
        ),
        "",
    )
    if problems := rules.ending(second):
        return [
            Finding(
                "resume-fails", f"the second start fails: {problems[0].seen}", problems[0].where, problems[0].detail
            )
        ]
    total, done, rest = (len(run.trained[0].steps) if run.trained else 0 for run in (whole, first, second))
    if rest >= total:
        kind = "epoch-repeated" if load else "never-resumes"
        return [Finding(kind, f"the second start takes all {rest} steps again", load)]
    if done + rest != total:
        kind = "epoch-repeated" if done + rest > total else "epoch-skipped"
        return [Finding(kind, f"{done} + {rest} steps in two parts, {total} in one", load)]
    for number, (one, other) in enumerate(zip(reported(whole)[done:], reported(second), strict=False), done + 1):
        if not abs(one - other) < SAME:
            seen = f"after the second start the loss of step {number} is {other:.4f}, and {one:.4f} without a break"
            return [Finding("resume-differs", seen, load)]
    return []


def exported(path: Path, reference: Path, kinds: set[str]) -> list[Finding]:
    """Whether a plain model loads the weights, and they are the trained ones."""
    import torch

    from workshop.training.models import SmallCNN

    if not path.is_file():
        return [Finding("not-exported", "--export leaves no file")]
    model = SmallCNN()
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except Exception as error:  # whatever it is that was written
        return [
            Finding(
                "not-exported", f"a plain SmallCNN cannot load it: {type(error).__name__}: {str(error).splitlines()[0]}"
            )
        ]
    theirs = torch.load(reference, weights_only=True)["model"]
    # (Another training ends with other weights, and has its name already.)
    if not kinds & {"differs-from-ddp", *RESUME} and not all(
        torch.allclose(weights, theirs[name], atol=1e-4) for name, weights in model.state_dict().items()
    ):
        return [Finding("export-differs", "the exported weights are not those that stage 02's solution ends with")]
    return []


def uneven(runs) -> list[Finding]:
    """Whether an evaluation ends for which some processes have a batch less, where each forward gathers the weights."""
    from workshop.check.launching import TEST_SAMPLES

    nproc = next(number for number in (3, 4, 5) if TEST_SAMPLES % number)
    options = ("--config", str(ROOT / "05_deepspeed" / "zero3.json"))
    run = runs.run(nproc=nproc, epochs=1, batch=TEST_SAMPLES // nproc, options=options)
    if problems := rules.ending(run):
        seen = f"with ZeRO-3, {nproc} processes and {TEST_SAMPLES} samples to evaluate: {problems[0].seen}"
        return [Finding("evaluation-uneven", seen, problems[0].where, problems[0].detail)]
    return []
