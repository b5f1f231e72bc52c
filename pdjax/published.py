"""What has been published of how fast an engine runs a model on a device: names enter (`get`), a `Published` leaves,
whose `pool` makes instances of a simulated cluster. Called by the planner, by launchers, and by users who simulate.

Constants are those of the sources; none is fitted here to a result that is to come out.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pdjax.curves import Curves, Decode, Interpolated
from pdjax.fleet import Pool
from pdjax.latency import Latency
from pdjax.messages import Role

# Bytes of K and V of one token, 16-bit, all layers: 2 * layers * (kv heads * head size) * 2 bytes.
KV_BYTES = {
    "opt-13b": 2 * 40 * 5120 * 2,
    "opt-66b": 2 * 64 * 9216 * 2,
    "opt-175b": 2 * 96 * 12288 * 2,
    "llama2-70b": 2 * 80 * (8 * 128) * 2,
    "bloom-176b": 2 * 70 * 14336 * 2,
    "llama3.1-8b": 2 * 32 * (8 * 128) * 2,
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


# --- Llama-3.1-8B, FP8, on H200 -------------------------------------------------------------------------------------

# NVIDIA Dynamo's pre-swept profile (ai-dynamo/dynamo, vLLM, TP 1): the least-squares fit to its 17 prompts, alone (mean
# error 2.6 %, at most 9 %), and to its steps of at most 256 rows (2.7 %, at most 16 %); KV is kept in 16 bits.
_H200 = Published(
    name="llama3.1-8b-fp8-h200-vllm-tp1-pp1",
    latency=Curves(prefill=(18.55e-3, 0.01411e-3, 4.92e-10), decode=(Decode(0, 4.384e-3, 3.198e-8, 0.01988e-3),)),
    kv_tokens=945_029,
    kv_bytes_per_token=KV_BYTES["llama3.1-8b"],
    devices=1,
    pp=1,
    hardware="h200",
    model="llama3.1-8b-fp8",
    engine="vllm",
)


# --- Llama2-70B and BLOOM-176B on eight A100 or H100 ----------------------------------------------------------------

# Splitwise's simulator (Mutinifni/splitwise-sim, commit 8f99e7d), data/perf_model.csv: medians of its measured passes,
# TP 8, milliseconds: (model, hardware) -> of prompts, by their tokens; of decode steps behind prompts of 512 tokens, by
# rows.
_Points = tuple[tuple[int, float], ...]
_TOKENS = tuple(128 << power for power in range(9))
_ROWS = tuple(1 << power for power in range(7))
_SPLITWISE: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("llama2-70b", "a100-80g"): (
        (65.35, 66.76, 93.02, 160.86, 282.71, 708.36, 1781.0, 3524.5, 7554.0),
        (44.85, 44.56, 45.79, 46.47, 50.44, 53.02, 71.61),
    ),
    ("llama2-70b", "h100"): (
        (58.19, 51.66, 53.86, 77.68, 134.42, 376.22, 831.49, 1551.7, 2936.3),
        (29.76, 30.26, 31.79, 32.5, 34.17, 38.62, 50.16),
    ),
    ("bloom-176b", "a100-80g"): (
        (79.67, 99.16, 174.38, 287.47, 536.06, 1332.6, 3591.5, 5782.0, 11251.8),
        (48.76, 49.99, 51.0, 52.95, 57.34, 65.38, 96.58),
    ),
    ("bloom-176b", "h100"): (
        (48.28, 51.18, 76.14, 132.22, 251.96, 649.6, 1411.6, 2521.9, 4996.5),
        (36.11, 36.91, 38.06, 38.14, 40.64, 45.84, 63.82),
    ),
}
# What that simulator itself takes for a decode step: the median of all passes, by the tokens that their *prompts* had,
# looked up at the number of rows. So its steps of 64 rows take what those of one row do.
_AS_SIMULATED: dict[tuple[str, str], tuple[float, ...]] = {
    ("llama2-70b", "a100-80g"): (43.03, 43.48, 45.03, 44.56, 45.7, 46.47, 48.47, 53.02, 71.61),
    ("llama2-70b", "h100"): (29.87, 28.27, 30.56, 29.97, 31.63, 31.33, 32.59, 38.62, 50.16),
    ("bloom-176b", "a100-80g"): (47.61, 47.71, 49.31, 49.44, 50.19, 51.63, 54.27, 65.38, 96.58),
    ("bloom-176b", "h100"): (35.74, 36.15, 36.17, 36.33, 36.74, 37.53, 39.02, 45.84, 63.82),
}
_CAPPED = 1.3  # passes of prompts on an H100 with half the power; steps take what they take without the cap
# The same: memory of a machine, all of which it uses, and its models' weights, bytes.
_MACHINE = 8 * 80 * 2**30
_WEIGHTS = {"llama2-70b": 135e9, "bloom-176b": 329e9}


def _splitwise() -> Iterator[Published]:
    for (model, hardware), (prompts, steps) in _SPLITWISE.items():
        for engine, decode in (
            ("splitwise", _points(_ROWS, steps)),
            ("splitwise-sim", _points(_TOKENS, _AS_SIMULATED[model, hardware])),
        ):
            for suffix, factor in (("", 1.0), ("-capped", _CAPPED))[: 2 if hardware == "h100" else 1]:
                yield Published(
                    name=f"{model}-{hardware}{suffix}-{engine}-tp8-pp1",
                    latency=Interpolated(_points(_TOKENS, prompts, factor), decode),
                    kv_tokens=int((_MACHINE - _WEIGHTS[model]) / KV_BYTES[model]),
                    kv_bytes_per_token=KV_BYTES[model],
                    devices=8,
                    pp=1,
                    hardware=hardware + suffix,
                    model=model,
                    engine=engine,
                )


def _points(at: tuple[int, ...], milliseconds: tuple[float, ...], factor: float = 1.0) -> _Points:
    return tuple((number, factor * ms * 1e-3) for number, ms in zip(at, milliseconds, strict=True))


_ALL = {entry.name: entry for entry in (*_opt(), _H200, *_splitwise())}
