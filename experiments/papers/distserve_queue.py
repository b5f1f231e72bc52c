"""DistServe's equations 1 to 3 and the simulator: an M/D/1 queue played through the controller beside its closed form.
Called by `pdjax.experiments.papers.distserve`.

All prompts have one length, a pass has one prompt, answers have one token. Tensor parallelism is a pass K times as
fast, pipeline parallelism two stages.
"""

from pdjax import queueing
from pdjax.curves import Curves, Decode
from pdjax.experiments.papers.outcome import Row, Setup
from pdjax.fleet import Pool, build
from pdjax.messages import Role
from pdjax.schedulers.colocated import Colocated
from pdjax.simulation import asks, poisson, serve
from pdjax.tally import Tally

PASS_S = 0.1  # D, on an instance that is not split: the unit of time here
SPEEDUP = 1.5  # K
LOADS = (0.3, 0.6)  # R D
REQUESTS = 60_000  # noise of the mean TTFT at the higher load: 0.7 % with one standard deviation
TOKENS = 512


def rows(setup: Setup) -> list[Row]:
    """The equations' values beside simulated ones, and the rate from which on pipelines win."""
    count = REQUESTS // 10 if setup.quick else REQUESTS
    made = []
    for load in LOADS[:1] if setup.quick else LOADS:
        rate = load / PASS_S
        cases = (
            ("1, one instance", queueing.single_s(rate, PASS_S), mean_ttft_s(rate, count, setup.seed)),
            ("2, two stages", queueing.pipelined_s(rate, PASS_S), mean_ttft_s(rate, count, setup.seed, stages=2)),
            (
                f"3, two shards, K {SPEEDUP}",
                queueing.sharded_s(rate, PASS_S, SPEEDUP),
                mean_ttft_s(rate, count, setup.seed, speedup=SPEEDUP),
            ),
        )
        made += [
            Row(f"Equation {what}, R D = {load}", 1e3 * closed_s, 1e3 * ours_s, "ms", 0.02)
            for what, closed_s, ours_s in cases
        ]
        setup.say(f"equations at a load of {load}: {count} requests each")
    made.append(
        Row(
            f"R D from which on two stages beat two shards, K {SPEEDUP}",
            queueing.crossover_rate(PASS_S, SPEEDUP) * PASS_S,
            simulated_crossover(count // 3, setup.seed) * PASS_S,
            tolerance=0.05,
            note="the paper draws it (figure 4); published: where equations 2 and 3 are equal",
        )
    )
    return made


def mean_ttft_s(rate: float, count: int, seed: int, *, stages: int = 1, speedup: float = 1.0) -> float:
    """Of simulated prompts."""
    latency = Curves((PASS_S / speedup, 0.0, 0.0), (Decode(0, PASS_S, 0.0, 0.0),))
    fleet = build(
        [Pool(Role.MIXED, 1, latency, kv_tokens=1 << 24, kv_bytes_per_token=1, devices=stages, pp=stages, max_chunks=1)]
    )
    tally = Tally()
    serve(fleet, asks([(TOKENS, 1)] * count, poisson(rate, count, seed)), Colocated(), tally)
    return tally.ttft_ms.mean / 1e3


def simulated_crossover(count: int, seed: int) -> float:
    """Where the simulated TTFT of stages and shards are equal: between two rates, by a straight line through their
    difference. Both have the same arrivals, so most of the noise is in neither."""
    low, high = (factor * queueing.crossover_rate(PASS_S, SPEEDUP) for factor in (0.9, 1.1))
    lead, lag = (
        mean_ttft_s(rate, count, seed, stages=2) - mean_ttft_s(rate, count, seed, speedup=SPEEDUP)
        for rate in (low, high)
    )
    return low + (high - low) * lead / (lead - lag)
