"""Change what the scripts run on without changing the scripts: Python imports this file at its start from PYTHONPATH.

TEST_PATCH names the changes, separated by commas. They apply to every process of a run, including spawned ones.
ForeachOnCPU always applies.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys


class ForeachOnCPU(importlib.abc.MetaPathFinder):
    """Make the optimizers on the CPU choose ``foreach`` by default, as on a GPU, so that the tests see the errors of a GPU.

    For example, ``foreach`` does not accept DTensors together with other tensors. This only waits for torch, because many
    processes of a run never import it.
    """

    def find_spec(self, name, path, target=None):
        if name != "torch.utils._foreach_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            devices = module._get_foreach_kernels_supported_devices
            module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]

        spec.loader.exec_module = changed
        return spec


sys.meta_path.insert(0, ForeachOnCPU())


def float64():
    """Compute in float64, where the rounding of two equal runs differs by very little."""
    import torch

    torch.set_default_dtype(torch.float64)


def sgd():
    """Replace AdamW by SGD, whose step is proportional to the gradient, so a wrong scale of the gradient shows."""
    import torch

    torch.optim.AdamW = lambda parameters, lr: torch.optim.SGD(parameters, lr=0.05)


def float32():
    """Compute in float32 even where bfloat16 is faster, so that equal runs differ little."""
    from workshop import tensors

    tensors.bf16_is_fast = lambda device: False


def odd_test_set():
    """Use a test set of 357 samples, which 2 ranks do not divide evenly."""
    from workshop.data import datasets

    whole = datasets.Digits.__init__

    def shortened(self, train, transform=None):
        whole(self, train, transform)
        if not train:
            self.images, self.labels = self.images[:357], self.labels[:357]

    datasets.Digits.__init__ = shortened


def fail_on_rank_1():
    """Let rank 1 raise in its third step; rank 0 then fails too, because its connection is lost."""
    import torch

    step = torch.optim.AdamW.step
    steps = []

    def failing(self, *args, **kwargs):
        import torch.distributed as dist

        steps.append(1)
        if len(steps) == 3 and dist.get_rank() == 1:
            raise ZeroDivisionError("rank 1 divides by zero")
        return step(self, *args, **kwargs)

    torch.optim.AdamW.step = failing


def die_while_saving():
    """Kill the process halfway through the file, the first time that it saves a checkpoint at the end of epoch 2."""
    import torch

    save = torch.save

    def half(checkpoint, path):
        save(checkpoint, path)
        marker = str(path) + ".died"
        if checkpoint["epoch"] == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half


def clock_jumps():
    """Set the clock back by eleven days."""
    import time

    clock = time.time
    time.time = lambda: clock() - 10**6


def large_disk():
    """Report 100 GB of free disk space on any machine."""
    import shutil

    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10**11)


def small_mnist():
    """Replace the files of MNIST by those that TEST_MNIST describes, and its mirror by TEST_MNIST_URL."""
    from workshop.data import mnist

    rows = [row.split(",") for row in os.environ["TEST_MNIST"].split(";")]
    mnist.ARCHIVES = tuple(mnist.Archive(name, sha256, int(size)) for name, sha256, size in rows)
    mnist.MIRRORS = (os.environ["TEST_MNIST_URL"],)


for name in filter(None, os.environ.get("TEST_PATCH", "").split(",")):
    globals()[name]()
