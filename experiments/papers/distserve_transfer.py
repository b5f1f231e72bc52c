"""What KV transfer costs in DistServe's cluster (figure 10): OPT-175B on 4 nodes of 8 GPUs, ShareGPT. Rows leave.
Called by `pdjax.experiments.papers.distserve`.

Prefill (TP3, PP3) and decode (TP4, PP3) share their nodes stage by stage (algorithm 2), so a third of a request's KV
moves over the NVLink of each of three nodes; side by side, that is one link of three times the bandwidth. If they stood
on nodes of their own, three network cards of 25 Gb/s would carry it.

There are no published pass times for OPT-175B: those of OPT-66B with the same TP stand for it. Its passes would take
longer, so the share of the transfer that comes out is an upper bound.
"""

import dataclasses
from typing import Any

import numpy as np

from pdjax.experiments.papers import distserve_bench as bench
from pdjax.experiments.papers.outcome import Row, Setup
from pdjax.fleet import Fleet, Pool
from pdjax.messages import Role
from pdjax.metrics import e2e_ms
from pdjax.network import Link, Network, nodes
from pdjax.published import KV_BYTES
from pdjax.simulation import asks, poisson, simulate

MODEL = "opt-175b"
STAGES, PREFILL_TP, DECODE_TP = 3, 3, 4
PREFILL_TOKENS, DECODE_TOKENS = 76192, 126160  # of KV (the authors' max_num_tokens.csv)
NVLINK_BYTES_PER_S = 300e9  # of one A100, each direction: 600 GB/s in both (NVIDIA's datasheet)
NIC_BYTES_PER_S = 25e9 / 8  # between nodes (section 6.1)
RATES = (0.03, 0.1, 0.2)  # requests per second per GPU: figure 10's, up to where the system keeps its limits
REQUESTS = 2000
FAST_MS = 30.0


def rows(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """Bytes of a token, the transfers' share of all time, and how many are quick."""
    made = [Row("KV of a token of OPT-175B", 4.72, KV_BYTES[MODEL] / 1e6, "MB", 0.01)]
    summary: dict[str, Any] = {}
    for place, same in (("on the same nodes", True), ("on nodes of their own", False)):
        cases = [measured(setup, rate, same=same) for rate in (RATES if same else RATES[:1])]
        share, quick = max(one[0] for one in cases), min(one[1] for one in cases)
        summary[f"transfer, {place}"] = {"most_of_time": share, "fast_at_least": quick}
        setup.say(f"transfer, {place}: {share:.3%} of the time, {quick:.1%} within {FAST_MS:.0f} ms")
        made += [
            Row(
                f"Figure 10, transfer's share of all time, phases {place}",
                "< 0.1 %" if same else None,
                "< 0.1 %" if share < 1e-3 else f"{share:.2%}",
                tolerance=0.0 if same else None,
                note=f"{share:.3%} at most, {RATES[0]} to {RATES[-1]} req/s per GPU; a bound: with passes of OPT-66B"
                if same
                else f"at {RATES[0]} req/s per GPU, over 25 Gb/s: why algorithm 2 keeps stages together",
            ),
            Row(
                f"Figure 10, transfers within {FAST_MS:.0f} ms, phases {place}",
                "> 95 %" if same else None,
                "> 95 %" if quick > 0.95 else f"{quick:.1%}",
                tolerance=0.0 if same else None,
                note=f"{quick:.1%} at least",
            ),
        ]
    return made, {"transfer": summary}


def measured(setup: Setup, rate: float, *, same: bool) -> tuple[float, float]:
    """The time in transfers over that of all requests, and the share of transfers within FAST_MS."""
    fleet = cluster(same=same)
    count = REQUESTS // (10 if setup.quick else 1)
    lengths = bench.sharegpt(setup.folder())
    drawn = np.random.default_rng(setup.seed).integers(0, len(lengths), count)
    arrivals = poisson(rate * fleet.devices, count, setup.seed)
    report = simulate(fleet, asks([lengths[at] for at in drawn], arrivals), bench.policy("distserve"))
    took_s = [move.finished_s - move.started_s for move in report.transfers]
    total_s = sum(e2e_ms(record) or 0.0 for record in report.records) / 1e3
    return sum(took_s) / total_s, float(np.mean([1e3 * seconds < FAST_MS for seconds in took_s]))


def cluster(*, same: bool) -> Fleet:
    """One prefill and one decode instance; `same`: stage by stage on the same nodes."""
    pools = [
        _pool(Role.PREFILL, PREFILL_TP, PREFILL_TOKENS, **bench.PREFILL),
        _pool(Role.DECODE, DECODE_TP, DECODE_TOKENS, **bench.DECODE),
    ]
    return dataclasses.replace(bench.in_step(pools), network=network(same=same))


def network(*, same: bool) -> Network:
    """The links of all stages side by side, as one: every stage moves its layers at the same time."""
    nic = Link("network card", STAGES * NIC_BYTES_PER_S)
    return nodes(nic, Link("NVLink", STAGES * NVLINK_BYTES_PER_S), [0, 0] if same else [0, 1])


def _pool(role: Role, tp: int, kv_tokens: int, **limits: int) -> Pool:
    latency = bench.named("opt-66b", "distserve", (tp, 2)).latency
    return Pool(role, 1, latency, kv_tokens, KV_BYTES[MODEL], devices=STAGES * tp, pp=STAGES, **limits)
