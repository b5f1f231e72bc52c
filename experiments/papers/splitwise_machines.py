"""The machines of Splitwise's clusters, eight devices each. A hardware, a model and a table of step times enter; what
is known of such a machine leaves, as a `pdjax.published.Published`. Called by the other `splitwise` modules.
"""

import dataclasses

from pdjax import fleet, hardware, published, roofline
from pdjax.curves import Interpolated
from pdjax.latency import Load
from pdjax.messages import InstanceSpec, Role
from pdjax.models.config import ModelConfig
from pdjax.published import Published

SIMULATED, MEASURED = "splitwise-sim", "splitwise"
"""Engines of `pdjax.published`: decode steps as the authors' simulator has them, and as measured by batch size."""

A100, H100, CAPPED, L40 = "a100-80g", "h100", "h100-capped", "l40"
POWER = {A100: 24.8, H100: 44.0, CAPPED: 30.8}  # of a machine, in units of the authors' simulator; capped: to 70 %
DEVICES = 8
MAX_CHUNK = 16384  # tokens of a pass: prompts are computed as a whole
CONTEXT = 1300  # tokens of a row at which steps on other hardware are compared: those of a conversation
LLAMA2_70B = ModelConfig(32000, 8192, 28672, 80, 64, 8, 128)  # arXiv 2307.09288; its published config.json


@dataclasses.dataclass(frozen=True, slots=True)
class Design:
    """Machines for prompts and machines for tokens, by hardware; without the latter, all do both (the paper's
    baselines)."""

    name: str
    prompt: str
    prompts: int
    token: str = A100
    tokens: int = 0

    @property
    def dollars(self) -> float:
        """Per hour, by the prices of `pdjax.hardware`."""
        return dollars(self.prompt) * self.prompts + dollars(self.token) * self.tokens

    @property
    def power(self) -> float:
        """In the units of `POWER`."""
        return POWER[self.prompt] * self.prompts + (POWER[self.token] * self.tokens if self.tokens else 0.0)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.prompts}, {self.tokens})" if self.tokens else f"{self.name} ({self.prompts})"


def dollars(kind: str) -> float:
    """Of a machine, per hour."""
    return DEVICES * hardware.get(kind).price_per_hour


def machine(kind: str, model: str, engine: str) -> Published:
    """What a machine does with a model.

    Raises:
        ValueError: nobody knows.
    """
    if kind == L40 and model == "llama2-70b":
        return _l40(engine)
    return published.get(f"{model}-{kind}-{engine}-tp8-pp1")


def spec(there: Published) -> InstanceSpec:
    """One machine by itself; it computes prompts as a whole."""
    return fleet.build([there.pool(Role.MIXED, max_chunk=MAX_CHUNK)]).specs[0]


def _l40(engine: str) -> Published:
    """Nobody has measured Llama2-70B on L40 with this engine. Passes take what they take on A100, times what the
    rooflines of the two differ by; the memory is that of the roofline."""
    known = machine(A100, "llama2-70b", engine)
    pools = [
        roofline.pool(Role.MIXED, 1, LLAMA2_70B, hardware.get(kind), tp=DEVICES, efficiency=roofline.EAGER)
        for kind in (L40, A100)
    ]
    specs = fleet.build(pools).specs
    assert isinstance(known.latency, Interpolated)

    def slower(load: Load) -> float:
        there, here = (pool.latency.iteration_s(spec, load) for pool, spec in zip(pools, specs, strict=True))
        return there / here

    latency = Interpolated(
        tuple((tokens, seconds * slower(Load(((tokens, 0),)))) for tokens, seconds in known.latency.prefill),
        tuple(
            (rows, seconds * slower(Load((), rows, rows * CONTEXT, rows * CONTEXT)))
            for rows, seconds in known.latency.decode
        ),
    )
    return dataclasses.replace(
        known, name=f"llama2-70b-{L40}-{engine}-tp8-pp1", latency=latency, kv_tokens=pools[0].kv_tokens, hardware=L40
    )
