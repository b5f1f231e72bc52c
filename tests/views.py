"""Instances, requests and clusters in a state that a test chooses, as policies see them. Imported as `tests.views`."""

import dataclasses
import math

import numpy as np

from pdjax.latency import LatencyModel, Load
from pdjax.messages import InstanceSpec, Role
from pdjax.request import SLO
from pdjax.schedulers.base import RowTable
from pdjax.testing import spec
from pdjax.traffic import Traffic

SIMPLE = LatencyModel((0.010, 0.001, 0, 0.002, 0, 0))  # 10 ms an iteration, 1 ms a prompt token, 2 ms a row


@dataclasses.dataclass
class Ask:
    id: int = 0
    context_tokens: int = 10
    prefilled: int = 0
    max_new_tokens: int = 8
    arrival_s: float = 0.0
    slo: SLO = dataclasses.field(default_factory=SLO)
    laxer: tuple = ()
    open_ended: bool = False


@dataclasses.dataclass
class View:
    """An instance in a state that a test chooses."""

    spec: InstanceSpec
    prefills: list = dataclasses.field(default_factory=list)
    rows: int = 0
    incoming: int = 0
    assigned: list = dataclasses.field(default_factory=list)
    context_tokens: int = 0
    attended_tokens: int = 0
    running: list = dataclasses.field(default_factory=list)
    coming: list = dataclasses.field(default_factory=list)  # rows on their way
    busy_s: float = 0.0
    became: Role | None = None
    next_role: Role | None = None
    free_pages: int = 64
    prefill_streak: int = 0
    alive: bool = True
    blocked: tuple = ()
    full: bool = False
    latency: LatencyModel = SIMPLE

    @property
    def role(self):
        return self.became or self.spec.role

    @property
    def twin(self):
        return self.spec.index

    @property
    def rows_due(self):
        return self.rows + self.incoming + len(self.assigned)

    @property
    def load(self):
        return Load((), self.rows, self.context_tokens, self.attended_tokens)

    @property
    def full_load(self):
        load = self.load
        for row in self.coming:
            load = load.plus_row(row.ask.context_tokens + 1)
        return load

    @property
    def table(self):
        rows, slos = [*self.running, *self.coming], [row.ask.slo for row in (*self.running, *self.coming)]
        return RowTable(
            [row.ask for row in rows],
            np.arange(len(rows)) < len(self.running),
            np.array([max(row.issued, 1) for row in rows], np.int64),
            np.array([row.most for row in rows], np.int64),
            np.array([row.ask.open_ended for row in rows], bool),
            np.array([row.first_s for row in rows], float),
            np.array([(slo.tpot_ms or math.inf) / 1e3 for slo in slos], float),
            np.array([(slo.itl_p99_ms or math.inf) / 1e3 for slo in slos], float),
            np.array([row.ask.arrival_s + (row.ask.slo.e2e_ms or math.inf) / 1e3 for row in rows], float),
        )

    @property
    def pending_tokens(self):
        return sum(ask.context_tokens - ask.prefilled for ask in self.prefills)

    def startable(self, ask):
        return ask.id not in self.blocked

    def room_for(self, ask):
        return not self.full


@dataclasses.dataclass
class Cluster:
    instances: list
    now: float = 0.0
    queue: list = dataclasses.field(default_factory=list)
    held: list = dataclasses.field(default_factory=list)
    traffic: Traffic = dataclasses.field(default_factory=Traffic)


def views(*roles: Role, **changes) -> list[View]:
    return [View(spec(index, role), **changes) for index, role in enumerate(roles)]
