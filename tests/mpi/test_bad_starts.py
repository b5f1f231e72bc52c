"""Jobs that cannot start end at once, with one line that says why."""

import re

import pytest

from tests.mpi.jobs import NEEDS_MPI, alone, mixed, run

SERVE = ("-m", "pdjax.experiments.serve", "--transfer=mpi", "--scheduler=disaggregated", "--model=tiny", "--out=")

pytestmark = [NEEDS_MPI, pytest.mark.slow]


def refused(job, line):
    assert job.status == 2, job.err
    assert len(job.said) == 1, job.err
    assert re.search(line, job.said[0]), job.said[0]


def test_without_mpirun_the_command_is_shown():
    refused(alone(*SERVE), r"transfer is 'mpi'; allowed: .* mpirun -n 3 python")


def test_a_wrong_number_of_ranks_is_refused_with_the_right_one():
    refused(run(2, *SERVE), r"mpirun -n is 2; allowed: 3: one rank that controls \+ 1 \+ 1")


def test_a_transfer_that_does_not_leave_the_process_is_refused():
    refused(run(3, *SERVE, "--transfer=device_put"), r"transfer is 'device_put'; allowed under mpirun: mpi, jax_tr")


def test_ranks_that_were_started_differently_name_field_and_values():
    job = mixed((2, SERVE), (1, (*SERVE, "--page_size=32")))
    refused(job, r"page_size is '64' on rank 0 \(\S+\) and '32' on rank 2 \(\S+\)")


def test_a_rank_without_the_model_is_named():
    job = mixed((2, SERVE), (1, (*SERVE, "--model=/nowhere")))
    refused(job, r"rank 2 on \S+: model is '/nowhere'; allowed: ")


def test_an_exception_on_rank_0_ends_the_job_with_its_traceback(tmp_path):
    script = tmp_path / "boom.py"
    script.write_text(
        "import pdjax, pdjax.mpi\n"
        "config = pdjax.EngineConfig(model='tiny', transfer='mpi', warmup=False)\n"
        "def main():\n"
        "    with pdjax.Engine(config):\n"
        "        print('up', flush=True)\n"
        "        raise KeyError('boom')\n"
        "pdjax.mpi.run(main, config)\n"
    )
    job = run(3, str(script))
    assert job.status not in (0, 2)
    assert "KeyError: 'boom'" in job.err and "up" in job.out


def test_ranks_do_not_wait_for_one_that_never_comes(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal, pdjax, pdjax.mpi.job\n"
        "if pdjax.mpi.rank_here() == 2:\n"
        "    signal.pause()\n"
        "pdjax.mpi.job.START_S = 1\n"
        "pdjax.mpi.run(print, pdjax.EngineConfig(model='tiny', transfer='mpi'))\n"
    )
    job = run(3, str(script), survive=True)  # where mpirun would let the one go on without the others
    assert job.status != 0
    assert job.said and re.search(r"rank [01] has waited for the other ranks for 1 s", job.said[0]), job.err
