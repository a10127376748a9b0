"""The figure of what happens after a kill, in four ways of surviving it."""

from canvas import GREEN, NODE, REPEATED, SKY, VERMILION, Canvas, figure, tint

TRAINS, STARTS, REPEATS = tint(GREEN, 0.45), NODE, tint(SKY, 0.6)
LEFT, KILL, RIGHT = 150, 300, 780

# For each answer: its name in two lines, the lane of the others, and the lane of the killed process, after the kill. A part
# of a lane is its end, its colour and its text; an empty colour: there is no process.
ANSWERS = (
    (
        ("1. Restart", "from the epoch"),
        ((440, STARTS, "all restart"), (690, REPEATS, "repeat up to one epoch"), (RIGHT, TRAINS, "train")),
        ((440, STARTS, "restarts"), (690, REPEATS, "repeats"), (RIGHT, TRAINS, "trains")),
    ),
    (
        ("2. Checkpoints", "every k steps"),
        ((440, STARTS, "all restart"), (530, REPEATS, "≈ k steps"), (RIGHT, TRAINS, "train")),
        ((440, STARTS, "restarts"), (530, REPEATS, "repeats"), (RIGHT, TRAINS, "trains")),
    ),
    (
        ("3. Elastic", "torchrun"),
        ((440, STARTS, "all others restart"), (530, REPEATS, "≈ k steps"), (RIGHT, TRAINS, "train with fewer ranks")),
        ((RIGHT, "", "a new node may join later; then all ranks restart once more"),),
    ),
    (
        ("4. Tolerance", "per step"),
        (
            (350, REPEATS, "1 step"),
            (560, TRAINS, "train with fewer replicas"),
            (RIGHT, TRAINS, "train with all replicas"),
        ),
        ((350, "", ""), (560, STARTS, "a new replica starts"), (RIGHT, TRAINS, "copies the state, joins")),
    ),
)


@figure(
    "surviving",
    height=448,
    title="Four ways to survive the same kill",
    alt="Four pairs of timelines. One process is killed, and the others continue. Restart from the epoch: all processes restart "
    "and repeat up to one epoch. Checkpoints every k steps: all restart and repeat about k steps. Elastic torchrun: the "
    "others restart, repeat about k steps and train with fewer ranks. Tolerance per step: the others repeat one step and "
    "train with fewer replicas, until a new replica copies their state and joins.",
)
def draw_surviving(canvas: Canvas) -> None:
    """For each way, the timeline of the others above that of the killed process."""
    for row, (names, others, killed) in enumerate(ANSWERS):
        y = 66 + 86 * row
        for place, name in enumerate(names):
            canvas.text(20, y + 20 + 17 * place, name, align="left", bold=True)
        for lane, parts in enumerate((others, killed)):
            top, x = y + 30 * lane, KILL
            canvas.box(LEFT, top, KILL - LEFT, 26, "train" if lane == 0 else "trains", fill=TRAINS, round_=2)
            for end, fill, text in parts:
                if fill:
                    hatch = REPEATED if fill == REPEATS else ""
                    canvas.box(x, top, end - x, 26, text, fill=fill, hatch=hatch, round_=2)
                elif text:
                    canvas.text((x + end) / 2, top + 13, text)
                x = end
        canvas.line((KILL, y + 28), (KILL, y + 58), colour=VERMILION, thick=3)
    canvas.text(KILL, 54, "kill", bold=True, colour=VERMILION)
    entries = (
        (TRAINS, "", "new steps"),
        (REPEATS, REPEATED, "steps done twice"),
        (STARTS, "", "no steps: processes start"),
    )
    canvas.legend(LEFT, 424, *entries)
