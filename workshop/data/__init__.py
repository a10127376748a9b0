"""Load data sets (``load_dataset``) and fetch them (``workshop fetch``)."""

import workshop.run.process_group  # noqa: F401
from workshop.data.datasets import DATASETS, data_folder, load_dataset

__all__ = ["DATASETS", "data_folder", "load_dataset"]
