"""The smallest program of many processes in JAX: each device has a number, and all of them learn the sum.
It is what torch.distributed.all_reduce does.

One process:  python bonus_jax/psum.py
N processes:  NPROC=2 bonus_jax/run_jax.sh psum.py
Slurm:        srun --ntasks=2 python bonus_jax/psum.py
"""

from functools import partial

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # kill -9 on torchrun would leave this process waiting; before the slow imports

from meeting import meet  # isort: skip - it says in one sentence that JAX is missing
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from workshop.training.arguments import ArgumentParser


def main():
    ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    meet()
    # All devices of all processes, in one row. "data" is the row's name.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    # One array that lies in pieces: P("data") cuts its first dimension, and each process brings what its own devices get.
    mine = np.full(jax.local_device_count(), jax.process_index() + 1)
    numbers = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)

    # shard_map runs a function once on each device, with its piece; psum adds over the row. P(): the result is whole on each.
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def add(piece):
        return jax.lax.psum(piece, "data")

    total = int(add(numbers)[0])

    print(f"process {jax.process_index()} of {jax.process_count()} had {mine.tolist()}, the sum is {total}", flush=True)
    each = jax.local_device_count()
    assert total == each * sum(range(1, jax.process_count() + 1)), "every process has as many devices"


if __name__ == "__main__":
    main()
