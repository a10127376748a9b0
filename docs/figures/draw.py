#!/usr/bin/env python3
"""Draw the figures of the course as SVG files into this folder.

All of them:  python docs/figures/draw.py
One of them:  python docs/figures/draw.py ranks
"""

import argparse
from pathlib import Path

# Each of these modules registers its figures.
import choosing  # noqa: F401
import combining  # noqa: F401
import launching  # noqa: F401
import learning  # noqa: F401
import sharding  # noqa: F401
import surviving  # noqa: F401
from canvas import FIGURES, write


def main() -> None:
    """Draw the figures that are named, or all of them."""
    parser = argparse.ArgumentParser(description="Draw the figures of the course as SVG files.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="write there instead")
    args = parser.parse_args()
    if unknown := set(args.names) - set(FIGURES):
        parser.error(f"no figure has the name {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or FIGURES:
        path = write(FIGURES[name], args.folder)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
