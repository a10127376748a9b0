"""Draw the picture of the README: PYTHONPATH=tests python -m check.bank.picture checks three mistakes of the bank."""

import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console

from check.bank.replay import check_for_real
from check.bank.whole import case_of
from workshop.check.report import show
from workshop.repository import ROOT

MISTAKES = (
    "no-sampler",
    "rank-0-first-around-ddp",
    "optimizer-not-loaded",
)  # the same samples, a hang, a lost optimizer state


def main() -> None:
    """Check the mistakes and draw the findings."""
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, highlight=False)
    for name in MISTAKES:
        case = case_of(name)
        with tempfile.TemporaryDirectory() as folder:
            verdict, _ = check_for_real(case, Path(folder))
            os.chdir(verdict.subject.file.parent)  # so that the findings show the file without its folder
            console.print(f"[bold cyan]$ ./workshop.sh check {case.base.removeprefix('solutions/')}[/]")
            show(verdict, console)
            console.print()
            os.chdir(ROOT)
    text = console.export_svg(title="workshop check: three mistakes")
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # a font of a different host
    (ROOT / "results" / "check-three-mistakes.svg").write_text(text)


if __name__ == "__main__":
    main()
