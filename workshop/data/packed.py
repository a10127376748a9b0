"""Many images in one file, a zip or HDF5: what torchvision's ImageFolder is for a folder with ``train/CLASS/IMAGE``."""

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

Sample = tuple[str, str, bytes]  # of an image: its class, its file's name, its file's bytes


def decode(encoded: bytes) -> Image.Image:
    """Make an RGB image of a JPEG's or PNG's bytes, as ImageFolder does."""
    with Image.open(io.BytesIO(encoded)) as image:
        return image.convert("RGB")


class PackedImages(Dataset):
    """Images that lie in one file. What they lie in opens the file (``open_file``) and reads from it (``read``).

    Args:
        path: the file.
        transform: makes a sample of a PIL image; None: the image is the sample.
        loader: makes the image of an encoded one's bytes.

    Attributes:
        classes: their names, sorted.
        labels: of each image the number of its class, int64.
    """

    classes: list[str]
    labels: np.ndarray  # and no list: reading an object counts its references, which copies its page in each worker

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
        # Each process opens the file for itself: processes that share an open file would move its position under each other.
        if self._owner != os.getpid():
            self._file, self._owner = self.open_file(), os.getpid()
        image = self.loader(self.read(self._file, index))
        return self.transform(image) if self.transform else image, int(self.labels[index])

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_file": None, "_owner": None}  # for workers that are not forked


class ZippedImages(PackedImages):
    """Images of a zip whose members are stored, not compressed: each is a piece of the file. Args: of ``PackedImages``.

    Raises:
        UserError: it is no zip, is compressed, or has no images in ``train/CLASS/`` (or ``FOLDER/train/CLASS/``).
    """

    def __init__(self, path, transform=None, loader=decode):
        super().__init__(path, transform, loader)
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile as error:
            raise UserError(f"{path} is no zip, or was cut short ({error})") from error
        found = []
        for member in members:
            match = re.fullmatch(r"(?:[^/]+/)?train/([^/]+)/(.+)", member.filename)
            if match and match[2].lower().endswith(IMG_EXTENSIONS):
                folder, _, name = match[2].rpartition("/")
                found.append(((match[1], folder, name), member))  # in ImageFolder's order
        if not found:
            raise UserError(f"{path} needs images in train/CLASS/, and has none there")
        if any(member.compress_type != zipfile.ZIP_STORED for _, member in found):
            raise UserError(f"{path} is compressed, which gains nothing on images; make it with: zip -0 -r")
        found.sort(key=lambda each: each[0])
        self.classes = sorted({name for (name, *_), _ in found})
        number = {name: index for index, name in enumerate(self.classes)}
        self.labels = np.array([number[name] for (name, *_), _ in found])
        # The directory of a zip with a million members takes a gigabyte as Python objects: two numbers are enough.
        self.places = np.array([(member.header_offset, member.file_size) for _, member in found])

    def open_file(self):
        return open(self.path, "rb")

    def read(self, file, index):
        offset, size = self.places[index].tolist()
        file.seek(offset)
        # In front of each member: 30 bytes, the last four the lengths of its name and of what else follows before the data.
        name, extra = struct.unpack("<26x2H", file.read(30))
        file.seek(name + extra, os.SEEK_CUR)
        return file.read(size)


class Hdf5Images(PackedImages):
    """Images of an HDF5 file with the datasets train/images (each an image's encoded bytes), train/labels and train/classes.

    Args: of ``PackedImages``.

    Raises:
        UserError: it is no such file, or h5py is not installed.
    """

    def __init__(self, path, transform=None, loader=decode):
        super().__init__(path, transform, loader)
        if not importlib.util.find_spec("h5py"):
            raise UserError(f"{path} needs h5py, which is an extra: pip install -e '.[hdf5]' in the workshop's folder")
        try:
            with self._open() as file:
                group = file["train"]
                self.classes = [name.decode() for name in group["classes"][:]]
                self.labels = group["labels"][:]
                images = len(group["images"])
        except OSError as error:
            raise UserError(f"{path} is no HDF5 file, or was cut short") from error
        except KeyError as error:
            raise UserError(f"{path} needs the datasets train/images, train/labels and train/classes") from error
        if images != len(self.labels):
            raise UserError(f"{path} has {images:,} images, and {len(self.labels):,} labels")

    def _open(self):
        import h5py  # an extra

        return h5py.File(self.path, "r", locking=False)  # nobody writes, and not every parallel file system has locks

    def open_file(self):
        return self._open()["train/images"]  # looked up once; the file stays open with it

    def read(self, file, index):
        return file[index].tobytes()


def write_folder(samples: Iterable[Sample], path: Path) -> None:
    """Write images to ``train/CLASS/NAME`` of a folder."""
    for label, name, encoded in samples:
        folder = path / "train" / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded)


def write_zip(samples: Iterable[Sample], path: Path) -> None:
    """Write images as ``ZippedImages`` reads them."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # a JPEG is compressed already
        for label, name, encoded in samples:
            archive.writestr(f"train/{label}/{name}", encoded)


def write_hdf5(samples: Sequence[Sample], path: Path) -> None:
    """Write images, in this order, as ``Hdf5Images`` reads them."""
    import h5py  # an extra

    classes = sorted({label for label, _, _ in samples})
    with h5py.File(path, "w") as file:
        images = file.create_dataset("train/images", len(samples), h5py.vlen_dtype(np.uint8))  # each of its own length
        for index, (_, _, encoded) in enumerate(samples):
            images[index] = np.frombuffer(encoded, np.uint8)
        file["train/labels"] = [classes.index(label) for label, _, _ in samples]
        file["train/classes"] = classes


def make_images(count: int) -> list[Sample]:
    """Make images of ten classes: noise, of which a JPEG with 500 x 375 pixels takes some 100 kB."""
    random = np.random.default_rng(42)
    noise = random.integers(-40, 40, (2 * 375, 2 * 500, 3), dtype=np.int16)
    samples = []
    for index in tqdm(range(count), "making images", leave=False, disable=None):
        top, left = random.integers(0, (375, 500))  # another piece of the noise for each
        pixels = 128 + noise[top : top + 375, left : left + 500] + random.integers(-100, 100, 3, dtype=np.int16)
        encoded = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
        samples.append((f"class{index % 10}", f"{index:07}.jpg", encoded.getvalue()))
    return samples


def take_images(folder: str, count: int) -> list[Sample]:
    """Read images of a folder with ``train/CLASS/IMAGE``, at most so many, in turn of each class.

    Raises:
        UserError: there are none.
    """
    try:
        images = ImageFolder(Path(folder) / "train")
    except OSError as error:
        raise UserError(f"--data {folder} needs images in train/CLASS/ ({error.strerror or error})") from error
    earlier = Counter()  # of the same class
    turns = []
    for path, label in images.imgs:
        turns.append((earlier[label], label, Path(path)))
        earlier[label] += 1
    chosen = sorted((label, path) for _, label, path in sorted(turns)[:count])
    return [
        (images.classes[label], f"{index:07}{path.suffix}", path.read_bytes())
        for index, (label, path) in enumerate(chosen)
    ]
