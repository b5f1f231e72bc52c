"""The public door: an engine in this process. Prompts in; text, tokens and timelines out.

    with pdjax.Engine(pdjax.EngineConfig(model="smollm2-135m")) as engine:
        print(engine.generate(["The capital of France is"], pdjax.SamplingParams(temperature=0))[0].text)

One thread runs the controller: it takes the next event of the cluster, and submits the commands that follow from it.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import jax

from pdjax import mpi, profile
from pdjax.build import Progress, Warmup, scheduler_of
from pdjax.capacity import Gauge, Remaining, queued_prompt_tokens, remaining, strictest
from pdjax.cluster import Cluster
from pdjax.config import EngineConfig
from pdjax.controller import Controller
from pdjax.eventlog import EventLog, check_path, header_of
from pdjax.handle import AsyncDeltas, Delta, Handle, Result
from pdjax.home import Here, Home
from pdjax.latency import LatencyModel, Probe, fitted
from pdjax.messages import Abort, Arrival, Command, Event, InstanceSpec, Tick
from pdjax.models.source import resolve
from pdjax.prompts import Prompt, check_length, check_options, check_stops, encode, limits_of, request_of
from pdjax.record import FlipRecord, IterationRecord, MoveRecord, RequestRecord, TransferRecord
from pdjax.replay import Recorder, replay
from pdjax.report import Report
from pdjax.request import SLO, Request, SamplingParams
from pdjax.schedulers.base import traits_of
from pdjax.workload import Workload

CLOSE_S = 5.0


class Engine:
    """Serves one model. A context manager; safe from any thread.

    Args:
        config: see `EngineConfig`.
        progress: told (done, total, what) while programs are compiled, from another thread.
        devices: to use, in the order of the instances; None: the first that JAX has. Engines that serve side by side
            in one process need their own.

    Attributes:
        warmup_s: seconds from the first weight to the last compiled program, at the start.
        compile_s: of these, seconds in XLA.

    Raises:
        ValueError: a configuration that cannot be served, before anything is loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self.config = config
        self._scheduler = scheduler_of(config)
        if config.event_log:
            check_path(config.event_log)
        self._source = resolve(config.model, max_len=config.max_model_len)
        self._home = self._home_of(devices)
        self.specs: tuple[InstanceSpec, ...] = self._home.specs
        self._profiled = self._from_profile()

        self._ids = itertools.count()
        self._handles: dict[int, Handle] = {}
        self._fault: RuntimeError | None = None
        self._closing = threading.Event()
        self._deciding = threading.Lock()  # held while the controller handles an event: its books are in motion
        self._drained = threading.Condition()
        self._recorder: Recorder | None = None
        self._log = EventLog(config.event_log, self) if config.event_log else None
        self._asked = False
        self._warming = threading.Lock()
        self._warmup: Warmup | None = None

        started, (_, compiled_s) = time.perf_counter(), self._home.compiled()
        self._cluster = self._home.open(self._check_open)
        try:
            if config.warmup:
                self._warmup = self._warm(progress, None)
            self._controller = self._control(self._models())
        except BaseException:
            self._closing.set()
            self._cluster.close()
            if self._log is not None:
                self._log.close()
            raise
        self.warmup_s = time.perf_counter() - started
        self._compiled, after_s = self._home.compiled()
        self.compile_s = after_s - compiled_s
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)
        self._thread.start()

    def _home_of(self, devices: Sequence[jax.Device] | None) -> Home:
        config, traits = self.config, traits_of(self._scheduler)
        if config.transfer != "device_put" and (head := mpi.current()) is not None:
            if devices is not None:
                raise ValueError(f"devices is {devices!r}; allowed: None, when the instances are other ranks")
            return head.ranks(config, self._source, traits)
        if config.transfer == "mpi":
            raise ValueError("transfer is 'mpi'; allowed: in a job that mpirun and pdjax.mpi.run have started")
        return Here(config, self._source, traits, devices)

    def _control(self, models: Sequence[LatencyModel]) -> Controller:
        config = self.config
        if self._log is not None:
            self._log.begin(header_of(config, self.specs, models))
        sink = self._log or self
        return Controller(
            self.specs,
            self._scheduler,
            models,
            sink,
            config.transfer_timeout_s,
            config.max_queue,
            on_failure=config.on_failure,
            correct=config.correct,
        )

    def _from_profile(self) -> tuple[LatencyModel, ...]:
        """The models of `config.profile`, by instance; none without one. ValueError if it is of something else."""
        config, home = self.config, self._home
        at = home.dtype, home.hardware, config.transfer
        return profile.models_for(config.profile, self.specs, self._source.config, *at) if config.profile else ()

    def _warm(self, progress: Progress | None, probes: Sequence[Probe] | None) -> Warmup:
        if probes is None and self._profiled:
            probes = ()  # what they would tell is known
        return self._home.warm(probes, progress, self._check_open)

    def _models(self) -> Sequence[LatencyModel]:
        """By instance: of the profile, fitted to what the warm-up measured, or constants that fit nothing."""
        if self._profiled:
            return self._profiled
        if self._warmup is None:
            return [LatencyModel()] * len(self.specs)
        return [fitted(spec, samples) for spec, samples in zip(self.specs, self._warmup.samples, strict=True)]

    def warmup(self, progress: Progress | None = None, probes: Sequence[Probe] | None = None) -> Warmup:
        """Compiles every program and measures the passes, so that nothing compiles while serving and predictions fit.

        The engine does it when it starts, unless `EngineConfig.warmup` is False; then it may come later, before the
        first request. Once done, this does nothing but tell again.

        Args:
            progress: told (done, total, what), from another thread.
            probes: passes to measure; None: those of the profile if there is one, else a few of each size.

        Raises:
            RuntimeError: requests have been asked for already; or the engine is closed, or broke.
        """
        with self._warming:
            self._check_open()
            if self._warmup is None:
                if self._asked:
                    raise RuntimeError("warmup() comes before the first request; this engine has had one")
                self._warmup = self._warm(progress, probes)
                self._controller = self._control(self._models())  # the one before has seen nothing
                self._compiled, _ = self._home.compiled()
            return self._warmup

    @property
    def cluster(self) -> Cluster:
        """What executes, for measurements and experiments: whoever submits to it disturbs the controller."""
        return self._cluster

    def now(self) -> float:
        """Seconds on the clock of all timelines."""
        return self._cluster.now()

    @property
    def devices(self) -> int:
        return sum(spec.devices for spec in self.specs)

    @property
    def home(self) -> Home:
        """Where the instances live, and on what."""
        return self._home

    @property
    def compiles_while_serving(self) -> int:
        """Programs compiled since the warm-up, here and on the ranks; not 0 is a bug, or somebody else's JAX."""
        return self._home.compiled()[0] - self._compiled

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Of every instance."""
        return tuple(lane.free_pages for lane in self._controller.books.instances)

    @property
    def latency(self) -> tuple[LatencyModel, ...]:
        """What predicts the passes of every instance."""
        return tuple(cast(LatencyModel, lane.latency) for lane in self._controller.books.instances)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens that were asked for and are not issued to any instance yet."""
        return queued_prompt_tokens(self._controller.books)

    def capacity(self, slo: SLO) -> tuple[Remaining, ...]:
        """What each instance could still take on and keep the limits, as its latency model predicts it."""
        if not isinstance(slo, SLO):
            raise ValueError(f"slo is {slo!r}; allowed: a pdjax.SLO")
        with self._deciding:
            return tuple(remaining(lane, slo) for lane in self._controller.books.instances)

    # --- asking -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        slo: SLO | str | None = None,
        user_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Handle:
        """Asks for one request; returns at once.

        Args:
            prompt: text, chat messages ({"role", "content"} each), or token ids.
            sampling: defaults to `SamplingParams()`.
            slo: limits that admission, its placement and the reports look at, or the name of one of
                `EngineConfig.slo_classes`, whose limits they are then; None: no limits.
            user_id: what reports call it: any text. It identifies nothing, so two live requests may have the same.
            deadline_s: seconds from now after which it is ended, wherever it is, with the tokens that it has and the
                finish reason "deadline".

        Raises:
            ValueError: the prompt, its length or an option is impossible; nothing else is disturbed.
            RuntimeError: the engine is closed, or broke (with the cause).
        """
        check_options(user_id, deadline_s)
        limits_of(slo, self.config.slo_classes)
        return self._ask(self.check(prompt, sampling), sampling, slo, user_id, deadline_s)

    def _ask(
        self,
        ids: tuple[int, ...],
        sampling: SamplingParams | None,
        slo: SLO | str | None = None,
        user_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Handle:
        """Starts a request that `check` has let through."""
        with self._warming:  # which makes a new controller: nothing is asked meanwhile
            self._check_open()
            self._asked = True
        request = request_of(
            next(self._ids), ids, sampling, slo, user_id, deadline_s, self._cluster.now(), self._source, self.config
        )
        handle = Handle(request, self._source.tokenizer_or_none, self._abort)
        self._handles[request.id] = handle
        self._cluster.post(Arrival(request))
        if self._fault is not None:  # it broke meanwhile: nobody will answer
            handle.fail(self._fault)
            self._handles.pop(request.id, None)
        return handle

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Answers a list of prompts, all at once; results in their order.

        Args:
            prompts: texts, message lists or id lists; a single text is a list of one.
            sampling: one for all, or one each.

        Raises:
            ValueError: a prompt is impossible; the message names its index, and none is started.
            RuntimeError: the engine is closed, or broke.
        """
        asked: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)  # type: ignore[arg-type]
        each = [sampling] * len(asked) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(asked):
            raise ValueError(f"sampling has {len(each)} entries; allowed: one, or one for each of {len(asked)} prompts")
        encoded = []
        for index, (prompt, params) in enumerate(zip(asked, each, strict=True)):
            try:
                encoded.append(self.check(prompt, params))
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        handles = [self._ask(ids, params) for ids, params in zip(encoded, each, strict=True)]
        try:
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.abort()  # nothing left to end, unless this is an exception

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Delta]:
        """Answers one prompt piece by piece. Closing the iterator early aborts the request."""
        return iter(self.submit(prompt, sampling))

    def astream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> AsyncDeltas:
        """The same for `async for`. The request is asked for at once, here; no thread waits for it. Leaving the loop
        early, `aclose`, and cancelling the task that waits abort it."""
        return aiter(self.submit(prompt, sampling))

    def check(self, prompt: Prompt, sampling: SamplingParams | None = None) -> tuple[int, ...]:
        """The prompt's token ids; ValueError if `submit` would refuse the request."""
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling is {sampling!r}; allowed: a pdjax.SamplingParams, or None")
        ids = encode(prompt, self._source)
        check_length(ids, sampling, self.specs[0].max_model_len)
        check_stops(sampling, self._source)
        return ids

    def replay(
        self,
        workload: Workload,
        on_text: Callable[[int, str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Plays a workload at its arrival times; see `pdjax.replay.replay`."""
        if self._recorder is not None:
            raise RuntimeError("the engine plays another workload; it takes one at a time")
        self._recorder = recorder = Recorder(Gauge(strictest(item.slo for item in workload.items)))
        try:
            return replay(self, recorder, workload, on_text, progress)
        finally:
            self._recorder = None

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is live: every request has ended and every page is free. False after timeout_s.

        Raises:
            RuntimeError: the engine broke, or was closed, and what was live will never end.
        """

        def idle() -> bool:
            return not self._handles and not self._controller.books.live

        with self._drained:
            ended = self._drained.wait_for(lambda: idle() or self._fault is not None, timeout_s)
            if ended and not idle():
                self._check_open()
            return ended

    # --- ending -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fails what is live and joins every thread within 5 s. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._cluster.post(Tick())
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
        self._cluster.close()
        self._break(RuntimeError("the engine is closed"))
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the controller's thread ------------------------------------------------------------------------------------

    def _loop(self) -> None:
        cluster = self._cluster
        try:
            while not self._closing.is_set():
                deadline = self._controller.next_deadline()
                event = cluster.next_event(None if deadline is None else max(0.0, deadline - cluster.now()))
                for command in self._handle(event or Tick(), cluster.now()):
                    cluster.submit(command)
                if not self._controller.books.live:
                    with self._drained:
                        self._drained.notify_all()
        except BaseException as error:
            fault = RuntimeError(f"the engine broke: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._break(fault)

    def _handle(self, event: Event, now: float) -> list[Command]:
        with self._deciding:
            if self._log is not None:
                return self._log.handle(self._controller, event, now)
            return self._controller.handle(event, now)

    def _break(self, fault: RuntimeError) -> None:
        if self._fault is None:
            self._fault = fault
        for handle in list(self._handles.values()):
            handle.fail(self._fault)
        self._handles.clear()
        with self._drained:
            self._drained.notify_all()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the engine is closed")
        if self._fault is not None:
            raise RuntimeError(str(self._fault)) from self._fault.__cause__

    def _abort(self, request_id: int) -> None:
        if request_id in self._handles:
            self._cluster.post(Abort(request_id))

    # The controller's sink: runs in the controller's thread.

    def token(self, request: Request, token: int, time_s: float, logprob: float | None) -> bool:
        return self._handles[request.id].push(token, logprob)

    def done(self, request: Request, record: RequestRecord) -> None:
        self._handles.pop(request.id).finish(record)

    def iteration(self, record: IterationRecord) -> None:
        if self._recorder is not None:
            self._recorder.iteration(record, self._controller.books)

    def transfer(self, record: TransferRecord) -> None:
        if self._recorder is not None:
            self._recorder.transfers.append(record)

    def revised(self, record: FlipRecord | MoveRecord) -> None:
        if self._recorder is not None:
            self._recorder.revisions.append(record)
