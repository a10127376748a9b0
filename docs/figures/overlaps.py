"""Find faults that a reader would see: text that is cut off, leaves its box, or overlaps text, a border or a line."""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

MARGIN = 2.0  # pixels between a text and the border of its box, at least
EDGE = 8.0  # pixels between a text and the border of the panel, at least


class Rect(NamedTuple):
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """How wide it is."""
        return self.right - self.left

    def contains(self, other: "Rect", margin: float = 0) -> bool:
        """Whether the other rectangle is inside, with a margin on each side."""
        across = self.left + margin <= other.left and other.right <= self.right - margin
        return across and self.top + margin <= other.top and other.bottom <= self.bottom - margin

    def meets(self, other: "Rect") -> bool:
        """Whether the two have an area in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class Line(NamedTuple):
    """A straight line from one point to another."""

    x1: float
    y1: float
    x2: float
    y2: float

    def crosses(self, rect: Rect) -> bool:
        """Whether a part of the line is inside the rectangle (Liang and Barsky's clipping)."""
        first, last = 0.0, 1.0
        run, rise = self.x2 - self.x1, self.y2 - self.y1
        sides = (
            (-run, self.x1 - rect.left),
            (run, rect.right - self.x1),
            (-rise, self.y1 - rect.top),
            (rise, rect.bottom - self.y1),
        )
        for step, room in sides:
            if step == 0:
                if room <= 0:
                    return False
            elif step < 0:
                first = max(first, room / step)
            else:
                last = min(last, room / step)
        return first < last


class Label(NamedTuple):
    """A text, the rectangle it covers, the box it belongs to, and whether it has a background of its own."""

    text: str
    place: Rect
    inside: Rect | None
    backed: bool


def find_problems(labels: list[Label], boxes: list[Rect], lines: list[Line], panel: Rect) -> Iterator[str]:
    """Name each overlap in words."""
    for label in labels:
        if not panel.contains(label.place, EDGE):
            yield f"{label.text!r} leaves the panel"
        if label.inside and not label.inside.contains(label.place, MARGIN):
            yield f"{label.text!r} leaves its box: {too_much(label.place, label.inside)}"
        yield from crossed(label, boxes, lines)
    for one, other in combinations(labels, 2):
        if one.place.meets(other.place):
            yield f"{one.text!r} and {other.text!r} overlap"


def too_much(place: Rect, box: Rect) -> str:
    """Say how large a text is and how large its box."""
    size = f"{place.width:.0f} x {place.bottom - place.top:.0f}"
    return f"{size} pixels in a box of {box.width:.0f} x {box.bottom - box.top:.0f}"


def crossed(label: Label, boxes: list[Rect], lines: list[Line]) -> Iterator[str]:
    """Name the borders and lines that a text overlaps."""
    for box in boxes:
        if not label.backed and label.place.meets(box) and not box.contains(label.place):
            yield f"{label.text!r} lies on the border of a box at ({box.left:.0f}, {box.top:.0f})"
    for line in lines:
        if not label.backed and line.crosses(label.place):
            yield f"{label.text!r} lies on a line from ({line.x1:.0f}, {line.y1:.0f})"
