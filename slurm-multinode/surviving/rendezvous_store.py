"""Host the store in which the torchruns of a job meet, in a process that none of the nodes needs for the training.

By default, the torchrun on the host of --rdzv-endpoint hosts this store. If that node leaves, all others end with
RendezvousConnectionError. With a store of its own, any node may leave.

Start it:  python rendezvous_store.py ADDRESS_FILE
It writes HOST:PORT to the file, and serves until it receives SIGTERM. Each torchrun then needs these options:
    --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-conf=is_host=0
"""

import os
import signal
import socket
import sys

from torch.distributed import TCPStore


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: rendezvous_store.py ADDRESS_FILE")
    path = sys.argv[1]
    host = os.environ.get("STORE_HOST") or socket.gethostname()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)  # port 0: the system chooses a free port
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".tmp", "w") as file:
        file.write(f"{host}:{store.port}\n")
    os.replace(path + ".tmp", path)  # a reader never finds half an address
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os.remove(path)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # main() waits for them
    main()
