"""From evidence to findings: pure functions, one for each kind of evidence. None of them knows an exercise or reads the source.

``main_findings`` judges one run with several processes; the others compare two runs. The first finding of a list is the one that
explains the most: a rule that rests on another's (gradients can only be compared where a group exists) comes after it.
"""

import itertools
import math
import re
from collections import Counter

from workshop.check.evidence import Process, Run, Step, is_echo
from workshop.check.findings import Finding

CLOSE = 1e-3  # relative difference between two ranks' figures from which on they count as different


# ---------------------------------------------------------------- comparing sketches


def difference(first, second) -> float:
    """The largest relative difference between two sketches; infinity where one has a tensor that the other lacks."""
    worst = 0.0
    if len(first) != len(second):
        return math.inf
    for one, other in zip(first, second, strict=True):
        worst = max(worst, _tensor_difference(one, other))
    return worst


def _tensor_difference(one, other) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    scale = max(one[0], other[0])
    if scale == 0:
        return 0.0
    if not math.isfinite(scale):
        return 0.0 if one[0] == other[0] else math.inf
    norm = abs(one[0] - other[0]) / scale
    top = max((abs(value) for value in (*one[1], *other[1])), default=0.0) or scale
    values = max((abs(a - b) for a, b in zip(one[1], other[1], strict=False)), default=0.0) / top
    return max(norm, values)


def different_names(first, second, names) -> list[str]:
    """The names of the tensors in which two sketches differ."""
    pairs = zip(first, second, names, strict=False)
    return [name or "?" for one, other, name in pairs if _tensor_difference(one, other) > CLOSE]


def _ratio(first, second) -> float | None:
    """By what factor all tensors of ``first`` are those of ``second``; None if there is no such factor."""
    ratios = []
    for one, other in zip(first, second, strict=False):
        if one is None or other is None or other[0] == 0 or one[0] == 0:
            continue
        ratio = one[0] / other[0]
        top = max((abs(value) for value in one[1]), default=0.0)
        if top and max(abs(a - ratio * b) for a, b in zip(one[1], other[1], strict=False)) > 0.02 * top:
            return None
        ratios.append(ratio)
    if not ratios or max(ratios) / min(ratios) > 1.03:
        return None
    return sum(ratios) / len(ratios)


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else (word[-1] in 'xsh' and 'es') or 's'}"


# ---------------------------------------------------------------- how the run ended


def ending(run: Run) -> list[Finding]:
    """Hangs, floods, endless loops and crashes."""
    if run.flooded:
        return [Finding("output-flood", "it printed more than 20 MB, and was stopped")]
    if run.hung:
        return [_hang(run)]
    return crash(run)


def _stands(process: Process) -> tuple[str, str]:
    """Where a process stands: the line of the program, and the call it is in."""
    place, call = "", ""
    for line in process.stack.splitlines():
        found = re.match(r'\s*File "(.+)", line (\d+) in (.+)', line)
        if not found:
            continue
        path, number, function = found.groups()
        if "/workshop/check/" in path:
            continue
        if re.search(r"/(site-packages|torch|lib/python\d)", path) or path.startswith("<"):
            call = call or function
            if not place:
                call = function if function not in ("wrapper", "_fn", "__call__", "_call_impl") else call
        else:
            place = f"{path.rsplit('/', 1)[-1]}:{number}"
            break
    return place, call


def _hang(run: Run) -> Finding:
    places, where = [], ""
    alive = [process for process in run.processes if process.stack]
    ranked = [process for process in alive if process.rank is not None] or alive
    for number, process in enumerate(ranked):
        name = f"rank {process.rank}" if process.rank is not None else f"process {number}"
        place, call = _stands(process)
        where = where or place
        places.append(
            f"{name} {'waits' if run.hung != 'busy' else 'is'} in {call or 'its own code'} at {place or 'an unknown line'}"
        )
    ended = [process for process in run.ranks if not process.stack]
    places += [f"rank {process.rank} has ended" for process in ended if process.rank is not None]
    counts = {len(process.steps) for process in run.trained}
    if len(counts) > 1:
        places.append("they took " + " and ".join(str(len(process.steps)) for process in run.trained) + " steps")
    joining = [process for process in ranked if process.of("joining") and not process.of("joined")]
    if joining and len(joining) == len(ranked):
        asked = {(w["world_size"], w["MASTER_PORT"]) for process in joining for w in process.of("joining")}
        text = "; ".join(f"world size {size}, port {port}" for size, port in sorted(asked, key=str))
        places.append(f"no group came about: they asked for {text}")
    detail = "\n".join(f"rank {process.rank}:\n{process.stack[:3000]}" for process in ranked)
    kind = "hang" if run.hung in ("idle", "long") or (len(ranked) > 1 and run.hung != "busy") else "endless"
    if run.hung == "long":
        seen = f"it was not over after {run.seconds:.0f} s; " + "; ".join(places)
        kind = "endless"
    else:
        seen = ("it stands still: " if kind == "hang" else "it runs on without doing anything: ") + "; ".join(places)
    return Finding(kind, seen, where, detail)


EXPLAINED = (
    # what the message says, what it means
    ("Weights only load failed", "the snapshot holds other things than tensors, numbers, lists and dicts"),
    (
        "mark a variable ready only once",
        "a parameter takes part twice in one backward (checkpointing, or two forwards)",
    ),
    (
        "finished reduction in the prior iteration",
        "some parameters take no part in the loss, so DDP waits for their gradients",
    ),
    ("initialize the default process group twice", "init_process_group is called a second time in the same process"),
    ("Address already in use", "the port is taken, by this program itself or by another one"),
    ("EADDRINUSE", "the port is taken, by this program itself or by another one"),
    ("device_ids and output_device", "on the CPU, DDP takes no device_ids"),
    ("Default process group has not been initialized", "a collective is called before init_process_group"),
    ("invalid device ordinal", "there is no device with this number on this machine"),
    ("No NVIDIA driver", "the program names a kind of device that this machine has not"),
    ("Found no NVIDIA driver", "the program names a kind of device that this machine has not"),
    ("Torch not compiled with CUDA", "the program names a kind of device that this machine has not"),
    ("NCCL", "the backend nccl needs GPUs; get_default_backend_for_device chooses the right one"),
    ("writing outside of the run's folder", "the check lets nothing be written outside of the run's folder"),
)


# What a library says, the kind of finding that it is, and the same in the words of the exercises.
TRANSLATED = (
    (
        r"You set `devices=(\d+)` and `num_nodes=(\d+)` in Lightning.* match the world size \((\d+)\)",
        "wrong-group",
        r"the Trainer counts on \1 x \2 processes (devices x num_nodes), and \3 were started",
    ),
    (
        r"No `(training_step|configure_optimizers|train_dataloader)\(\)` method defined",
        "step-missing",
        r"the Trainer finds no \1()",
    ),
    (
        r"Tried to step (\d+) times. The specified number of total steps is (\d+)",
        "schedule-uneven",
        r"the schedule was made for \2 steps, and the run takes more",
    ),
)


def crash(run: Run) -> list[Finding]:
    """What ended the run with an error."""
    for process in run.processes:
        outside = process.of("outside")
        if outside:
            return [
                Finding(
                    "outside-write",
                    f"it writes to {outside[0]['path']}, outside of the folder that it runs in",
                    outside[0]["where"],
                )
            ]
    found = run.first_exception()
    if found:
        process, what = found
        for sign, kind, seen in TRANSLATED:
            if match := re.search(sign, what["message"]):
                return [Finding(kind, match.expand(seen), what["where"], what["traceback"])]
        who = f"rank {process.rank}: " if process.rank is not None and run.nproc > 1 else ""
        meaning = next((f" ({text})" for sign, text in EXPLAINED if sign in what["message"]), "")
        message = what["message"][:300] + ("..." if len(what["message"]) > 300 else "")
        return [Finding("crash", f"{who}{what['type']}: {message}{meaning}", what["where"], what["traceback"])]
    exits = [(process, what) for process in run.processes for what in process.of("exit") if what["status"] != 0]
    if exits:
        process, what = exits[0]
        said = process.stderr.strip().splitlines()
        return [
            Finding("crash", f"it ends with exit status {what['status']}" + (f": {said[-1][:300]}" if said else ""))
        ]
    if run.status not in (0, None):
        silent = [process for process in run.processes if not process.of("end")]
        who = f"rank {silent[0].rank}" if silent and silent[0].rank is not None else "a process"
        said = (silent[0].stderr.strip().splitlines() or [""])[-1][:300] if silent else ""
        return [
            Finding("crash", f"{who} died without a traceback (status {run.status})" + (f": {said}" if said else ""))
        ]
    return []


# ---------------------------------------------------------------- the group


def group(run: Run) -> list[Finding]:
    """Whether all processes are in one group of the right size."""
    if run.nproc == 1:
        return []
    joined = [process for process in run.processes if process.rank is not None]
    trained = [process for process in run.processes if process.of("backward")]
    if not joined:
        if len(trained) > 1:
            return [Finding("no-group", f"{len(trained)} processes train, and none has joined a process group")]
        attempts = [what for process in run.processes for what in process.of("joining")]
        if attempts:
            return []  # it failed or hangs there: that is said elsewhere
        where = _loader_where(trained[0]) if trained else ""
        return [
            Finding(
                "no-group",
                "one process trains, in no process group" if trained else "no process has joined a process group",
                where,
            )
        ]
    if len(joined) > run.nproc:
        parents = {process.events[0][2]["parent"] for process in joined} & {process.pid for process in run.processes}
        text = (
            f"; {_plural(len(parents), 'process')} of those that were started started them"
            if run.launch == "torchrun" and parents
            else ""
        )
        return [
            Finding(
                "wrong-group",
                f"{len(joined)} processes have joined a group, and {run.nproc} were to{text}",
                joined[0].of("joined")[-1]["where"],
            )
        ]
    sizes = {process.of("joined")[-1]["world_size"] for process in joined}
    where = joined[0].of("joined")[-1]["where"]
    if sizes != {run.nproc}:
        size = min(sizes)
        return [
            Finding("wrong-group", f"the group has {_plural(size, 'process')} where {run.nproc} were started", where)
        ]
    for process in joined:
        given = process.events[0][2].get("RANK")
        if run.launch == "torchrun" and given is not None and int(given) != process.rank:
            return [
                Finding(
                    "wrong-group",
                    f"the process that torchrun calls rank {given} has joined as rank {process.rank}",
                    where,
                )
            ]
    return []


def address(run: Run) -> list[Finding]:
    """Whether the address that torchrun set was left alone."""
    for process in run.processes:
        for what in process.of("joining"):
            given = what["given"]
            if run.launch == "torchrun" and given["MASTER_PORT"] and what["MASTER_PORT"] != given["MASTER_PORT"]:
                return [
                    Finding(
                        "address-overwritten",
                        f"MASTER_PORT was {given['MASTER_PORT']} and is {what['MASTER_PORT']} at init_process_group",
                        what["where"],
                    )
                ]
            here = ("127.0.0.1", "localhost", "::1")
            if run.launch == "torchrun" and given["MASTER_ADDR"] and what["MASTER_ADDR"] != given["MASTER_ADDR"]:
                literal = "on another machine that would be the wrong one" if what["MASTER_ADDR"] in here else ""
                seen = (
                    f"MASTER_ADDR was {given['MASTER_ADDR']} and is {what['MASTER_ADDR']} "
                    f"at init_process_group {literal}"
                )
                return [Finding("address-overwritten", seen.strip(), what["where"])]
    return []


def trainer(run: Run) -> list[Finding]:
    """Whether Lightning's Trainer takes the steps."""
    steps = [step for process in run.processes for step in process.steps]
    if any(step.before["fitting"] for step in steps):
        return []
    fits = [what for process in run.processes for what in process.of("fit")]
    if steps:
        return [
            Finding(
                "trainer-idle",
                "the steps are taken by a loop of the program, and not by a Trainer",
                steps[0].before["where"],
            )
        ]
    return [] if fits else [Finding("trainer-idle", "Trainer.fit() is never called")]


def images(run: Run, channels: int, size: int) -> list[Finding]:
    """Whether a model for images of this shape is given them, and keeps their pixels for its first layers."""
    for process in run.trained[:1]:
        step = process.steps[0]
        forward = step.backwards[0]["forward"] if step.backwards else None
        shape, convolved = forward and forward["shape"], step.after.get("convolved", [])
        if shape != (channels, size, size):
            seen = " x ".join(map(str, shape or ()))
            return [
                Finding(
                    "wrong-images",
                    f"the model is given images of {seen}, not {channels} x {size} x {size}",
                    _loader_where(process),
                )
            ]
        if convolved.count((size, size)) < 3:
            later = convolved[min(1, len(convolved) - 1)] if convolved else (0, 0)
            seen = f"of {size} x {size} pixels the first block puts out {later[0]} x {later[1]}"
            return [Finding("stem-shrinks", seen, _loader_where(process))]
    return []


def cycle(run: Run) -> list[Finding]:
    """Whether the learning rate rises and falls once, over all steps of the run."""
    for process in run.trained[:1]:
        rates = [step.before["rates"][0] for step in process.steps]
        shown = ", ".join(f"{rate:.1e}" for rate in rates[:8]) + (", ..." if len(rates) > 8 else "")
        where = process.steps[0].before["where"]
        if len(set(rates)) == 1:
            return [
                Finding(
                    "schedule-flat", f"the learning rate is {rates[0]:.1e} at all {_plural(len(rates), 'step')}", where
                )
            ]
        if len(set(rates)) < len(rates):
            return [Finding("schedule-uneven", f"the learning rate does not move with each step: {shown}", where)]
        top = rates.index(max(rates))
        once = rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
        if not once or rates[-1] > 0.05 * rates[top]:
            return [
                Finding("schedule-uneven", f"the learning rate does not come down by the last step: {shown}", where)
            ]
    return []


def monitoring(run: Run) -> list[Finding]:
    """Whether a Lightning run keeps its best checkpoint, ends when it learns no more, and logs its learning rate."""
    found = []
    saves = [what for process in run.processes for what in process.of("save") if what["path"] and what.get("whole")]
    last = {what["path"]: what["accuracy"] for what in saves}  # what each file holds in the end
    seen = [what["accuracy"] for what in saves if what["accuracy"] is not None]
    where = saves[0]["where"] if saves else ""
    if len(last) < 2:
        found.append(
            Finding("best-lost", "one checkpoint is kept, the last: if the accuracy falls, the best is gone", where)
        )
    elif seen and max(seen) not in last.values():
        kept = ", ".join(f"{value:.1%}" for value in last.values() if value is not None)
        found.append(
            Finding("best-lost", f"the best accuracy was {max(seen):.1%}; the checkpoints kept have {kept}", where)
        )
    watched = [what for process in run.ranks[:1] for what in process.of("watched")]
    for monitor, mode in (rule for what in watched for rule in what["best"]):
        if "acc" in monitor and mode == "min" and not found:
            found.append(Finding("best-lost", f"it keeps the checkpoint with the lowest {monitor}", where))
    rules = [rule for what in watched for rule in what["stop"]]
    if not rules:
        found.append(Finding("never-stops", "nothing ends the training when the accuracy rises no more", where))
    for monitor, mode in rules:
        if "acc" in monitor and mode == "min":
            found.append(Finding("stops-too-early", f"it stops when {monitor} no longer falls", where))
    names = {name for process in run.ranks[:1] for what in process.of("logged") for name in what["names"]}
    if not any("lr" in name.lower() or "learning" in name.lower() for name in names):
        what = (
            "nothing reaches a logger"
            if not names
            else f"the logger gets {', '.join(sorted(names)[:4])}, and no learning rate"
        )
        found.append(Finding("not-logged", what, where))
    return found


def nodes(run: Run) -> list[Finding]:
    """Whether a run over two machines, of the options of which one says so, came about."""
    wrong = [*ending(run), *group(run)]
    if not wrong and not run.trained:
        return [Finding("nodes-ignored", "on 2 nodes of 2 processes it takes no step")]
    return [
        Finding("nodes-ignored", f"on 2 nodes of 2 processes: {each.seen}", each.where, each.detail)
        for each in wrong[:1]
    ]


def loss_scale(run: Run, single: Run) -> list[Finding]:
    """Whether the losses of a step add up to that of one process on the same samples, as near as BatchNorm lets them.

    Args:
        run: N processes.
        single: one process, with N (and where it accumulates, as many more) times the batch.
    """
    if not run.trained or not single.trained:
        return []
    step = run.trained[0].steps[0]
    ours, theirs = (
        sum(backward["loss"] or 0 for backward in one.backwards) for one in (step, single.trained[0].steps[0])
    )
    if not theirs or abs(ours / theirs - 1) < 0.25:
        return []
    kind = "accumulation-scale" if run.accumulate > 1 else "gradient-scale"
    seen = f"backward() gets {ours / theirs:.2f} times the loss that one process has on the same samples, in step 1"
    return [Finding(kind, seen, step.before["where"])]


def has_batchnorm(run: Run) -> bool:
    """Whether a layer normalizes with the batch of its process: then two processes rightly compute otherwise than one."""
    return any(step.after.get("batchnorm") for process in run.trained for step in process.steps)


def ports(run: Run, other: Run) -> list[Finding]:
    """Whether two runs met at the same port."""

    def used(one):
        found = {}
        for process in one.processes:
            for what in process.of("store"):
                if what["master"] and what["port"]:
                    found[str(what["port"])] = ""
            for what in process.of("joining"):
                url = re.search(r"tcp://.*:(\d+)", what["init_method"])
                if url:
                    found[url[1]] = what["where"]
                elif one.launch != "torchrun" and what["MASTER_PORT"]:
                    found[what["MASTER_PORT"]] = what["where"]
        return found

    first, second = used(run), used(other)
    both = first.keys() & second.keys()
    if both:
        port = sorted(both)[0]
        return [Finding("port-fixed", f"every run meets at port {port}", first[port])]
    return []


# ---------------------------------------------------------------- collectives and steps


def collectives(run: Run) -> list[Finding]:
    """Whether all ranks make the same collective calls, and the same number of steps."""
    ranks = run.ranks
    if len(ranks) < 2 or any(process.of("join") for process in ranks):
        return []
    calls = [process.of("collective") for process in ranks]
    ordered = [[call for call in each if call["name"] not in ("send", "recv", "isend", "irecv")] for each in calls]
    steps = [len(process.steps) for process in ranks]
    backwards = [sum(1 for what in process.of("backward") if what["sync"] is not False) for process in ranks]
    if len(set(steps)) > 1 or len(set(backwards)) > 1:
        counts, word = (steps, "steps") if len(set(steps)) > 1 else (backwards, "backwards")
        text = ", ".join(f"rank {process.rank} {count}" for process, count in zip(ranks, counts, strict=True))
        shorter = ranks[counts.index(min(counts))]
        if any(process.of("wrapped") for process in ranks) or any(map(len, ordered)):
            return [
                Finding(
                    "collectives-differ", f"the ranks take different numbers of {word}: {text}", _last_where(shorter)
                )
            ]
    for index, together in enumerate(zip(*ordered, strict=False)):
        names = [(call["name"], call["shape"] if call["name"] != "all_gather" else None) for call in together]
        if len(set(names)) > 1:
            text = ", ".join(
                f"rank {process.rank} calls {call['name']}"
                f"{'' if call['shape'] is None else list(call['shape'])} at {call['where']}"
                for process, call in zip(ranks, together, strict=True)
            )
            return [Finding("collectives-differ", f"collective {index + 1}: {text}", together[0]["where"])]
    lengths = [len(each) for each in ordered]
    if len(set(lengths)) > 1:
        longer = max(range(len(ranks)), key=lengths.__getitem__)
        extra = ordered[longer][min(lengths)]
        return [Finding("collectives-differ", f"only rank {ranks[longer].rank} calls {extra['name']}", extra["where"])]
    return []


def _last_where(process: Process) -> str:
    for _, _, what in reversed(process.events):
        if what.get("where"):
            return what["where"]
    return ""


# ---------------------------------------------------------------- gradients and weights


def gradients(run: Run) -> list[Finding]:
    """Whether the ranks hold the same gradients at each step, and the same weights."""
    ranks = run.trained
    if len(ranks) < 2:
        return []
    base = ranks[0]
    joined = any(process.of("join") for process in ranks)
    for process in ranks[1:]:
        for index, (one, other) in enumerate(zip(base.steps, process.steps, strict=False)):
            names = one.before["names"]
            if index == 0 and difference(one.before["weights"], other.before["weights"]) > CLOSE:
                if difference(one.before["gradients"], other.before["gradients"]) > CLOSE:
                    return [_unequal_gradients(run, base, process, index, start=True)]
                which = _names(different_names(one.before["weights"], other.before["weights"], names))
                return [
                    Finding("weights-differ", f"the ranks begin with different weights ({which})", one.before["where"])
                ]
            if difference(one.before["gradients"], other.before["gradients"]) > CLOSE and not joined:
                return [_unequal_gradients(run, base, process, index)]
            after, others = one.after.get("weights"), other.after.get("weights")
            if after and others and difference(after, others) > CLOSE and not joined:
                which = _names(different_names(after, others, names))
                rates = (
                    ""
                    if one.before["rates"] == other.before["rates"]
                    else f"; their learning rates are {one.before['rates']} and {other.before['rates']}"
                )
                return [
                    Finding(
                        "weights-differ",
                        f"the gradients agree, and after step {index + 1} the weights do not ({which}){rates}",
                        one.before["where"],
                    )
                ]
    if not base.of("wrapped") and not _averages_by_hand(base) and _same_inputs(ranks):
        seen = "the gradients agree only because all ranks train on the same samples: nothing averages them"
        return [Finding("gradients-differ", seen, base.steps[0].before["where"])]
    return []


def _same_inputs(ranks: list[Process]) -> bool:
    """Whether all ranks gave their models the same at each step."""
    together = list(zip(*(process.steps for process in ranks), strict=False))
    return bool(together) and all(step.rows and step.rows == steps[0].rows for steps in together for step in steps)


def _unequal_gradients(run: Run, base: Process, other: Process, index: int, start: bool = False) -> Finding:
    one, two = base.steps[index], other.steps[index]
    names = one.before["names"]
    which = different_names(one.before["gradients"], two.before["gradients"], names)
    some = len(which) < len(names)
    lead = f"before step {index + 1} the ranks hold different gradients" + (f" for {_names(which)}" if some else "")
    where = one.before["where"]
    wrapped = base.of("wrapped")
    backwards = one.backwards
    if start:
        lead += ", and they began with different weights"
    if not wrapped:
        averaged = _averages_by_hand(base)
        reason = (
            "nothing averages all of them"
            if averaged
            else "nothing averages them: the model is in no DistributedDataParallel"
        )
    elif backwards and backwards[-1]["forward"] and not backwards[-1]["forward"]["wrapped"]:
        where = backwards[-1]["forward"]["where"]
        reason = "the forward goes past DistributedDataParallel, to the model inside or kept beside it"
    elif backwards and backwards[-1]["sync"] is False:
        where = backwards[-1]["where"]
        reason = "the last backward before the step is under no_sync()"
    elif not backwards or len(backwards) != len(two.backwards):
        reason = f"this step belongs to {len(backwards)} backwards on one rank and {len(two.backwards)} on the other"
    else:
        reason = "something changes them on one rank after backward, or they travelled before they were complete"
    return Finding("gradients-differ", f"{lead}; {reason}", where)


def _averages_by_hand(process: Process) -> bool:
    """Whether a collective is called between a backward and its step."""
    after_backward = False
    for _, kind, _ in process.events:
        if kind == "collective" and after_backward:
            return True
        after_backward = kind == "backward" or (after_backward and kind != "step")
    return False


def learning(run: Run) -> list[Finding]:
    """Whether the steps move the model's weights, along fresh gradients, and the loss falls."""
    found = []
    for process in run.trained[:1]:
        steps = process.steps
        where = steps[0].before["where"]
        if not all(step.before["of_model"] for step in steps):
            found.append(
                Finding("wrong-parameters", "the optimizer holds none of the weights that the forward uses", where)
            )
            continue
        flat = [all(g is None or g[0] == 0 for g in step.before["gradients"]) for step in steps]
        if all(flat):
            none = all(g is None for step in steps for g in step.before["gradients"])
            text = "there is no gradient at any step" if none else "the gradient is zero at every step"
            losses = [backward["loss"] for step in steps for backward in step.backwards if backward["loss"] is not None]
            if losses and max(losses) == min(losses):
                text += f"; the loss is {losses[0]:.4f} every time"
            found.append(Finding("no-learning", text, where))
            continue
        last = steps[-1].after.get("weights") or steps[-1].before["weights"]
        if difference(steps[0].before["weights"], last) == 0:
            found.append(
                Finding("no-learning", f"after {_plural(len(steps), 'step')} the weights are what they were", where)
            )
            continue
        piled = [step for step in steps[1:] if step.backwards and step.backwards[0]["leftover"]]
        if len(piled) > len(steps) // 3:
            found.append(
                Finding(
                    "gradients-pile-up",
                    "when a step's first backward begins, the gradients of the step before are still there",
                    piled[0].backwards[0]["where"],
                )
            )
        sizes = [what["nodes"] for what in process.of("graphs")]
        if len(sizes) == 2 and sizes[1] >= 1.6 * sizes[0] and sizes[1] - sizes[0] >= 12:
            seen = (
                f"somebody holds a tensor whose graph has {sizes[0]} nodes at step 4 and {sizes[1]} at step 7: "
                "losses that were kept or added up without detach() or item()"
            )
            found.append(Finding("graph-kept", seen, where))
    return found


def falls(run: Run) -> list[Finding]:
    """Whether the loss is anything but finite, constant or rising: the few steps of a check cannot show more."""
    for process in run.trained[:1]:
        losses = [backward["loss"] for backward in process.of("backward") if backward["loss"] is not None]
        third = max(1, len(losses) // 3)
        if len(losses) < 6:
            return []
        first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
        if not math.isfinite(last) or last > first + 0.1 * abs(first) or max(losses) == min(losses):
            seen = f"the loss goes from {first:.3f} to {last:.3f} over {_plural(len(process.steps), 'step')}"
            return [Finding("no-learning", seen, process.of("backward")[0]["where"])]
    return []


def accumulation(run: Run, expected: int | None = None) -> list[Finding]:
    """Whether each step belongs to the same number of batches, and the gradients travel once a step."""
    for process in run.trained[:1]:
        sizes = [len(step.backwards) for step in process.steps]
        where = process.steps[0].before["where"]
        wanted = expected or Counter(sizes).most_common(1)[0][0]
        if expected and expected > 1 and set(sizes) == {1}:
            return [
                Finding(
                    "accumulation-uneven", f"each step belongs to one batch, where {expected} were asked for", where
                )
            ]
        odd = [(number, size) for number, size in enumerate(sizes, 1) if size != wanted]
        if odd:
            shown = ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")
            asked = f" ({expected} were asked for)" if expected else ""
            return [Finding("accumulation-uneven", f"batches per step: {shown}{asked}", where)]
        thrown = [backward for step in process.steps for backward in step.backwards[1:] if not backward["leftover"]]
        if wanted > 1 and len(thrown) > len(process.steps) // 2:
            return [
                Finding(
                    "accumulation-uneven",
                    "the gradients of all batches of a step but the last are thrown away before the step",
                    thrown[0]["where"],
                )
            ]
        if process.unstepped:
            return [
                Finding(
                    "accumulation-uneven", f"{_plural(process.unstepped, 'backward')} at the end no step follows", where
                )
            ]
        if wanted > 1 and run.nproc > 1:
            synced = [sum(1 for backward in step.backwards if backward["sync"]) for step in process.steps]
            if process.of("wrapped") and max(synced) > 1:
                return [
                    Finding(
                        "accumulation-traffic",
                        f"the gradients travel {max(synced)} times for a step of {wanted} batches",
                        process.steps[0].backwards[0]["where"],
                    )
                ]
    return []


# ---------------------------------------------------------------- samples


def shares(run: Run, whole: bool = True) -> list[Finding]:
    """Whether the ranks train on different samples, all of them, in a new order each epoch.

    Args:
        run: the run.
        whole: whether every sample of the data set is to be trained on (or evaluated) in an epoch.
    """
    ranks = run.trained
    divided = all(what["forward"] and what["forward"]["loader"] for process in ranks for what in process.of("backward"))
    if len(ranks) >= 2:
        for number, together in enumerate(zip(*(process.epochs for process in ranks if divided), strict=False), 1):
            found = _overlap(run, ranks, number, together)
            if found:
                return [found]
        found = _step_overlap(ranks)
        if found:
            return [found]
        for number, together in enumerate(zip(*(process.epochs for process in ranks), strict=False), 1):
            missed = _missed(run, ranks, together) if whole and not _stopped_early(run, ranks[0], number) else None
            if missed:
                return [Finding("samples-missed", f"in epoch {number} {missed}", _loader_where(ranks[0]))]
    for process in ranks[:1]:
        epochs = process.epochs
        if len(epochs) > 1 and len(epochs[0]) > 8 and epochs[0] == epochs[1] and len(set(epochs[0])) > 1:
            calls = [what["epoch"] for what in process.of("set_epoch")]
            extra = (
                f"; set_epoch was called with {calls}"
                if calls
                else "; set_epoch was never called"
                if run.nproc > 1
                else ""
            )
            return [
                Finding(
                    "same-order",
                    f"epoch 2 brings the same samples in the same order as epoch 1{extra}",
                    _loader_where(process),
                )
            ]
    return []


def _loader_where(process: Process) -> str:
    backward = next(iter(process.of("backward")), None)
    return backward["forward"]["where"] if backward and backward["forward"] else ""


def _overlap(run, ranks, number, together) -> Finding | None:
    sets = [set(keys) for keys in together]
    if min(map(len, sets)) < 4:
        return None
    where = _loader_where(ranks[0])
    for one, other in itertools.combinations(range(len(sets)), 2):
        names = f"ranks {_number(ranks, one)} and {_number(ranks, other)}"
        both = len(sets[one] & sets[other])
        smaller = min(len(sets[one]), len(sets[other]))
        if both >= 0.95 * smaller:
            seen = f"{names} saw the same {both:,} samples in epoch {number}: the gradient is the same twice"
            return Finding("same-samples", seen, where)
        if both > run.nproc - 1 and both > 0.03 * smaller:
            seen = f"{names} share {both:,} of their {smaller:,} samples in epoch {number}"
            return Finding("shares-overlap", seen, where)
    return None


def _number(ranks, index) -> int:
    """The rank of a process; its place in the order of starting where there is no group."""
    return index if ranks[index].rank is None else ranks[index].rank


def _step_overlap(ranks) -> Finding | None:
    """The same samples at the same step: all that can be said where no loader divides the run into epochs."""
    for first, second in itertools.combinations(range(len(ranks)), 2):
        names = f"ranks {_number(ranks, first)} and {_number(ranks, second)}"
        fractions = []
        for one, other in zip(ranks[first].steps, ranks[second].steps, strict=False):
            if one.keys and other.keys:
                here, there = set(one.keys), set(other.keys)
                fractions.append(len(here & there) / min(len(here), len(there)))
        same = sum(fraction >= 0.95 for fraction in fractions)
        if fractions and same > len(fractions) / 2:
            seen = (
                f"at {same} of {len(fractions)} steps {names} train on the same samples: the gradient is the same twice"
            )
            return Finding("same-samples", seen, _loader_where(ranks[0]))
        if fractions and sum(fractions) / len(fractions) > 0.1:
            seen = f"at each step {names} share {sum(fractions) / len(fractions):.0%} of their samples"
            return Finding("shares-overlap", seen, _loader_where(ranks[0]))
    return None


def _stopped_early(run: Run, process: Process, number: int) -> bool:
    """Whether the program left an epoch's loader before its end, on purpose: then no sample was forgotten."""
    loaders = [
        what["forward"]["loader"] for what in process.of("backward") if what["forward"] and what["forward"]["loader"]
    ]
    order = list(dict.fromkeys(loaders))
    if number > len(order):
        return False
    here = order[number - 1]
    lengths = {(what["loader"], what["iteration"]): what["length"] for what in process.of("iterate")}
    return loaders.count(here) < (lengths.get(here) or 0) - run.accumulate


def _missed(run, ranks, together) -> str | None:
    trained = set().union(*together)
    numbered = {key for key in trained if key[0] != "content"}
    if not numbered or len(numbered) < len(trained):
        return None
    names = {key[:2] for key in numbered}
    if len(names) != 1:
        return None
    _, size = next(iter(names))
    evaluated = {key for process in ranks for phase in process.evaluations for key in phase if key[:2] in names}
    left = size - len(trained | evaluated)
    step = max(sum(len(process.steps[0].keys) for process in ranks), 1) * run.accumulate if ranks[0].steps else 1
    allowed = max(step, run.nproc) + run.nproc
    if left >= allowed:
        return f"{left:,} of {size:,} samples are seen by no rank"
    return None


def leak(run: Run) -> list[Finding]:
    """Whether samples are evaluated that some rank has trained on."""
    trained = {key for process in run.ranks for epoch in process.epochs for key in epoch}
    evaluated = [key for process in run.ranks for phase in process.evaluations for key in phase]
    both = trained & set(evaluated)
    if evaluated and len(both) > 0.02 * len(set(evaluated)):
        where = next((what["where"] for process in run.ranks for what in process.of("evaluated")), "")
        return [
            Finding(
                "leak",
                f"{len(both):,} of the {len(set(evaluated)):,} samples evaluated are trained on by some rank",
                where,
            )
        ]
    return []


# ---------------------------------------------------------------- evaluation and figures


def evaluation(run: Run) -> list[Finding]:
    """Whether each sample of the test set is evaluated once."""
    ranks = [process for process in run.ranks if process.evaluations]
    if not ranks:
        return []
    phases = list(zip(*(process.evaluations for process in ranks), strict=False))
    if not phases:
        return []
    keys = [key for part in phases[0] for key in part]
    counts = Counter(keys)
    where = ranks[0].of("evaluated")[0]["where"]
    names = {key[:2] for key in counts if key[0] != "content"}
    if len(names) == 1:
        _, size = next(iter(names))
        trained = {key for process in run.ranks for epoch in process.epochs for key in epoch if key[:2] in names}
        if len(counts) < size and not trained:
            return [
                Finding(
                    "evaluation-missed",
                    f"{size - len(counts):,} of the {size:,} test samples are evaluated by no rank",
                    where,
                )
            ]
    twice = sum(1 for count in counts.values() if count > 1)
    if twice and len(ranks) > 1 and twice == len(counts):
        return [
            Finding(
                "evaluation-repeated",
                f"each of the {twice:,} test samples is evaluated by {max(counts.values())} ranks",
                where,
            )
        ]
    if twice and len(ranks) > 1 and not _accuracy_is_exact(run):  # who cuts off what was added counts each sample once
        return [Finding("evaluation-repeated", f"{twice:,} of the {len(counts):,} test samples count twice", where)]
    return []


def _accuracy_is_exact(run: Run) -> bool:
    reports = [what for process in run.processes for what in process.of("report") if "accuracy" in what["truth"]]
    exact = (
        each["accuracy"] is not None and abs(each["accuracy"] - each["truth"]["accuracy"]) < 1e-6 for each in reports
    )
    return bool(reports) and all(exact)


def figures(run: Run) -> list[Finding]:
    """Whether the reported figures are those of all samples and all ranks."""
    reports = [what for process in run.processes for what in process.of("report")]
    if not reports:
        return []
    report, where = reports[0], reports[0]["where"]
    truth = report["truth"]
    if "accuracy" in truth:
        for each in reports:
            if (
                each["accuracy"] is not None
                and abs(each["accuracy"] - each["truth"].get("accuracy", each["accuracy"])) > 1e-6
            ):
                seen = (
                    f"the accuracy is reported as {each['accuracy']:.2%}; "
                    f"over all {truth['samples']:,} test samples it is {each['truth']['accuracy']:.2%}"
                )
                return [Finding("metric-wrong", seen, where)]
        for each in reports:
            for name, value in each["metrics"].items():
                true = each["truth"].get(name)
                if true is not None and abs(value - true) > 1e-4:
                    seen = (
                        f"the {name.replace('_', ' ')} is reported as {value:.4f}; "
                        f"over all {truth['samples']:,} test samples it is {true:.4f}"
                    )
                    return [Finding("metric-wrong", seen, where)]
    return _loss_figure(run, reports) or _throughput(run, reports)


def _loss_figure(run, reports) -> list[Finding]:
    ranks = run.trained
    true = []
    for together in zip(*(process.steps for process in ranks), strict=False):
        per_rank = [[b["loss"] for b in step.backwards if b["loss"] is not None] for step in together]
        if not all(per_rank):
            return []
        true.append(sum(map(sum, per_rank)) / len(per_rank))
    reported = [loss for each in reports for loss in each["losses"]]
    if not true or not reported or len(true) != len(reported):
        return []
    worst = max(range(len(true)), key=lambda i: abs(true[i] - reported[i]) / max(abs(true[i]), 1e-3))
    scale = run.accumulate
    fits = [
        all(abs(a * factor - b) <= 0.01 * max(abs(b), 0.02) for a, b in zip(true, reported, strict=True))
        for factor in {1, 1 / scale}  # who divides the gradients, and not the loss, reports its mean all the same
    ]
    if not any(fits):
        seen = (
            f"the loss of step {worst + 1} is reported as {reported[worst]:.4f}; "
            f"the mean over all ranks is {true[worst]:.4f}"
        )
        return [Finding("metric-wrong", seen, reports[0]["where"])]
    return []


def _throughput(run, reports) -> list[Finding]:
    ranks = run.trained
    if not ranks:
        return []
    base = ranks[0]
    starts = [seconds for seconds, kind, what in base.events if kind == "iterate"]
    epochs, current, loader = [], [], None
    for step in base.steps:
        forward = step.backwards[-1]["forward"] if step.backwards else None
        here = forward["loader"] if forward else None
        if current and here != loader:
            epochs.append(current)
            current = []
        loader = here
        current.append(step)
    epochs.append(current)
    ratios = []
    for report, steps in zip(reports, epochs, strict=False):
        begin = max((second for second in starts if second <= steps[0].seconds), default=None)
        if begin is None or len(steps) < 2:
            return []
        samples = sum(len(step.keys) for step in steps) * len(ranks)
        ratios.append(report["samples_per_second"] / (samples / (steps[-1].seconds - begin)))
    if ratios and (max(ratios) < 0.66 or min(ratios) > 1.6):
        middle = sorted(ratios)[len(ratios) // 2]
        hint = " (about one rank's)" if abs(middle - 1 / run.nproc) < 0.15 and run.nproc > 1 else ""
        return [
            Finding(
                "metric-wrong",
                f"the reported samples/s are {middle:.2f} times those of all {run.nproc} processes together{hint}",
                reports[0]["where"],
            )
        ]
    return []


def missing_metric(run: Run, name: str) -> list[Finding]:
    """Whether a metric ("accuracy", which every report has, or a further one) was reported at all."""
    reports = [what for process in run.processes for what in process.of("report")]
    if not any(each[name] is not None if name == "accuracy" else name in each["metrics"] for each in reports):
        where = reports[0]["where"] if reports else ""
        return [Finding("metric-wrong", f"no {name} is given to log.write()", where)]
    return []


def unjudged_figures(run: Run) -> str:
    """Why the figures that are reported cannot be compared with the true ones, or ""."""
    reports = [what for process in run.processes for what in process.of("report")]
    return reports[0]["truth"].get("failed", "") if reports else ""


# ---------------------------------------------------------------- files and output


def writers(run: Run) -> list[Finding]:
    """Whether a file has one writer."""
    by_path = {}
    for process in run.processes:
        for what in process.of("write"):
            by_path.setdefault(what["path"], {}).setdefault(process.pid, (process, what["where"]))
    for path, writing in by_path.items():
        processes = [process for process, _ in writing.values() if process.steps or process.rank is not None]
        if len(processes) > 1:
            ranks = " and ".join(
                str(process.rank if process.rank is not None else index) for index, process in enumerate(processes)
            )
            return [
                Finding(
                    "two-writers", f"ranks {ranks} write {path.rsplit('/', 1)[-1]}", next(iter(writing.values()))[1]
                )
            ]
    return []


def printing(run: Run) -> list[Finding]:
    """Whether one process prints what concerns all."""
    ranks = [process for process in run.ranks if process.stdout.strip()]
    if len(ranks) < 2:
        return []

    def patterns(process):
        lines = [line.strip() for line in process.stdout.splitlines()]
        own = [
            line for line in lines if line and not re.search(r"\brank\W{0,3}\d|^\W*\d+\W*[|:\]]", line, re.IGNORECASE)
        ]
        return {re.sub(r"[\d.,]+", "#", line) for line in own if re.search(r"\w", line)}

    both = patterns(ranks[0]) & patterns(ranks[1])
    if both:
        line = next(
            line.strip() for line in ranks[1].stdout.splitlines() if re.sub(r"[\d.,]+", "#", line.strip()) in both
        )
        return [
            Finding("several-print", f'rank {ranks[1].rank} prints what rank {ranks[0].rank} prints too: "{line[:70]}"')
        ]
    return []


def snapshots(run: Run, epochs: int | None) -> list[Finding]:
    """Whether the run leaves snapshots as it goes, each whole.

    Args:
        run: the run.
        epochs: how many epochs it had, each to end with a snapshot; None: not known.
    """
    saves = [(process, what) for process in run.processes for what in process.of("save") if what["path"]]
    if not saves:
        return [Finding("no-snapshot", "nothing was saved")] if epochs else []
    moved = {what["source"] for process in run.processes for what in process.of("rename")}
    counts = Counter((process.pid, what["path"]) for process, what in saves)
    for process, what in saves:
        in_folder = any(
            what["path"].startswith(source + "/") for source in moved
        )  # that got its name when it was whole
        if (
            not what.get("whole")
            and what["path"] not in moved
            and not in_folder
            and counts[process.pid, what["path"]] > 1
        ):
            return [
                Finding(
                    "snapshot-torn",
                    f"{what['path'].rsplit('/', 1)[-1]} is written in place: whoever dies meanwhile leaves half of it",
                    what["where"],
                )
            ]
    if epochs and epochs > 1:
        steps = {
            len([s for s in process.steps if s.seconds <= seconds])
            for process in run.processes
            for seconds, kind, _ in process.events
            if kind == "save"
        }
        total = max((len(process.steps) for process in run.processes), default=0)
        if not any(0 < count < total for count in steps):
            return [
                Finding(
                    "no-snapshot",
                    f"the first snapshot comes at the end, after all {_plural(total, 'step')}",
                    saves[0][1]["where"],
                )
            ]
    return []


def saved_before_the_end(run: Run) -> bool:
    """Whether steps follow the first snapshot."""
    saves = [seconds for process in run.processes for seconds, kind, _ in process.events if kind == "save"]
    return bool(saves) and any(step.seconds > min(saves) for process in run.trained for step in process.steps)


def prefixed(run: Run) -> str:
    """The line that saved a snapshot whose keys begin with "module.", or ""."""
    for process in run.processes:
        for what in process.of("save"):
            if what["keys"] and all(key.startswith("module.") for key in what["keys"]):
                return what["where"] or "?"
    return ""


# ---------------------------------------------------------------- two runs


def resumed(whole: Run, first: Run, second: Run) -> list[Finding]:
    """Whether a run of two parts equals one without a break.

    Args:
        whole: all epochs at once.
        first, second: the first epochs, and the rest from their snapshot.
    """
    keys = prefixed(first)
    problems = ending(second)
    failed = second.first_exception()
    if second.trained and failed and is_echo(failed[1]):
        parts = [f"rank {process.rank} {_plural(len(process.steps), 'step')}" for process in second.trained]
        load = next((what["where"] for process in second.processes for what in process.of("load")), "")
        return [
            Finding(
                "collectives-differ",
                f"after the second start the ranks go different ways ({', '.join(parts)}), and one loses the other",
                load,
            )
        ]
    if problems and not second.trained:
        problem = problems[0]
        if keys:
            return [
                Finding(
                    "snapshot-keys",
                    'the weights are saved under names that begin with "module.", and the second start fails: '
                    + problem.seen,
                    keys.strip("?"),
                    problem.detail,
                )
            ]
        return [Finding("resume-fails", f"the second start fails: {problem.seen}", problem.where, problem.detail)]
    if not whole.trained or not first.trained:
        return []
    a, b = whole.trained[0], first.trained[0]
    c = second.trained[0] if second.trained else None
    total, done, rest = len(a.steps), len(b.steps), len(c.steps) if c else 0
    load = next((what["where"] for process in second.processes for what in process.of("load")), "")
    if not c:
        return [Finding("epoch-skipped", f"the second start takes no step, where {total - done} are left", load)]
    had = [step.before["weights"] for step in b.steps] + [b.steps[-1].after.get("weights", [])]
    carried_on = min(difference(c.steps[0].before["weights"], weights) for weights in had[1:]) < 1e-6
    reproducible = _reproducible(a, b)
    fresh = difference(c.steps[0].before["weights"], a.steps[0].before["weights"]) < 1e-7 or not (
        reproducible or carried_on
    )
    if fresh and rest >= total:
        return [
            Finding(
                "never-resumes",
                f"the second start begins with fresh weights and takes all {rest} steps again",
                load or c.steps[0].before["where"],
            )
        ]
    starts = {process.rank: process.steps[0].before["weights"] for process in second.trained}
    if any(difference(next(iter(starts.values())), weights) > CLOSE for weights in starts.values()):
        return [Finding("weights-differ", "after the second start the ranks begin with different weights", load)]
    counts = {len(process.steps) for process in second.trained}
    if len(counts) > 1 and not any(process.of("join") for process in second.trained):
        return [
            Finding(
                "collectives-differ",
                f"after the second start the ranks take {' and '.join(map(str, sorted(counts)))} steps",
                load,
            )
        ]
    if rest > total - done:
        return [
            Finding("epoch-repeated", f"{done} + {rest} steps in two parts, {total} in one: work is done twice", load)
        ]
    if rest < total - done:
        return [Finding("epoch-skipped", f"{done} + {rest} steps in two parts, {total} in one: work is left out", load)]
    if problems:
        return [
            Finding(
                "resume-fails", f"the second start ends with: {problems[0].seen}", problems[0].where, problems[0].detail
            )
        ]
    if not reproducible:  # unseeded: no two runs are alike, and only what the first run had says what to expect
        if not carried_on:
            return [
                Finding("resume-differs", "the second start begins with weights that the first run never had", load)
            ]
        if c.steps[0].before["state"] == 0 and b.steps[-1].before["state"] > 0:
            return [_optimizer_empty(load)]
        return []
    there = a.steps[done]
    if set(c.steps[0].keys) != set(there.keys) and c.steps[0].keys and set(c.steps[0].keys) == set(a.steps[0].keys):
        return [
            Finding("resume-differs", "the second start takes the samples in the order of the first epoch again", load)
        ]
    if difference(c.steps[0].before["weights"], there.before["weights"]) > 1e-6:
        return [Finding("resume-differs", "the second start begins with other weights than the first ended with", load)]
    if c.steps[0].before["state"] == 0 and there.before["state"] > 0:
        return [_optimizer_empty(load)]
    if c.steps[0].before["rates"] != there.before["rates"]:
        pair = ", ".join(f"{rates[0]:.3g}" for rates in (there.before["rates"], c.steps[0].before["rates"]))
        return [Finding("schedule-lost", f"the learning rate without a break and after it: {pair}", load)]
    if _draws(a) and _random(c.steps[0]) != _random(there):
        seen = "the steps draw random numbers, and after the second start others than in a run without a break"
        return [Finding("random-lost", seen, load)]
    end, other = a.steps[-1].after.get("weights"), c.steps[-1].after.get("weights")
    if end and other and difference(end, other) > 1e-6:
        if set(c.steps[0].keys) != set(there.keys):
            text = "the second start trains on other samples than a run without a break"
        elif difference(c.steps[0].after.get("weights", []), there.after.get("weights", [])) > 1e-6:
            seen = (
                "from the same weights and samples, the first step after the second start goes another way: "
                "the optimizer's state is another"
            )
            return [Finding("optimizer-lost", seen, load)]
        else:
            text = "the weights at the end differ from those of a run without a break"
        return [Finding("resume-differs", text, load)]
    return []


def _optimizer_empty(load: str) -> Finding:
    return Finding("optimizer-lost", "the optimizer's state is empty at the first step after the second start", load)


def _reproducible(one: Process, other: Process) -> bool:
    """Whether two runs, as far as both go, hold the same weights before each step and take the same samples."""
    return all(
        first.keys == second.keys and difference(first.before["weights"], second.before["weights"]) < 1e-6
        for first, second in zip(one.steps, other.steps, strict=False)
    )


def one_process(run: Run, single: Run) -> list[Finding]:
    """Whether N processes compute what one process computes on the same global batches.

    Nothing where the batches differ, or the steps draw random numbers: each process has its own.

    Args:
        run: N processes.
        single: one process, with N (and where it accumulates, as many more) times the batch.
    """
    if not run.trained or not single.trained or any(_draws(process) for process in run.trained):
        return []
    base, other = run.trained, single.trained[0]
    steps = min(len(base[0].steps), len(other.steps))
    for index in range(steps):
        here = Counter(row for process in base if index < len(process.steps) for row in process.steps[index].rows)
        there = Counter(other.steps[index].rows)
        if not here or here != there:
            return []
        one, two = base[0].steps[index].before, other.steps[index].before
        if index == 0 and difference(one["weights"], two["weights"]) > CLOSE:
            return []
        ratio = _ratio(one["gradients"], two["gradients"])
        if ratio is not None and abs(ratio - 1) > 0.03:
            accumulated = run.accumulate > 1 and abs(ratio - run.accumulate) < 0.1 * run.accumulate
            kind = "accumulation-scale" if accumulated else "gradient-scale"
            return [
                Finding(
                    kind,
                    f"the gradient of step {index + 1} is {ratio:.2f} times that of one process on the same samples",
                    one["where"],
                )
            ]
        if index == 0 and ratio is None and difference(one["gradients"], two["gradients"]) > 0.02:
            which = _names(different_names(one["gradients"], two["gradients"], one["names"]))
            return [
                Finding(
                    "differs-from-one-process",
                    f"on the same samples the gradient of step 1 is another than with one process ({which})",
                    one["where"],
                )
            ]
        rates = (one["rates"], two["rates"])
        if rates[0] != rates[1]:
            seen = (
                f"the learning rate is {rates[0]} with {run.nproc} processes and {rates[1]} with one, "
                "for the same global batch"
            )
            return [Finding("differs-from-one-process", seen, one["where"])]
        after = (base[0].steps[index].after.get("weights"), other.steps[index].after.get("weights"))
        if all(after) and difference(*after) > 0.05:
            return [
                Finding(
                    "differs-from-one-process",
                    f"on the same samples the weights after step {index + 1} are others than with one process",
                    one["where"],
                )
            ]
    return []


def devices(run: Run, nodes: int) -> list[Finding]:
    """Whether each process of two simulated machines asks for the device with its local number."""
    local = run.nproc // nodes
    for process in run.processes:
        environment = process.events[0][2]
        if environment.get("LOCAL_RANK") is None:
            continue
        for what in process.of("device"):
            if what["index"] is not None and what["index"] != int(environment["LOCAL_RANK"]):
                seen = (
                    f"on two machines of {local} devices, rank {environment['RANK']} (local rank {environment['LOCAL_RANK']}) "
                    f"asks for device {what['index']}"
                )
                return [Finding("device-index", seen, what["where"])]
    asked = [process for process in run.processes if process.of("device")]
    if run.processes and not asked:
        return [Finding("device-index", "with two devices a machine, no process asks for one: all take the first", "")]
    return []


# ---------------------------------------------------------------- one device


def waiting(run: Run) -> list[Finding]:
    """Whether each step asks the device for a value."""
    for process in run.trained[:1]:
        counts = [step.after["values"] for step in process.steps if "values" in step.after]
        per_step = sorted(b - a for a, b in itertools.pairwise(counts))
        if per_step and per_step[len(per_step) // 2] >= 1:
            where = process.steps[-1].after["value_at"]
            seen = (
                f"each step asks a tensor for its value ({per_step[len(per_step) // 2]} "
                f"time{'s' if per_step[len(per_step) // 2] > 1 else ''})"
            )
            return [Finding("host-sync", seen, where)]
    return []


def loading(run: Run) -> list[Finding]:
    """Whether samples are still prepared one by one when training has begun, or batches are waited for."""
    for process in run.trained[:1]:
        steps = process.steps
        again = steps[-1].after.get("prepared", 0) - steps[0].after.get("prepared", 0)
        trained = sum(len(step.keys) for step in steps[1:])
        if again > trained / 2:
            text = f"after the first step {again:,} samples were put through the transform again, one at a time"
            return [Finding("data-per-sample", text, _loader_where(process))]
        waits = [
            what["seconds"] for second, kind, what in process.events if kind == "batch" and steps[0].seconds <= second
        ]
        whole = steps[-1].seconds - steps[0].seconds
        if whole > 0 and sum(waits) > 0.3 * whole:
            text = f"{sum(waits) / whole:.0%} of the time between the first step and the last goes into waiting for batches"
            return [Finding("data-per-sample", text, _loader_where(process))]
    return []


def bf16_is_fast(run: Run) -> bool:
    """Whether the device that the program trained on is fast at bfloat16."""
    return any(step.after.get("bf16") for process in run.trained for step in process.steps)


def dtypes(run: Run) -> list[Finding]:
    """Whether the layers compute in a 16-bit type."""
    for process in run.trained[:1]:
        used = process.steps[-1].after.get("dtypes", [])
        if used and not {"torch.bfloat16", "torch.float16"} & set(used):
            return [
                Finding(
                    "precision",
                    f"the layers put out {', '.join(name.removeprefix('torch.') for name in used)}",
                    _loader_where(process),
                )
            ]
    return []


def told(run: Run) -> list[Finding]:
    """Whether the rank that was made to fail has written down why, for torchrun to show."""
    if run.first_exception() and 1 not in run.error_files:
        return [Finding("traceback-hidden", "rank 1 was made to fail, and left torchrun no word of why")]
    return []


# ---------------------------------------------------------------- matters of taste


def taste(run: Run) -> list[Finding]:
    """Hints."""
    found = []
    ranks = run.trained
    if len(ranks) > 1:
        lightning = any(process.of("fit") for process in ranks)  # it leaves a gloo group to the end of the process
        if not lightning and all(process.rank is not None and not process.of("destroyed") for process in ranks):
            found.append(Finding("not-destroyed", "the process group is never destroyed"))
        wasted = [
            process
            for process in ranks
            if len(process.of("batch")) > len(process.of("backward")) + len(process.of("evaluated")) + 1
        ]
        if wasted:
            count = len(wasted[0].of("batch")) - len(wasted[0].of("backward")) - len(wasted[0].of("evaluated"))
            found.append(Finding("batch-wasted", f"{_plural(count, 'batch')} loaded and not used"))
        if _same_random(ranks):
            seen = "random numbers are drawn in the steps, and at each step all ranks draw the same"
            found.append(Finding("same-random", seen, _loader_where(ranks[0])))
    return found


def _same_random(ranks: list[Process]) -> bool:
    """Whether the steps draw random numbers, on all ranks from the same state of the generator."""
    states = [[what["random"] for what in process.of("backward")] for process in ranks]
    return _draws(ranks[0]) and all(each == states[0] for each in states[1:])


def _random(step: Step) -> int | None:
    """What the random numbers of a step begin with."""
    return step.backwards[0]["random"] if step.backwards else None


def _draws(process: Process) -> bool:
    """Whether the steps draw from torch's default generator: dropout, augmentation."""
    states = [what["random"] for what in process.of("backward")]
    return len(states) > 2 and len(set(states)) > len(states) / 2  # an iteration over a loader draws too, once an epoch


# ---------------------------------------------------------------- together


def main_findings(run: Run, *, exercise: bool, expected_accumulation: int | None = None) -> list[Finding]:
    """All findings of one run, the one that explains the most first."""
    run.settle_identity()
    found = []
    final = ending(run)
    echo = final and run.first_exception() and is_echo(run.first_exception()[1])
    unequal = collectives(run)
    found += address(run)
    no_group = group(run)
    joined = any(process.rank is not None for process in run.processes)
    refused = final and not joined and "/lightning/" in final[0].detail  # Lightning says itself what it does not take
    explained = refused or (bool(final) and final[0].kind in {kind for _, kind, _ in TRANSLATED})
    if not explained and (not final or joined or (exercise and not run.hung and not run.flooded)):
        found += no_group  # otherwise how it ended says why there is no group
    if run.hung:
        # Which ranks wait where says more than that the numbers of steps differ.
        found += final
    elif echo:
        found += unequal + final
    else:
        found += final + ([] if final else unequal)
    if not run.trained:
        if not found:
            found.append(Finding("no-training", "the run ended well and took no step"))
        return found
    if no_group:
        return found + writers(run) + printing(run)
    shared = writers(run)
    if shared and any("No such file" in finding.seen for finding in final):
        found = [
            finding for finding in found if finding not in final
        ]  # two that write one file take it from each other
    found += shared + printing(run) + learning(run) + gradients(run) + leak(run) + shares(run, whole=exercise)
    found += accumulation(run, expected_accumulation)
    if not final:
        found += evaluation(run) if exercise else []
        found += [] if found else falls(run)
    found += taste(run)
    return found
