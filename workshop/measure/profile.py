"""``workshop profile``: show where a training script spends its time.

The script trains three epochs in this process. The first one warms up. The second one runs under line_profiler, which measures
each line of ``train_one_epoch``. The third one runs under torch.profiler, which measures each operation, and writes a trace to
``runs/trace.json`` that you can open at https://ui.perfetto.dev (the file stays on your machine). Both profilers slow the script
down, so compare fractions, not seconds.
"""

import importlib.util
import inspect
import os
import sys
from pathlib import Path

from workshop.errors import UserError

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's own messages; read when torch is imported
WIDTH = 20  # of the longest bar, in characters
TRACE = "runs/trace.json"


def profile(script: Path, options: list[str]) -> None:
    """Run the script's ``main()`` for three epochs, and print where the time went.

    Raises:
        UserError: there is no such script, it has no ``main`` and ``train_one_epoch``, or line_profiler is missing.
    """
    if not script.is_file():
        raise UserError(f"{script}: no such file")
    try:
        from line_profiler import LineProfiler
    except ImportError as error:
        raise UserError(f"line_profiler is missing: {sys.executable} -m pip install line-profiler") from error
    script = script.resolve()
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location("profiled", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["profiled"] = module
    spec.loader.exec_module(module)
    if not (hasattr(module, "main") and hasattr(module, "train_one_epoch")):
        raise UserError(f"{script} has no main() and train_one_epoch()")

    from torch.profiler import ProfilerActivity

    train = module.train_one_epoch
    by_line = LineProfiler(train)
    found = {"epochs": 0}

    def one_epoch(*arguments):
        found["epochs"] += 1
        if found["epochs"] == 1:
            return train(*arguments)
        if found["epochs"] == 2:
            return by_line.runcall(train, *arguments)
        import torch
        from torch.profiler import profile as by_operation

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():  # ROCm answers here too
            activities.append(ProfilerActivity.CUDA)
        with by_operation(activities=activities) as found["operations"]:
            return train(*arguments)

    module.train_one_epoch = one_epoch
    os.makedirs("runs", exist_ok=True)
    Path("runs/profile.pt").unlink(missing_ok=True)
    sys.argv = [str(script), *options, "--epochs", "3", "--checkpoint", "runs/profile.pt"]
    module.main()
    print_lines(by_line, train)
    print_operations(found["operations"])


def print_lines(by_line, function) -> None:
    """Print the lines of a function, each with its fraction of the time."""
    ((_, timings),) = by_line.get_stats().timings.items()
    total = sum(time for _, _, time in timings) or 1
    shares = {number: time / total for number, _, time in timings}
    source, first = inspect.getsourcelines(function)
    print("\nIn the second epoch, by line:")
    for number, line in enumerate(source, start=first):
        share = shares.get(number, 0)
        bar = "█" * round(WIDTH * share) if share >= 0.005 else ""
        percent = f"{share:4.0%}" if share >= 0.005 else "    "
        print(f"{percent} {bar:<{WIDTH}} {number:3} {line.rstrip()}")


def print_operations(profiler) -> None:
    """Print the operations with the most time of their own, and write the trace."""
    from torch.autograd import DeviceType

    averages = [event for event in profiler.key_averages() if not event.is_user_annotation]
    on_device = sum(event.self_device_time_total for event in averages) > 0
    if on_device:  # only kernels, because the rows of operations count their time again
        averages = [event for event in averages if event.device_type != DeviceType.CPU]
    where = "self_device_time_total" if on_device else "self_cpu_time_total"
    averages.sort(key=lambda event: getattr(event, where), reverse=True)
    whole = max(event.time_range.end for event in profiler.events()) - min(
        event.time_range.start for event in profiler.events()
    )
    inside = sum(getattr(event, where) for event in averages)
    name = "the GPU" if on_device else "torch"
    print(f"\nIn the third epoch, by operation ({name} was busy {min(inside / whole, 1):.0%} of the time):")
    for event in averages[:8]:
        print(f"{getattr(event, where) / whole:4.0%} {event.count:6,} calls  {event.key[:80]}")
    profiler.export_chrome_trace(TRACE)
    print(f"\nThe trace: {TRACE}, {os.path.getsize(TRACE) / 1e6:.0f} MB; open it at https://ui.perfetto.dev")
