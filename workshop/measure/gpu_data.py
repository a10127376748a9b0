"""Write the data that the items of ``workshop gpu-day`` share into $WORKSHOP_DATA, without a network.

    python -m workshop.measure.gpu_data [model] [mnist=FOLDER]

model: the tiny CodeLlama. mnist=FOLDER: MNIST from the data folder FOLDER. If it is not there, files of the same size take its
place. They contain the digits again and again, which is enough to measure a speed.
"""

import sys
from pathlib import Path

import numpy as np

from workshop.data import data_folder, mnist
from workshop.data.codellama import TINY, model_folder
from workshop.data.datasets import Digits

IMAGES, LABELS = 0x803, 0x801  # the first four bytes of the files, which say what they contain


def write_mnist(source: Path, folder: Path) -> None:
    """Put MNIST into ``folder``: a link to the files in ``source`` if they are there, else files that look like them."""
    raw = folder / "MNIST" / "raw"
    raw.parent.mkdir(parents=True, exist_ok=True)
    if not mnist.missing_files(source):
        raw.symlink_to((source / "MNIST" / "raw").resolve())
        return
    raw.mkdir()
    for prefix, count, train in (("train", 60_000, True), ("t10k", 10_000, False)):
        digits = Digits(train=train)
        images = np.resize(digits.images, (count, 28, 28)).astype(np.uint8)
        labels = np.resize(np.array(digits.labels), count).astype(np.uint8)
        header = np.array([IMAGES, count, 28, 28], ">i4").tobytes()
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([LABELS, count], ">i4").tobytes()
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def main() -> None:
    for word in sys.argv[1:]:
        if word == "model":
            model_folder(TINY)
        elif word.startswith("mnist="):
            write_mnist(Path(word.removeprefix("mnist=")), data_folder())


if __name__ == "__main__":
    main()
