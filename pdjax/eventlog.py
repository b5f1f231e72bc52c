"""events.jsonl: everything that a controller was told, and everything that it commanded. Events and commands enter,
lines of JSON leave; `read` gives them back. Called by the engine, and by whoever replays a log (`pdjax.rerun`).

The first line is the `Header`, what the controller was made from. Every other line is one event:

    time_s    the time it was handled at, seconds of the cluster's clock
    event     {its class: its fields}
    commands  that followed, in order, each {its class: its fields}
    ends      which tokens of this event (by their number in it) completed a stop text, as the sink said
    done      [request, state, output tokens] of the requests that ended
    raised    the error that ended the controller, if one did

Fields with their default value, and empty lists, are left out. Every line is written at once, so that a log also tells
what came before a crash; a last line without its end is ignored.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdjax import codec
from pdjax.config import EngineConfig
from pdjax.latency import LatencyModel
from pdjax.messages import Command, Event, InstanceSpec
from pdjax.record import IterationRecord, RequestRecord, TransferRecord
from pdjax.request import Request, State

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a controller was made from.

    Attributes:
        scheduler: a name of `pdjax.schedulers.SCHEDULERS`, or the class of a user's own policy.
        stream_from: the argument of a named policy.
        specs, latency: one of each per instance.
        transfer_timeout_s, max_queue, max_steps: as of the controller.
        version: of this format.
    """

    scheduler: str
    stream_from: int | None
    specs: tuple[InstanceSpec, ...]
    latency: tuple[LatencyModel, ...]
    transfer_timeout_s: float
    max_queue: int = 0
    max_steps: int = 1
    version: int = VERSION


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One event and what followed; see the module's text."""

    time_s: float
    event: Event
    commands: tuple[Command, ...] = ()
    ends: tuple[int, ...] = ()
    done: tuple[tuple[int, State, int], ...] = ()
    raised: str = ""


def header_of(config: EngineConfig, specs: Sequence[InstanceSpec], latency: Sequence[LatencyModel]) -> Header:
    """The header of an engine's log."""
    named = config.scheduler
    return Header(
        scheduler=named if isinstance(named, str) else type(named).__name__,
        stream_from=config.stream_from,
        specs=tuple(specs),
        latency=tuple(latency),
        transfer_timeout_s=config.transfer_timeout_s,
        max_queue=config.max_queue,
    )


class EventLog:
    """A log that is being written. It is the controller's sink too, in front of the real one, whose answers it notes.

    Args:
        path: the file, which is replaced.
        sink: takes tokens and records.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str | Path, sink: Any) -> None:
        try:
            self._file = Path(path).expanduser().open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"event_log is {str(path)!r} ({error.strerror}); allowed: a file to write") from None
        self._sink = sink
        self._tokens = 0
        self._ends: list[int] = []
        self._done: list[tuple[int, State, int]] = []

    def begin(self, header: Header) -> None:
        """Writes the first line; what was there is gone."""
        self._file.seek(0)
        self._file.truncate()
        self._write(codec.encode(header))

    def handle(self, controller: Any, event: Event, now: float) -> list[Command]:
        """`controller.handle`, written down."""
        self._tokens = 0
        self._ends, self._done = [], []
        commands: list[Command] = []
        raised = ""
        try:
            commands = controller.handle(event, now)
            return commands
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            entry = Entry(now, event, tuple(commands), tuple(self._ends), tuple(self._done), raised)
            self._write(_line(entry))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    # The controller's sink.

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        ends: bool = self._sink.token(request, token, time_s, logprob)
        if ends:
            self._ends.append(self._tokens)
        self._tokens += 1
        return ends

    def done(self, request: Request, record: RequestRecord) -> None:
        self._done.append((request.id, record.state, len(record.token_ids)))
        self._sink.done(request, record)

    def iteration(self, record: IterationRecord) -> None:
        self._sink.iteration(record)

    def transfer(self, record: TransferRecord) -> None:
        self._sink.transfer(record)


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """A log that was read."""

    header: Header
    entries: tuple[Entry, ...]


def read(path: str | Path) -> Log:
    """The log in a file.

    Raises:
        ValueError: no such file, another version, or a line that is no event; the message names the line.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"log is {str(path)!r}, which cannot be read ({error}); allowed: an events.jsonl") from None
    whole = text[: text.rfind("\n") + 1].splitlines()  # the rest was being written when the process ended
    lines = [_at(f"{path}:{number}", json.loads, line) for number, line in enumerate(whole, 1)]
    if not lines or not isinstance(lines[0], dict) or lines[0].get("version", VERSION) != VERSION:
        raise ValueError(f"log is {str(path)!r}; allowed: an events.jsonl of version {VERSION}")
    header = _at(f"{path}:1", lambda line: codec.decode(Header, line), lines[0])
    return Log(header, tuple(_at(f"{path}:{number}", _entry, line) for number, line in enumerate(lines[1:], 2)))


def _line(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {"time_s": entry.time_s, "event": codec.encode_tagged(entry.event)}
    lists = {
        "commands": [codec.encode_tagged(command) for command in entry.commands],
        "ends": list(entry.ends),
        "done": [[request, state.value, tokens] for request, state, tokens in entry.done],
        "raised": entry.raised,
    }
    return line | {name: value for name, value in lists.items() if value}


def _entry(line: Any) -> Entry:
    return Entry(
        time_s=line["time_s"],
        event=codec.decode_tagged(Event, line["event"]),
        commands=tuple(codec.decode_tagged(Command, command) for command in line.get("commands", ())),
        ends=tuple(line.get("ends", ())),
        done=tuple((request, State(state), tokens) for request, state, tokens in line.get("done", ())),
        raised=line.get("raised", ""),
    )


def _at(where: str, read: Callable[[Any], Any], line: Any) -> Any:
    try:
        return read(line)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"log: {where}: {type(error).__name__}: {error}") from None
