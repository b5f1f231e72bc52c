"""The flags that launchers share, and what they mean: one `EngineConfig`, one workload, one SLO.

Called by the launchers; nothing else reads flags. A flag has the name of the field it sets, so that a ValueError of the
library names the flag. Flags without a value here keep the default of `EngineConfig`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from absl import flags

from pdjax import metrics, workload
from pdjax.config import DTYPES, ON_FAILURE, TRANSFERS, EngineConfig
from pdjax.request import SLO, SLOClass
from pdjax.schedulers import SCHEDULERS

_DEFAULTS = EngineConfig()

MODEL = flags.DEFINE_string("model", _DEFAULTS.model, "Preset name, Hugging Face folder, GGUF file or orbax folder.")
DTYPE = flags.DEFINE_enum("dtype", _DEFAULTS.dtype, DTYPES, "Of the weights.")
OUT = flags.DEFINE_string("out", None, "Folder to write to; empty: nothing is written.")
SEED = flags.DEFINE_integer("seed", 0, "Of the workload and of sampling.", lower_bound=0)
LOG_LEVEL = flags.DEFINE_enum("log_level", "warning", ["debug", "info", "warning", "error"], "Of the logger pdjax.")

SCHEDULER = flags.DEFINE_string("scheduler", "disaggregated", f"One of {', '.join(SCHEDULERS)}.")

_ENGINE = [
    flags.DEFINE_integer(name, getattr(_DEFAULTS, name), text, lower_bound=low)
    for name, low, text in (
        ("prefill_instances", 1, "Instances that prefill."),
        ("decode_instances", 1, "Instances that decode."),
        ("prefill_pp", 1, "Pipeline stages of a prefill instance."),
        ("decode_pp", 1, "Pipeline stages of a decode instance."),
        ("prefill_tp", 1, "Devices of a stage of a prefill instance."),
        ("decode_tp", 1, "Devices of a stage of a decode instance."),
        ("prefill_ranks", 1, "Ranks of a prefill instance under mpirun."),
        ("decode_ranks", 1, "Ranks of a decode instance under mpirun, also of a colocated one."),
        ("devices_per_rank", 0, "Devices that a rank may see under mpirun; 0: as many as it needs."),
        ("prefill_chunk", 0, "Most prompt tokens in one iteration of a prefill instance; 0: chosen."),
        ("decode_chunk", 0, "The same of a decode instance, for prompts that it computes itself."),
        ("prefill_max_batch", 1, "Most prompts in one iteration of a prefill instance."),
        ("decode_max_batch", 1, "Most rows of a decode instance."),
        ("prefill_num_pages", 0, "KV pages of a prefill instance; 0: chosen."),
        ("decode_num_pages", 0, "KV pages of a decode instance; 0: chosen."),
        ("page_size", 1, "Tokens in a page."),
        ("max_model_len", 0, "Most tokens of a request, prompt and answer; 0: the model's context, at most 8192."),
        ("stream_layers", 0, "Layers in a group of streamed KV; 0: a prompt's KV goes whole after its prefill."),
        ("max_queue", 0, "Requests that may wait for their first pass, one more is rejected; 0: any number."),
    )
]
TRANSFER = flags.DEFINE_enum("transfer", _DEFAULTS.transfer, TRANSFERS, "How KV moves between instances.")
PIN = flags.DEFINE_bool("pin", _DEFAULTS.pin, "Under mpirun, give the ranks of each instance CPU cores of their own.")
PEER_TIMEOUT_S = flags.DEFINE_float(
    "peer_timeout_s", _DEFAULTS.peer_timeout_s, "A rank that is silent for so long is given up.", lower_bound=0.1
)
flags.DEFINE_alias("peer_timeout", "peer_timeout_s")
ON_FAILURE_FLAG = flags.DEFINE_enum(
    "on_failure", _DEFAULTS.on_failure, ON_FAILURE, "Of requests on an instance that is lost."
)
VERIFY_KV = flags.DEFINE_bool("verify_kv", _DEFAULTS.verify_kv, "Compare the KV of both sides of each transfer.")
PROFILE = flags.DEFINE_string(
    "profile", _DEFAULTS.profile, "File of a latency profile (pdjax.experiments.profile); empty: a brief measurement."
)

WORKLOAD = flags.DEFINE_string("workload", "chat", f"One of {workload.KINDS}.")
NUM_REQUESTS = flags.DEFINE_integer("num_requests", 10, "Requests; 0: all that the workload has.", lower_bound=0)
WARMUP_REQUESTS = flags.DEFINE_integer("warmup_requests", 0, "First requests left out of statistics.", lower_bound=0)
ARRIVAL = flags.DEFINE_string("arrival", "poisson", f"One of {workload.ARRIVALS}.")
RATE = flags.DEFINE_float(
    "rate", None, "Requests per second, inf for all at once; unset: a trace's own, none for closed, else 2."
)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 48, "Of an answer to chat and prompts.", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
TRACE_START_S = flags.DEFINE_float("trace_start_s", 0.0, "Take a trace from here, in its seconds.", lower_bound=0.0)
TRACE_END_S = flags.DEFINE_float("trace_end_s", math.inf, "Take a trace up to here.")

SLO_PRESET = flags.DEFINE_enum("slo", "interactive", list(metrics.TARGETS), "Targets of the run and of requests.")
TTFT_SLO_MS = flags.DEFINE_float("ttft_slo_ms", None, "Limit of each request, in place of the preset's.")
TPOT_SLO_MS = flags.DEFINE_float("tpot_slo_ms", None, "Limit of each request, in place of the preset's.")
E2E_SLO_MS = flags.DEFINE_float("e2e_slo_ms", None, "Limit of each request, in place of the preset's.")

SLO_CLASSES = flags.DEFINE_string(
    "slo_classes",
    "",
    "Classes that requests are of in turn, with limits in ms, laxer ones behind '>': "
    "'chat:ttft=500,tpot=50>batch;batch:e2e=60000'. Limits are ttft, tpot, itl_p99, e2e.",
)
ADMISSION = flags.DEFINE_bool("admission", _DEFAULTS.admission, "Take in only whose limits can be kept.")
DROP_LATE = flags.DEFINE_bool("drop_late", _DEFAULTS.drop_late, "Reject those waiting that must miss their limits.")
CORRECT = flags.DEFINE_bool("correct", _DEFAULTS.correct, "Correct the latency models while serving.")

ATTAINMENT = flags.DEFINE_float(
    "attainment",
    metrics.ATTAINMENT,
    "Share of the requests that must meet their SLO for a rate to count as served.",
    lower_bound=0.01,
    upper_bound=1.0,
)

# Flags that say what is asked, when, and with which limits.
_REQUESTS = (
    *("workload", "num_requests", "warmup_requests", "arrival", "rate", "max_tokens", "temperature"),
    *("trace_start_s", "trace_end_s", "slo", "ttft_slo_ms", "tpot_slo_ms", "e2e_slo_ms", "attainment"),
)
DEFAULT_RATE = 2.0


def build_config(**changes: Any) -> EngineConfig:
    """The engine that the flags describe, with some fields changed. Raises ValueError naming the flag."""
    fields: dict[str, Any] = {
        "model": MODEL.value,
        "dtype": DTYPE.value,
        "scheduler": SCHEDULER.value,
        "transfer": TRANSFER.value,
        "pin": PIN.value,
        "peer_timeout_s": PEER_TIMEOUT_S.value,
        "on_failure": ON_FAILURE_FLAG.value,
        "verify_kv": VERIFY_KV.value,
        "profile": PROFILE.value,
        "slo_classes": build_classes(),
        "admission": ADMISSION.value,
        "drop_late": DROP_LATE.value,
        "correct": CORRECT.value,
        "seed": SEED.value,
        **{holder.name: holder.value for holder in _ENGINE},
    }
    return EngineConfig(**(fields | changes))


def build_workload(*, vocab_size: int, max_model_len: int) -> workload.Workload:
    """The requests that the flags describe. Raises ValueError naming the flag."""
    rate = RATE.value
    if rate is None and ARRIVAL.value != "trace" and not ARRIVAL.value.startswith("closed"):
        rate = DEFAULT_RATE
    return workload.parse(
        WORKLOAD.value,
        num_requests=NUM_REQUESTS.value or None,
        rate=rate,
        arrival=ARRIVAL.value,
        seed=SEED.value,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_tokens=MAX_TOKENS.value,
        temperature=TEMPERATURE.value,
        slo=build_slo(),
        slo_classes=build_classes(),
        trace_start_s=TRACE_START_S.value,
        trace_end_s=TRACE_END_S.value,
    )


def build_slo() -> SLO:
    """The limits of each request: the preset's, but for those that have a flag of their own."""
    own = {"ttft_ms": TTFT_SLO_MS.value, "tpot_ms": TPOT_SLO_MS.value, "e2e_ms": E2E_SLO_MS.value}
    return dataclasses.replace(
        metrics.preset_slo(SLO_PRESET.value), **{name: limit for name, limit in own.items() if limit is not None}
    )


def build_classes() -> tuple[SLOClass, ...]:
    """The classes that --slo_classes describes. Raises ValueError naming it."""
    classes = []
    for text in filter(None, SLO_CLASSES.value.split(";")):
        try:
            words, _, laxer = text.partition(">")
            name, _, limits = words.partition(":")
            pairs = [limit.split("=") for limit in filter(None, limits.split(","))]
            slo = SLO(**{f"{limit}_ms": float(number) for limit, number in pairs})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"slo_classes has {text!r} ({error}); allowed: NAME:LIMIT=MS,...>LAXER, limits ttft, tpot, itl_p99, e2e"
            ) from None
        classes.append(SLOClass(name, slo, laxer))
    return tuple(classes)


def build_targets() -> Sequence[metrics.Target]:
    """The percentile targets of the run."""
    return metrics.preset_targets(SLO_PRESET.value)


def refuse_requests(*used: str) -> None:
    """For launchers that choose requests and limits themselves. ValueError if a flag that says something of them was
    given, but for those that are `used`."""
    for name in _REQUESTS:
        if name not in used and flags.FLAGS[name].present:
            own = f", but for {', '.join(used)}" if used else ""
            raise ValueError(
                f"{name} is {flags.FLAGS[name].value!r}; allowed with this launcher: none, it chooses requests and "
                f"limits itself{own}"
            )


def given() -> dict[str, Any]:
    """Every flag of this module with its value, for `pdjax.provenance`."""
    return {flag.name: flag.value for flag in flags.FLAGS.flags_by_module_dict()[__name__]}
