"""Instances, requests and clusters in a state that a test chooses, as policies see them. Imported as `tests.views`."""

import dataclasses

from pdjax.latency import LatencyModel, Load
from pdjax.messages import InstanceSpec, Role
from pdjax.request import SLO
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
    starting: list = dataclasses.field(default_factory=list)
    expected: list = dataclasses.field(default_factory=list)
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
    def load(self):
        return Load((), self.rows, self.context_tokens, self.attended_tokens)

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
