"""Policies that revise, for tests. Imported as `tests.revisers`."""

import random

from pdjax.messages import Role
from pdjax.request import State
from pdjax.schedulers import Place, decoders
from pdjax.schedulers.base import Drop, Flip, Move, Traits
from tests.worlds import RoundRobin


class Scripted(RoundRobin):
    """Revises as a function of the cluster says."""

    def __init__(self, script) -> None:
        self.revise = script


class Local(Scripted):
    """The same, with every request placed on one instance."""

    def __init__(self, script, instance=0) -> None:
        super().__init__(script)
        self._instance = instance

    def place(self, ask, cluster):
        return Place(self._instance, self._instance, "whole", "here")


def once(*steps):
    """A script that tries its steps one after the other, each until it gives revisions."""
    left = list(steps)

    def script(cluster):
        revisions = left[0](cluster) if left else []
        if revisions:
            del left[0]
        return revisions

    return script


def row_of(cluster, number):
    """Of a request: (its ask, its instance), or None if it is no row now."""
    for view in cluster.instances:
        for row in view.running:
            if row.ask.id == number:
                return row, view.spec.index
    return None


def moves(number, to, after=0):
    """A step: moves a request's row once it has `after` tokens."""

    def step(cluster):
        found = row_of(cluster, number)
        if found is None or found[0].generated < after or found[1] == to:
            return []
        return [Move(found[0].ask, to, "told to")]

    return step


class Nomads(RoundRobin):
    """Every row goes on on the next instance whenever it has made `stay` more tokens."""

    def __init__(self, stay=3) -> None:
        self._stay = stay
        self._next = {}

    def revise(self, cluster):
        out = []
        alive = [view for view in cluster.instances if view.alive]
        if len(alive) < 2:
            return out
        for at, view in enumerate(alive):
            onward = alive[(at + 1) % len(alive)]
            for row in view.running:
                due = self._next.setdefault(row.ask.id, row.generated + self._stay)
                # A flip waits for hand-offs: rows that kept coming would hold it up until the last of them ends.
                if row.generated >= due and onward.next_role is None:
                    out.append(Move(row.ask, onward.spec.index, "on and on"))
                    self._next[row.ask.id] = row.generated + self._stay
        return out


class Turncoat(Nomads):
    """Rows wander, and both instances become what the other was, twice, by way of MIXED."""

    traits = Traits(moves=True)

    def __init__(self) -> None:
        super().__init__(stay=3)
        self._flips = [(0, Role.MIXED), (1, Role.PREFILL), (0, Role.DECODE), (1, Role.MIXED), (0, Role.PREFILL)]
        self._made = {}  # tokens of each request: flips are due by these, not by how often a busy machine lets us ask
        self._due = 10

    def revise(self, cluster):
        out = super().revise(cluster)
        self._made |= {row.ask.id: row.generated for view in cluster.instances for row in view.running}
        made = sum(self._made.values())
        settled = all(view.next_role is None for view in cluster.instances)
        if self._flips and settled and made >= self._due:
            self._due = made + 10
            out.append(Flip(*self._flips.pop(0), "to and fro"))
        return out


class Restless(RoundRobin):
    """Moves, flips and drops at random; the same for the same seed."""

    def __init__(self, seed, rate=0.2, drops=0.02) -> None:
        self._draw = random.Random(seed)
        self._rate, self._drops = rate, drops

    def place(self, ask, cluster):
        place = super().place(ask, cluster)
        able = [view.spec.index for view in decoders(cluster.instances)]
        kind = self._draw.randrange(4)
        if kind == 0:
            return Place(place.prefill, place.prefill, "whole", "here")
        if kind == 1:
            return place
        return Place(place.prefill, self._draw.choice(able), "whole" if kind == 2 else "stream", "there")

    def revise(self, cluster):
        draw, out = self._draw, []
        alive = [view for view in cluster.instances if view.alive]
        rows = [(row, view) for view in alive for row in view.running]
        if rows and len(alive) > 1 and draw.random() < self._rate:
            row, view = draw.choice(rows)
            out.append(Move(row.ask, draw.choice([other.spec.index for other in alive if other is not view]), "so"))
        view = draw.choice(alive)
        roles = {other.spec.index: other.next_role or other.role for other in alive}
        role = draw.choice(list(Role))
        if role is not roles[view.spec.index] and draw.random() < self._rate:
            after = {**roles, view.spec.index: role}.values()
            if all(any(one in (able, Role.MIXED) for one in after) for able in (Role.PREFILL, Role.DECODE)):
                out.append(Flip(view.spec.index, role, "so"))
        waits = [ask for ask in cluster.queue if ask.state is State.WAITING]
        if waits and draw.random() < self._drops:
            out.append(Drop(draw.choice(waits), "so"))
        return out
