"""Which decode rows should go on elsewhere: TaiChi's flowing decode (section 3.3, algorithm 1). Enter: views of one
instance and of the cluster. Leaves: at most one `Move`. Called by `dynamic`, for one instance after each event.

Rows of a D-heavy instance that is short of pages flow to P-heavy ones, the longest answer first: it has had the most
steps without interference. Rows that hold up the prompts of a P-heavy instance flow back.
"""

import math

import numpy as np

from pdjax.messages import Role
from pdjax.schedulers import predict
from pdjax.schedulers.base import ClusterView, InstanceView, Move, able
from pdjax.schedulers.disaggregated import least_loaded

FULL = 0.95  # of the pages: a D-heavy instance gives rows away (the paper's M)
BACK = 0.96  # of a row's TPOT limit is used up: it flows back (the paper's alpha)


def flow(view: InstanceView, cluster: ClusterView) -> list[Move]:
    """The row of this instance that should go on on another one, if there is one."""
    if not view.alive or not view.rows or view.next_role is not None:
        return []
    move = degraded(view, cluster) if view.role is Role.DECODE else backflow(view, cluster)
    return [] if move is None else [move]


def degraded(view: InstanceView, cluster: ClusterView) -> Move | None:
    """From a D-heavy instance without pages: its longest answer, to a P-heavy one."""
    if view.free_pages >= (1 - FULL) * view.spec.usable_pages:
        return None
    targets = able(cluster.instances, Role.PREFILL)
    if any(other.incoming or other.assigned for other in targets):  # that one still has its pages here
        return None
    row = max(view.running, key=lambda row: row.generated, default=None)
    free = [other for other in targets if row and other.room_for(row.ask)]
    if row is None or not free:
        return None
    return Move(row.ask, least_loaded(free).spec.index, f"KV fills instance {view.spec.index}; the longest answer goes")


def backflow(view: InstanceView, cluster: ClusterView) -> Move | None:
    """From a P-heavy instance with prompts: a row that leaves them no time any more, to a D-heavy one.

    The paper compares a row's TPOT up to now with its limit. Here rows are promised their limit wherever they are, so
    what counts is what they can still spare; and a row must be able to afford the move, which makes it stand still
    until it has left its batch, its KV has moved, and what is issued over there is done.
    """
    if view.role is not Role.PREFILL or not view.prefills:
        return None
    rows, spares = view.table, predict.spares(view, cluster)
    gaps = predict.answers_tokens(rows, cluster.traffic) - 1
    limited = rows.here & (rows.tpot_s < math.inf) & (gaps > 0)
    short = limited & (spares.seconds >= 0) & (spares.seconds <= (1 - BACK) * np.where(limited, rows.tpot_s, 0) * gaps)
    for at in short.nonzero()[0].tolist():
        ask = rows.asks[at]
        nbytes = (ask.context_tokens + int(rows.issued[at])) * view.spec.kv_bytes_per_token
        left_s = float(spares.seconds[at]) - view.busy_s - view.latency.transfer_s(nbytes)
        targets = able(cluster.instances, Role.DECODE)
        free = [other for other in targets if other.busy_s <= left_s and other.room_for(ask)]
        if free:
            reason = f"nothing to spare beside {view.pending_tokens} prompt tokens on instance {view.spec.index}"
            return Move(ask, least_loaded(free).spec.index, reason)
    return None
