"""Run by `mpirun` (see test_serving): rows wander between two ranks, which flip their roles; rank 0 prints one line of
JSON: how many answers equal those of one process, and what was revised.

    mpirun -n 3 python -m tests.mpi.revisions_job MODEL
"""

import json
import sys
from unittest import mock

import pdjax
from pdjax import mpi
from pdjax.workload import Item, Workload
from tests import engines
from tests.revisers import Turncoat

MODEL = {"model": sys.argv[1], "decode_max_batch": 3}
CONFIG = pdjax.EngineConfig(
    **engines.LIMITS | MODEL, scheduler=Turncoat(), transfer="mpi", verify_kv=True, stream_layers=1
)
ASKED = [(engines.ids(seed, length), engines.sampled(seed, max_tokens=24)) for seed, length in enumerate((1, 33, 50))]


def main() -> None:
    with engines.engine(**MODEL, scheduler=engines.First()) as engine:
        want = [engine.submit(prompt, sampling).result().token_ids for prompt, sampling in ASKED]
    items = tuple(Item(0.0, prompt, sampling, pdjax.SLO(), "") for prompt, sampling in ASKED)
    with mock.patch("pdjax.mpi.head.specs_of", engines.one_size), pdjax.Engine(CONFIG) as engine:
        report = engine.replay(Workload(items, ""))
        idle = engine.wait_idle(engines.WAIT_S)
    equal = sum(record.token_ids == ids for record, ids in zip(report.records, want, strict=True))
    print(json.dumps({"equal": equal, "idle": idle, "moves": len(report.moves), "flips": len(report.flips)}))


if __name__ == "__main__":
    mpi.run(main, CONFIG)
