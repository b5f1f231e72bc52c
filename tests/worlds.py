"""Shared by the tests of the controller, of policies and of the simulation: requests and clusters of every policy."""

import random

from pdjax.messages import InstanceSpec, Role, StartTransfer, TransferFailed
from pdjax.request import Request, SamplingParams
from pdjax.schedulers import (
    ChunkedColocated,
    Colocated,
    Disaggregated,
    Dynamic,
    Place,
    Plan,
    Scheduler,
    decoders,
    prefillers,
    take_chunks,
)
from pdjax.testing import VOCAB, World, spec


class RoundRobin:
    """A user's own policy, as the README shows one."""

    def place(self, ask, cluster):
        prefill = prefillers(cluster.instances)
        chosen = prefill[ask.id % len(prefill)]
        return Place(chosen.spec.index, None, "whole", "its turn")

    def hand_off(self, ask, cluster):
        free = [view for view in decoders(cluster.instances) if view.room_for(ask)]
        return free[ask.id % len(free)].spec.index if free else None

    def iterate(self, instance, cluster):
        return Plan(take_chunks(instance, instance.spec.max_chunk), decode=instance.rows > 0)


POLICIES: dict[str, tuple[type, dict, tuple[Role, ...]]] = {
    "colocated": (Colocated, {}, (Role.MIXED, Role.MIXED)),
    "chunked": (ChunkedColocated, {}, (Role.MIXED, Role.MIXED)),
    "pull": (Disaggregated, {}, (Role.PREFILL, Role.DECODE)),
    "stream": (Disaggregated, {"stream_from": 1}, (Role.PREFILL, Role.DECODE)),
    "2p2d": (Disaggregated, {"stream_from": 8}, (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)),
    "dynamic": (Dynamic, {}, (Role.PREFILL, Role.DECODE)),
    "dynamic_stream": (Dynamic, {"stream_from": 1}, (Role.PREFILL, Role.DECODE, Role.DECODE)),
    "own": (RoundRobin, {}, (Role.PREFILL, Role.DECODE)),
}


def policy(name: str) -> Scheduler:
    kind, options, _ = POLICIES[name]
    return kind(**options)


def specs(name: str, **changes: int) -> list[InstanceSpec]:
    return [spec(index, role, **changes) for index, role in enumerate(POLICIES[name][2])]


def ask(
    number: int, prompt: int = 5, tokens: int = 4, at_s: float = 0.0, stops: frozenset[int] = frozenset()
) -> Request:
    """A request whose prompt ids are easy to tell apart."""
    ids = tuple((7 * number + 3 * position) % VOCAB for position in range(prompt))
    return Request(number, ids, SamplingParams(max_tokens=tokens, seed=0), stops, arrival_s=at_s)


def crowd(seed: int, count: int, longest: int = 60) -> list[Request]:
    """Random lengths, arrivals and stop ids."""
    draw = random.Random(seed)
    return [
        ask(
            number,
            draw.randint(1, longest),
            draw.randint(1, 30),
            draw.random() * 0.5,
            frozenset(draw.sample(range(VOCAB), 20)),
        )
        for number in range(count)
    ]


def run_until(w: World, condition) -> None:
    while not condition():
        assert w.step(), "the condition never held"


def break_transfers(w: World, times: int) -> None:
    """The first `times` transfers fail instead of starting."""
    submit, left = w.cluster.submit, [times]

    def wrapped(command):
        if isinstance(command, StartTransfer) and left[0]:
            left[0] -= 1
            w.cluster.post(TransferFailed(command.key, "the wire broke"))
        else:
            submit(command)

    w.cluster.submit = wrapped
