"""The launchers that compute: what they say, draw, write and refuse."""

import json
import subprocess
import sys

import pytest

from pdjax.experiments import analytic_plots
from pdjax.experiments.kv_cost_tables import answer, arithmetic
from pdjax.kv_cost import LINKS, Job, Link, Shape, cost, link
from pdjax.pd_ratio import Side, curve

SLOW, FAST = Link("slow", 8, rdma=False), Link("fast", 80, rdma=True)
JOB = Job(10**9, prefill_s=0.5, groups=10, rate=1.6)  # a second on the slow link, 0.1 on the fast one


def asked(job, *links):
    return answer(job, [cost(job, one) for one in links], share=0.1)


def test_the_arithmetic_is_written_out():
    text = arithmetic(Shape(32, 32, 8, 128), "float16", 2048)
    assert "2 (K and V) x 32 layers x 8 kv heads x 128 x 2 bytes (float16) = 131,072 bytes (128 KiB)" in text
    assert "2,048 tokens x 131,072 bytes = 268,435,456 bytes (256 MiB)" in text
    assert "32 query heads share the 8: without that 1 GiB" in text


def test_rdma_is_needed_where_only_it_keeps_up():
    needs, why = asked(JOB, SLOW, FAST)
    assert needs and "slow (busy 160%, it cannot keep up) is not enough; fast (busy 16%, visible 10 ms, 2.0%" in why


def test_rdma_is_not_needed_where_a_plain_link_is_enough():
    needs, why = asked(Job(10**8, prefill_s=0.5, groups=10, rate=1.6), SLOW, FAST)
    assert needs is False and "slow (busy 16%" in why


def test_no_link_that_is_enough_is_no_answer():
    assert asked(JOB, SLOW)[0] is None


@pytest.mark.parametrize("name", ["5g", "5g:", "5g:x", "5g:-1", ":5", "5g:5:tcp"])
def test_a_link_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match=f"links has '{name}'; allowed: 10 GbE"):
        link(name)


def test_a_link_of_ones_own_has_a_name_and_a_rate():
    assert link("5g:5") == Link("5g", 5, rdma=False) and link("roce:100:rdma") == Link("roce", 100, rdma=True)


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    analytic_plots.kv_cost(JOB, [cost(JOB, one) for one in LINKS.values()], 0.9, "title", tmp_path / "kv.png")
    points = curve(Side(0.1, 1, 501), lambda rows: 0.025, range(1, 65))
    analytic_plots.ratio(points, (3, 8), tmp_path / "ratio.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


@pytest.mark.slow
def test_the_launchers_print_write_and_refuse(tmp_path):
    """One process each, side by side."""
    lines = {
        "kv": ("kv_cost", f"--out={tmp_path}/kv"),
        "ratio": ("ratio", f"--out={tmp_path}/ratio"),
        "bad": ("kv_cost", "--layers=4"),
        "links": ("kv_cost", "--links="),
        "groups": ("kv_cost", "--stream_layers=1000"),
        "share": ("kv_cost", "--share=2"),
    }
    jobs = {
        name: subprocess.Popen(
            [sys.executable, "-m", f"pdjax.experiments.{module}", flag],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (module, flag) in lines.items()
    }
    said = {name: (*job.communicate(timeout=120), job.returncode) for name, job in jobs.items()}
    assert said["kv"][2] == said["ratio"][2] == 0, said
    assert "Does disaggregation need RDMA here? Yes" in said["kv"][0]
    assert json.loads((tmp_path / "kv/summary.json").read_text())["job"]["nbytes"] == 2**30
    assert "for B_d from 16 to 41; 1:125 at B_d 1" in said["ratio"][0]
    assert json.loads((tmp_path / "ratio/summary.json").read_text())["usual"] == [16, 41]
    assert (tmp_path / "kv/kv_cost.png").exists() and (tmp_path / "ratio/ratio.png").exists()
    for name, words in (
        ("links", "links is empty; allowed: 10 GbE"),
        ("groups", "stream_layers is 1000; allowed: at most the 32 layers of the model"),
        ("share", "flag --share=2: "),
    ):
        assert said[name][2] == 2 and said[name][1].startswith(f"error: {words}") and said[name][1].count("\n") == 1
    assert said["bad"][2] == 2 and said["bad"][1].startswith("error: kv_heads is not given; allowed: layers, kv_heads")
