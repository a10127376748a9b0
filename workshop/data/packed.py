"""Read many images from one zip or HDF5 file, as torchvision's ImageFolder reads a folder with ``train/CLASS/IMAGE``."""

import importlib.util
import io
import os
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder
from tqdm import tqdm

from workshop.errors import UserError

Sample = tuple[str, str, bytes]  # of an image: class, file name, bytes of the file


def decode(encoded: bytes) -> Image.Image:
    """Decode the bytes of a JPEG or PNG to an RGB image, as ImageFolder does."""
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


class PackedImages(Dataset):
    """A data set of images in one file. A subclass opens the file (``open_file``) and reads an image from it (``read``).

    Args:
        path: the file.
        transform: converts a PIL image to a sample; None: the image is the sample.
        loader: decodes the bytes of an image.

    Attributes:
        classes: the names of the classes, sorted.
        labels: the class number of each image, int64.
    """

    classes: list[str]
    labels: np.ndarray  # no list: reading an object changes its reference count, so each worker copies its page

    def __init__(self, path: str | os.PathLike, transform: Callable | None = None, loader: Callable = decode):
        self.path, self.transform, self.loader = Path(path), transform, loader
        self._file = self._owner = None

    def open_file(self):
        raise NotImplementedError

    def read(self, file, index: int) -> bytes:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        # Each process opens the file itself, because processes that share an open file also share its position.
        if self._owner != os.getpid():
            self._file, self._owner = self.open_file(), os.getpid()
        image = self.loader(self.read(self._file, index))
        return self.transform(image) if self.transform else image, int(self.labels[index])

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None, "_owner": None}  # for workers that are not forked


class ZippedImages(PackedImages):
    """A data set of images in an uncompressed zip: each image is a piece of the file. Args: as in ``PackedImages``.

    Raises:
        UserError: the file is not a zip, is compressed, or has no images in ``train/CLASS/`` (or ``FOLDER/train/CLASS/``).
    """

    def __init__(self, path, transform=None, loader=decode):
        super().__init__(path, transform, loader)
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile as error:
            raise UserError(f"{path} is not a zip file, or is incomplete ({error})") from error
        found = []
        for member in members:
            match = re.fullmatch(r"(?:[^/]+/)?train/([^/]+)/(.+)", member.filename)
            if match and match[2].lower().endswith(IMG_EXTENSIONS):
                folder, _, name = match[2].rpartition("/")
                found.append(((match[1], folder, name), member))  # in ImageFolder's order
        if not found:
            raise UserError(f"{path} has no images in train/CLASS/")
        if any(member.compress_type != zipfile.ZIP_STORED for _, member in found):
            raise UserError(f"{path} is compressed, which does not make images smaller; create it with: zip -0 -r")
        found.sort(key=lambda each: each[0])
        self.classes = sorted({name for (name, *_), _ in found})
        number = {name: index for index, name in enumerate(self.classes)}
        self.labels = np.array([number[name] for (name, *_), _ in found])
        # The directory of a zip with a million members takes a gigabyte as Python objects, but two numbers are enough.
        self.places = np.array([(member.header_offset, member.file_size) for _, member in found])

    def open_file(self):
        return open(self.path, "rb")

    def read(self, file, index):
        offset, size = self.places[index].tolist()
        file.seek(offset)
        # A header of 30 bytes precedes each member. Its last 4 bytes are the lengths of the name and of the extra field.
        name, extra = struct.unpack("<26x2H", file.read(30))
        file.seek(name + extra, os.SEEK_CUR)
        return file.read(size)


class Hdf5Images(PackedImages):
    """Images of an HDF5 file with the datasets train/images (encoded images), train/labels and train/classes.

    Args: as in ``PackedImages``.

    Raises:
        UserError: the file is not such a file, or h5py is not installed.
    """

    def __init__(self, path, transform=None, loader=decode):
        super().__init__(path, transform, loader)
        if not importlib.util.find_spec("h5py"):
            raise UserError(f"{path} needs h5py; run pip install -e '.[hdf5]' in the folder of the workshop")
        try:
            with self._open() as file:
                group = file["train"]
                self.classes = [name.decode() for name in group["classes"][:]]
                self.labels = group["labels"][:]
                images = len(group["images"])
        except OSError as error:
            raise UserError(f"{path} is not an HDF5 file, or is incomplete") from error
        except KeyError as error:
            raise UserError(f"{path} needs the datasets train/images, train/labels and train/classes") from error
        if images != len(self.labels):
            raise UserError(f"{path} has {images:,} images but {len(self.labels):,} labels")

    def _open(self):
        import h5py  # optional

        return h5py.File(self.path, "r", locking=False)  # some parallel file systems have no locks

    def open_file(self):
        return self._open()["train/images"]  # looked up once; the file stays open with it

    def read(self, file, index):
        return file[index].tobytes()


def write_folder(samples: Iterable[Sample], path: Path) -> None:
    """Write images to ``train/CLASS/NAME`` in a folder."""
    for label, name, encoded in samples:
        folder = path / "train" / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded)


def write_zip(samples: Iterable[Sample], path: Path) -> None:
    """Write images in the format that ``ZippedImages`` reads."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # a JPEG is compressed already
        for label, name, encoded in samples:
            archive.writestr(f"train/{label}/{name}", encoded)


def write_hdf5(samples: Sequence[Sample], path: Path) -> None:
    """Write images, in this order, in the format that ``Hdf5Images`` reads."""
    import h5py  # optional

    classes = sorted({label for label, _, _ in samples})
    with h5py.File(path, "w") as file:
        images = file.create_dataset("train/images", len(samples), h5py.vlen_dtype(np.uint8))  # of different lengths
        for index, (_, _, encoded) in enumerate(samples):
            images[index] = np.frombuffer(encoded, np.uint8)
        file["train/labels"] = [classes.index(label) for label, _, _ in samples]
        file["train/classes"] = classes


def make_images(count: int) -> list[Sample]:
    """Create noise images in ten classes. A JPEG of 500 x 375 pixels takes about 100 kB."""
    random = np.random.default_rng(42)
    noise = random.integers(-40, 40, (2 * 375, 2 * 500, 3), dtype=np.int16)
    samples = []
    for index in tqdm(range(count), "making images", leave=False, disable=None):
        top, left = random.integers(0, (375, 500))  # a different piece of the noise for each
        pixels = 128 + noise[top : top + 375, left : left + 500] + random.integers(-100, 100, 3, dtype=np.int16)
        encoded = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
        samples.append((f"class{index % 10}", f"{index:07}.jpg", encoded.getvalue()))
    return samples


def take_images(folder: str, count: int) -> list[Sample]:
    """Read at most ``count`` images of a folder with ``train/CLASS/IMAGE``, about the same number of each class.

    Raises:
        UserError: there are no images.
    """
    try:
        images = ImageFolder(Path(folder) / "train")
    except OSError as error:
        raise UserError(f"--data {folder} needs images in train/CLASS/ ({error.strerror or error})") from error
    earlier = Counter()  # number of earlier images of the same class
    turns = []
    for path, label in images.imgs:
        turns.append((earlier[label], label, Path(path)))
        earlier[label] += 1
    chosen = sorted((label, path) for _, label, path in sorted(turns)[:count])
    return [
        (images.classes[label], f"{index:07}{path.suffix}", path.read_bytes())
        for index, (label, path) in enumerate(chosen)
    ]
