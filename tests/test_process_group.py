"""The end of a process whose gloo threads are late: made late here, as on a machine where they wait for a core."""

import subprocess
import sys

import pytest

from needs import require
from runs import run

# gloo's threads compute for a while after they have said that a collective has ended, before they let go of its tensors.
LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

int pthread_cond_broadcast(pthread_cond_t *condition)
{
    int (*broadcast)(pthread_cond_t *) = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
    int result = broadcast(condition);
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strcmp(name, "pt_gloo_runloop") == 0) {
        struct timespec start, now;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < 60);
    }
    return result;
}
"""

SCRIPT = """
import atexit
import sys
import time

# The last thing before Python ends: it has Python's lock all the time, and the thread has to wait.
atexit.register(sum, range(10**7))

import torch
import torch.distributed as dist
{workshop}

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # while Python ends: the thread gets the lock

def train():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    dist.all_gather([torch.zeros(2)], torch.ones(2))

sys.modules["slow"] = Slow()
train()
"""


@pytest.fixture(scope="module")
def late_threads(tmp_path_factory):
    """A library that, loaded first, makes gloo's threads late."""
    require("cc")
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.c").write_text(LATE)
    library = folder / "late.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "late.c", "-ldl"], check=True)
    return library


# From Python 3.14 on such a thread is made to wait, not stopped: there the first row ends well, too.
FORCED = -6 if sys.version_info < (3, 14) else 0


@pytest.mark.parametrize(("workshop", "status"), [("", FORCED), ("import workshop.data", 0)])
def test_a_process_ends_well_though_gloos_threads_are_late(workshop, status, late_threads, tmp_path):
    """Without the wait Python's end stops the thread by force, and it the process: the first row shows that the test can fail."""
    (tmp_path / "script.py").write_text(SCRIPT.format(workshop=workshop))
    ended = run(
        [sys.executable, tmp_path / "script.py", tmp_path / "store"], tmp_path, timeout=60, LD_PRELOAD=late_threads
    )
    assert ended.returncode == status, ended.stderr
    assert ("terminate called" in ended.stderr) == (status != 0)
