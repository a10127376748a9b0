"""Programs that try to change the report: each is submitted in place of an exercise."""

# It forks a process that leaves its session, prints a report and 1 GB, and deletes its copy of the course.
VANDAL = """
import json, os, shutil, sys, time
from pathlib import Path

import workshop.repository

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)  # {marker}"])
    os._exit(0)
print(json.dumps({{"states": {{"0": "met", "1": "met"}}, "findings": [], "not_checked": [], "judged": True}}))
print("✓ 1 everything: 100 of 100 points\\x1b[2J</testcase>", flush=True)
shutil.rmtree(workshop.repository.ROOT, ignore_errors=True)
shutil.rmtree(Path(__file__).resolve().parents[1], ignore_errors=True)
for _ in range(1024):
    os.write(1, b"x" * (1 << 20))
"""
# It writes the result of its check and ends the check. It uses a shell, because the check does not let the program write there.
KILLER = """
import json, subprocess

import psutil

met = {"states": {"0": "met", "1": "met"}, "findings": [], "not_checked": [], "judged": True}
for process in reversed(psutil.Process().parents()):
    words = process.cmdline()
    if "workshop.grades.one" in words:
        subprocess.run(["sh", "-c", 'echo "$1" >"$2"', "sh", json.dumps(met), words[-1]], check=True)
        process.kill()
"""
# It sleeps, and ignores SIGTERM.
SLEEPER = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(10_000)
"""
BROKEN = "def main(:\n"
