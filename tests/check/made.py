"""Run a tiny program of a test under the probes."""

import logging
import logging.handlers
import os
import textwrap

from workshop.check import launching
from workshop.check.forked import Program
from workshop.check.probes import PROBES

CORE = tuple(probe for probe in PROBES if not probe.library)


class Made:
    """A run and its program."""

    def __init__(self, folder, text, launch="single", nproc=1, probes=CORE, **settings):
        self.script, self.scratch = folder / "program.py", folder / "run"
        self.text = textwrap.dedent(text)
        self.script.write_text(self.text)
        self.scratch.mkdir(exist_ok=True)
        launching.prepare(probes, on_cpu=True)
        log = logging.getLogger(launching.__name__)
        self.warnings = logging.handlers.BufferingHandler(100)
        log.addHandler(self.warnings)
        program = Program(
            script=self.script, launch=launch, nproc=nproc, scratch=self.scratch, probes=tuple(probes), **settings
        )
        self.run = launching.run_program(program)
        log.removeHandler(self.warnings)
        self.ranks = self.run.ranks

    def well(self):
        """Return this run; fail unless it ended normally and no probe raised an error."""
        assert self.run.status == 0, "\n".join(process.stderr for process in self.run.processes)
        assert not self.run.hung
        assert [record.getMessage() for record in self.warnings.buffer] == []
        return self

    def line(self, part):
        """Return the file and line of a text that occurs once in the program."""
        (number,) = (number for number, line in enumerate(self.text.splitlines(), 1) if part in line)
        return f"program.py:{number}"

    def path(self, name):
        return os.path.realpath(self.scratch / name)
