"""Run by `mpirun` (see test_instance_ranks): one instance of a small random model over all ranks, each of which drives
its part by the same iterations. Every rank leaves a file in the folder that it is given: what it found.

    mpirun -n 2 python -m tests.mpi.instance_job FOLDER STAGES TP
"""

import dataclasses
import pickle
import sys
import time
from pathlib import Path

import jax
import numpy as np

from pdjax.instance import Instance
from pdjax.messages import Iteration, StartTransfer
from pdjax.models import weights
from pdjax.models.sharding import meshes_over_ranks, shares
from pdjax.mpi import devices
from pdjax.request import SamplingParams
from tests.replicas import SMALL, Driver, prompt, spec, table

# With two ranks, four shards of two kv heads: a head for each rank, twice.
MODEL = dataclasses.replace(SMALL, num_heads=4, num_kv_heads=2)
LONG = prompt(1, 29)
STEPS, CHUNK, KEY = 12, 7, 4
SAMPLING = SamplingParams(temperature=1.0, seed=5)  # the most likely tokens would soon be one and the same
STEP = Iteration(0, 0, decode=True)


def build(group, pp: int, tp: int) -> Instance:
    """This rank's part."""
    each = pp * tp // group.size
    found = [[d for d in jax.devices() if d.process_index == process][:each] for process in range(group.size)]
    meshes, held = meshes_over_ranks(MODEL, found, pp), shares(MODEL.num_layers, pp)
    loaded = [weights.random(MODEL, mesh, "float32", share=share) for mesh, share in zip(meshes, held, strict=True)]
    limits = spec(MODEL, devices=pp * tp, pp=pp, chunk_buckets=(16,), row_buckets=(2,))
    return Instance(limits, MODEL, loaded, meshes, stream_layers=1)


def in_flight(instance: Instance) -> list[int]:
    """Tokens of a prompt whose passes are all dispatched before the first token is read."""
    driver = Driver(instance, sampling=SAMPLING)
    pending = [
        instance.run(Iteration(0, 0, chunks=(driver.part(0, LONG, start, 16),)), driver.units.append)
        for start in (0, 16)
    ]
    pending.append(instance.run(dataclasses.replace(STEP, joins=(driver.join(0, len(LONG)),)), driver.units.append))
    pending += [instance.run(STEP, driver.units.append) for _ in range(STEPS - 2)]
    waited = [each.wait() for each in pending]
    driver.run(leaves=(0,))
    return [dict(waited[1].firsts)[0], *(dict(each.rows)[0] for each in waited[2:])]


def arrived(unit, sharding):
    """The unit as an inbox makes it: from what this rank's devices hold, by way of the host."""
    held = {shard.index[3].start or 0: np.array(shard.data) for shard in unit.kv.addressable_shards}
    there = sharding.addressable_devices_indices_map(unit.header.shape)
    placed = [jax.device_put(held[index[3].start or 0], device) for device, index in there.items()]
    return dataclasses.replace(unit, kv=jax.make_array_from_single_device_arrays(unit.header.shape, sharding, placed))


def move(instance: Instance, streamed) -> dict:
    """KV of request 0 to 2 by its units that streamed, and to 3 by those that are read back; what all of them hold."""
    command = StartTransfer(KEY, 0, 0, 0, 1, table(instance, 0), table(instance, 3), len(LONG), "whole")
    for request, units in ((2, streamed), (3, instance.extract(command))):
        for unit in units:
            instance.insert(arrived(unit, instance.kv_shardings[unit.header.layer]), table(instance, request))
    return {
        name: {(layer, head): kv for layer, head, kv in instance.held_kv(table(instance, request), len(LONG))}
        for name, request in (("source", 0), ("streamed", 2), ("pulled", 3))
    }


def follow(instance: Instance, request: int, token: int) -> list[int]:
    """The tokens of LONG behind the first, from the KV of a request."""
    driver = Driver(instance, sampling=SAMPLING)
    joins, out = (dataclasses.replace(driver.join(1, len(LONG), token), pages=table(instance, request)),), [token]
    while len(out) < STEPS:
        rows = driver.run(joins=joins, decode=True).rows
        joins = ()
        out.append(dict(rows)[1])
    driver.run(leaves=(1,))
    return out


def drive(group, instance: Instance) -> dict:
    """All that is looked at."""
    driver = Driver(instance, chunk=CHUNK, sampling=SAMPLING)
    found = {"alone": instance.alone, "tokens": driver.generate(LONG, STEPS), "in flight": in_flight(instance)}
    first = driver.prefill(0, LONG, stream=KEY)
    for rank in range(group.size):  # one after the other: nothing of it may wait for another rank
        if group.rank == rank:
            found["kv"] = move(instance, driver.units)
        group.Barrier()
    for name, request in (("streamed", 2), ("pulled", 3)):
        found[name] = follow(instance, request, first)
    began = time.perf_counter()
    follow(instance, 0, first)
    found["step_ms"] = 1e3 * (time.perf_counter() - began) / STEPS
    return found


def main() -> None:
    from mpi4py import MPI  # starts MPI

    folder, pp, tp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    world = MPI.COMM_WORLD
    jax.config.update("jax_num_cpu_devices", 2 * pp * tp // world.size)
    devices.join_ranks(world, one_host=True)
    found = drive(world, build(world, pp, tp))
    Path(folder, f"{world.rank}.pickle").write_bytes(pickle.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
