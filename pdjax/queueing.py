"""The mean TTFT of a prefill instance in closed form: rates and pass times enter, seconds leave. Called by the planner
as a first guess, and by reproductions as what a simulation has to agree with.

Prompts of one length arrive at random (Poisson), are served first come, first served, and share no pass: an M/D/1
queue (DistServe, section 3.1, equations 1 to 3). D is the time of one pass on an instance that is not split, R the
rate. Replicating an instance N times divides R by N.
"""

import math


def single_s(rate: float, pass_s: float) -> float:
    """Equation 1: D + R D^2 / (2 (1 - R D)). `inf` where the queue has no end.

    Args:
        rate: requests per second.
        pass_s: D, seconds.

    Raises:
        ValueError: rate or pass_s is not positive and finite.
    """
    return pass_s + _wait_s(rate, pass_s)


def pipelined_s(rate: float, pass_s: float, stages: int = 2) -> float:
    """Equation 2, for two stages: D + R D^2 / (4 (2 - R D)). A pass takes as long as before, but the next one enters
    when the first of `stages` equal parts is done. Errors as `single_s`."""
    if stages < 1:
        raise ValueError(f"stages is {stages}; allowed: a whole number >= 1")
    return pass_s + _wait_s(rate, pass_s / stages)


def sharded_s(rate: float, pass_s: float, speedup: float) -> float:
    """Equation 3: D / K + R D^2 / (2 K (K - R D)). Tensor parallelism makes a pass K = `speedup` times as fast. Errors
    as `single_s`."""
    if not 0 < speedup < math.inf:
        raise ValueError(f"speedup is {speedup!r}; allowed: a number > 0")
    return single_s(rate, pass_s / speedup)


def crossover_rate(pass_s: float, speedup: float) -> float:
    """The rate from which on two pipeline stages have the smaller mean TTFT, two shards before: requests per second.

    Where equations 2 and 3 are equal. With x = R D that is a quadratic: with 3K - 2 divided out,
    x^2 - (K + 2) x + 8 K (K - 1) / (3K - 2) = 0, whose smaller root keeps both queues finite.

    Raises:
        ValueError: pass_s is not positive, or speedup is not in [1, 2], where there is one.
    """
    if not 1 <= speedup <= 2:
        raise ValueError(f"speedup is {speedup!r}; allowed: 1 to 2")
    _check("pass_s", pass_s)
    K = speedup
    return (K + 2 - math.sqrt((K + 2) ** 2 - 32 * K * (K - 1) / (3 * K - 2))) / 2 / pass_s


def _wait_s(rate: float, service_s: float) -> float:
    """The mean wait of an M/D/1 queue (Pollaczek and Khinchine)."""
    _check("rate", rate)
    _check("pass_s", service_s)
    load = rate * service_s
    return math.inf if load >= 1 else load * service_s / (2 * (1 - load))


def _check(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; allowed: a finite number > 0")
