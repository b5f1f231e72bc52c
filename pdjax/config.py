"""The one frozen configuration of an engine. Launchers build it from flags; scripts write it by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from pdjax import profile
from pdjax.checks import check_whole, is_number
from pdjax.messages import Role
from pdjax.request import SLO, SLOClass

DTYPES = ("auto", "float32", "bfloat16")
TRANSFERS = ("device_put", "jax_transfer", "mpi")
ON_FAILURE = ("recompute", "fail")
MAX_TIMEOUT_S = 1e6  # more than that no lock can wait for everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from.

    Attributes:
        model: preset name, Hugging Face folder, GGUF file or orbax folder.
        dtype: of the weights: "float32", "bfloat16", or "auto", which is float32 on CPU (many have no bfloat16
            arithmetic) and bfloat16 elsewhere. KV is float32 on CPU, else the dtype of the weights.
        scheduler: "colocated", "colocated_chunked", "disaggregated", "dynamic", or an object with the methods of
            `pdjax.schedulers.Scheduler`.
        prefill_instances, decode_instances: how many of each.
        prefill_pp, decode_pp: pipeline stages of one instance; each holds a run of the layers.
        prefill_tp, decode_tp: devices of one stage.
        prefill_chunk, decode_chunk: most prompt tokens in one iteration of such an instance; 0: chosen from the
            context length.
        prefill_max_batch: most prompts in one iteration of an instance.
        decode_max_batch: most decode rows of an instance.
        prefill_num_pages, decode_num_pages: KV pages of one instance; 0: room for `decode_max_batch` requests of
            1024 tokens (or of the context length, where that is less).
        page_size: tokens in a page.
        max_model_len: most tokens of one request; 0: the model's context, at most 8192.
        transfer: how KV moves between instances: "device_put" from device to device, "jax_transfer" by
            `jax.experimental.transfer`, through the host and sockets, or "mpi" between the ranks of an `mpirun` job
            (`pdjax.mpi`). In such a job each instance has ranks of its own, and "jax_transfer" works too.
        prefill_ranks, decode_ranks: ranks of one instance in an `mpirun` job; each has tp / ranks devices of every
            stage.
        devices_per_rank: devices that a rank of an `mpirun` job may see; 0: as many as it needs.
        pin: give the ranks of each instance CPU cores of their own; rank 0 shares those of the first instance.
        peer_timeout_s: a rank that is not heard of for so long is given up, its instance with it.
        on_failure: of a request that was on an instance that is lost: "recompute" its KV on another, or "fail" it.
        verify_kv: compare the KV of both sides, read back from their pages, at the end of every transfer; a
            difference fails it. For debugging: it copies pools to the host.
        stream_layers: layers per streamed group; 0 sends a prompt's KV whole after its prefill.
        transfer_timeout_s: a transfer that takes longer is given up, and the request starts over.
        max_queue: requests that may wait for their first pass; one more is rejected. 0: any number.
        slo_classes: kinds of requests with limits of their own, which requests name.
        admission: take a request in only where its limits, and those of the requests that are there, are predicted to
            be kept (`pdjax.schedulers.admission`); otherwise it waits, is put into a laxer class, or is rejected.
        drop_late: reject requests that have not begun and can no longer keep their limits.
        profile: file of a latency profile (`pdjax.profile`) of this model on this hardware; "": passes are measured
            briefly at the warm-up.
        correct: correct the latency models while serving, by what passes and transfers took.
        seed: of sampling, for requests that bring none.
        warmup: compile every program before the first request.
        compilation_cache: folder of JAX's persistent compilation cache; "" turns it off.
        event_log: file that every event of the controller and the commands that follow are written to
            (`pdjax.eventlog`); "": none.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    scheduler: Any = "disaggregated"
    prefill_instances: int = 1
    decode_instances: int = 1
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_chunk: int = 0
    decode_chunk: int = 0
    prefill_max_batch: int = 4
    decode_max_batch: int = 8
    prefill_num_pages: int = 0
    decode_num_pages: int = 0
    page_size: int = 64
    max_model_len: int = 0
    transfer: str = "device_put"
    prefill_ranks: int = 1
    decode_ranks: int = 1
    devices_per_rank: int = 0
    pin: bool = False
    peer_timeout_s: float = 10.0
    on_failure: Literal["recompute", "fail"] = "recompute"
    verify_kv: bool = False
    stream_layers: int = 3
    transfer_timeout_s: float = 60.0
    max_queue: int = 0
    slo_classes: tuple[SLOClass, ...] = ()
    admission: bool = False
    drop_late: bool = False
    profile: str = ""
    correct: bool = True
    seed: int = 0
    warmup: bool = True
    compilation_cache: str = "~/.cache/pdjax/xla"
    event_log: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ValueError(f"model is {self.model!r}; allowed: a preset name or a path, as text")
        for name, allowed in (("dtype", DTYPES), ("transfer", TRANSFERS), ("on_failure", ON_FAILURE)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name in (
            "prefill_instances",
            "decode_instances",
            "prefill_pp",
            "decode_pp",
            "prefill_tp",
            "decode_tp",
            "prefill_ranks",
            "decode_ranks",
            "prefill_max_batch",
            "decode_max_batch",
            "page_size",
        ):
            check_whole(name, getattr(self, name), 1)
        for name in (
            "prefill_chunk",
            "decode_chunk",
            "prefill_num_pages",
            "decode_num_pages",
            "max_model_len",
            "stream_layers",
            "devices_per_rank",
            "max_queue",
            "seed",
        ):
            check_whole(name, getattr(self, name), 0)
        if self.max_model_len == 1:
            raise ValueError("max_model_len is 1; allowed: 0, or at least 2: a prompt token and an answer")
        for name in ("event_log", "profile"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: a path as text, or an empty one")
        for name in ("verify_kv", "pin", "admission", "drop_late", "correct"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: True, False")
        for name in ("transfer_timeout_s", "peer_timeout_s"):
            timeout = getattr(self, name)
            if not is_number(timeout) or not 0 < timeout <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} is {timeout!r}; allowed: seconds > 0, at most {MAX_TIMEOUT_S:.0f}")
        for side in ("prefill", "decode"):
            tp, ranks = getattr(self, f"{side}_tp"), getattr(self, f"{side}_ranks")
            if tp % ranks:
                raise ValueError(f"{side}_ranks is {ranks}; allowed: a divisor of {side}_tp, which is {tp}")
        _check_classes(self.slo_classes)

    @property
    def stream_from(self) -> int | None:
        """What a named policy is told: from how many prompt tokens on KV is streamed, which the profile says if there
        is one; None: never."""
        if not self.stream_layers:
            return None
        return profile.stream_from(self.profile, self.transfer) if self.profile else 1

    @property
    def devices(self) -> int:
        """Of both pools together; colocated instances use as many."""
        prefill = self.prefill_instances * self.prefill_pp * self.prefill_tp
        return prefill + self.decode_instances * self.decode_pp * self.decode_tp

    def roles(self, colocated: bool) -> tuple[Role, ...]:
        """Of the instances, in order. Colocated ones are MIXED, made of the devices of both pools at decode_pp stages
        of decode_tp.

        Raises:
            ValueError: those devices do not divide.
        """
        if not colocated:
            return (Role.PREFILL,) * self.prefill_instances + (Role.DECODE,) * self.decode_instances
        if self.devices % (self.decode_pp * self.decode_tp):
            raise ValueError(
                f"decode_pp * decode_tp is {self.decode_pp} * {self.decode_tp}; allowed: a divisor of the "
                f"{self.devices} devices of both pools, since colocated instances use them all"
            )
        return (Role.MIXED,) * (self.devices // (self.decode_pp * self.decode_tp))

    def ranks_of(self, role: Role) -> int:
        """Ranks of one instance of a role."""
        return self.prefill_ranks if role is Role.PREFILL else self.decode_ranks


def class_chain(classes: Sequence[SLOClass], name: str) -> tuple[SLOClass, ...]:
    """The class of that name, and those that its requests may be degraded to, in this order.

    Raises:
        ValueError: there is no such class.
    """
    by_name = {kind.name: kind for kind in classes}
    if name not in by_name:
        raise ValueError(
            f"slo is {name!r}; allowed: a pdjax.SLO, None, or a class: {', '.join(by_name) or 'none here'}"
        )
    chain = [by_name[name]]
    while chain[-1].degrade_to:
        chain.append(by_name[chain[-1].degrade_to])
    return tuple(chain)


def _check_classes(classes: Any) -> None:
    """ValueError unless names are unique, and each class leads by `degrade_to` to one without."""
    if not isinstance(classes, tuple) or not all(isinstance(kind, SLOClass) for kind in classes):
        raise ValueError(f"slo_classes is {classes!r}; allowed: a tuple of pdjax.SLOClass")
    names = [kind.name for kind in classes]
    for kind in classes:
        if not isinstance(kind.name, str) or not kind.name or names.count(kind.name) > 1:
            raise ValueError(f"slo_classes has the name {kind.name!r}; allowed: texts, not empty, each of one class")
        if not isinstance(kind.slo, SLO):
            raise ValueError(f"slo_classes: slo of {kind.name!r} is {kind.slo!r}; allowed: a pdjax.SLO")
        if not isinstance(kind.degrade_to, str):
            raise ValueError(
                f"slo_classes: degrade_to of {kind.name!r} is {kind.degrade_to!r}; allowed: the name of another class, "
                "or an empty text"
            )
    next_of = {kind.name: kind.degrade_to for kind in classes}
    for kind in classes:
        seen, name = [kind.name], kind.degrade_to
        while name:
            if name not in next_of or name in seen:
                raise ValueError(
                    f"slo_classes: degrade_to leads from {kind.name!r} to {name!r}; allowed: names of other classes, "
                    "and no way back"
                )
            seen.append(name)
            name = next_of[name]
