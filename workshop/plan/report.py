"""Print plans: the best ten, why the best is best, what one change would do, time, energy, failures, and the error."""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from workshop.plan.failures import RATE, Failures, expected
from workshop.plan.layout import Layout, misfit
from workshop.plan.search import Plan, Request, evaluate
from workshop.plan.validate import known_errors


def show(console: Console, plans: list[Plan], title: str, training: float, failures: Failures) -> None:
    """Print the best ten plans, and the details of the best.

    Args:
        console: where to print.
        plans: the fastest first.
        title: the model and the GPUs.
        training: tokens of the whole training; 0: not given.
        failures: how often it is interrupted, and writes a checkpoint.
    """
    best = plans[0]
    request = best.request
    console.print(f"{title}, {request.sequence_length:,} tokens per sequence, {request.sequences:,} sequences per step")
    console.print(_table(best_meshes(plans)[:10]))
    console.print(f"The best of {len(plans):,} layouts that fit: {describe(best.layout)}", soft_wrap=True)
    console.print(f"  it needs {memory_words(best)}", soft_wrap=True)
    console.print(f"  a step takes {best.times.step:.2f} s: {shares(best)}", soft_wrap=True)
    console.print(f"Why: {why(plans)}", soft_wrap=True)
    for line in changes(best):
        console.print(f"  {line}")
    if training:
        console.print(bill(best, training, failures))
    console.print(error_line(request))


def best_meshes(plans: list[Plan]) -> list[Plan]:
    """Return the best plan of each mesh and strategy, the fastest first."""
    found: dict[tuple, Plan] = {}
    for plan in plans:
        layout = plan.layout
        found.setdefault((layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.replicas), plan)
    return list(found.values())


def _table(plans: list[Plan]) -> Table:
    table = Table()
    for name in ("", "layout", "micro-batch", "recompute", "tokens/s per GPU", "MFU", "GB", "binds"):
        table.add_column(name, justify="left" if name in ("layout", "recompute", "binds") else "right")
    for number, plan in enumerate(plans, 1):
        layout = plan.layout
        table.add_row(
            str(number),
            layout.mesh() + (", fp8" if layout.fp8 else ""),
            f"{layout.mbs} x {layout.microbatches}",
            layout.recompute,
            f"{plan.tokens:,.0f}",
            f"{plan.mfu:.0%}",
            f"{plan.bytes.total / 1e9:.0f}",
            plan.times.binds,
        )
    return table


def describe(layout: Layout) -> str:
    """Return a layout in words."""
    words = [layout.mesh(), f"{layout.microbatches} micro-batch{'es' * (layout.microbatches > 1)} of {layout.mbs}"]
    words.append("no recomputation" if layout.recompute == "none" else f"recomputation: {layout.recompute}")
    words.append("float8" if layout.fp8 else "bfloat16")
    return ", ".join(words)


def memory_words(plan: Plan) -> str:
    """Return what takes the memory of a GPU, the largest part first."""
    parts = sorted(
        ((size, name) for name, size in vars(plan.bytes).items() if size > 5e8 and name != "peak"), reverse=True
    )
    words = ", ".join(f"{name} {size / 1e9:.0f}" for size, name in parts)
    return f"{plan.bytes.total / 1e9:.0f} of {plan.request.card.memory / 1e9:.0f} GB at the peak: at most {words}"


def shares(plan: Plan) -> str:
    """Return what a step is spent on, the largest part first."""
    parts = sorted(((seconds / plan.times.step, name) for name, seconds in vars(plan.times).items()), reverse=True)
    names = {"matmul": "matrix products", "traffic": "memory traffic", "p2p": "PP transfers", "bubble": "PP bubble"}
    names |= {"optimizer": "optimizer step", "tp": "TP", "cp": "CP", "ep": "EP", "dp": "DP"}
    return ", ".join(f"{names.get(name, name)} {share:.0%}" for share, name in parts if share >= 0.01)


def why(plans: list[Plan]) -> str:
    """Say what the best plan saves compared with the best one that has a different mesh."""
    best = plans[0]
    shape = lambda plan: (plan.layout.tp, plan.layout.pp, plan.layout.cp, plan.layout.zero)  # noqa: E731
    other = next((plan for plan in plans if shape(plan) != shape(best)), None)
    if other is None:
        return "no other mesh fits into the memory."
    batch = best.layout.global_batch / other.layout.global_batch
    saved = {name: getattr(other.times, name) * batch - getattr(best.times, name) for name in vars(best.times)}
    name = max(saved, key=lambda each: saved[each])
    words = {"matmul": "in matrix products", "traffic": "in memory traffic", "bubble": "in the bubble of the pipeline"}
    words |= {"tp": "in exposed TP exchanges", "dp": "in exposed DP exchanges", "p2p": "between stages"}
    where = words.get(name, f"in {name}")
    gain = best.tokens / other.tokens - 1
    return (
        f"it is {gain:.0%} faster than the best other mesh ({other.layout.mesh()}, {other.layout.recompute}), mostly because it "
        f"spends {saved[name]:.2f} s less per step {where}."
    )


def changes(best: Plan) -> list[str]:
    """Say what one change of the best plan would do."""
    layout, request = best.layout, best.request
    tried = {
        "twice the TP": _with_mesh(layout, tp=layout.tp * 2),
        "half the TP": _with_mesh(layout, tp=layout.tp // 2),
        "twice the stages": _with_mesh(layout, pp=layout.pp * 2),
        "twice the micro-batch": _with_batch(layout, layout.mbs * 2),
        "half the micro-batch": _with_batch(layout, layout.mbs // 2),
    }
    others = {"none": ["selective", "full"], "selective": ["none", "full"], "full": ["none", "selective"]}
    for kind in others.get(layout.recompute, []):
        tried[f"recompute {kind}"] = replace(layout, recompute=kind)
    if request.card.fp8 and not layout.fp8:
        tried["float8"] = replace(layout, fp8="tensorwise")
    lines = []
    for name, changed in tried.items():
        if changed is None or changed == layout or misfit(changed, request.model, request.sequence_length):
            continue
        plan = evaluate(request, changed)
        speed = f"{plan.tokens / best.tokens - 1:+.0%} tokens/s, {plan.bytes.total / 1e9:.0f} GB"
        lines.append(f"{name}: {speed}" + ("" if plan.fits else ", which does not fit"))
    return lines


def _with_mesh(layout: Layout, **sizes: int) -> Layout | None:
    """Return the same layout with another mesh on the same GPUs and the same global batch; None: there is none."""
    changed = replace(layout, **{name: max(1, size) for name, size in sizes.items()})
    rest = changed.tp * changed.pp * changed.cp
    if layout.gpus % rest or layout.global_batch % (layout.gpus // rest * layout.mbs):
        return None
    dp = layout.gpus // rest
    count = layout.global_batch // dp // layout.mbs
    if (layout.replicas > 1 and dp % layout.replicas) or dp % layout.ep:
        return None
    return replace(changed, dp=dp, microbatches=count)


def _with_batch(layout: Layout, mbs: int) -> Layout | None:
    mine = layout.global_batch // layout.dp
    return replace(layout, mbs=mbs, microbatches=mine // mbs) if mbs and mine % mbs == 0 else None


def bill(plan: Plan, training: float, failures: Failures) -> str:
    """Return days, GPU-hours, energy and interruptions for a number of tokens."""
    gpus, card = plan.layout.gpus, plan.request.card
    hours = training / (plan.tokens * gpus) / 3600
    costs = {"checkpoint": failures.checkpoint, "restart": failures.restart}
    lost = expected(gpus, hours, rate=failures.rate, interval=failures.interval, **costs)
    whole = hours + lost.hours
    energy = whole * gpus * card.power / 1e6
    known = " (Llama 3 had 466 in 54 days on 16,384 GPUs)" if failures.rate == RATE else ""
    best = "" if failures.interval else " (Young and Daly) loses the least time,"
    words = f"A checkpoint every {lost.interval / 60:,.0f} minutes{best or ' loses'} {lost.hours:,.1f} hours."
    return (
        f"{training:,.0f} tokens take {hours / 24:,.1f} days ({hours * gpus:,.0f} GPU-hours) without interruptions.\n"
        f"  Expect {lost.interruptions:,.1f} interruptions{known}.\n  {words}\n"
        f"  In total: {whole / 24:,.1f} days, {whole * gpus:,.0f} GPU-hours, and "
        f"{energy:,.1f} MWh for the GPUs at {card.power:,.0f} W. The goodput is {lost.goodput(hours):.0%}."
    )


def error_line(request: Request | None = None) -> str:
    """Return the error of predictions, which stands under each of them; with a request, also whether its card was tried."""
    errors = known_errors()
    kind = "experts" if request is not None and request.model.experts > 1 else "dense"
    if kind not in errors:
        return "The error of these predictions is unknown: run workshop plan --validate."
    found, memory = errors[kind], errors["dense"]
    words = f"{found['runs']} published runs of {found['projects']} project{'s' * (found['projects'] > 1)}"
    lines = (
        f"Error on {words}, each predicted without the runs of its own project: tokens/s median {found['median']:.0%},\n"
        f"  nine of ten below {found['nine_of_ten']:.0%}, largest {found['largest']:.0%}; memory median "
        f"{memory['memory_median']:.0%}, largest {memory['memory_largest']:.0%}."
    )
    if request is not None and not found["cards"].get(request.card.name):
        lines += f"\n  None of them ran on {request.card.name}: the error may be larger."
    return lines


def memory_error_line() -> str:
    """Return the error of the predicted memory, in a line of at most 90 characters."""
    found = known_errors().get("dense")
    if not found:
        return ""
    return (
        f"\nerror: on {found['memory_runs']} published runs, workshop plan is off by {found['memory_median']:.0%} (median), "
        f"{found['memory_largest']:.0%} (largest)."
    )
