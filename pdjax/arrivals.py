"""When the requests of a workload come: a description such as "poisson" or "gamma:2" enters, seconds leave. Called by
`pdjax.workload`, whose text lists the kinds."""

import math
from collections.abc import Sequence

import numpy as np

KINDS = "poisson, gamma:CV, uniform, trace, closed:N"
MAX_CV = 1e3  # of gamma gaps; beyond it, and below its inverse, draws are all zero or all equal


def draw(
    arrival: str, rate: float | None, paces: Sequence[float], times: Sequence[float] | None, rng: np.random.Generator
) -> tuple[list[float], int | None, str]:
    """When each request comes.

    Args:
        arrival: one of KINDS.
        rate: requests per second, inf for all at once, or None.
        paces: of each request, by how much faster than the rate it comes.
        times: of each request in its trace, seconds from the first; None: there is none.
        rng: of random gaps.

    Returns:
        Seconds, the first is 0; the clients of a closed loop; how they come, in words.

    Raises:
        ValueError: naming `arrival` or `rate`, its value and what is allowed.
    """
    count = len(paces)
    name, _, detail = arrival.partition(":")
    if rate is not None and not rate > 0:
        raise ValueError(f"rate is {rate!r}; allowed: requests per second > 0, or inf")
    if name == "closed":
        clients = int(_number(arrival, detail, whole=True))
        if rate is not None:
            raise ValueError(f"rate is {rate!r}; allowed with arrival {arrival!r}: none, the answers set the pace")
        return [0.0] * count, clients, f"{clients} clients"
    if name == "trace" and not detail:
        if times is None:
            raise ValueError(
                "arrival is 'trace'; allowed with a workload without times: poisson, gamma:CV, uniform, closed:N"
            )
        own = (count - 1) / times[-1] if times[-1] > 0 else math.inf
        stretch = 1.0 if rate is None else own / rate if math.isfinite(own) else 0.0
        return [stretch * time for time in times], None, f"arriving as in the trace, intervals x {stretch:.3g}"
    if name == "gamma":
        variation = _number(arrival, detail)
        if not 1 / MAX_CV <= variation <= MAX_CV:
            raise ValueError(f"arrival is {arrival!r}; allowed: gamma:CV with CV from {1 / MAX_CV:g} to {MAX_CV:g}")
    elif name in ("poisson", "uniform") and not detail:
        variation = 1.0 if name == "poisson" else 0.0
    else:
        raise ValueError(f"arrival is {arrival!r}; allowed: {KINDS}")
    if rate is None:
        raise ValueError(f"rate is None; allowed with arrival {arrival!r}: requests per second > 0, or inf")
    # Gamma gaps of shape 1/CV^2 have that coefficient of variation; Poisson arrivals are the case of 1.
    gaps = rng.gamma(variation**-2, variation**2, count - 1) if variation else np.ones(count - 1)
    with np.errstate(over="ignore"):  # infinity is refused with all that comes too late
        ends = np.cumsum(gaps / np.asarray(paces[1:])) / rate
    return [0.0, *ends.tolist()], None, f"{arrival} arrivals, {rate:g}/s" if math.isfinite(rate) else "all at once"


def _number(arrival: str, text: str, *, whole: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf or (whole and not number.is_integer()):
        raise ValueError(f"arrival is {arrival!r}; allowed: {KINDS}, with a number > 0")
    return number
