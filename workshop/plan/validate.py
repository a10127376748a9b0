"""``workshop plan --validate``: predict every published run with constants that were fitted without its source."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

from workshop.plan.fit import fit, relative_error
from workshop.plan.memory import predict_bytes
from workshop.plan.published import GIVEN, Run
from workshop.plan.time import Constants, predict
from workshop.repository import ROOT

RESULT = ROOT / "results" / "plan-validation.json"


def validate(runs: list[Run], say: Callable[[str], None] = lambda line: None) -> list[dict]:
    """Return a row for each run: published and predicted values, and relative errors.

    Args:
        runs: the published runs; each project is held out in turn.
        say: is told which project is being held out.
    """
    dense = [run for run in runs if run.model.experts == 1]
    whole = fit(dense)
    rows = {}
    for group in dict.fromkeys(run.group for run in runs):
        say(group)
        constants = fit([run for run in dense if run.group != group], whole)
        for run in runs:
            if run.group == group:
                rows[id(run)] = _row(run, constants)
    found = [rows[id(run)] for run in runs]
    for number, row in enumerate(found):
        row["given"] = number < GIVEN
    return found


def predict_rows(runs: list[Run], constants: Constants) -> list[dict]:
    """Return the same rows for runs of another file, all predicted with these constants."""
    return [_row(run, constants) | {"given": False} for run in runs]


def _row(run: Run, constants: Constants) -> dict:
    layout = run.layout
    times = predict(run.model, layout, run.card, run.sequence_length, constants)
    held = predict_bytes(run.model, layout, run.sequence_length)
    memory = held.total if run.reserved else held.peak
    error = relative_error(run, constants)
    return {
        "source": run.source,
        "project": run.group,
        "model": run.name,
        "experts": run.model.experts,
        "card": run.card.name,
        "gpus": layout.gpus,
        "sequence_length": run.sequence_length,
        "mesh": layout.mesh(),
        "micro_batch": f"{layout.mbs} x {layout.microbatches}",
        "recompute": layout.recompute,
        "fp8": layout.fp8,
        "layout": repr(layout),
        "assumed": list(run.assumed),
        "published": round(run.tokens, 1),
        "predicted": round(run.tokens * (1 + error), 1),
        "error": round(error, 4),
        "binds": times.binds,
        "memory_published": run.memory,
        "memory_predicted": round(memory),
        "memory_error": round(memory / run.memory - 1, 4) if run.memory else None,
    }


def pairs(rows: Sequence[dict]) -> tuple[int, int]:
    """Return how many pairs of layouts are ranked as published, and how many there are.

    A pair has the same source, model, number and kind of GPUs, and sequence length, different layouts, and speeds that differ by
    more than 2 % (less is noise: sources that repeat a layout differ by as much).
    """
    right = total = 0
    for first, second in combinations(rows, 2):
        same = all(first[key] == second[key] for key in ("source", "model", "gpus", "card", "sequence_length"))
        layouts = [
            [row[key] for key in ("mesh", "micro_batch", "recompute", "fp8", "layout")] for row in (first, second)
        ]
        if same and layouts[0] != layouts[1] and abs(first["published"] / second["published"] - 1) > 0.02:
            total += 1
            right += (first["published"] > second["published"]) == (first["predicted"] > second["predicted"])
    return right, total


def summary(rows: Sequence[dict]) -> dict:
    """Return the errors of all rows of dense models, of the first 40 rows, and of models with experts."""
    parts = {
        "dense": [row for row in rows if row["experts"] == 1],
        "given": [row for row in rows if row["given"]],
        "experts": [row for row in rows if row["experts"] > 1],
    }
    found = {name: _errors(part) for name, part in parts.items() if part}
    for name, part in parts.items():
        if part:
            right, total = pairs(part)
            found[name]["pairs"] = f"{right} of {total}"
    return found


def _errors(rows: Sequence[dict]) -> dict:
    errors = sorted(abs(row["error"]) for row in rows)
    memory = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    return {
        "runs": len(rows),
        "projects": len({row["project"] for row in rows}),
        "cards": dict(Counter(row["card"] for row in rows)),
        "median": round(statistics.median(errors), 4),
        "nine_of_ten": round(errors[int(0.9 * (len(errors) - 1))], 4),
        "largest": round(errors[-1], 4),
        "memory_runs": len(memory),
        "memory_median": round(statistics.median(memory), 4) if memory else None,
        "memory_largest": round(max(memory), 4) if memory else None,
    }


def write(rows: list[dict], folder: Path) -> None:
    """Write plan-validation.json, .md and .png."""
    found = summary(rows)
    kept = [{key: value for key, value in row.items() if key != "layout"} for row in rows]
    text = json.dumps({"summary": found, "rows": kept}, indent=0)
    (folder / "plan-validation.json").write_text(text.replace('\n"', ' "').replace("\n}", "}") + "\n")
    (folder / "plan-validation.md").write_text(table(rows, found))
    plot(rows, folder / "plan-validation.png")


def table(rows: list[dict], found: dict) -> str:
    """Return the errors as Markdown: a line for each project, then one for each of the first 40 runs."""
    lines = [
        "# Predictions of `workshop plan` compared with published runs",
        "",
        "`workshop plan --validate` wrote this page.",
        "It predicted each run with constants that it had fitted without the runs of the same project.",
        "",
        "| runs | projects | median error of tokens/s | nine of ten below | largest | median error of memory | pairs in order |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"dense": "dense models", "given": "the first 40 rows", "experts": "models with experts"}
    for name, errors in found.items():
        memory = f"{errors['memory_median']:.1%} of {errors['memory_runs']}" if errors["memory_runs"] else "-"
        lines.append(
            f"| {names[name]}: {errors['runs']} | {errors['projects']} | {errors['median']:.1%} | {errors['nine_of_ten']:.1%} | "
            f"{errors['largest']:.1%} | {memory} | {errors['pairs']} |"
        )
    lines += ["", "| project | runs | median error | median of the signed errors | largest |", "|---|---|---|---|---|"]
    for project in dict.fromkeys(row["project"] for row in rows):
        part = [row["error"] for row in rows if row["project"] == project and row["experts"] == 1]
        if part:
            middle, sign = statistics.median(map(abs, part)), statistics.median(part)
            lines.append(f"| {project} | {len(part)} | {middle:.1%} | {sign:+.1%} | {max(part, key=abs):+.1%} |")
    lines += ["", "This table shows the runs in the first 40 rows of `workshop/plan/published.csv`:", ""]
    lines += [
        "| model | GPUs | card | mesh | tokens/s per GPU, published | predicted | error | memory |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        if row["given"]:
            memory = f"{row['memory_error']:+.1%}" if row["memory_error"] is not None else "-"
            speeds = f"{row['published']:,.0f} | {row['predicted']:,.0f} | {row['error']:+.1%}"
            lines.append(f"| {row['model']} | {row['gpus']:,} | {row['card']} | {row['mesh']} | {speeds} | {memory} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    """Draw predicted over published tokens per second, a colour for each project."""
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 6), facecolor="white", layout="constrained")
    dense = [row for row in rows if row["experts"] == 1]
    projects = list(dict.fromkeys(row["project"] for row in dense))
    for number, project in enumerate(projects):
        part = [row for row in dense if row["project"] == project]
        axes.scatter(
            [row["published"] for row in part],
            [row["predicted"] for row in part],
            s=18,
            alpha=0.7,
            color=plt.get_cmap("tab20")(number % 20),
            label=f"{project} ({len(part)})",
        )
    ends = [min(row["published"] for row in dense) * 0.7, max(row["published"] for row in dense) * 1.4]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.8, 1.25):
        axes.plot(ends, [end * factor for end in ends], color="grey", linewidth=0.8, linestyle="dashed")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="published: tokens per second and GPU", ylabel="predicted without the rows of the same project")
    axes.set_title("workshop plan and published runs (dashed: a factor of 1.25)")
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def known_errors() -> dict:
    """Return the summary of results/plan-validation.json; {}: there is none."""
    return json.loads(RESULT.read_text())["summary"] if RESULT.is_file() else {}
