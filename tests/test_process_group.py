"""The end of a process whose gloo threads are late, as on a busy machine; here a library delays them."""

import subprocess
import sys

import pytest

from needs import require
from runs import run

# A thread of gloo reports first that the result of a collective is there, then that the collective has ended. After that it
# releases the tensors. Here it computes after the second report until Python exits, at most LATE milliseconds of processor time.
LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

volatile int exiting = 0;

int pthread_cond_broadcast(pthread_cond_t *condition)
{
    int (*broadcast)(pthread_cond_t *) = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
    int result = broadcast(condition);
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    static int reports = 0;
    if (strcmp(name, "pt_gloo_runloop") == 0 && ++reports == 2) {
        struct timespec start, now;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        while (!exiting && (now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < atoi(getenv("LATE")));
    }
    return result;
}
"""

SCRIPT = """
import atexit
import ctypes
import sys
import time

# These run last, just before Python ends. They are no Python code, so they never release the global interpreter lock, and the
# thread must wait for it.
exiting = ctypes.c_int.in_dll(ctypes.CDLL(None), "exiting")
atexit.register(sum, range(10**7))
atexit.register(setattr, exiting, "value", 1)

import torch
import torch.distributed as dist
{workshop}

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # while Python ends, releases the lock to the thread

def train():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    dist.all_gather([torch.zeros(2)], torch.ones(2))

sys.modules["slow"] = Slow()
train()
"""


@pytest.fixture(scope="module")
def late_threads(tmp_path_factory):
    """A library that delays the threads of gloo if it is loaded first."""
    require("cc")
    folder = tmp_path_factory.mktemp("late")
    (folder / "late.c").write_text(LATE)
    library = folder / "late.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "late.c", "-ldl"], check=True)
    return library


# Python 3.14 lets such a thread wait instead of stopping it, so there the first case also ends normally.
FORCED = -6 if sys.version_info < (3, 14) else 0


@pytest.mark.parametrize(("workshop", "status", "late"), [("", FORCED, 10_000), ("import workshop.data", 0, 60)])
def test_a_process_ends_normally_although_the_threads_of_gloo_are_late(workshop, status, late, late_threads, tmp_path):
    """Without the workshop's wait, Python stops the thread by force, which aborts the process: the first case shows this."""
    (tmp_path / "script.py").write_text(SCRIPT.format(workshop=workshop))
    command = [sys.executable, tmp_path / "script.py", tmp_path / "store"]
    ended = run(command, tmp_path, timeout=60, LD_PRELOAD=late_threads, LATE=late)
    assert ended.returncode == status, ended.stderr
    assert ("terminate called" in ended.stderr) == (status != 0)
