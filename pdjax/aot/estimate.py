"""What passes ought to take on devices that are not there. Enters: an instance, the programs of its passes for such
devices (`pdjax.aot.programs`), and what times a program, its compiler. Leaves: seconds of any pass, and of them a
`pdjax.profile.Kind` like that of an instance that was measured. Called by `pdjax.experiments.aot_profile`.

    pass = embedding + layers without attention + head      by the compiler, where it tells times (TPU)
         + attention, and what devices send each other      by operations and bytes, as `pdjax.roofline` counts them

Attention stands apart because no compiler can tell its time: its loops go round as often as contexts are long, and a
kernel of our own is a call that a compiler does not look into. So one layer is compiled with attention left out, and
counts once for each layer of the model. Where the compiler tells no times (CUDA), all is the roofline's, at the sizes
that programs are padded to. The host takes no time but what the roofline has for launches.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pdjax import probes, profile, roofline
from pdjax.catalogue import Program
from pdjax.config import TRANSFERS
from pdjax.hardware import Hardware
from pdjax.latency import Load, Probe, Sample, features
from pdjax.messages import InstanceSpec
from pdjax.models.buckets import Buckets
from pdjax.models.config import ModelConfig
from pdjax.models.kv import LayerKV
from pdjax.models.llama import layer_graph, merge
from pdjax.models.params import layer_params
from pdjax.models.rope import angles
from pdjax.models.sharding import KV, shares
from pdjax.roofline import USUAL, Roofline

Time = Callable[[Program], float | None]
"""Seconds of a program; None: the compiler does not tell."""
Progress = Callable[[int, int, str], None]  # done, total, what

_NAME = re.compile(r"(embed|unpack|group|head)(?: of \d+)? (\d+)(?:\+(\d+))?")
_ACTIVATION = 2  # our sums between devices are of float32, those of the roofline of 16 bits


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """What passes of an instance take, seconds.

    Attributes:
        spec: the instance.
        bounds: of the model on its devices, by their datasheet.
        compiled: (padded tokens, padded rows) -> all but attention and what devices send each other, by the compiler;
            empty: it does not tell.
    """

    spec: InstanceSpec
    bounds: Roofline
    compiled: Mapping[tuple[int, int], float]

    def seconds(self, load: Load) -> float:
        """Of a pass."""
        return self.dense_s(load) + self.attention_s(load)

    def dense_s(self, load: Load) -> float:
        """Of all but attention."""
        tokens, _, rows, _, _ = features(self.spec, load)
        bounds = self.bounds
        sent = bounds.pass_s + _ACTIVATION * bounds.moved_s * (tokens + rows)
        if self.compiled:
            return self.compiled[int(tokens), int(rows)] + sent
        sampled = _sampled(self.spec, int(tokens), int(rows))
        return max(bounds.token_s * (tokens + rows) + bounds.sampled_s * sampled, bounds.weights_s) + sent

    def attention_s(self, load: Load) -> float:
        """Of attention. A block of queries reads its pages once, and so does a row."""
        tokens, pairs, _, _, attended = features(self.spec, load)
        bounds = self.bounds
        read = pairs / min(self.spec.query_block or tokens, tokens) if tokens else 0.0
        return max(bounds.pair_s * pairs, bounds.context_s * read) + bounds.context_s * attended

    @property
    def how(self) -> str:
        """Where these times come from, in words."""
        reached = f"{USUAL.compute:.0%} of the peak and {USUAL.memory:.0%} of the memory's bandwidth"
        if not self.compiled:
            return f"passes by operations and bytes of the padded programs at {reached}"
        return (
            "embedding, layers and head by the compiler's own estimate, attention by operations and bytes at "
            f"{reached}, no time of the host"
        )


def passes(
    spec: InstanceSpec,
    config: ModelConfig,
    hardware: Hardware,
    programs: Iterable[Program],
    time: Time,
    *,
    dtype: Any,
    kv_dtype: Any,
    progress: Progress | None = None,
) -> Passes:
    """Times the programs of an instance.

    Args:
        programs: all that it has, or those of its passes; the others are not looked at.
        time: called once for each program that is needed, and not again when it knows no time.
        dtype, kv_dtype: of weights, of KV.

    Raises:
        ValueError: what `time` raises.
    """
    compiled = _compiled(spec, config, programs, time, progress or (lambda done, total, what: None))
    bounds = roofline.latency(
        config,
        hardware,
        spec.devices // spec.pp,
        spec.pp,
        dtype_bytes=jnp.dtype(dtype).itemsize,
        kv_dtype_bytes=jnp.dtype(kv_dtype).itemsize,
        # A compiled group of layers is launched once, while the one before it computes.
        efficiency=dataclasses.replace(USUAL, layer_s=0.0) if compiled else USUAL,
    )
    return Passes(spec, bounds, compiled)


def kind_of(passes: Passes) -> profile.Kind:
    """The latency model that fits the estimates, by the probes and the fit that measured instances have."""

    def samples(tried: Sequence[Probe]) -> list[Sample]:
        return [Sample(probe, passes.seconds(probe.load(passes.spec))) for probe in tried]

    held_out = probes.held_out(passes.spec)
    return profile.kind_of(
        passes.spec, samples(probes.measured(passes.spec)), [(name, samples(tried)) for name, tried in held_out.items()]
    )


def transfers(bounds: Roofline, hardware: Hardware, first: str) -> tuple[profile.Transfers, ...]:
    """Of every transport, the one of that name first: from device to device over the links of a machine or slice, by
    the others through the network. Streaming is taken to pay always."""
    through = {"device_put": hardware.link_bytes_per_s / hardware.nic_bytes_per_s}
    return tuple(
        profile.Transfers(transport, bounds.alpha_s, bounds.bytes_per_s * through.get(transport, 1.0), 1, ())
        for transport in sorted(TRANSFERS, key=lambda transport: transport != first)
    )


def without_attention(config: ModelConfig, group: Program) -> Program:
    """One layer of a group, its queries in place of what they would attend to; nothing is written to pages.

    Args:
        group: (columns, caches, x, step), as `pdjax.models.programs.PassPrograms.group`.
    """
    columns, caches, x, step = group.args
    fn = _layer_program(config, x.sharding.mesh, jax.tree.leaves(caches)[0].dtype)
    args = tuple(column[0] for column in columns), x, step.positions
    return dataclasses.replace(group, name=re.sub(r"group of \d+", "layer", group.name), fn=fn, args=args)


# --- inside ---------------------------------------------------------------------------------------------------------


def _compiled(
    spec: InstanceSpec, config: ModelConfig, programs: Iterable[Program], time: Time, progress: Progress
) -> dict[tuple[int, int], float]:
    """Seconds by padded size, without attention; empty where a program has no time."""
    held = shares(config.num_layers, spec.pp)
    jobs: dict[tuple[str, int, int, int], tuple[Program, int]] = {}  # part, stage, sizes -> program, how many
    for program in programs:
        if (match := _NAME.match(program.name)) is None:
            continue  # it moves KV
        part, T, B = match.groups(default="0")
        key = part, program.stage, int(T), int(B)
        if key in jobs:
            continue  # groups of another size: the layers are the same
        if part == "group":
            jobs[key] = without_attention(config, program), len(held[program.stage].layers)
        else:
            jobs[key] = program, 1
    times: dict[tuple[str, int, int, int], float] = {}
    for done, (key, (program, count)) in enumerate(jobs.items()):
        progress(done, len(jobs), program.name)
        seconds = time(program)
        if seconds is None:
            return {}
        times[key] = count * seconds
    made = {}
    for tokens, rows in Buckets(spec.chunk_buckets, spec.row_buckets).pairs:
        total = times["head", spec.pp - 1, _sampled(spec, tokens, rows), 0]
        for stage, share in enumerate(held):
            first = "embed" if share.first else "unpack"
            total += times[first, stage, tokens, rows] + times["group", stage, tokens, rows]
        made[tokens, rows] = total
    return made


def _sampled(spec: InstanceSpec, tokens: int, rows: int) -> int:
    """Rows of the head (`pdjax.models.plan.PassShape.sampled`)."""
    return rows + (spec.max_chunks if tokens else 0)


@functools.cache
def _layer_program(config: ModelConfig, mesh: Mesh, kv_dtype: Any) -> Any:
    """(leaves of a layer, x [R, D], positions [R]) -> (x, fresh (k, v), each [R, K, H])."""
    graph, table = layer_graph(config, mesh.size), layer_params(config, mesh.size, 0)
    nothing: Any = jax.ShapeDtypeStruct((), kv_dtype)
    pages = LayerKV(nothing, nothing)  # a layer asks them for their dtype, the rest is up to attention

    def layer(leaves: tuple[jax.Array, ...], x: jax.Array, positions: jax.Array) -> Any:
        cos, sin = angles(config, positions)
        x, _, fresh = merge(graph, leaves)(x, cos, sin, lambda q, k, v, cache: (q, cache), pages)
        return x, fresh

    everywhere, heads = PartitionSpec(), PartitionSpec(None, KV)
    specs = tuple(table[name].spec for name in graph[2])
    inner: Callable[..., Any] = layer
    if mesh.size > 1:
        inner = jax.shard_map(
            layer, mesh=mesh, in_specs=(specs, everywhere, everywhere), out_specs=(everywhere, (heads, heads)),
            check_vma=False,
        )  # fmt: skip
    return jax.jit(inner)
