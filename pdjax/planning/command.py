"""The job that realises a plan: a cluster enters, the words of an `mpirun` command leave, with the flags of
`pdjax.experiments.serve`. Called by `pdjax.planning.planner`.
"""

from pdjax.messages import Role
from pdjax.planning.clusters import Cluster
from pdjax.planning.mix import Mix

REQUESTS = 300  # that the job serves: as many as a run of the plan judges


def of(cluster: Cluster, model: str, workload: str, mix: Mix, rate: float) -> tuple[str, ...]:
    """The command, rank 0 and a rank for each instance; of one group, where there are several. Empty for a single
    colocated instance: jobs have at least two."""
    pools, parts = cluster.pools, cluster.parts
    if parts[0].role is Role.MIXED:
        (part,) = parts
        if part.count < 2:
            return ()
        # They are made of the devices of both pools.
        sides = {"prefill": (1, part, pools[0]), "decode": (part.count - 1, part, pools[0])}
    else:
        sides = {name: (part.count, part, pool) for name, part, pool in zip(_SIDES, parts, pools, strict=True)}
    words = [
        "mpirun",
        "-n",
        str(1 + sum(count for count, _, _ in sides.values())),
        "python",
        "-m",
        "pdjax.experiments.serve",
        f"--model={model}",
        f"--scheduler={cluster.policy}",
        "--transfer=mpi",
        "--stream_layers=0",  # KV is pulled, as it was played
        f"--page_size={pools[0].page_size}",
        f"--max_model_len={mix.longest}",
    ]
    for name, (count, part, pool) in sides.items():
        words += [
            f"--{name}_instances={count}",
            f"--{name}_tp={part.shape.tp}",
            f"--{name}_pp={part.shape.pp}",
            f"--{name}_num_pages={1 + -(-pool.kv_tokens // pool.page_size)}",
            f"--{name}_chunk={min(pool.max_chunk, mix.longest)}",
        ]
    words += [f"--prefill_max_batch={pools[0].max_chunks}", f"--decode_max_batch={pools[-1].max_rows}"]
    words += [f"--workload={workload}", f"--rate={rate / cluster.groups:.3g}", f"--num_requests={REQUESTS}"]
    words += [
        f"--{name}_slo_ms={limit:g}"
        for name, limit in (("ttft", mix.slo.ttft_ms), ("tpot", mix.slo.tpot_ms), ("e2e", mix.slo.e2e_ms))
        if limit is not None
    ]
    return tuple(words)


_SIDES = ("prefill", "decode")
