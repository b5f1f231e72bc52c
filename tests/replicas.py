"""Instances for tests, and a controller of a few lines that drives them. Imported as `tests.replicas`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from pdjax.instance import Instance
from pdjax.messages import Chunk, InstanceSpec, Iteration, Join, Role
from pdjax.models import source, weights
from pdjax.models.config import ModelConfig
from pdjax.models.kv import kv_bytes_per_token
from pdjax.models.sharding import make_meshes, shares
from pdjax.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SMALL = ModelConfig(
    vocab_size=67, hidden_size=24, ffn_size=40, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, tied=True
)
SHARED = Path(__file__).parents[2] / "shared" / "weights"


def spec(model: ModelConfig, **changes) -> InstanceSpec:
    """A small instance; pages for four requests of the longest length."""
    fields = {
        "index": 0, "role": Role.MIXED, "devices": 1, "max_rows": 2, "max_chunk": 16, "max_chunks": 2,
        "page_size": 16, "max_model_len": 64, "kv_bytes_per_token": kv_bytes_per_token(model, np.float32),
    } | changes  # fmt: skip
    fields.setdefault("num_pages", 1 + 4 * -(-fields["max_model_len"] // fields["page_size"]))
    return InstanceSpec(**fields)


def small(*, stream_layers: int = 1, first_device: int = 0, model: ModelConfig = SMALL, **changes) -> Instance:
    """An instance of a small random model; one layer per group, which compiles fastest."""
    limits = spec(model, **changes)
    meshes, held = _stages(model, limits, first_device)
    loaded = [weights.random(model, mesh, "float32", share=share) for mesh, share in zip(meshes, held, strict=True)]
    return Instance(limits, model, loaded, meshes, stream_layers=stream_layers)


def stories(**changes) -> Instance:
    """An instance of stories260K."""
    found = source.resolve(str(SHARED / "stories260k-hf"))
    limits = spec(found.config, **({"max_model_len": 256} | changes))
    meshes, held = _stages(found.config, limits)
    loaded = [found.load(mesh, "float32", share=share) for mesh, share in zip(meshes, held, strict=True)]
    return Instance(limits, found.config, loaded, meshes, stream_layers=1)


def _stages(model: ModelConfig, limits: InstanceSpec, first_device: int = 0):
    devices = jax.devices()[first_device : first_device + limits.devices]
    return make_meshes(model, devices, limits.pp), shares(model.num_layers, limits.pp)


def references() -> dict[str, dict]:
    """The stored greedy runs of stories260K by name."""
    return {case["name"]: case for case in json.loads((SHARED / "ref" / "stories.json").read_text())["cases"]}


def table(instance: Instance, row: int) -> tuple[int, ...]:
    """The block table of request number `row` of four, scattered over the pool."""
    width = instance.spec.pages_for(instance.spec.max_model_len)
    return tuple(1 + row + 4 * i for i in range(width))


@dataclasses.dataclass
class Driver:
    """Runs prompts on one instance, request number = slot = row of `table`."""

    instance: Instance
    chunk: int = 0  # tokens per pass; 0: as many as the instance takes
    sampling: SamplingParams = GREEDY
    number: int = 0
    units: list = dataclasses.field(default_factory=list)

    def run(self, **fields):
        """One iteration, its tokens."""
        self.number += 1
        return self.instance.run(Iteration(0, self.number, **fields), self.units.append).wait()

    def part(self, request: int, prompt: Sequence[int], start: int, take: int, stream: int | None = None) -> Chunk:
        """A chunk of a prompt."""
        end = min(start + take, len(prompt))
        return Chunk(
            request, tuple(prompt[start:end]), start, table(self.instance, request), request, end == len(prompt),
            self.sampling, stream,
        )  # fmt: skip

    def prefill(self, request: int, prompt: Sequence[int], stream: int | None = None) -> int:
        """All chunks of a prompt, alone; the first token."""
        take = self.chunk or self.instance.spec.max_chunk
        for start in range(0, len(prompt), take):
            firsts = self.run(chunks=(self.part(request, prompt, start, take, stream),)).firsts
        return dict(firsts)[request]

    def join(self, request: int, position: int, token: int | None = None) -> Join:
        """The row of a request whose KV holds `position` tokens."""
        return Join(request, request, position, table(self.instance, request), token, self.sampling)

    def generate(self, prompt: Sequence[int], tokens: int, request: int = 0) -> list[int]:
        """Prefill and decode of one prompt, alone."""
        out = [self.prefill(request, prompt)]
        joins = (self.join(request, len(prompt)),)
        while len(out) < tokens:
            rows = self.run(joins=joins, decode=True).rows
            joins = ()
            out.append(dict(rows)[request])
        self.run(leaves=(request,) if tokens > 1 else ())
        return out


def prompt(seed: int, length: int, vocab: int = SMALL.vocab_size) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()
