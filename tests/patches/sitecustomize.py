"""Python imports this at start where a test puts the folder on PYTHONPATH: it changes what the scripts run on, not them.

TEST_PATCH names the changes, separated by commas; they reach every process that a run starts, spawned ones too.
"""

import os
import signal


def float64():
    """Double precision, to see that two runs compute the same up to rounding."""
    import torch

    torch.set_default_dtype(torch.float64)


def sgd():
    """Plain SGD in place of AdamW: a wrong gradient then shows in proportion."""
    import torch

    torch.optim.AdamW = lambda parameters, lr: torch.optim.SGD(parameters, lr=0.05)


def float32():
    """No bfloat16, also where the device is fast at it: two runs then differ by little."""
    from workshop import tensors

    tensors.bf16_is_fast = lambda device: False


def odd_test_set():
    """A test set of 357 samples: it does not divide by 2."""
    from workshop.data import datasets

    whole = datasets.Digits.__init__

    def shortened(self, train, transform=None):
        whole(self, train, transform)
        if not train:
            self.images, self.labels = self.images[:357], self.labels[:357]

    datasets.Digits.__init__ = shortened


def fail_on_rank_1():
    """Rank 1 raises in its third step; rank 0 then fails too, because its peer has gone."""
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
    """The first time that a checkpoint is saved at the end of epoch 2, half of the file is written and the process killed."""
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


def large_disk():
    """100 GB of free disk, whatever this machine has."""
    import shutil

    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=10**11)


def small_mnist():
    """Other files in place of MNIST's, described in TEST_MNIST, to be had from TEST_MNIST_URL."""
    from workshop.data import mnist

    rows = [row.split(",") for row in os.environ["TEST_MNIST"].split(";")]
    mnist.ARCHIVES = tuple(mnist.Archive(name, sha256, int(size)) for name, sha256, size in rows)
    mnist.MIRRORS = (os.environ["TEST_MNIST_URL"],)


for name in filter(None, os.environ.get("TEST_PATCH", "").split(",")):
    globals()[name]()
