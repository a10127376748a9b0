"""Train on replicas that may die at any time: the others repeat at most one step, and nothing restarts.

Three replicas:  python slurm-multinode/surviving/tolerate.py --replicas 3
Kill a replica:  kill -9 PID, in a different terminal. The program prints the process ids (PIDs) of its replicas.
Several nodes:   sbatch tolerate.sh, in the folder of this file
"""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchvision import transforms

from lighthouse import launch, open_connection, receive, send, serve  # the file beside this one
from workshop.data import load_dataset
from workshop.training.arguments import ArgumentParser, positive_float, positive_int
from workshop.training.models import SmallCNN

SEED = 42
PARTS, SAMPLES = 12, 2  # a global batch has 12 parts with 2 samples each, regardless of the number of replicas


def main():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=positive_int, default=3, help="replicas to start on this node")
    parser.add_argument("--steps", type=positive_int, default=200, help="optimizer steps")
    parser.add_argument(
        "--patience", type=positive_float, default=30, help="seconds after which a silent replica is killed"
    )
    parser.add_argument("--log", default="runs/tolerate.jsonl", help="file for the loss of each step")
    parser.add_argument("--address", help="file for the address of the lighthouse, if other nodes take part")
    parser.add_argument(
        "--lighthouse", metavar="HOST:PORT", help="start replicas for the training with this lighthouse"
    )
    parser.add_argument("--join", nargs=3, help="the program starts its replicas with this option")
    args = parser.parse_args()
    if args.replicas > PARTS:
        parser.error(f"--replicas {args.replicas}: a global batch has {PARTS} parts, so use at most {PARTS} replicas")
    if args.join:
        train(args)
        return
    if args.lighthouse:
        launch_for(args, parser)
    try:
        os.makedirs(os.path.dirname(args.log) or ".", exist_ok=True)
        with open(args.log, "w", buffering=1) as log:
            sys.exit(serve(args, log))
    except OSError as error:
        parser.error(f"cannot write {error.filename or args.log}: {error.strerror}")


def launch_for(args, parser):
    """Launch the replicas of this node, for a lighthouse on a different node."""
    host, _, port = args.lighthouse.rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--lighthouse {args.lighthouse}: not HOST:PORT")
    try:
        sys.exit(launch(args, (host, int(port))))
    except OSError as error:
        parser.error(f"--lighthouse {args.lighthouse}: {error.strerror}")


def train(args):
    """Be one replica: compute a part of each global batch, average the gradients, vote, and update if the step is valid."""
    torch.manual_seed(SEED)
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters())
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))])
    train_set, test_set = (default_collate(list(each)) for each in load_dataset("digits", transform))  # images, labels
    patience = timedelta(seconds=args.patience)
    lighthouse, store = connect(*args.join, patience)
    step, quorum, ok, loss = 0, 0, False, 0.0
    sender = {"pid": os.getpid(), "parent": f"{socket.gethostname()}:{os.getppid()}"}
    while True:
        send(lighthouse, sender | {"step": step, "ok": ok, "loss": loss})
        answer = receive(lighthouse)
        if not answer:
            return  # the launcher was killed, or the training ended while this replica was starting
        rank, size = answer["rank"], answer["size"]
        if answer["valid"]:
            optimizer.step()
            step += 1
        if answer["end"]:
            break
        try:
            if answer["quorum"] != quorum:  # a replica has died or joined
                quorum = answer["quorum"]
                form_group(dist.PrefixStore(str(quorum), store), rank, size, patience)
                step = copy_state(model, optimizer, step)
            loss = average_gradients(model, train_set, step, rank, size)
            ok = True
        except RuntimeError:  # another replica has died in a collective
            leave_group()
            ok = False
    leave_group()
    if rank == 0:
        with torch.inference_mode():
            right = model(test_set[0]).argmax(dim=1) == test_set[1]
        print(f"step {step}: accuracy {right.float().mean():.3f} on {size} replicas")


def connect(host, port, store_port, patience):
    """Connect to the lighthouse and to the store in which process groups find each other."""
    try:
        store = dist.TCPStore(host, int(store_port), timeout=patience)
        return open_connection((host, int(port))), store
    except (OSError, RuntimeError):
        sys.exit(0)  # the training has ended while this replica was starting


def average_gradients(model, train_set, step, rank, size):
    """Compute the gradients of the global batch: each replica those of its parts. Return the loss of this replica's parts.

    The samples depend only on the step. If a step is repeated by fewer replicas, each of them computes more parts of the
    same global batch, so no sample is lost or used twice, and the learning rate stays right.
    """
    images, labels = train_set
    epoch, place = divmod(step, len(labels) // (PARTS * SAMPLES))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED + epoch))
    batch = order[place * PARTS * SAMPLES :][: PARTS * SAMPLES].view(PARTS, SAMPLES)
    model.zero_grad()
    total = 0.0
    for part in batch[rank::size]:
        loss = F.cross_entropy(model(images[part]), labels[part]) / PARTS
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # raises an error if a replica dies
    return total


def copy_state(model, optimizer, step):
    """Copy the model, the optimizer and the step from rank 0, so that a new replica can take part."""
    state = [step, model.state_dict(), optimizer.state_dict()] if dist.get_rank() == 0 else [None] * 3
    dist.broadcast_object_list(state)
    step, parameters, moments = state
    model.load_state_dict(parameters)
    optimizer.load_state_dict(moments)
    return step


def form_group(store, rank, size, patience):
    """Form a new process group of the members of the quorum."""
    leave_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)


def leave_group():
    """Close the connections to all members, so that none of them waits for this replica until the time-out."""
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
