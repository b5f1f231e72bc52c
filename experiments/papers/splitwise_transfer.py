"""What moving KV costs one request, layer by layer or as a whole (Splitwise, section VI-A). Enter: a hardware and its
InfiniBand. Leave: the part of the transfer that the user waits for, and what it adds to the second token and to E2E.
Called by `pdjax.experiments.papers.splitwise`.
"""

import dataclasses

from pdjax import fleet, simulation
from pdjax.experiments.papers.outcome import Row
from pdjax.experiments.papers.splitwise_clusters import LAYERS
from pdjax.experiments.papers.splitwise_machines import A100, H100, MAX_CHUNK, MEASURED, machine
from pdjax.messages import Role
from pdjax.network import Link, switched
from pdjax.schedulers.colocated import Colocated
from pdjax.schedulers.splitwise import Splitwise

# Section VI-A: serialized, layer by layer. BLOOM-176B; the request is the median of the coding trace.
MODEL, MEDIAN = "bloom-176b", (1500, 13)
INFINIBAND = {A100: 200e9, H100: 400e9}  # bytes per second of a machine: eight ports of 200 and of 400 Gb/s
UNEXPLAINED = "ours is the last layer on the wire; semaphores, launches and interference have no model here"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Of a move: `visible_ms` of it lie behind the prompt; what it adds to the second token and to E2E, relative to a
    machine that does both."""

    visible_ms: float
    second_token: float
    e2e: float


def cost(kind: str, model: str, bytes_per_s: float, lengths: tuple[int, int], *, streamed: bool) -> Cost:
    """Of one request (prompt, answer) alone on two machines."""
    there = machine(kind, model, MEASURED)
    options = {"max_chunk": MAX_CHUNK, "layer_groups": LAYERS[model]}
    pair = fleet.build(
        [there.pool(Role.PREFILL, **options), there.pool(Role.DECODE, **options)],
        switched(Link("InfiniBand", bytes_per_s), 2),
    )
    one = fleet.build([there.pool(Role.MIXED, **options)])
    asks = list(simulation.asks([lengths], [0.0]))
    moved = simulation.simulate(pair, asks, Splitwise(1 if streamed else None)).records[0].timeline
    stayed = simulation.simulate(one, asks, Colocated()).records[0].timeline
    assert moved.transfer_end_s is not None and moved.prefill_end_s is not None
    second = [marks.token_s[1] - marks.token_s[0] for marks in (moved, stayed)]
    return Cost(
        1e3 * (moved.transfer_end_s - moved.prefill_end_s),
        second[0] / second[1] - 1,
        moved.token_s[-1] / stayed.token_s[-1] - 1,
    )


def transfers() -> list[Row]:
    whole, layers = (cost(A100, MODEL, INFINIBAND[A100], MEDIAN, streamed=way) for way in (False, True))
    at = "KV of a request of 1500 + 13 tokens, A100"
    rows = [
        Row(f"{at}: second token, sent as a whole (VI-A)", 64.0, 100 * whole.second_token, "%", 0.15),
        Row(f"{at}: E2E, sent as a whole (VI-A: up to)", 3.0, 100 * whole.e2e, "%", 0.15),
        Row(f"{at}: second token, layer by layer (VI-A)", 16.5, 100 * layers.second_token, "%", note=UNEXPLAINED),
        Row(f"{at}: E2E, layer by layer (VI-A)", 0.8, 100 * layers.e2e, "%", note=UNEXPLAINED),
    ]
    for kind, published in ((A100, 8.0), (H100, 5.0)):
        sent = {way: cost(kind, MODEL, INFINIBAND[kind], MEDIAN, streamed=way).visible_ms for way in (False, True)}
        note = f"as a whole: {sent[False]:.1f} ms; {UNEXPLAINED}"
        rows.append(
            Row(f"time of a transfer that is not hidden, {kind} (VI-A)", published, sent[True], "ms", note=note)
        )
    order = "layer by layer < as a whole"
    found = order if layers.second_token < whole.second_token and layers.e2e < whole.e2e else "another"
    return [*rows, Row("what the user waits for", order, found, tolerance=0)]
