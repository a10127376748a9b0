"""Load the data sets, real images, from files that are already on this machine. Nothing here downloads anything."""

import importlib.util
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from workshop.data import cifar10, mnist
from workshop.errors import UserError
from workshop.repository import ROOT


def data_folder() -> Path:
    """Return the folder of the fetched data sets: ``$WORKSHOP_DATA``, or ``data/`` in the repository."""
    return Path(os.environ.get("WORKSHOP_DATA") or ROOT / "data").expanduser()


class Digits(Dataset):
    """scikit-learn's 1,797 handwritten digits (8x8, 16 grey levels, 43 writers) as 28x28 images: 1,437 to train, 360 to test.

    The split is a fixed permutation, the same on every machine. Source: E. Alpaydin and C. Kaynak, "Optical Recognition of
    Handwritten Digits", UCI Machine Learning Repository, 1998, https://doi.org/10.24432/C50P49.

    Args:
        train: the training part if true, else the test part.
        transform: converts a 28x28 grey PIL image to a sample, as in torchvision. None: a float tensor of shape
            (1, 28, 28) with values in [0, 1].
    """

    def __init__(self, train: bool, transform=None):
        table = _digits_table()
        # RandomState's stream is frozen (NumPy's NEP 19), so this split never changes.
        order = np.random.RandomState(0).permutation(len(table))
        rows = table[order[:1437] if train else order[1437:]]
        small = (rows[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        self.images = np.stack([Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR) for image in small])
        self.labels = rows[:, 64].astype(int).tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        if self.transform is None:
            image = torch.from_numpy(self.images[index]).to(torch.get_default_dtype()).div(255).unsqueeze(0)
        else:
            image = self.transform(Image.fromarray(self.images[index]))
        return image, self.labels[index]


@cache
def _digits_table() -> np.ndarray:
    """Read the file that sklearn.datasets.load_digits() reads. Importing sklearn would take over a second per process."""
    package = Path(importlib.util.find_spec("sklearn").submodule_search_locations[0])
    return np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")


def _digits(transform):
    return Digits(train=True, transform=transform), Digits(train=False, transform=transform)


def _mnist(transform):
    missing = mnist.missing_files(data_folder())
    if missing:
        raise UserError(
            f"MNIST is not in {data_folder()} ({len(missing)} of 4 files missing or cut short); "
            "fetch it once with: ./workshop.sh fetch mnist"
        )
    from torchvision.datasets import MNIST  # here, because the import is slow
    from torchvision.transforms import ToTensor

    transform = transform or ToTensor()
    return MNIST(data_folder(), train=True, transform=transform), MNIST(data_folder(), train=False, transform=transform)


def _cifar10(transform):
    missing = cifar10.missing_files(data_folder())
    if missing:
        raise UserError(
            f"CIFAR-10 is not in {data_folder()} ({len(missing)} of {len(cifar10.FILES)} files missing); "
            "fetch it once with: ./workshop.sh fetch cifar10"
        )
    from torchvision.datasets import CIFAR10
    from torchvision.transforms import ToTensor

    transform = transform or ToTensor()
    try:
        return tuple(CIFAR10(data_folder(), train=train, transform=transform) for train in (True, False))
    except RuntimeError as error:  # the MD5 sum of a file is wrong
        raise UserError(
            f"CIFAR-10 in {data_folder()} is damaged; delete {cifar10.FOLDER} there and fetch it again"
        ) from error


DATASETS = {"digits": _digits, "mnist": _mnist, "cifar10": _cifar10}


def load_dataset(name: str, transform=None) -> tuple[Dataset, Dataset]:
    """Return the training set and the test set called ``name``, without downloading anything.

    Args:
        name: "digits" (1,437 and 360 images, always there), "mnist" (60,000 and 10,000, after ``workshop fetch mnist``) or
            "cifar10" (50,000 and 10,000, after ``workshop fetch cifar10``).
        transform: converts a 28x28 grey PIL image (cifar10: 32x32, RGB) to a sample; None gives float tensors of shape
            (1, 28, 28) (cifar10: (3, 32, 32)) in [0, 1].

    Raises:
        UserError: the data set is unknown, or has not been fetched.
    """
    if name not in DATASETS:
        raise UserError(f"unknown data set '{name}'; choose from: {', '.join(DATASETS)}")
    return DATASETS[name](transform)
