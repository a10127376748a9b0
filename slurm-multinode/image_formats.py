"""Measure how fast images are read from many small files, from one zip, and from one HDF5 file.
A parallel file system is designed for a few large files. Opening a file needs a request to a metadata server, which all jobs of
the cluster share, so a million small files slow down the jobs of all users. Most sites also limit the number of files per user.
If all images are in one file, each process opens only this file. On a local disk this matters less, so measure where you train.

Generated images:  python slurm-multinode/image_formats.py --images 400
Your own images:   python slurm-multinode/image_formats.py --data FOLDER --images 10000 --output /scratch/me/image-formats
"""

import importlib.util
import json
import os
import shutil
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop, ToTensor
from tqdm import tqdm

from workshop.data import packed
from workshop.errors import UserError
from workshop.measure.plots import plot_formats
from workshop.run.machine import machine
from workshop.training.arguments import ArgumentParser, positive_int, require_writable

SEED, ROUNDS = 42, 3
TRANSFORM = Compose([RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor()])  # as usual for ImageNet


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--images", type=positive_int, default=400, help="number of images; generated images have about 100 kB each"
    )
    parser.add_argument("--data", help="folder with images in train/CLASS/; without it, images are generated")
    parser.add_argument("--workers", type=positive_int, default=2, help="processes that read and decode the images")
    parser.add_argument(
        "--output", default="runs/image-formats", help="folder for the images, the figures and the picture"
    )
    args = parser.parse_args()
    try:
        require_writable(f"--output {args.output}", Path(args.output))
        images = packed.take_images(args.data, args.images) if args.data else packed.make_images(args.images)
        measure(images, args)
    except UserError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename or args.output}: {error.strerror}")


def measure(samples, args):
    """Write the images in each format, read them, and report the figures as a table, a picture and a JSON file."""
    formats = {"folder": packed.write_folder, "images.zip": packed.write_zip, "images.h5": packed.write_hdf5}
    if not importlib.util.find_spec("h5py"):
        print("HDF5 is left out, because h5py is not installed here; run pip install -e '.[hdf5]'", flush=True)
        del formats["images.h5"]
    rows = {name: store(samples, write, Path(args.output) / name) for name, write in formats.items()}
    for number in range(
        ROUNDS
    ):  # measure the formats in turn, so that other programs on this machine disturb all of them
        for name in tqdm(rows, f"round {number + 1} of {ROUNDS}", leave=False, disable=None):
            for figure, rate in read(Path(args.output) / name, args.workers).items():
                rows[name].setdefault(figure, []).append(rate)
    report({"machine": machine(), **vars(args), "images": len(samples), "formats": rows}, Path(args.output))


def store(samples, write, path):
    """Write the images in one format, and return the number of files and folders, the bytes, and the images per second.

    Until the file or folder is complete, it has a temporary name.
    """
    making = path.with_name(f"making-{path.name}")
    for old in (path, making):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    making.parent.mkdir(parents=True, exist_ok=True)
    os.sync()
    start = time.perf_counter()
    write(samples, making)
    os.sync()  # wait for the disk, because drop_from_memory() drops only what is on the disk
    seconds = time.perf_counter() - start
    os.replace(making, path)
    inodes = [path, *path.rglob("*")]  # files and folders
    size = sum(place.stat().st_size for place in inodes if place.is_file())
    return {"inodes": len(inodes), "bytes": size, "written": len(samples) / seconds}


def read(path, workers):
    """Return the images per second, from the disk and from memory.

    For ``bytes``, this process only reads the bytes of the images. For ``samples``, the workers of a DataLoader also decode and
    transform the images. ``opens``, only for a folder, is the number of files opened and closed per second.
    """
    rates = {}
    order = torch.randperm(len(open_images(path)), generator=torch.Generator().manual_seed(SEED)).tolist()
    for what, loader in (("bytes", len), ("samples", packed.decode)):
        for state in ("disk", "memory"):
            if state == "disk":
                drop_from_memory(path)
            images = open_images(path, loader, TRANSFORM if what == "samples" else None)
            batches = DataLoader(images, 32, sampler=order, num_workers=workers) if what == "samples" else None
            start = time.perf_counter()
            for _ in batches or (images[index] for index in order):
                pass
            rates[f"{what} from {state}"] = len(order) / (time.perf_counter() - start)
    if path.is_dir():
        start = time.perf_counter()
        for index in order:
            open(images.imgs[index][0], "rb").close()
        rates["opens"] = len(order) / (time.perf_counter() - start)
    return rates


def open_images(path, loader=len, transform=None):
    """Open the images of one format; ``loader`` converts the bytes of an image."""
    if path.is_dir():
        return ImageFolder(path / "train", transform, loader=partial(load_file, loader))
    return {".zip": packed.ZippedImages, ".h5": packed.Hdf5Images}[path.suffix](path, transform, loader)


def load_file(loader, path):
    return loader(Path(path).read_bytes())


def drop_from_memory(path):
    """Drop these files from the page cache of this machine.

    This needs no root rights, and does not affect the cache of a file server.
    """
    for place in [path, *path.rglob("*")]:
        if place.is_file():
            with open(place, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(figures, output):
    """Print a table, draw a picture, and write the figures of each round as JSON."""
    rates = [name for name in figures["formats"]["images.zip"] if " from " in name]
    table = Table(Column(no_wrap=True), "files", "MB", "written", *rates)
    for name, row in figures["formats"].items():
        medians = [statistics.median(row[rate]) for rate in rates]
        table.add_row(
            name, *(f"{value:,.0f}" for value in (row["inodes"], row["bytes"] / 1e6, row["written"], *medians))
        )
    Console().print(table)
    opens = statistics.median(figures["formats"]["folder"]["opens"])
    print(f"Images/s, the median of {ROUNDS} rounds. Opening and closing the small files alone: {opens:,.0f}/s.")
    with open(output / "formats.json.tmp", "w") as file:
        json.dump(figures, file, indent=1)
    os.replace(output / "formats.json.tmp", output / "formats.json")
    plot_formats(output / "formats.png", figures)


if __name__ == "__main__":
    main()
