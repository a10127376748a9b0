"""Draw figures on a light panel with boxes, arrows and labels, and keep the registry of all figures.

Lengths are pixels at a width of 800, and y grows downwards. The panel has its own background and dark text, so a figure
is readable in light and dark themes. The colours are those of Okabe and Ito, which colour-blind readers can distinguish.
Hatches and labels repeat what a colour says, so a figure is also readable in grey print.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text
from overlaps import Label, Line, Rect, find_problems

WIDTH = 800
PIXELS_PER_INCH = 96

# Sizes of text in points. Text below 9 points is hard to read at this width.
SMALL, NORMAL, TITLE = 9.0, 10.0, 12.5

INK, GREY, LINE, PANEL, WHITE = "#1c1c1c", "#4d4d4d", "#8a8f98", "#fcfcfa", "#ffffff"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"
NODE = "#eef0f2"  # the background of a node

# What a colour and its hatch stand for, in all figures.
COMMUNICATION = "////"
REPEATED = "xxxx"

Point = tuple[float, float]
Draw = Callable[["Canvas"], None]


def tint(colour: str, strength: float = 0.4) -> str:
    """Return the colour mixed with white, so that dark text reads on it."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)


def shade(colour: str, strength: float = 0.25) -> str:
    """Return the colour mixed with black, for a hatch that does not hide the text on it."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part * (1 - strength)):02x}" for part in parts)


# The colour and the hatch for the part of each rank.
PARTS = (
    (tint(SKY), ""),
    (tint(ORANGE), "////"),
    (tint(GREEN), "xxx"),
    (tint(PURPLE), "\\\\\\\\"),
)


@dataclass(frozen=True)
class Drawing:
    """A figure of the course: its name, the height of its panel, its title, and what it shows in words."""

    name: str
    height: int
    title: str
    alt: str
    draw: Draw


FIGURES: dict[str, Drawing] = {}


def figure(name: str, height: int, title: str, alt: str) -> Callable[[Draw], Draw]:
    """Register a function that draws the figure ``name``; ``alt`` is its text for readers who cannot see it."""

    def register(draw: Draw) -> Draw:
        FIGURES[name] = Drawing(name, height, title, alt, draw)
        return draw

    return register


@dataclass(frozen=True)
class Written:
    """A text on the canvas.

    ``inside`` is the box that it must fit into, ``backed`` whether it may lie on lines because it has a background, and
    ``beyond`` how far that background extends beyond the letters.
    """

    artist: Text
    inside: Rect | None = None
    backed: bool = False
    beyond: float = 0


@dataclass
class Canvas:
    """A panel to draw on. It remembers where text, boxes and lines are, and ``problems`` names what overlaps."""

    height: int
    title: str
    texts: list[Written] = field(default_factory=list)
    boxes: list[Rect] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    order: int = 10

    def __post_init__(self) -> None:
        """Make the figure, its panel and its title."""
        size = (WIDTH / PIXELS_PER_INCH, self.height / PIXELS_PER_INCH)
        self.figure = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        self.figure.patch.set_alpha(0)
        self.renderer = FigureCanvasAgg(self.figure).get_renderer()  # type: ignore[no-untyped-call]
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(self.height, 0))
        self.axes.axis("off")
        style = "round,pad=0,rounding_size=10"
        panel = FancyBboxPatch((1, 1), WIDTH - 2, self.height - 2, boxstyle=style, fc=PANEL, ec=LINE, lw=1)
        self.axes.add_patch(panel)
        self.text(20, 26, self.title, size=TITLE, align="left", bold=True)

    def layer(self) -> int:
        """Return a drawing order above everything that is already there."""
        self.order += 1
        return self.order

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = SMALL,
        align: Literal["left", "center", "right"] = "center",
        bold: bool = False,
        mono: bool = False,
        colour: str = INK,
        backed: bool = False,
        ground: str = "",
        inside: Rect | None = None,
    ) -> None:
        """Write lines of text, vertically centred at y. ``backed``: on the panel's colour, so that it may be on a line."""
        if size < SMALL:
            raise ValueError(f"{text!r} has {size} points; {SMALL} are the smallest that reads well")
        lines = text.split("\n")
        apart = 1.35 * size * PIXELS_PER_INCH / 72
        for place, line in enumerate(lines):
            if not line:
                continue
            artist = self.axes.text(
                x,
                y - 0.8 + (place - (len(lines) - 1) / 2) * apart,
                line,
                fontsize=size,
                ha=align,
                va="center_baseline",
                color=colour,
                weight="bold" if bold else "normal",
                family="DejaVu Sans Mono" if mono else "DejaVu Sans",
                zorder=self.layer(),
                parse_math=False,
            )
            if backed or ground:
                artist.set_bbox({"boxstyle": "square,pad=0.12", "fc": ground or PANEL, "ec": "none"})
            self.texts.append(Written(artist, inside, backed or bool(ground)))

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = WHITE,
        edge: str = GREY,
        hatch: str = "",
        dashed: bool = False,
        thick: float = 1.0,
        round_: float = 4,
        size: float = SMALL,
        bold: bool = False,
        mono: bool = False,
    ) -> Rect:
        """Draw a rounded box with its top left corner at (x, y) and text in its middle; a hatch leaves the text free."""
        shape = f"round,pad=0,rounding_size={round_}" if round_ else "square,pad=0"

        def add(face: str, border: str, border_width: float, lines: str) -> None:
            patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, clip_on=False, zorder=self.layer())
            patch.set(facecolor=face, edgecolor=border, linewidth=border_width, hatch=lines)
            patch.set_linestyle((0, (4, 3)) if dashed and border_width else "-")
            self.axes.add_patch(patch)

        if hatch:  # in a patch of its own, because matplotlib draws hatch and border in one colour
            add(fill, shade(fill), 0, hatch)
        add("none" if hatch else fill, edge, thick, "")
        rect = Rect(x, y, x + width, y + height)
        self.boxes.append(rect)
        if text:
            middle = (x + width / 2, y + height / 2)
            ground = fill if hatch else ""
            self.text(*middle, text, size=size, bold=bold, mono=mono, ground=ground, inside=rect)
        return rect

    def stripe(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a plain area without a border, behind what follows."""
        self.axes.add_patch(Rectangle((x, y), width, height, fc=fill, ec="none", clip_on=False, zorder=self.layer()))

    def line(self, *points: Point, colour: str = GREY, dashed: bool = False, thick: float = 1.2) -> None:
        """Draw a line through the points."""
        xs, ys = zip(*points, strict=True)
        style = (0, (4, 3)) if dashed else "-"
        self.axes.add_line(Line2D(xs, ys, color=colour, lw=thick, ls=style, clip_on=False, zorder=self.layer()))
        self.remember(points)

    def arrow(
        self,
        *points: Point,
        text: str = "",
        colour: str = INK,
        both: bool = False,
        thick: float = 1.3,
    ) -> None:
        """Draw an arrow through the points to the last one, with a label in the middle of its longest part."""
        for start, end in pairwise(points[:-1]):
            self.line(start, end, colour=colour, thick=thick)
        head = FancyArrowPatch(
            points[-2],
            points[-1],
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            lw=thick,
            color=colour,
            clip_on=False,
            zorder=self.layer(),
        )
        self.axes.add_patch(head)
        self.remember(points)
        if text:
            parts = pairwise(points)
            (x1, y1), (x2, y2) = max(
                parts, key=lambda part: abs(part[0][0] - part[1][0]) + abs(part[0][1] - part[1][1])
            )
            self.text((x1 + x2) / 2, (y1 + y2) / 2, text, backed=True)

    def remember(self, points: tuple[Point, ...]) -> None:
        """Note a line, so that ``problems`` finds text that it crosses."""
        self.lines += [Line(*start, *end) for start, end in pairwise(points)]

    def number(self, x: float, y: float, number: int) -> None:
        """Draw a dark disc with a number, for a step that is explained elsewhere in the figure."""
        self.axes.add_patch(Circle((x, y), 10, fc=INK, ec="none", clip_on=False, zorder=self.layer()))
        self.text(x, y - 0.3, str(number), bold=True, colour=WHITE)
        self.texts[-1] = Written(self.texts[-1].artist, backed=True, beyond=4)

    def brace(self, x1: float, x2: float, y: float, text: str, *, depth: float = 8, below: bool = True) -> None:
        """Draw a bracket from x1 to x2 with a label under it (or above it)."""
        down = depth if below else -depth
        self.line((x1, y), (x1, y + down), (x2, y + down), (x2, y))
        lines = text.count("\n") + 1
        self.text((x1 + x2) / 2, y + down + (6 + 8 * lines) * (1 if below else -1), text)

    def legend(self, x: float, y: float, *entries: tuple[str, str, str], gap: float = 20) -> None:
        """Draw a row of small boxes with labels, each entry a (fill, hatch, label)."""
        for fill, hatch, label in entries:
            self.box(x, y - 7, 22, 14, fill=fill, hatch=hatch, round_=2)
            self.text(x + 28, y, label, align="left")
            x += 28 + self.extent(self.texts[-1].artist).width + gap

    def extent(self, text: Text) -> Rect:
        """Return the rectangle that a text covers, in this canvas's coordinates."""
        place = text.get_window_extent(self.renderer)  # without the background that `backed` gives it
        return Rect(place.x0, self.height - place.y1, place.x1, self.height - place.y0)

    def problems(self) -> Iterator[str]:
        """Name each text that is cut off, leaves its box, or overlaps a different text, a border or a line."""
        texts = []
        for text in self.texts:
            left, top, right, bottom = self.extent(text.artist)
            place = Rect(left - text.beyond, top - text.beyond / 2, right + text.beyond, bottom + text.beyond / 2)
            texts.append(Label(text.artist.get_text(), place, text.inside, text.backed))
        return find_problems(texts, self.boxes, self.lines, Rect(0, 0, WIDTH, self.height))


def render(drawing: Drawing) -> str:
    """Draw a figure and return its SVG, the same bytes each time; raise ValueError if something in it overlaps."""
    settings: dict[Any, Any] = {
        "svg.hashsalt": "figures",
        "svg.fonttype": "path",
        "hatch.linewidth": 0.8,
        "text.usetex": False,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings}):
        canvas = Canvas(drawing.height, drawing.title)
        drawing.draw(canvas)
        if found := list(canvas.problems()):
            raise ValueError(f"{drawing.name}:\n  " + "\n  ".join(found))
        written = StringIO()
        nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        canvas.figure.savefig(written, format="svg", metadata=nothing)
    return shorten(describe(written.getvalue(), drawing))


def describe(svg: str, drawing: Drawing) -> str:
    """Put title and description into the SVG, where screen readers look for them."""
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    names = f"{drawing.name}-title {drawing.name}-desc"
    words = (
        f' <title id="{drawing.name}-title">{escape(drawing.title)}</title>\n'
        f' <desc id="{drawing.name}-desc">{escape(drawing.alt)}</desc>\n'
    )
    start = re.search(r"<svg [^>]*>\n", svg)
    if start is None:
        raise ValueError(f"{drawing.name}: matplotlib has written no <svg>")
    opening = start[0].replace("<svg ", f'<svg role="img" aria-labelledby="{names}" ')
    return svg[: start.start()] + opening + words + svg[start.end() :]


def shorten(svg: str) -> str:
    """Make the file smaller: coordinates with two decimals are exact enough, and no white space is needed."""
    svg = re.sub(r"(?:translate\(| d=\")[^)\"]*", lambda part: re.sub(r"(\.\d\d)\d+", r"\1", part[0]), svg)
    svg = re.sub(r" d=\"[^\"]*", lambda part: re.sub(r"\s*([A-Za-z])\s*", r"\1", part[0]).replace("d=", " d="), svg)
    svg = re.sub(r"^ +", "", svg, flags=re.MULTILINE)
    for long, short in (("DejaVuSans-Bold-", "bold-"), ("DejaVuSansMono-", "mono-"), ("DejaVuSans-", "sans-")):
        svg = svg.replace(f'"{long}', f'"{short}').replace(f'"#{long}', f'"#{short}')
    return svg


def write(drawing: Drawing, folder: Path) -> Path:
    """Write a figure into a folder and return its path."""
    path = folder / f"{drawing.name}.svg"
    path.write_text(render(drawing), encoding="utf-8", newline="\n")
    return path
