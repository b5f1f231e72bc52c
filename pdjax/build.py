"""From a configuration to instances: which there are, on which devices, how large. Called once by the engine.

Everything that can be refused is refused before anything is loaded: the checks need the model's config only.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from pdjax import compiles, provenance
from pdjax.config import EngineConfig
from pdjax.instance import Instance
from pdjax.latency import Probe, Sample
from pdjax.local import LocalCluster
from pdjax.messages import InstanceSpec, Role
from pdjax.models import attention
from pdjax.models.buckets import chunk_buckets, row_buckets, wire_buckets
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_bytes_per_token, kv_dtype_on
from pdjax.models.params import Weights
from pdjax.models.sharding import make_meshes, shares, split
from pdjax.models.source import Source
from pdjax.models.weights import copy_to
from pdjax.schedulers import SCHEDULERS
from pdjax.schedulers.admission import guarded
from pdjax.schedulers.base import Scheduler, Traits
from pdjax.transfer.base import Transport
from pdjax.transfer.device_put import DevicePut
from pdjax.transfer.jax_transfer import JaxTransfer

Progress = Callable[[int, int, str], None]  # done, total, what

MAX_CONTEXT = 8192  # tokens of a request unless more is asked for: 131072 tokens of KV are nobody's default
USUAL_TOKENS = 1024  # what the default pools hold per request
_POLL_S = 0.2  # how often a warm-up looks whether it is still wanted


@dataclasses.dataclass(frozen=True, slots=True)
class Warmup:
    """What a warm-up did.

    Attributes:
        programs: names of all programs that are ready, by instance, whether XLA compiled them now, or this process or
            the compilation cache had them.
        seconds: of all, measuring the passes included.
        compile_s: seconds in XLA, added over the threads that compile.
        samples: what was measured, by instance.
    """

    programs: tuple[str, ...]
    seconds: float
    compile_s: float
    samples: tuple[tuple[Sample, ...], ...]


def scheduler_of(config: EngineConfig) -> Scheduler:
    """The policy that the configuration names, or brings, with the admission that it asks for.

    Raises:
        ValueError: an unknown name, or an object without the three methods.
    """
    return guarded(_policy_of(config), admission=config.admission, drop_late=config.drop_late)


def _policy_of(config: EngineConfig) -> Scheduler:
    named, names = config.scheduler, ", ".join(SCHEDULERS)
    if isinstance(named, str):
        if named not in SCHEDULERS:
            raise ValueError(f"scheduler is {named!r}; allowed: {names}, or a Scheduler")
        return SCHEDULERS[named](config.stream_from)
    if isinstance(named, type):
        raise ValueError(f"scheduler is the class {named.__name__}; allowed: an object of it, {names}")
    for method in ("place", "hand_off", "iterate"):
        if not callable(getattr(named, method, None)):
            raise ValueError(f"scheduler is {named!r}, without {method}(); allowed: {names}, or a Scheduler")
    return named


def check_meshes(config: EngineConfig, model: ModelConfig, traits: Traits) -> None:
    """ValueError if the model cannot be cut for the meshes. Needs no device: JAX takes long to make a thousand."""
    for side in ("decode",) if traits.colocated else ("prefill", "decode"):
        try:
            split(model, getattr(config, f"{side}_tp"))
            shares(model.num_layers, getattr(config, f"{side}_pp"))
        except ValueError as error:
            raise ValueError(f"{side}_{error}") from None


def specs_of(
    config: EngineConfig, model: ModelConfig, traits: Traits, platform: str | None = None
) -> tuple[InstanceSpec, ...]:
    """The instances of an engine. With a colocated policy the devices of both pools, at decode_pp stages of decode_tp.
    `platform`: of their devices; None: the one at hand.

    Raises:
        ValueError: an impossible mesh, or pages too few for one request.
    """
    check_meshes(config, model, traits)
    max_len = _max_model_len(config, model)
    prefill_chunk = min(config.prefill_chunk or 256, max_len)
    decode_chunk = min(config.decode_chunk or max(prefill_chunk // 2, 1), max_len)
    prefill_rows = config.decode_max_batch if traits.prefill_decodes else 0
    mesh = config.prefill_pp, config.prefill_tp
    prefill = _Pool(Role.PREFILL, *mesh, config.prefill_num_pages, prefill_chunk, prefill_rows)
    chunk = decode_chunk if traits.decode_prefills else 0
    mesh = config.decode_pp, config.decode_tp
    decode = _Pool(Role.DECODE, *mesh, config.decode_num_pages, chunk, config.decode_max_batch)
    mixed = dataclasses.replace(decode, role=Role.MIXED, chunk=prefill_chunk)
    pools = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: mixed}
    roles = config.roles(traits.colocated)
    platform = platform or platform_here()
    dtype = kv_dtype_on(platform, dtype_of(config, platform))
    kv = kv_bytes_per_token(model, dtype)
    blocks = attention.backend_on(platform).blocks(model, config.page_size, dtype)
    specs = [_spec(index, pools[role], config, max_len, kv, blocks) for index, role in enumerate(roles)]
    return tuple(dataclasses.replace(spec, moves=traits.moves) for spec in specs)


def devices_for(count: int, given: Sequence[jax.Device] | None = None) -> Sequence[jax.Device]:
    """The first `count` of the given devices, or of all. On CPU, JAX is asked for as many, if it has not started yet.

    Raises:
        ValueError: there are fewer.
    """
    if given is not None:
        if len(given) < count:
            raise ValueError(f"devices has {len(given)}; allowed: at least {count}, which the instances need")
        return given[:count]
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # XLA's CPU client has as many worker threads as devices. When all of them compute, a copy between two waits
        # for a program to end (517 ms at the median, against 1 ms with threads to spare): half are never used.
        wanted = max(2 * count, jax.config.values["jax_num_cpu_devices"])
        with contextlib.suppress(RuntimeError):  # a backend runs already: what it has must do
            jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"the instances need {count} devices; there are {len(devices)} of platform {devices[0].platform}. On CPU, "
            f'call jax.config.update("jax_num_cpu_devices", {count}) before the first use of JAX'
        )
    return devices[:count]


def platform_here() -> str:
    """Of the devices of this process."""
    platform: str = jax.devices()[0].platform
    return platform


def hardware_here() -> str:
    """What the devices of this process are: their kind, or on CPU the processor's name."""
    device = jax.devices()[0]
    return provenance.cpu() if device.platform == "cpu" else str(device.device_kind)


def dtype_of(config: EngineConfig, platform: str | None = None) -> str:
    """The dtype of the weights on a platform; None: the one at hand."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if (platform or platform_here()) == "cpu" else "bfloat16"


def build(
    config: EngineConfig, source: Source, specs: Sequence[InstanceSpec], devices: Sequence[jax.Device]
) -> list[Instance]:
    """Loads the weights onto every instance's mesh, instances side by side on `devices`. Nothing is compiled: see
    `warm`."""
    instances = []
    loaded: dict[tuple[int, int], list[Weights]] = {}
    for spec in specs:
        mine, devices = devices[: spec.devices], devices[spec.devices :]
        meshes = make_meshes(source.config, mine, spec.pp)
        # Files are read once per (pp, tp); other replicas copy from device to device.
        known = loaded.get((spec.pp, spec.devices))
        if known is None:
            weights = load(source, meshes, dtype_of(config))
        else:
            weights = [copy_to(stage, mesh) for stage, mesh in zip(known, meshes, strict=True)]
        loaded[spec.pp, spec.devices] = weights
        instances.append(instance_of(spec, specs, source.config, weights, meshes, config.stream_layers))
    return instances


def load(source: Source, meshes: Sequence[Mesh], dtype: str) -> list[Weights]:
    """What each stage of an instance holds, read from the model's files."""
    held = shares(source.config.num_layers, len(meshes))
    return [source.load(mesh, dtype, share=share) for mesh, share in zip(meshes, held, strict=True)]


def exchange_of(
    spec: InstanceSpec, specs: Sequence[InstanceSpec], model: ModelConfig, stream_layers: int
) -> dict[str, Any]:
    """What one of the instances `specs` is told of the others, as keyword arguments of `Instance`: which units they
    exchange follows from all of them."""
    sizes = {size for other in specs for size in wire_buckets(other.max_chunk, stream_layers > 0)}
    cuts = {share.layers[0] for other in specs for share in shares(model.num_layers, other.pp)}
    return {
        "stream_layers": stream_layers,
        "cuts": sorted(cuts),
        "peer_buckets": sorted(sizes),
        "exchanges": spec.moves or any(other.role is not Role.MIXED for other in specs),
    }


def instance_of(
    spec: InstanceSpec,
    specs: Sequence[InstanceSpec],
    model: ModelConfig,
    weights: Sequence[Weights],
    meshes: Sequence[Mesh],
    stream_layers: int,
) -> Instance:
    """One of the instances `specs`."""
    return Instance(spec, model, weights, meshes, **exchange_of(spec, specs, model, stream_layers))


def warm(
    cluster: LocalCluster, probes: Sequence[Probe] | None, progress: Progress | None, check: Callable[[], None]
) -> Warmup:
    """Compiles every program and measures passes; one instance after the other, each in its own thread.

    Args:
        cluster: its instances do nothing else meanwhile.
        probes: passes to measure; None: a few of each size.
        progress: told (done, total, what) from those threads.
        check: called now and then; what it raises ends the warm-up.
    """

    def tell(done: int, total: int, what: str) -> None:
        check()
        if progress is not None:
            progress(done, total, what)

    def work(instance: Instance) -> tuple[list[Sample], list[str]]:
        label = f"{instance.spec.role.value} instance {instance.spec.index}"
        measured = instance.warmup(lambda done, total, what: tell(done, total, f"{label}: {what}"), probes)
        return measured, [f"{label}: {program.name}" for program in instance.programs()]

    started, (_, compiled_s) = time.perf_counter(), compiles.compiled()
    samples, programs = [], []
    for spec in cluster.specs:
        future = cluster.on_lane(spec.index, work)
        while not concurrent.futures.wait([future], _POLL_S).done:
            check()
        measured, names = future.result()
        samples.append(tuple(measured))
        programs += names
    seconds, (_, after_s) = time.perf_counter() - started, compiles.compiled()
    return Warmup(tuple(programs), seconds, after_s - compiled_s, tuple(samples))


def transport_of(config: EngineConfig, instances: Sequence[Instance]) -> Transport:
    """What moves KV between these instances.

    Raises:
        ValueError: this jax cannot do what the configuration asks for.
    """
    kind = {"device_put": DevicePut, "jax_transfer": JaxTransfer}[config.transfer]
    return kind([instance.kv_shardings for instance in instances], config.transfer_timeout_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Pool:
    role: Role
    pp: int
    tp: int
    num_pages: int
    chunk: int
    rows: int

    @property
    def devices(self) -> int:
        return self.pp * self.tp


def _spec(
    index: int, pool: _Pool, config: EngineConfig, max_len: int, kv_bytes_per_token: int, blocks: tuple[int, int]
) -> InstanceSpec:
    row_block, query_block = blocks  # of attention on these devices
    side = "prefill" if pool.role is Role.PREFILL else "decode"
    one = -(-max_len // config.page_size)
    usual = -(-min(max_len, USUAL_TOKENS) // config.page_size)
    pages = pool.num_pages or 1 + max(one, usual * (pool.rows or 2 * config.prefill_max_batch))
    if pages - 1 < one:
        raise ValueError(
            f"{side}_num_pages is {pages}; allowed: at least {one + 1} for one request of max_model_len = {max_len} "
            f"tokens at page_size = {config.page_size} (page 0 is never given out)"
        )
    return InstanceSpec(
        index=index,
        role=pool.role,
        devices=pool.devices,
        pp=pool.pp,
        max_in_flight=pool.pp + 1,
        max_rows=pool.rows,
        max_chunk=pool.chunk,
        max_chunks=config.prefill_max_batch,
        page_size=config.page_size,
        num_pages=pages,
        max_model_len=max_len,
        kv_bytes_per_token=kv_bytes_per_token,
        chunk_buckets=chunk_buckets(pool.chunk),
        row_buckets=row_buckets(pool.rows),
        # Where the largest batch does not divide, all of its rows attend together; smaller ones are one block anyway,
        # or of a size between, which is then predicted as one.
        row_block=row_block if pool.rows and pool.rows % row_block == 0 else 0,
        query_block=query_block if pool.chunk else 0,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; allowed: at most {model.max_position}, the model's context"
        )
    if config.max_model_len:
        return config.max_model_len
    given = [pages for pages in (config.prefill_num_pages, config.decode_num_pages) if pages]
    return min([model.max_position, MAX_CONTEXT, *((pages - 1) * config.page_size for pages in given)])
