"""The order of DistServe's ablation (figure 11): vLLM, the same with searched parallelism (vLLM++), disaggregation with
both phases inside a node (Low), and with phases placed freely (High). Called by `pdjax.experiments.papers.distserve`.

OPT-66B, ShareGPT, limits (0.4 s, 0.1 s) as in the authors' scripts; each engine with its own pass times, and vLLM with
DistServe's as well, which shows what placement alone is worth. Instances are split by TP in {2, 4, 8} and PP, within a
node of 8 GPUs; there are no constants for TP 1. Low tries every pair that fits into a node (algorithm 2). High takes
for each phase the split with the best goodput per GPU, judged by its own limit, and as many of each as 32 GPUs hold at
matched rates (algorithm 1); what Low finds is open to it as well.
"""

import dataclasses
import itertools
from typing import Any

from pdjax.experiments.papers import distserve_bench as bench
from pdjax.experiments.papers.distserve_curves import ABLATION_SLO, late_alone
from pdjax.experiments.papers.outcome import Row, Setup
from pdjax.fleet import Fleet
from pdjax.goodput import Trial, mean, search
from pdjax.request import SLO

MODEL = "opt-66b"
NODE, GPUS = 8, 32
SPLITS = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))  # (TP, PP) of an instance within a node
RUN_S, LEAST = 100.0, 200  # arrivals of a run: several times as long as an answer takes; and at least so many
SAME = 0.05  # of two goodputs that count as one: the bracket of a search
HOPELESS = 0.05  # req/s per GPU: a search that finds not even this ends

Split = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The best placement of a kind: goodput per GPU and what it is, in words."""

    goodput: float
    words: str


class Ablation:
    """Searches; `lengths` are those of all runs."""

    def __init__(self, setup: Setup, lengths: bench.Lengths) -> None:
        self._lengths = lengths
        self._seed = setup.seed
        self._run_s = RUN_S / (2 if setup.quick else 1)

    def per_gpu(self, fleet: Fleet, system: str, slo: SLO, devices: int, *, answers: bool = True) -> float:
        """Goodput of a fleet per GPU; 0 where hardly any rate will do. `answers`: False for prompts alone."""
        lengths = self._lengths if answers else [(prompt, 1) for prompt, _ in self._lengths]

        def run(rate: float) -> Trial:
            count = max(round(rate * devices * self._run_s), LEAST)
            return bench.play(fleet, bench.policy(system), lengths, rate * devices, count, self._seed).trial(
                slo, devices
            )

        first = run(HOPELESS)
        if first.attainment < 0.9:
            return 0.0
        return mean([search(run, 0.5, known=[first], max_runs=9)])

    def vllm(self, split: Split, engine: str = "vllm") -> Found:
        """One instance of both phases, with the pass times of an engine."""
        fleet = bench.colocated(MODEL, split, engine)
        return Found(self.per_gpu(fleet, "vllm", ABLATION_SLO, fleet.devices), _words(split))

    def pair(self, prefill: Split, decode: Split) -> Found:
        """One instance of each phase."""
        fleet = bench.disaggregated(MODEL, prefill, decode)
        goodput = self.per_gpu(fleet, "distserve", ABLATION_SLO, fleet.devices)
        return Found(goodput, f"P{_words(prefill)} + D{_words(decode)}")

    def high(self) -> Found:
        """Each phase by itself, then as many of each as go together."""
        prefills, decodes = ({split: judge(split) for split in SPLITS} for judge in (self._prefill, self._decode))
        prefill, decode = max(SPLITS, key=prefills.__getitem__), max(SPLITS, key=decodes.__getitem__)
        p_gpus, d_gpus = _devices(prefill), _devices(decode)
        together = [(p, d) for p, d in itertools.product(range(1, GPUS), repeat=2) if p * p_gpus + d * d_gpus <= GPUS]

        def matched(counts: tuple[int, int]) -> float:
            p, d = counts[0] * p_gpus, counts[1] * d_gpus
            return min(p * prefills[prefill], d * decodes[decode]) / (p + d)

        counts = max(together, key=matched)
        fleet = bench.disaggregated(MODEL, prefill, decode, counts=counts)
        goodput = self.per_gpu(fleet, "distserve", ABLATION_SLO, fleet.devices)
        return Found(goodput, f"{counts[0]} x P{_words(prefill)} + {counts[1]} x D{_words(decode)}")

    def _prefill(self, split: Split) -> float:
        """Per GPU, by TTFT alone."""
        fleet, slo = bench.disaggregated(MODEL, split, split), SLO(ttft_ms=ABLATION_SLO.ttft_ms)
        return self.per_gpu(fleet, "distserve", slo, _devices(split), answers=False)

    def _decode(self, split: Split) -> float:
        """Per GPU, by TPOT alone."""
        fleet, slo = bench.decode_alone(MODEL, split), SLO(tpot_ms=ABLATION_SLO.tpot_ms)
        return self.per_gpu(fleet, "distserve", slo, _devices(split))


def rows(setup: Setup) -> tuple[list[Row], dict[str, Any]]:
    """The order and what it comes from."""
    lengths = bench.sharegpt(setup.folder())
    ablation = Ablation(setup, lengths)
    vllm = ablation.vllm((4, 1))
    searched, same_engine = (
        max((ablation.vllm(split, engine) for split in SPLITS), key=_goodput) for engine in ("vllm", "distserve")
    )
    setup.say(f"ablation: vLLM {vllm.goodput:.3g}, vLLM++ {searched.goodput:.3g} req/s per GPU")
    pairs = [
        (prefill, decode)
        for prefill, decode in itertools.product(SPLITS, repeat=2)
        if _devices(prefill) + _devices(decode) <= NODE
    ]
    low = max((ablation.pair(*pair) for pair in pairs), key=_goodput)
    high = max(low, ablation.high(), key=_goodput)
    setup.say(f"ablation: Low {low.goodput:.3g}, High {high.goodput:.3g} req/s per GPU")
    found = {"High": high, "Low": low, "vLLM++": searched, "vLLM": vllm}
    shown = found | {"vLLM++ with DistServe's pass times": same_engine}
    made = [Row(f"Figure 11, {who}", None, one.goodput, "req/s per GPU", note=one.words) for who, one in shown.items()]
    late = late_alone(bench.MODELS[1], ABLATION_SLO, lengths)
    note = (
        f"the paper says that TP4 is vLLM's best split; with these lengths {late:.0%} of the prompts miss 0.4 s even "
        "alone with TP4, so that it never keeps 90 %, and TP8 does"
    )
    published = "High >= Low > vLLM++ = vLLM"
    made.append(Row("Figure 11, order", published, order(found), tolerance=0.0, note=note))
    return made, {"ablation": {name: dataclasses.asdict(one) for name, one in shown.items()}}


def order(found: dict[str, Found]) -> str:
    """In the words of the paper: what lies within SAME of each other is equal."""
    high, low, searched, vllm = (found[name].goodput for name in ("High", "Low", "vLLM++", "vLLM"))
    first = ">=" if high >= (1 - SAME) * low else "<"
    second = ">" if low > (1 + SAME) * searched else "="
    third = ">" if searched > (1 + SAME) * vllm else "="
    return f"High {first} Low {second} vLLM++ {third} vLLM"


def _goodput(found: Found) -> float:
    return found.goodput


def _devices(split: Split) -> int:
    return split[0] * split[1]


def _words(split: Split) -> str:
    return f"(TP{split[0]}, PP{split[1]})"
