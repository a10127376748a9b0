"""Measure the nodes of a job. This program runs once on each node, and on the first node also leads the others.

srun --ntasks-per-node=1 python -P -m workshop.doctor.nodes.program RESULT PORT NODE [NODE ...]
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

from workshop.doctor.nodes.agent import Agent, connect, node_name
from workshop.doctor.nodes.lead import Lead


def main() -> None:
    result, port, *names = sys.argv[1:]
    host, lead = names[0], None
    if int(os.environ.get("SLURM_PROCID", 0)) == 0:
        lead = Lead(int(port), names)
        leading = Thread(target=lead.run, args=(Path(result),))
        leading.start()
        host, port = "127.0.0.1", lead.port
    agent = Agent()
    try:
        connection = connect(host, int(port))
    except OSError as error:
        sys.exit(f"{node_name()} cannot reach {host}:{port}: {error}")
    with suppress(ConnectionError):
        agent.work(connection)
    if lead:
        leading.join()


if __name__ == "__main__":
    main()
