"""Yield endless batches of images like those of ImageNet, for training at scale: made on the device, or from files."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

from workshop.data.packed import Hdf5Images, PackedImages, ZippedImages
from workshop.errors import UserError
from workshop.run.machine import cores

PACKED = {".zip": ZippedImages, ".h5": Hdf5Images, ".hdf5": Hdf5Images}


def synthetic_batches(
    batch_size: int, image_size: int, device: torch.device, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches that a model can learn: ten patterns, which are the classes, with noise added.

    Sample n is the same for any number of processes. The ranks share the samples as with a DistributedSampler that does not
    shuffle, so all ranks together process the same global batches.

    Args:
        batch_size: samples per batch, on each process.
        image_size: height and width, in pixels.
        device: where the images are created, and stay.
        seed: the seed of patterns and noise.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size = (image_size, image_size)
    patterns = F.interpolate(torch.randn(10, 3, 8, 8, generator=generator, device=device), size)
    noise = torch.randn(64, 3, *size, generator=generator, device=device)
    # The number of labels is not a multiple of 64, so each noise is combined with different patterns.
    labels = torch.randint(10, (1009,), generator=generator, device=device)
    places = torch.arange(batch_size, device=device) * dist.get_world_size() + dist.get_rank()
    for first in count(step=batch_size * dist.get_world_size()):
        samples = first + places
        chosen = labels[samples % len(labels)]
        yield patterns[chosen] + noise[samples % len(noise)], chosen


def open_images(data: str | os.PathLike, image_size: int, smallest: int) -> ImageFolder | PackedImages:
    """Open images in ``train/CLASS/``, cropped and flipped at random, as ImageNet models are trained.

    Args:
        data: the folder that contains ``train``, an uncompressed .zip of it, or a .h5 file for ``Hdf5Images``.
        image_size: height and width of a sample, in pixels.
        smallest: the smallest number of images that is enough.

    Raises:
        UserError: there are no such images, or not enough.
    """
    imagenet = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and std of red, green and blue
    transform = Compose([RandomResizedCrop(image_size), RandomHorizontalFlip(), ToTensor(), imagenet])
    suffix = Path(data).suffix.lower() if Path(data).is_file() else ""
    if suffix in (".sqsh", ".sqfs", ".squashfs"):
        raise UserError(f"{data} has to be mounted; name the folder (slurm-multinode/README.md: Many small files)")
    if suffix in PACKED:
        images = PACKED[suffix](data, transform)
    else:
        try:
            images = ImageFolder(Path(data) / "train", transform)
        except OSError as error:
            raise UserError(f"{data} needs images in train/CLASS/ ({error.strerror or error})") from error
    if len(images) < smallest:
        raise UserError(f"{data} has {len(images):,} images to train on, but one step needs {smallest:,}")
    if len(images.classes) > 1000:
        raise UserError(f"{data} has {len(images.classes):,} classes, but the models have only 1,000")
    return images


def image_batches(
    images: ImageFolder | PackedImages, batch_size: int, device: torch.device, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of this process from such images, in a different order in each epoch.

    Args:
        images: from ``open_images``.
        batch_size: samples per batch, on each process.
        device: where the batches are copied to.
        seed: the seed of the order.
    """
    sampler = DistributedSampler(images, seed=seed, drop_last=True)
    workers = max(1, min(8, cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    loader = DataLoader(
        images,
        batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type != "cpu",
    )
    for epoch in count():
        sampler.set_epoch(epoch)
        for samples, labels in loader:
            yield samples.to(device, non_blocking=True), labels.to(device, non_blocking=True)
