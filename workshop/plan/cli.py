"""``workshop plan``: which layout for a model on some GPUs, how fast, how long, and what it costs."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from workshop.errors import UserError

if TYPE_CHECKING:
    from workshop.plan.search import Plan, Request


@click.command()
@click.argument("model", required=False)
@click.option("--site", metavar="SITE", help="Plan for the GPUs and the network of this site.")
@click.option(
    "--gpu",
    metavar="CARD",
    help="Plan for this GPU, such as h100, or for this machine (here), measured by bench --card.",
)
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs.  [default: one node]")
@click.option("--tokens", metavar="1T", default="", help="Tokens of the whole training; also prints days and energy.")
@click.option("--global-batch", type=click.IntRange(min=1), help="Sequences per step.  [default: 4M tokens]")
@click.option(
    "--sequence-length", type=click.IntRange(min=2), help="Tokens per sequence.  [default: 4096 or the model's maximum]"
)
@click.option("--layout", default="", metavar="tp=8,pp=4", help="Fix these parts of the layout.")
@click.option("--fp8", is_flag=True, help="Also try float8.")
@click.option(
    "--failures",
    type=float,
    metavar="N",
    help="How many times per day a training on 1,000 GPUs is interrupted.  [default: 0.53, the rate of Llama 3]",
)
@click.option(
    "--checkpoint-every",
    type=click.FloatRange(min=1),
    metavar="MINUTES",
    help="Minutes between checkpoints.  [default: the best interval]",
)
@click.option(
    "--checkpoint-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long a checkpoint stops the training.",
)
@click.option(
    "--restart",
    type=click.FloatRange(min=0),
    default=10,
    show_default=True,
    metavar="MINUTES",
    help="Time from an interruption until training goes on.",
)
@click.option("--output", metavar="FILE", help="Write the best plan as JSON, for workshop submit --plan.")
@click.option("--validate", is_flag=True, help="Predict published runs, and write the errors into --output FOLDER.")
@click.option("--rows", metavar="FILE.csv", help="With --validate: predict the runs of this file instead.")
@click.option("--fit", is_flag=True, help="Fit the constants to the published runs.")
def plan(model, validate, rows, fit, output, **options) -> None:
    """Plan a training on one to thousands of GPUs: layout, speed, memory, days.

    MODEL is llama-3-8b, -70b, -405b, codellama-7b, -13b, -34b, -70b, mixtral-8x7b, or a config.json of Hugging Face.
    """
    if fit:
        run_fit()
    if validate:
        run_validate(output, rows)
    if not (fit or validate):
        if not model:
            raise UserError("name a model, such as llama-3-8b; workshop plan --help shows all options")
        run_plan(model, output=output, **options)


def run_plan(
    model: str,
    *,
    site: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    tokens: str = "",
    global_batch: int | None = None,
    sequence_length: int | None = None,
    layout: str = "",
    fp8: bool = False,
    failures: float | None = None,
    checkpoint_every: float | None = None,
    checkpoint_seconds: float = 60,
    restart: float = 10,
    output: str | None = None,
) -> "Plan":
    """Search, print the best plans, and return the best.

    Raises:
        UserError: a name is unknown, a number is wrong, or nothing fits.
    """
    from rich.console import Console

    from workshop.plan import report
    from workshop.plan.failures import RATE, Failures
    from workshop.plan.search import search

    training = parse_tokens(tokens)
    request = _request(model, site, gpu, gpus, global_batch, sequence_length, layout, fp8)
    plans = search(request)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    where = f"{request.gpus:,} x {request.card.name}"
    rate = failures / 24 / 1000 if failures is not None else RATE
    lost = Failures(rate, 60 * (checkpoint_every or 0), checkpoint_seconds, 60 * restart)
    report.show(console, plans, f"{Path(model).name} on {where}", training, lost)
    if output:
        _write(Path(output), model, site, plans[0])
        console.print(f"the best plan: {output}")
    return plans[0]


def _request(model, site, gpu, gpus, global_batch, sequence_length, layout, fp8) -> "Request":
    from workshop.plan.cards import find_card
    from workshop.plan.layout import parse_layout
    from workshop.plan.search import Request
    from workshop.plan.sizes import find_model

    if bool(site) == bool(gpu):
        raise UserError("name either a site (--site lumi) or a GPU (--gpu h100)")
    sizes = find_model(model)
    if site:
        card, most = site_card(site)
    else:
        card, most = find_card(gpu), None
    gpus = gpus or min(card.gpus_per_node, most or card.gpus_per_node)
    if most and gpus > most:
        raise UserError(f"a job at {site} can have at most {most:,} GPUs, not {gpus:,}")
    sequence_length = sequence_length or min(4096, sizes.context)
    if sequence_length > sizes.context:
        raise UserError(f"{model} takes sequences of up to {sizes.context:,} tokens, not {sequence_length:,}")
    if fp8 and not card.fp8:
        raise UserError(f"{card.name} has no float8; leave out --fp8")
    fixed = tuple(parse_layout(layout).items())
    return Request(sizes, card, gpus, sequence_length, global_batch or 0, fixed, fp8)


def site_card(name: str):
    """Return the card of a site with its network, and the most GPUs of a job there (None: no limit known).

    Raises:
        UserError: there is no such site, or its profile names no card.
    """
    from workshop.plan.cards import find_card
    from workshop.slurm.sites import find_site

    site = find_site(name)
    if not site.card:
        raise UserError(f"the profile of {name} names no card, so workshop plan does not know its GPUs; use --gpu")
    most = site.max_nodes * site.gpus_per_node if site.max_nodes else None
    return find_card(site.card, site.card_network, site.gpus_per_node), most


def parse_tokens(text: str) -> float:
    """Return the number for "1T", "300B" or "15e12"; 0 for "".

    Raises:
        UserError: it is none.
    """
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise UserError(f"--tokens {text}: write a number such as 300B, 1T or 15e12")
    return float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()]


def _write(path: Path, model: str, site: str | None, best: "Plan") -> None:
    from workshop.files import write_atomically
    from workshop.plan.validate import known_errors

    request = best.request
    node = min(request.card.gpus_per_node, request.gpus)
    content = {
        "model": model,
        "site": site,
        "card": request.card.name,
        "gpus": request.gpus,
        "nodes": -(-request.gpus // node),
        "gpus_per_node": node,
        "sequence_length": request.sequence_length,
        "layout": asdict(best.layout),
        "mesh": best.layout.mesh(),
        "tokens_per_second_and_gpu": round(best.tokens, 1),
        "mfu": round(best.mfu, 4),
        "memory": round(best.bytes.total),
        "seconds": asdict(best.times),
        "bytes": asdict(best.bytes),
        "error": known_errors().get("experts" if request.model.experts > 1 else "dense"),
    }
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def run_fit() -> None:
    """Fit the constants to published.csv and write constants.toml."""
    from workshop.plan import fit
    from workshop.plan.published import read_runs

    dense = [run for run in read_runs() if run.model.experts == 1]
    constants = fit.fit(dense)
    fit.write(constants, dense)
    for name, value in vars(constants).items():
        print(f"{name:10} {value:.4g}")
    print(f"written to {fit.CONSTANTS.name}; now run workshop plan --validate")


def _compare_here(folder: Path | None) -> None:
    """Print predictions beside trainings on this machine, if it has been measured as a card; write them into a folder."""
    from workshop.plan.here import compare_here, write_here

    rows = compare_here()
    if not rows:
        print("There is no comparison with this machine, because workshop bench --card has not measured it.\n")
    for row in rows:
        print(
            f"this machine, {row['strategy']} on {row['processes']}: measured {row['measured']:,.0f}, "
            f"predicted {row['predicted']:,.0f} tokens/s per process, {row['error']:+.0%}"
        )
    if rows and folder:
        write_here(rows, folder / "plan-here.json")


def run_validate(output: str | None, rows: str | None) -> None:
    """Predict published runs, print the table of errors, and write it.

    Args:
        output: the folder; None: results/ in the repository, or with ``rows`` none.
        rows: a file with the columns of published.csv, whose runs are predicted with the constants as they are.
    """
    from workshop.plan import validate
    from workshop.plan.published import read_runs
    from workshop.plan.time import fitted
    from workshop.repository import ROOT, open_folder

    folder = open_folder(output or ROOT / "results") if output or not rows else None
    if rows:
        found = validate.predict_rows(read_runs(Path(rows)), fitted())
        for row in found:
            memory = f"  memory {row['memory_error']:+.1%}" if row["memory_error"] is not None else ""
            print(
                f"{row['model']:16.16} {row['gpus']:6,} GPUs  {row['mesh']:36.36} published {row['published']:9,.1f}  "
                f"predicted {row['predicted']:9,.1f}  {row['error']:+.1%}{memory}"
            )
        print()
    else:
        found = validate.validate(read_runs(), lambda group: print(f"held out: {group}", file=sys.stderr))
        _compare_here(folder)
    print(validate.table(found, validate.summary(found)).split("\n| project")[0].strip())
    if folder:
        validate.write(found, folder)
        print(f"\nwritten: plan-validation.json, .md and .png in {folder.name}/")
