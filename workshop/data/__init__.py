"""Data sets (``load_dataset``) and fetching them (``workshop fetch``)."""

from workshop.data.datasets import DATASETS, data_folder, load_dataset

__all__ = ["DATASETS", "data_folder", "load_dataset"]
