"""Libraries that are imported before the processes of a program are forked."""

import subprocess
import sys

from workshop.run.environment import environment

PROGRAM = """
import os, sys
from pathlib import Path
from types import ModuleType

from workshop.check import preloaded
from workshop.check.probes.patching import Patches

import torch.utils.data
import torch.distributed.distributed_c10d as c10d

place = Path(sys.argv[1])
text = {text!r}
preloaded.preload(text, place, place)
"""


def run(folder, text: str, then: str, **variables: object) -> str:
    """What a new interpreter prints that preloads what a program imports, and then runs a few lines."""
    code = PROGRAM.format(text=text) + then
    variables = {"HOME": folder, "XDG_CACHE_HOME": None, "HF_HOME": None} | variables
    command = [sys.executable, "-P", "-c", code, folder]
    result = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_library_is_imported_unless_the_program_has_a_module_of_this_name(tmp_path):
    asks = "print('sklearn.metrics' in sys.modules)"
    assert run(tmp_path, "from sklearn.metrics import f1_score\nimport json", asks) == "True\n"
    assert run(tmp_path, "import json", asks) == "False\n"
    assert run(tmp_path, "this is no Python", asks) == "False\n"
    (tmp_path / "sklearn.py").touch()
    assert run(tmp_path, "from sklearn.metrics import f1_score", asks) == "False\n"


def test_the_models_are_looked_for_where_the_variables_of_the_process_say(tmp_path):
    asks = f"""
os.environ["HF_HOME"] = "{tmp_path}/owner"
preloaded.use_own_caches()
from huggingface_hub import constants
print(constants.HF_HUB_CACHE)
"""
    assert run(tmp_path, "from transformers import AutoTokenizer", asks) == f"{tmp_path}/owner/hub\n"
    assert not (tmp_path / ".cache" / "matplotlib").exists()


def test_a_program_that_sets_such_a_variable_itself_imports_the_library_itself(tmp_path):
    text = 'import os\nos.environ["HF_HUB_OFFLINE"] = "1"\nimport transformers\n'
    assert run(tmp_path, text, "print('transformers' in sys.modules)") == "False\n"


def test_a_function_that_a_library_has_under_its_own_name_is_replaced_too(tmp_path):
    then = """
library = ModuleType("library")
library.reduce_it = c10d.all_reduce
sys.modules["library"] = library
preloaded._find_copies(set(sys.modules) - {"library"})
original = c10d.all_reduce
with Patches() as patches:
    patches.set(c10d, "all_reduce", print)
    assert library.reduce_it is c10d.all_reduce is print
assert library.reduce_it is c10d.all_reduce is original
print("restored")
"""
    assert run(tmp_path, "", then) == "restored\n"


def test_functions_of_safetensors_that_accelerate_has_are_known_if_it_was_imported_before(tmp_path):
    then = """
import accelerate.utils.other as other
preloaded.preload("pass", place, place)
assert any(module is other for found in preloaded.copies.values() for module, _ in found)
print("found")
"""
    assert run(tmp_path, "", then) == "found\n"
