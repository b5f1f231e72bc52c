"""What has been published of how fast an engine runs a model on a device: names enter (`get`), a `Published` leaves,
whose `pool` makes instances of a simulated cluster. Called by the planner, by launchers, and by users who simulate.

Constants are those of the sources; none is fitted here to a result that is to come out.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pdjax.curves import Curves, Decode
from pdjax.fleet import Pool
from pdjax.latency import Latency
from pdjax.messages import Role

# Bytes of K and V of one token, 16-bit, all layers: 2 * layers * (kv heads * head size) * 2 bytes.
KV_BYTES = {
    "opt-13b": 2 * 40 * 5120 * 2,
    "opt-66b": 2 * 64 * 9216 * 2,
    "opt-175b": 2 * 96 * 12288 * 2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """One model on one instance, as published.

    Attributes:
        name: model, hardware, engine, tensor and pipeline parallelism, joined by dashes.
        latency: what passes take; transfers take no time unless the fleet has a network.
        kv_tokens: tokens whose KV the instance holds.
        kv_bytes_per_token: all layers, K and V.
        devices: of the instance, `pp` stages of equal size.
        hardware: a name of `pdjax.hardware`.
        engine: which was measured.
    """

    name: str
    latency: Latency
    kv_tokens: int
    kv_bytes_per_token: int
    devices: int
    pp: int
    hardware: str
    model: str
    engine: str

    def pool(self, role: Role, count: int = 1, **options: Any) -> Pool:
        """Instances of it; `options` are other fields of `Pool`."""
        return Pool(
            role,
            count,
            self.latency,
            kv_tokens=self.kv_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            devices=self.devices,
            pp=self.pp,
            **options,
        )


def names() -> tuple[str, ...]:
    """All that `get` knows."""
    return tuple(_ALL)


def get(name: str) -> Published:
    """By name, such as "opt-13b-a100-80g-distserve-tp2-pp1". ValueError with the names there are."""
    if name not in _ALL:
        raise ValueError(f"published latency is {name!r}; allowed: {', '.join(_ALL)}")
    return _ALL[name]


# --- OPT on A100-80G ------------------------------------------------------------------------------------------------

# DistServe's repository (LLMServe/DistServe, commit 82831f1), simdistserve/estimators/profile_data/
# profiler-a100-80g.{distserve,vllm}.json, milliseconds: (model, engine, TP) -> prefill a + b * sum(L) + c * sum(L^2);
# decode a + b * sum(context) + c * rows, for fewer than _LARGE rows and from there on. vLLM is that of 2023. Its
# OPT-66B TP 2 has c = -7.1e-6 there: a pass that gets faster with length is taken for noise, and c for 0.
_Three = tuple[float, float, float]
_OPT: dict[tuple[str, str, int], tuple[_Three, _Three, _Three]] = {
    ("opt-13b", "distserve", 1): (
        (18.10255, 0.1019123, 7.122264e-06),
        (19.9347, 0.0006269357, 0.03850698),
        (7.166189, 0.0005798, 0.158311),
    ),
    ("opt-13b", "distserve", 2): (
        (14.74297, 0.06857721, 2.449573e-06),
        (13.2948, 0.0003410922, 0.06296393),
        (10.63874, 0.0003118337, 0.08562914),
    ),
    ("opt-13b", "distserve", 4): (
        (12.0623, 0.0380814, 5.22625e-07),
        (10.25623, 0.000187867, 0.03269274),
        (10.48351, 0.0001712089, 0.04566649),
    ),
    ("opt-66b", "distserve", 2): (
        (43.05881, 0.2742293, 2.247804e-05),
        (48.28802, 0.0009424344, 0.1275502),
        (28.72769, 0.0004744848, 0.2961779),
    ),
    ("opt-66b", "distserve", 3): (
        (32.99823, 0.1956826, 1.220525e-05),
        (35.80154, 0.0005845005, 0.09526698),
        (22.65386, 0.0005358489, 0.2085144),
    ),
    ("opt-66b", "distserve", 4): (
        (29.44164, 0.1513522, 8.317451e-06),
        (30.76028, 0.0004519476, 0.0632842),
        (27.47082, 0.0004046846, 0.1248067),
    ),
    ("opt-66b", "distserve", 8): (
        (25.49066, 0.1065918, 3.39105e-06),
        (23.15511, 0.0002269149, 0.04800638),
        (21.71773, 0.000375809, 0.08978614),
    ),
    ("opt-13b", "vllm", 1): (
        (22.0522, 0.1405092, 8.076585e-06),
        (23.47504, 0.0005929345, 0.06072686),
        (20.20636, 0.0004907727, 0.1200031),
    ),
    ("opt-13b", "vllm", 2): (
        (27.44081, 0.09054533, 8.452054e-06),
        (24.54058, 0.0002244015, 0.08715787),
        (17.94777, 0.0004570851, 0.1117908),
    ),
    ("opt-13b", "vllm", 4): (
        (30.53632, 0.05150645, 4.232473e-07),
        (25.90114, 7.753634e-05, 0.05528087),
        (23.88388, 0.0002840016, 0.06276524),
    ),
    ("opt-66b", "vllm", 2): (
        (58.3822, 0.3826408, 0.0),
        (57.07344, 0.003646114, 0.2249374),
        (26.98376, 0.006200132, 0.4482569),
    ),
    ("opt-66b", "vllm", 3): (
        (45.74453, 0.2778128, 3.646247e-05),
        (44.93959, 0.0008096153, 0.2128798),
        (43.69603, 0.0008402567, 0.2400647),
    ),
    ("opt-66b", "vllm", 4): (
        (42.96549, 0.2128658, 4.601017e-05),
        (39.58179, 0.0006945722, 0.1358087),
        (40.85972, 0.0004264871, 0.1950837),
    ),
    ("opt-66b", "vllm", 8): (
        (38.93119, 0.1573682, 4.531676e-06),
        (31.17604, 0.0002755654, 0.06797704),
        (29.08777, 0.000602772, 0.1389609),
    ),
}
_LARGE = 95  # rows, of all of them

# The same repository, max_num_tokens.csv: (model, TP) -> PP -> tokens whose KV fits.
_OPT_TOKENS: dict[tuple[str, int], dict[int, int]] = {
    ("opt-13b", 1): {1: 66144, 2: 163008, 4: 356752, 5: 453616, 8: 744224},
    ("opt-13b", 2): {1: 163008, 2: 356752, 4: 744224, 5: 937968, 8: 1519184},
    ("opt-13b", 4): {1: 356736, 2: 744224, 4: 1519168, 5: 1906656, 8: 3069088},
    ("opt-66b", 2): {1: 11600, 2: 78512, 4: 212320, 8: 479952},
    ("opt-66b", 3): {1: 45056, 2: 145408, 4: 346128, 8: 747568},
    ("opt-66b", 4): {1: 78496, 2: 212320, 4: 479936, 8: 1015200},
    ("opt-66b", 8): {1: 212304, 2: 479936, 4: 1015184, 8: 2085696},
}

# What the simulator of that repository adds, milliseconds: to every pass and for every token of its prompts' and rows'
# contexts, on the first stage; and on each of the PP stages of a pass of prompts, PP.
_PASS, _CONTEXT_TOKEN = 2.0, 1e-4


def _opt() -> Iterator[Published]:
    for (model, engine, tp), (prefill, small, large) in _OPT.items():
        for pp, tokens in _OPT_TOKENS[model, tp].items():
            yield Published(
                name=f"{model}-a100-80g-{engine}-tp{tp}-pp{pp}",
                latency=_opt_curves(prefill, small, large, pp),
                kv_tokens=tokens,
                kv_bytes_per_token=KV_BYTES[model],
                devices=tp * pp,
                pp=pp,
                hardware="a100-80g",
                model=model,
                engine=engine,
            )


def _opt_curves(prefill: _Three, small: _Three, large: _Three, pp: int) -> Curves:
    """All that the simulator of the source adds is kept, in the constants that it comes with."""
    constant, of_token, of_square = prefill
    decode = tuple(
        # The engine sees groups of rows, `Curves` counts those of all groups.
        Decode(rows * pp, step * 1e-3, (context + _CONTEXT_TOKEN) * 1e-3, row * 1e-3)
        for rows, (step, context, row) in ((0, small), (_LARGE, large))
    )
    return Curves(
        prefill=((constant + pp * pp) * 1e-3, (of_token + _CONTEXT_TOKEN) * 1e-3, of_square * 1e-3),
        decode=decode,
        pass_s=_PASS * 1e-3,
    )


_ALL = {entry.name: entry for entry in _opt()}
