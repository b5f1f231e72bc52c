"""Runs a log of events again: `replay` shows that the controller still decides alike, `workload_of` and `simulate` show
what another policy would have made of the same requests. A `pdjax.eventlog.Log` enters, reports leave. Called by the
launcher `replay_events` and by users.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from pdjax import simulation
from pdjax.controller import Controller
from pdjax.eventlog import Entry, Header, Log
from pdjax.fleet import Fleet
from pdjax.latency import LatencyModel
from pdjax.messages import Arrival, Command, InstanceSpec, Role
from pdjax.report import Report
from pdjax.request import Request, State
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.admission import guarded
from pdjax.schedulers.base import Scheduler, Traits, traits_of
from pdjax.simulation import Records

_ROWS = ("row_buckets", "row_block")  # what instances with rows have besides
_CHUNKS = ("chunk_buckets", "max_chunks", "query_block")


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay.

    Attributes:
        events, commands: how many were equal; all of them where there is no difference.
        difference: the first one, in words; "" if there is none.
        report: of the recorded run, up to there.
    """

    events: int
    commands: int
    difference: str
    report: Report


def policy_of(header: Header) -> Scheduler:
    """A fresh policy like the recorded one.

    Raises:
        ValueError: it was a user's own.
    """
    if header.scheduler not in SCHEDULERS:
        raise ValueError(
            f"scheduler of the log is {header.scheduler!r}; allowed without the policy itself: {', '.join(SCHEDULERS)}"
        )
    policy = SCHEDULERS[header.scheduler](header.stream_from)
    return guarded(policy, admission=header.admission, drop_late=header.drop_late)


def replay(log: Log, scheduler: Scheduler | None = None) -> Replayed:
    """Gives the events to a fresh controller and compares its commands with the recorded ones, one by one.

    Args:
        log: the events; the answers of the sink are taken from it too.
        scheduler: a fresh policy like the recorded one; None: made by `policy_of`, with its ValueError.
    """
    header = log.header
    sink = Records()
    controller = Controller(
        header.specs,
        policy_of(header) if scheduler is None else scheduler,
        header.latency,
        sink,
        header.transfer_timeout_s,
        header.max_queue,
        header.max_steps,
        header.on_failure,
        correct=header.correct,
    )
    equal = 0
    for number, entry in enumerate(log.entries):
        sink.ends, sink.count = entry.ends, 0
        commands, raised = _handle(controller, entry)
        if difference := _difference(entry, commands, raised):
            where = f"event {number} ({type(entry.event).__name__} at {entry.time_s:.6f} s): {difference}"
            return Replayed(number, equal, where, sink.report(header.specs))
        equal += len(commands)
    return Replayed(len(log.entries), equal, "", sink.report(header.specs))


def workload_of(log: Log) -> list[Request]:
    """The requests of a log, for another policy: they arrive at the recorded times, the first at 0.

    An answer has the length that it had, whatever ended it (a stop, an abort, a deadline), and at least one token;
    where the recorded run gave none (rejected, failed, or still under way), it has the length that was asked for.
    """
    asked = [entry.event.request for entry in log.entries if isinstance(entry.event, Arrival)]
    ends = {request: (state, tokens) for entry in log.entries for request, state, tokens in entry.done}
    start_s = min((request.arrival_s for request in asked), default=0.0)
    requests = []
    for request in asked:
        state, tokens = ends.get(request.id, (State.FAILED, 0))
        length = max(tokens, 1) if state in (State.FINISHED, State.ABORTED) else request.sampling.max_tokens
        requests.append(
            dataclasses.replace(
                request,
                sampling=dataclasses.replace(request.sampling, max_tokens=length, stop=()),
                stop_ids=frozenset(),
                arrival_s=request.arrival_s - start_s,
                deadline_s=None,
            )
        )
    return requests


def simulate(requests: Sequence[Request], header: Header, scheduler: Scheduler) -> Report:
    """Serves requests in virtual time, on the instances and with the limits of a header.

    Raises:
        ValueError: the instances cannot be given the roles that the policy needs; see `instances_for`.
    """
    specs, latency = instances_for(header, traits_of(scheduler))
    return simulation.simulate(
        Fleet(specs, latency, (1,) * len(specs)),
        sorted(requests, key=lambda request: request.arrival_s),
        scheduler,
        max_queue=header.max_queue,
        transfer_timeout_s=header.transfer_timeout_s,
        on_failure=header.on_failure,
    )


def instances_for(header: Header, traits: Traits) -> tuple[tuple[InstanceSpec, ...], tuple[LatencyModel, ...]]:
    """The instances of a log with the roles and abilities that another policy needs, and their latency models.

    A colocated policy gets them all as mixed ones; any other, of mixed ones, the first half to prefill and the rest to
    decode. An instance that must now do what it had no programs for gets the limits and the coefficients of one that
    had them.

    Raises:
        ValueError: there is but one instance for two roles; or none that could do it; or instances that would have to
            stand in for each other have different meshes.
    """
    specs = header.specs
    if traits.colocated:
        roles = [Role.MIXED] * len(specs)
    elif all(spec.role is Role.MIXED for spec in specs):
        roles = [Role.PREFILL if spec.index < len(specs) // 2 else Role.DECODE for spec in specs]
        if len(specs) == 1:
            raise ValueError("the log has 1 instance; allowed with a policy of two roles: 2 or more")
    else:
        roles = [spec.role for spec in specs]
    made = []
    for spec, model, role in zip(specs, header.latency, roles, strict=True):
        changed = dataclasses.replace(spec, role=role, moves=spec.moves or traits.moves)
        if role is not Role.PREFILL or traits.prefill_decodes:
            changed, model = _able(changed, model, header, "max_rows", _ROWS, range(3, 6))
        if role is not Role.DECODE or traits.decode_prefills:
            changed, model = _able(changed, model, header, "max_chunk", _CHUNKS, range(1, 3))
        made.append((changed, model))
    return tuple(spec for spec, _ in made), tuple(model for _, model in made)


def _able(
    spec: InstanceSpec, model: LatencyModel, header: Header, limit: str, more: tuple[str, ...], part: range
) -> tuple[InstanceSpec, LatencyModel]:
    """An instance without `limit` (it is 0) gets it, and what goes with it, from one that has it."""
    if getattr(spec, limit):
        return spec, model
    for other, theirs in zip(header.specs, header.latency, strict=True):
        if not getattr(other, limit):
            continue
        if (other.devices, other.pp) != (spec.devices, spec.pp):
            raise ValueError(
                f"the log has instances of {spec.devices} and {other.devices} devices (pp {spec.pp} and {other.pp}); "
                "allowed with a policy that gives them each other's work: equal ones"
            )
        iteration: Any = tuple(
            max(mine, others) if index == 0 else others if index in part else mine
            for index, (mine, others) in enumerate(zip(model.iteration, theirs.iteration, strict=True))
        )
        changes: dict[str, Any] = {name: getattr(other, name) for name in (limit, *more)}
        known = {(T, B): seconds for T, B, seconds in (*theirs.shapes, *model.shapes)}
        shapes = tuple((T, B, seconds) for (T, B), seconds in sorted(known.items()))
        return dataclasses.replace(spec, **changes), dataclasses.replace(model, iteration=iteration, shapes=shapes)
    raise ValueError(f"no instance of the log has {limit}; allowed with this policy: at least one")


def _handle(controller: Controller, entry: Entry) -> tuple[list[Command], str]:
    try:
        return controller.handle(entry.event, entry.time_s), ""
    except Exception as error:  # what ended the recorded controller must end this one too
        return [], f"{type(error).__name__}: {error}"


def _difference(entry: Entry, commands: list[Command], raised: str) -> str:
    if raised != entry.raised:
        return f"raises {raised or 'nothing'}; recorded: {entry.raised or 'nothing'}"
    for number, (now, before) in enumerate(itertools.zip_longest(commands, entry.commands)):
        if now != before:
            return f"command {number} is {_short(now, before)}; recorded: {_short(before, now)}"
    return ""


def _short(command: Command | None, other: Command | None) -> str:
    """A command, or of one that differs from `other` in some fields, only these."""
    if type(command) is not type(other) or command is None:
        return repr(command)
    differing = [
        f"{field.name}={getattr(command, field.name)!r}"
        for field in dataclasses.fields(command)
        if getattr(command, field.name) != getattr(other, field.name)
    ]
    return f"{type(command).__name__}({', '.join(differing)}, ...)"
