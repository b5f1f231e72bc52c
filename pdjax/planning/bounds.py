"""What one instance carries at most, in closed form: instances and a mix of requests enter, requests per second leave.
Called by `pdjax.planning.search`, which starts its searches there, and does not play what cannot win.

No queue ever forms here, and decode rows are mean ones, so that a simulation hardly finds more.
"""

import math

from pdjax import fleet
from pdjax.fleet import Pool
from pdjax.latency import Load
from pdjax.messages import InstanceSpec
from pdjax.planning.mix import Mix

LENGTHS = 24  # of the sample that are looked at one by one


def alone_s(pool: Pool, mix: Mix) -> float:
    """Seconds that a prompt takes alone, at the share of prompts that must be in time."""
    spec = _spec(pool)
    lengths = sorted(prompt for prompt, _ in mix.lengths)
    at = math.ceil(mix.attainment * len(lengths)) - 1
    return pool.latency.prefill_s(spec, lengths[at])


def prompt_s(pool: Pool, mix: Mix) -> float:
    """Seconds of an instance that the mean prompt costs where the best number of them share a pass. Stages of a
    pipeline work at several passes at a time."""
    spec = _spec(pool)
    lengths = sorted(prompt for prompt, _ in mix.lengths)
    parts = [lengths[(2 * part + 1) * len(lengths) // (2 * LENGTHS)] for part in range(LENGTHS)]
    total = 0.0
    for length in parts:
        best = pool.latency.prefill_s(spec, length)
        count = 2
        while count * length <= spec.max_chunk and count <= spec.max_chunks:
            best = min(best, pool.latency.iteration_s(spec, Load(((length, 0),) * count)) / count)
            count *= 2
        total += best
    return total / LENGTHS / pool.pp


def step_s(pool: Pool, rows: float, mix: Mix) -> float:
    """Seconds of a decode step of so many mean rows."""
    spec, count = _spec(pool), max(round(rows), 1)
    context = round(count * mix.context_tokens)
    return pool.latency.decode_s(spec, count, context, context)


def most_rows(pool: Pool, mix: Mix, limit_s: float) -> int:
    """Mean rows that an instance has slots and memory for, with steps within a limit; 0: not even one."""
    low, high = 0, min(pool.max_rows, int(pool.kv_tokens / max(mix.context_tokens, 1.0)))
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(pool, middle, mix) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def prefill_rate(pool: Pool, mix: Mix) -> float:
    """Of an instance that only prefills, judged on TTFT; 0 where prompts alone take too long."""
    if not _fits(pool, mix) or alone_s(pool, mix) > mix.ttft_s:
        return 0.0
    return 1 / prompt_s(pool, mix)


def prefill_guess(pool: Pool, mix: Mix) -> float:
    """About the goodput of such an instance: the rate at which the queue's tail reaches the TTFT limit.

    Of an M/D/1 queue at utilisation u, with T_p seconds of a prompt, u * exp(-2 (1 - u) x / T_p) of the requests wait
    for more than x, nearly; x is what the limit leaves to the mean prompt.
    """
    if not prefill_rate(pool, mix):
        return 0.0
    spec, cost_s = _spec(pool), prompt_s(pool, mix)
    left_s = max(mix.ttft_s - pool.latency.prefill_s(spec, round(mix.prompt_tokens)), 0.0)
    if math.isinf(left_s):
        return 1 / cost_s
    low, high = 0.05, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        if middle * math.exp(-2 * (1 - middle) * left_s / cost_s) <= 1 - mix.attainment:
            low = middle
        else:
            high = middle
    return low / cost_s


def decode_rate(pool: Pool, mix: Mix) -> float:
    """Of an instance that only decodes, judged on TPOT; 0 where a row alone is too slow."""
    if not _fits(pool, mix):
        return 0.0
    return _decoded(pool, mix, 1.0)


def capacity(pool: Pool, mix: Mix) -> float:
    """Answers per second of an instance that decodes as many rows as it holds, whatever the limits: what comes faster
    than this waits longer and longer."""
    rows = max(most_rows(pool, mix, math.inf), 1)
    return rows / max(mix.steps * step_s(pool, rows, mix), 1e-9)


def mixed_rate(pool: Pool, mix: Mix) -> float:
    """Of an instance that does both: decode steps have the time that prefill leaves.

    The rate at which r = rows(tpot * (1 - r * T_p)) / (steps * tpot), by bisection, T_p the seconds of a prompt.
    """
    if not _fits(pool, mix) or alone_s(pool, mix) > mix.ttft_s:
        return 0.0
    cost_s = prompt_s(pool, mix)
    low, high = 0.0, 1 / cost_s
    for _ in range(30):
        middle = (low + high) / 2
        if _decoded(pool, mix, 1 - middle * cost_s) >= middle:
            low = middle
        else:
            high = middle
    return low


def _decoded(pool: Pool, mix: Mix, share: float) -> float:
    """Answers per second where steps have a share of the time."""
    rows = most_rows(pool, mix, share * mix.tpot_s)
    if not rows:
        return 0.0
    return share * rows / max(mix.steps * step_s(pool, rows, mix), 1e-9)


def _fits(pool: Pool, mix: Mix) -> bool:
    return mix.longest <= _spec(pool).max_model_len


def _spec(pool: Pool) -> InstanceSpec:
    return fleet.build([pool]).specs[0]
