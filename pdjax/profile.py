"""The latency profile of a model on some hardware: a versioned JSON file. Enters: passes and transfers, measured, or
estimated and marked so. Leaves: what `EngineConfig.profile` names, checked against the engine that is to use it. Called
by `pdjax.experiments.profile` and `aot_profile`, which make profiles, and by the engine and launchers, which read them.

    known = profile.load("profile.json")
    known.prefill_s(512)  # T_p: seconds to prefill 512 tokens alone
    known.decode_s(6, 600)  # T_d: a decode step of 6 rows, each with 600 tokens
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from pdjax import codec
from pdjax.latency import KINDS, LatencyModel, Load, Sample, fitted, kind, saturating_tokens, solve
from pdjax.messages import InstanceSpec, Role
from pdjax.models.config import ModelConfig
from pdjax.record import IterationRecord, RequestRecord

log = logging.getLogger("pdjax")

VERSION = 1
_NO_COST = ("max_position", "eos_ids", "bos_id")  # of a model: what its passes take does not depend on it
_FASTEST = 1e15  # bytes/s where the measured transfers show no bandwidth


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """Measured passes of one kind, and how well they are predicted: |predicted / measured - 1|."""

    name: str
    mean_error: float
    max_error: float
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Instances that are equal but for their role and their pages.

    Attributes:
        spec: one of them.
        latency: fitted to `points`.
        points: by kind of pass, those that it was fitted to.
        held_out: passes that it was not fitted to.
        saturating_tokens: DistServe's L_m; see `pdjax.latency.saturating_tokens`.
        token_budget: the same beside decode rows: of a chunked prefill.
    """

    spec: InstanceSpec
    latency: LatencyModel
    points: tuple[Points, ...]
    held_out: tuple[Points, ...]
    saturating_tokens: int
    token_budget: int


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A request alone: its KV moved after its prefill, or `streamed` while it was computed.

    Attributes:
        nbytes: of its KV.
        transfer_s: from the first byte offered to the last inserted.
        second_token_s: from its arrival to its second token, the first from the decode instance.
        prefill_s: from the start of its first chunk to its first token; 0: not known.
        chunks: of its prompt.
    """

    tokens: int
    nbytes: int
    streamed: bool
    transfer_s: float
    second_token_s: float
    prefill_s: float = 0.0
    chunks: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Transfers:
    """What moves KV, and how fast.

    Attributes:
        transport: as in `EngineConfig.transfer`.
        alpha_s, bytes_per_s: a whole transfer of n bytes takes alpha + n / bytes_per_s.
        stream_from: from how many prompt tokens on streamed KV is there earlier than whole KV; None: never.
        streaming: by how much a pass takes longer for every prompt part, and for every token, that is streamed.
        reporting: how long after its end the controller hears of a pass behind which another one follows at once.
    """

    transport: str
    alpha_s: float
    bytes_per_s: float
    stream_from: int | None
    samples: tuple[Moved, ...]
    streaming: tuple[float, float] = (0.0, 0.0)
    reporting: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Where the times of a profile come from that nobody has measured.

    Attributes:
        target: the devices, as `pdjax.aot.targets` names them.
        platform: of these devices.
        how: what passes and transfers were taken from, in words.
    """

    target: str
    platform: str
    how: str


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Of one model on one kind of hardware.

    Attributes:
        version: of this format.
        name: what the model was called.
        model, dtype: its config, and the dtype of its weights.
        hardware: what its devices are (`pdjax.build.hardware_here`).
        kinds: of instances, the one that most is known of first.
        transfers: by transport.
        estimate: None: it was measured; else all times are estimates.
    """

    version: int
    name: str
    model: ModelConfig
    dtype: str
    hardware: str
    kinds: tuple[Kind, ...]
    transfers: tuple[Transfers, ...] = ()
    estimate: Estimate | None = None

    @property
    def origin(self) -> str:
        """In words, for the reader of what follows from it."""
        text = f"the profile of {self.name} on {self.hardware}"
        if self.estimate is None:
            return text
        return f"{text}, an estimate for {self.estimate.target} that nobody has measured ({self.estimate.how})"

    def check(self, model: ModelConfig, dtype: str, hardware: str) -> None:
        """ValueError unless it is of this model, dtype and hardware."""
        for field in dataclasses.fields(ModelConfig):
            mine, theirs = getattr(self.model, field.name), getattr(model, field.name)
            if field.name not in _NO_COST and mine != theirs:
                raise ValueError(f"is of a model whose {field.name} is {mine!r} ({self.name}); allowed: {theirs!r}")
        for name, mine, theirs in (("dtype", self.dtype, dtype), ("hardware", self.hardware, hardware)):
            if mine != theirs:
                raise ValueError(f"is of {name} {mine!r}; allowed: {theirs!r}")

    def latency(self, spec: InstanceSpec, transport: str = "") -> LatencyModel:
        """The model of an instance; its transfers are those of a transport, "": the first that was measured.

        Raises:
            ValueError: no instance of this shape, or the transport, was measured.
        """
        for known in self.kinds:
            if covers(known.spec, spec):
                break
        else:
            one = self.kinds[0].spec
            raise ValueError(
                f"has no instance like {_shape(spec)}; allowed: of {_shape(one)}, or a part of these sizes"
            )
        moved = self.moved(transport)
        if moved is None:
            return known.latency
        return dataclasses.replace(
            known.latency,
            transfer_alpha_s=moved.alpha_s,
            transfer_bytes_per_s=moved.bytes_per_s,
            streaming=moved.streaming,
            reporting=moved.reporting,
        )

    def moved(self, transport: str = "") -> Transfers | None:
        """Transfers of a transport, "": of the first, None if there are none at all. ValueError if others were
        measured."""
        if not self.transfers or not transport:
            return next(iter(self.transfers), None)
        for known in self.transfers:
            if known.transport == transport:
                return known
        names = ", ".join(known.transport for known in self.transfers)
        raise ValueError(f"has no transfers by {transport!r}; allowed: {names}")

    def prefill_s(self, tokens: int) -> float:
        """T_p: seconds to prefill a prompt alone, on the first kind of instance."""
        first = self.kinds[0]
        return first.latency.prefill_s(first.spec, tokens)

    def decode_s(self, rows: int, context: int) -> float:
        """T_d: seconds of a decode step of rows with `context` tokens each, on the first kind of instance."""
        first = self.kinds[0]
        return first.latency.decode_s(first.spec, rows, rows * context, rows * context)


def load(path: str) -> Profile:
    """Reads a profile; of an estimate a warning tells, once.

    Raises:
        ValueError: it cannot be read, or is none, or of another version; the message names `profile`, and the field.
    """
    try:
        stamp = Path(path).stat().st_mtime_ns
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise ValueError(f"profile is {path!r}, which cannot be read: {error}") from None
    return _load(path, stamp)


@functools.lru_cache(maxsize=4)  # a configuration is asked for its threshold more than once
def _load(path: str, stamp: int) -> Profile:
    del stamp
    try:
        data = json.loads(Path(path).read_text())
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f"version is {version!r}; allowed: {VERSION}")
        known = codec.decode(Profile, data)
        if not known.kinds:
            raise ValueError("kinds is empty; allowed: at least one")
        if known.estimate is not None:
            log.warning("profile is %r, %s", path, known.origin)
        return known
    except (OSError, ValueError) as error:
        raise ValueError(f"profile is {path!r}, which is no profile: {error}") from None


def save(profile: Profile, path: str | Path) -> None:
    Path(path).write_text(json.dumps(codec.encode(profile), indent=1) + "\n")


def models_for(
    path: str, specs: Sequence[InstanceSpec], model: ModelConfig, dtype: str, hardware: str, transport: str
) -> tuple[LatencyModel, ...]:
    """The latency models of an engine's instances, from a file.

    Raises:
        ValueError: it is no profile of this model, hardware and these instances; the message says what differs.
    """
    known = load(path)
    try:
        known.check(model, dtype, hardware)
        exchange = any(spec.role is not Role.MIXED for spec in specs)
        return tuple(known.latency(spec, transport if exchange else "") for spec in specs)
    except ValueError as error:
        raise ValueError(f"profile is {path!r}, which {error}") from None


def stream_from(path: str, transport: str) -> int | None:
    """From how many prompt tokens on streaming pays, from a file. ValueError as of `load`, and if the transport was not
    measured."""
    known = load(path)
    try:
        moved = known.moved(transport)
    except ValueError as error:
        raise ValueError(f"profile is {path!r}, which {error}") from None
    return 1 if moved is None else moved.stream_from


# --- making one -----------------------------------------------------------------------------------------------------


def kind_of(spec: InstanceSpec, measured: Iterable[Sample], held_out: Iterable[tuple[str, Sequence[Sample]]]) -> Kind:
    """Fits a latency model to measured passes, and looks how well it predicts them and others."""
    measured = tuple(measured)
    model = fitted(spec, measured)
    groups: dict[str, list[Sample]] = {}
    for sample in measured:
        groups.setdefault(name_of(sample.probe.load(spec)), []).append(sample)
    return Kind(
        spec,
        model,
        tuple(points(spec, model, name, samples) for name, samples in groups.items()),
        tuple(points(spec, model, name, samples) for name, samples in held_out),
        saturating_tokens(model, spec),
        saturating_tokens(model, spec, beside_rows=True) if spec.max_rows and spec.max_chunk else 0,
    )


def name_of(load: Load) -> str:
    """One of `pdjax.latency.KINDS`."""
    return KINDS[kind(load)]


def points(spec: InstanceSpec, model: LatencyModel, name: str, samples: Sequence[Sample]) -> Points:
    """Samples and how well a model predicts them."""
    errors = [abs(model.iteration_s(spec, s.probe.load(spec)) / s.seconds - 1) for s in samples]
    return Points(name, statistics.fmean(errors), max(errors), tuple(samples))


def transfers_of(transport: str, samples: Sequence[Moved], max_model_len: int, reporting: float = 0.0) -> Transfers:
    """Fits alpha and the bandwidth to whole transfers on relative error, and finds the streaming threshold.

    What streaming gains is the difference of the times to the second token, a line over the length of the prompt: it
    costs a message for each layer group and chunk, and hides what was sent before the last chunk. It pays from where
    the line is above zero.
    """
    whole = [sample for sample in samples if not sample.streamed]
    alpha, slope = solve([[1.0, sample.nbytes] for sample in whole], [sample.transfer_s for sample in whole])
    return Transfers(
        transport,
        alpha,
        1 / max(slope, 1 / _FASTEST),
        _threshold(samples, max_model_len),
        tuple(samples),
        _streaming(samples),
        reporting,
    )


def reporting_s(records: Iterable[RequestRecord], iterations: Iterable[IterationRecord]) -> float:
    """How long after its end the controller hears of a pass behind which another one follows at once: the median over
    first tokens. What computes keeps the core from those that report; where it does not, that is next to nothing. 0:
    there was no such pass."""
    ends: dict[str, tuple[IterationRecord, bool]] = {}  # by request: what computed its last tokens
    passes = sorted(iterations, key=lambda one: (one.instance, one.started_s))
    for one, other in itertools.zip_longest(passes, passes[1:]):
        follows = other is not None and other.instance == one.instance and other.started_s <= one.finished_s
        ends |= dict.fromkeys(one.requests, (one, follows))
    firsts = [(record.timeline.token_s[0], *ends[record.request_id]) for record in records if record.timeline.token_s]
    late = [max(0.0, time_s - one.finished_s) for time_s, one, follows in firsts if follows]
    return statistics.median(late) if late else 0.0


def _pairs(samples: Sequence[Moved]) -> list[tuple[Moved, Moved]]:
    """(moved as a whole, streamed) prompts of equal length."""
    streamed = {sample.tokens: sample for sample in samples if sample.streamed}
    return [(one, streamed[one.tokens]) for one in samples if not one.streamed and one.tokens in streamed]


def _streaming(samples: Sequence[Moved]) -> tuple[float, float]:
    """Seconds of a part and of a token that prefills took longer where KV was streamed; neither is negative."""
    from scipy.optimize import nnls  # as in `solve`

    pairs = [(one, other) for one, other in _pairs(samples) if other.prefill_s]
    if not pairs:
        return 0.0, 0.0
    longer = [other.prefill_s - one.prefill_s for one, other in pairs]
    solution, _ = nnls(np.array([[other.chunks, other.tokens] for _, other in pairs], float), np.array(longer))
    return float(solution[0]), float(solution[1])


def _threshold(samples: Sequence[Moved], max_model_len: int) -> int | None:
    gains = [(one.tokens, one.second_token_s - other.second_token_s) for one, other in _pairs(samples)]
    if len(gains) < 2:
        return 1
    tokens, seconds = zip(*gains, strict=True)
    slope, start = np.polyfit(np.array(tokens), np.array(seconds), 1)
    if slope <= 0:
        return 1 if start > 0 else None
    least = max(1, math.ceil(-start / slope))
    return least if least <= max_model_len else None


# --- inside ---------------------------------------------------------------------------------------------------------


def covers(known: InstanceSpec, spec: InstanceSpec) -> bool:
    """Whether prompts and rows of an instance have sizes that were measured. Where its largest batch is another, passes
    of both are predicted by the line through the sizes."""
    same = all(getattr(known, name) == getattr(spec, name) for name in ("devices", "pp", "page_size"))
    sizes = ("chunk_buckets", "row_buckets")
    return same and all(set(getattr(spec, name)) <= set(getattr(known, name)) for name in sizes)


def _shape(spec: InstanceSpec) -> str:
    tp = spec.devices // spec.pp
    return (
        f"tp {tp}, pp {spec.pp}, page_size {spec.page_size}, chunks of at most {spec.max_chunk} tokens and "
        f"{spec.max_rows} rows"
    )
