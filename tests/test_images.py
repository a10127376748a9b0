"""Images in a folder, a zip or an HDF5 file: equal samples, mistakes reported in one sentence, and the speed of each format."""

import importlib.util
import json
import pickle
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

import runs
from test_scale import SCRIPT, train
from workshop.data import packed
from workshop.data.images import open_images
from workshop.errors import UserError

FORMATS = SCRIPT.with_name("image_formats.py")
needs_h5py = pytest.mark.skipif(not importlib.util.find_spec("h5py"), reason="needs h5py, an extra")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images in every format, among them one with a palette, a grey one, one in a subfolder, and a text file."""
    folder = tmp_path_factory.mktemp("formats")
    packed.write_folder(packed.make_images(24), folder / "images")
    odd = folder / "images" / "train" / "class1"
    (odd / "more").mkdir()
    Image.new("L", (70, 80), 90).save(odd / "grey.PNG")
    Image.new("P", (80, 70), 3).save(odd / "more" / "palette.png")
    (odd / "notes.txt").write_text("no image")
    files = sorted(path for path in (folder / "images").rglob("*") if path.is_file())
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for path in reversed(files):  # the order in the zip must not matter
            archive.write(path, path.relative_to(folder / "images"))
    with zipfile.ZipFile(folder / "with_folder.zip", "w") as archive:
        for path in files:
            archive.write(path, path.relative_to(folder))
    if importlib.util.find_spec("h5py"):
        images = ImageFolder(folder / "images" / "train")
        samples = [(images.classes[label], "", Path(path).read_bytes()) for path, label in images.imgs]
        packed.write_hdf5(samples, folder / "images.h5")
    return folder


@pytest.mark.parametrize("name", ["images.zip", "with_folder.zip", pytest.param("images.h5", marks=needs_h5py)])
def test_a_packed_file_has_the_samples_of_the_folder(name, place):
    folder = ImageFolder(place / "images" / "train", ToTensor())
    kind = packed.Hdf5Images if name.endswith("h5") else packed.ZippedImages
    images = kind(place / name, ToTensor())
    assert len(images) == len(folder) == 26
    assert images.classes == folder.classes
    assert torch.equal(images[3][0], folder[3][0])  # opens the file here, so that the workers inherit an open file
    order = torch.randperm(26).tolist()
    for workers in (0, 2):
        seen = DataLoader(images, batch_size=None, sampler=order, num_workers=workers)
        for index, (image, label) in zip(order, seen, strict=True):
            assert label == folder[index][1]
            assert torch.equal(image, folder[index][0])
    assert torch.equal(
        pickle.loads(pickle.dumps(images))[3][0], folder[3][0]
    )  # workers that are not forked need it pickled


def cut_short(place, folder):
    (folder / "images.zip").write_bytes((place / "images.zip").read_bytes()[:-100])


def compressed(place, folder):
    shutil.make_archive(folder / "images", "zip", place / "images")


def no_images(place, folder):
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        archive.write(place / "images" / "train" / "class1" / "grey.PNG", "train/grey.PNG")


def too_many_classes(place, folder):
    packed.write_zip(((f"class{number}", "0.jpg", b"") for number in range(1001)), folder / "images.zip")


def no_hdf5(place, folder):
    (folder / "images.h5").write_bytes(b"no HDF5")


def other_hdf5(place, folder):
    import h5py

    with h5py.File(folder / "images.h5", "w") as file:
        file["train/images"] = [1, 2]


BAD = {
    "images": (None, r"needs images in train/CLASS/ \(No such file or directory\)"),
    "cut_short.zip": (cut_short, "images.zip is not a zip file, or is incomplete"),
    "compressed.zip": (compressed, "zip is compressed, which does not make images smaller; create it with: zip -0"),
    "no_images.zip": (no_images, "images.zip has no images in train/CLASS/"),
    "classes.zip": (too_many_classes, "images.zip has 1,001 classes, but the models have only 1,000"),
    "no_hdf5.h5": (no_hdf5, "images.h5 is not an HDF5 file, or is incomplete"),
    "other_hdf5.h5": (other_hdf5, "images.h5 needs the datasets train/images, train/labels and train/classes"),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_h5py) if "hdf5" in case else case for case in BAD])
def test_a_wrong_file_of_images_is_reported_in_one_sentence(case, place, tmp_path):
    make, message = BAD[case]
    if make:
        make(place, tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_images(tmp_path / f"images{Path(case).suffix}", 64, smallest=2)
    assert "\n" not in str(error.value)


def test_too_few_images_and_missing_packages_are_reported(place, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"images.zip has 26 images to train on, but one step needs 128"):
        open_images(place / "images.zip", 64, smallest=128)
    (tmp_path / "images.sqsh").touch()
    with pytest.raises(UserError, match="has to be mounted; name the folder"):
        open_images(tmp_path / "images.sqsh", 64, smallest=1)
    (tmp_path / "images.h5").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs h5py; run pip install -e '.\[hdf5\]'"):
        open_images(tmp_path / "images.h5", 64, smallest=1)


@pytest.mark.full
@needs_h5py
def test_every_format_gives_the_same_losses(place, tmp_path):
    losses = {}
    for name in ("images", "images.zip", "images.h5"):
        options = ["--data", place / name, "--batch-size", 4, "--steps", 2]
        losses[name] = train(2, tmp_path, *options)[0]["losses"]
    assert losses["images.zip"] == losses["images.h5"] == losses["images"]
    assert len(losses["images"]) == 2


def measure(folder, *options):
    return runs.run([sys.executable, FORMATS, "--output", "found", *options], folder, COLUMNS=160)


@pytest.mark.full
@needs_h5py
def test_the_formats_are_measured(tmp_path):
    done = measure(tmp_path, "--images", 20)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found" / "formats.json").read_text())
    rows = found["formats"]
    assert [row["inodes"] for row in rows.values()] == [20 + 10 + 2, 1, 1]
    assert all(row["bytes"] >= rows["folder"]["bytes"] > 20 * 80_000 for row in rows.values())
    for row in rows.values():
        for figure in ("bytes from disk", "bytes from memory", "samples from disk", "samples from memory"):
            assert len(row[figure]) == 3
            assert min(row[figure]) > 0
    assert "Opening and closing the small files alone" in done.stdout
    with Image.open(tmp_path / "found" / "formats.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20, "the picture is empty"
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"folder", "images.zip", "images.h5"} | {
        "formats.json",
        "formats.png",
    }
    assert len(open_images(tmp_path / "found" / "images.zip", 64, smallest=20)) == 20  # the file works for training


def test_a_selection_has_images_of_all_classes(place):
    for count in (10, 12, 23):
        taken = packed.take_images(place / "images", count)
        assert len(taken) == count
        assert sorted({label for label, *_ in taken}) == ImageFolder(place / "images" / "train").classes
    assert len(packed.take_images(place / "images", 1000)) == 26


@pytest.mark.full
def test_the_formats_of_a_given_folder_are_measured(place, tmp_path):
    done = measure(tmp_path, "--data", place / "images", "--images", 12)
    assert done.returncode == 0, done.stderr
    found = packed.ZippedImages(tmp_path / "found" / "images.zip")
    assert len(found) == 12
    assert found.classes == ImageFolder(place / "images" / "train").classes  # of all classes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--images", "0"], "'0' is not a whole number of at least 1"),
        (["--data", "nowhere"], "--data nowhere needs images in train/CLASS/ (No such file or directory)"),
        (["--output", "file/x"], "file is a file, so nothing can be written beneath it"),
    ],
)
def test_wrong_options_of_the_measurement_are_reported_in_one_line(options, message, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(FORMATS), *options])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FORMATS), run_name="__main__")
    seen = capfd.readouterr()
    assert (end.value.code, seen.out, seen.err.count("\n")) == (2, "", 1), seen.err
    assert message in seen.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
