"""Check that an image has the versions of its lock and can import its framework:  python versions.py image.lock torch"""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def found(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


lock, framework = sys.argv[1:]
lines = [line.rstrip(" \\") for line in Path(lock).read_text().splitlines() if line[:1].isalpha()]
pins = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate()]
wrong = [f"{pin.name}{pin.specifier}: {found(pin.name)}" for pin in pins if not pin.specifier.contains(found(pin.name))]
if wrong or not pins:
    sys.exit(f"the packages differ from {lock}: {', '.join(wrong) or 'the lock is empty'}")
print(f"{framework} {importlib.import_module(framework).__version__}, and {len(pins)} packages as in {lock}")
