"""Sum one number per device over all processes with JAX, so that every device has the sum.
This is what torch.distributed.all_reduce does.

One process:  python bonus_jax/psum.py
N processes:  NPROC=2 bonus_jax/run_jax.sh psum.py
Slurm:        srun --ntasks=2 python bonus_jax/psum.py
"""

from functools import partial

from workshop.training.launcher import exit_with_launcher

exit_with_launcher()  # this process must end if torchrun is killed (kill -9); before the slow imports

from meeting import meet  # isort: skip - prints one sentence if JAX is not installed
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from workshop.training.arguments import ArgumentParser


def main():
    ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    meet()
    # The mesh has one dimension, "data", which contains all devices of all processes.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    # One sharded array: P("data") shards the first dimension over the devices, and each process provides the shards of its own
    # devices.
    mine = np.full(jax.local_device_count(), jax.process_index() + 1)
    numbers = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)

    # shard_map runs the function on each device with its shard. psum sums over the dimension "data". P() means that each device
    # has the whole result.
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def add(piece):
        return jax.lax.psum(piece, "data")

    total = int(add(numbers)[0])

    print(f"process {jax.process_index()} of {jax.process_count()} had {mine.tolist()}, the sum is {total}", flush=True)
    each = jax.local_device_count()
    assert total == each * sum(range(1, jax.process_count() + 1)), "all processes must have the same number of devices"


if __name__ == "__main__":
    main()
