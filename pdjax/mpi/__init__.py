"""One engine over many processes: rank 0 decides, the other ranks are instances, or parts of one. See `pdjax.mpi.job`.

    def main():
        with pdjax.Engine(config) as engine:
            ...

    pdjax.mpi.run(main, config)     # in every rank: rank 0 runs main, the others serve and end with its status

Importing this package starts no MPI.
"""

from pdjax.mpi.job import current as current
from pdjax.mpi.job import launched as launched
from pdjax.mpi.job import rank_here as rank_here
from pdjax.mpi.job import run as run
