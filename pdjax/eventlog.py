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
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from reprlib import repr as short  # a bad value may be as long as its line
from typing import Any, Literal

from pdjax import codec
from pdjax.checks import is_number
from pdjax.config import MAX_TIMEOUT_S, EngineConfig
from pdjax.latency import LatencyModel
from pdjax.messages import Arrival, Command, Event, InstanceSpec, Role, RunStarted
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.request import Request, State

VERSION = 1
MAX_COUNT = 2**40  # of tokens, bytes and the like in a log that is read
MAX_ITEMS = 2**24  # of pages, rows and the like: who reads a log keeps a list of them


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a controller was made from.

    Attributes:
        scheduler: a name of `pdjax.schedulers.SCHEDULERS`, or the class of a user's own policy.
        stream_from: the argument of a named policy.
        specs, latency: one of each per instance.
        transfer_timeout_s, max_queue, max_steps, on_failure, correct: as of the controller.
        admission, drop_late: what the policy was wrapped in, as of the engine.
        version: of this format.
    """

    scheduler: str
    stream_from: int | None
    specs: tuple[InstanceSpec, ...]
    latency: tuple[LatencyModel, ...]
    transfer_timeout_s: float
    max_queue: int = 0
    max_steps: int = 1
    on_failure: Literal["recompute", "fail"] = "recompute"
    correct: bool = False
    admission: bool = False
    drop_late: bool = False
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
        on_failure=config.on_failure,
        correct=config.correct,
        admission=config.admission,
        drop_late=config.drop_late,
    )


def check_path(path: str | Path) -> Path:
    """The file that a log will be written to. It is made if there is none; what is in it stays.

    Raises:
        ValueError: it cannot be written, or is no regular file: a log starts anew where its engine warms up again.
    """
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():  # opening a pipe would wait for its reader
            raise ValueError("not a regular file")
        file.open("ab").close()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: "~" of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"event_log is {str(path)!r} ({reason}); allowed: a file that can be written") from None
    return file


class EventLog:
    """A log that is being written. It is the controller's sink too, in front of the real one, whose answers it notes.

    Args:
        path: the file, which is replaced.
        sink: takes tokens and records.

    Raises:
        ValueError: as of `check_path`.
    """

    def __init__(self, path: str | Path, sink: Any) -> None:
        self._file = check_path(path).open("w", buffering=1, encoding="utf-8")
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

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        self._sink.revised(record)


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """A log that was read."""

    header: Header
    entries: tuple[Entry, ...]


def read(path: str | Path) -> Log:
    """The log in a file.

    Raises:
        ValueError: no such file, another version, a header that no controller can be made from, or a line that is no
            event; the message names the line.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"log is {str(path)!r}, which is not UTF-8 text; allowed: an events.jsonl") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"log is {str(path)!r}, which cannot be read ({error}); allowed: an events.jsonl") from None
    whole = text[: text.rfind("\n") + 1].splitlines()  # the rest was being written when the process ended
    lines = [_at(f"{path}:{number}", json.loads, line) for number, line in enumerate(whole, 1)]
    if not lines or not isinstance(lines[0], dict) or lines[0].get("version", VERSION) != VERSION:
        raise ValueError(f"log is {str(path)!r}; allowed: an events.jsonl of version {VERSION}")
    header = _at(f"{path}:1", _header, lines[0])
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


def _header(line: Any) -> Header:
    header = codec.decode(Header, line)
    _within("Header.transfer_timeout_s", header.transfer_timeout_s, 0, MAX_TIMEOUT_S, above=True)
    _within("Header.stream_from", header.stream_from or 0, 0, MAX_COUNT)
    _within("Header.max_queue", header.max_queue, 0, MAX_COUNT)
    _within("Header.max_steps", header.max_steps, 1, 1 if header.correct else MAX_COUNT)
    _within("Header.specs length", len(header.specs), 1, MAX_ITEMS)
    _within("Header.latency length", len(header.latency), len(header.specs), len(header.specs))
    for index, (spec, model) in enumerate(zip(header.specs, header.latency, strict=True)):
        _check_spec(f"Header.specs[{index}]", index, spec)
        at = f"Header.latency[{index}]"
        for coefficient in model.iteration:
            _within(f"{at}.iteration", coefficient, 0, MAX_TIMEOUT_S)
        _within(f"{at}.transfer_alpha_s", model.transfer_alpha_s, 0, MAX_TIMEOUT_S)
        _within(f"{at}.transfer_bytes_per_s", model.transfer_bytes_per_s, 0, math.inf, above=True)
        for *_, seconds in model.shapes:
            _within(f"{at}.shapes", seconds, 0, MAX_TIMEOUT_S)
        for name in ("scale", "streaming"):
            for number in getattr(model, name):
                _within(f"{at}.{name}", number, 0, MAX_TIMEOUT_S)
    return header


def _check_spec(at: str, index: int, spec: InstanceSpec) -> None:
    """An instance must be able to do what its role asks for: a prompt in chunks of no token never ends."""
    prompts, rows = int(spec.role is not Role.DECODE), int(spec.role is not Role.PREFILL)
    for name, low, high in (
        ("index", index, index),
        ("devices", 1, MAX_ITEMS),
        ("pp", 1, spec.devices),
        ("max_rows", rows, MAX_ITEMS),
        ("max_chunk", prompts, MAX_ITEMS),
        ("max_chunks", int(spec.max_chunk > 0), MAX_ITEMS),
        ("page_size", 1, MAX_COUNT),
        ("num_pages", 2, MAX_ITEMS),
        ("max_model_len", 2, MAX_COUNT),
        ("kv_bytes_per_token", 0, MAX_COUNT),
        ("max_in_flight", 1, MAX_ITEMS),
    ):
        _within(f"{at}.{name}", getattr(spec, name), low, high)
    for name, most in (("chunk_buckets", spec.max_chunk), ("row_buckets", spec.max_rows)):
        buckets = getattr(spec, name)
        if buckets and (buckets[0] < 1 or buckets[-1] < most or list(buckets) != sorted(set(buckets))):
            raise ValueError(f"{at}.{name} is {buckets}; allowed: ascending whole numbers >= 1, up to {most}")


def _entry(line: Any) -> Entry:
    entry = codec.decode(Entry, line)
    _within("Entry.time_s", entry.time_s, -MAX_COUNT, MAX_COUNT)
    event = entry.event
    told = event.request if isinstance(event, Arrival) else event
    for field in dataclasses.fields(told):
        value = getattr(told, field.name)
        if field.name.endswith("_s") and value is not None:
            _within(f"{type(told).__name__}.{field.name}", value, -MAX_COUNT, MAX_COUNT)
    if isinstance(event, Arrival):
        _within("Request.prompt_ids length", len(event.request.prompt_ids), 1, MAX_COUNT)
        _within("SamplingParams.max_tokens", event.request.sampling.max_tokens, 1, MAX_COUNT)
    if isinstance(event, RunStarted):
        for end_s in event.ends:
            _within("RunStarted.ends", end_s, -MAX_COUNT, MAX_COUNT)
    for _, _, tokens in entry.done:
        _within("Entry.done tokens", tokens, 0, MAX_COUNT)
    return entry


def _within(what: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """ValueError unless low <= value <= high, or low < value <= high."""
    if not is_number(value) or not low <= value <= high or (above and value == low):
        sign = ">" if above else ">="
        raise ValueError(f"{what} is {short(value)}; allowed: a number {sign} {low} and <= {high}")


def _at(where: str, read: Callable[[Any], Any], line: Any) -> Any:
    try:
        return read(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"log: {where}: {type(error).__name__}: {error}") from None
