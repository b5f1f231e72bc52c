"""What the KV of a prompt costs on the links of a data centre, and whether disaggregation needs RDMA there. Flags
enter; the arithmetic, a table, an answer, and with --out summary.json and kv_cost.png leave. Run as
`python -m pdjax.experiments.kv_cost [--model=llama3.1-70b --prompt_tokens=8192 --kv_dtype=bfloat16 --chips=8]`.

The prefill's time is that of its operations at a part (--mfu) of an accelerator's peak, or given (--prefill_ms). Models
are presets, the folder of a config.json, or given by --layers, --kv_heads and --head_dim. Nothing is measured.
"""

import dataclasses
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from pdjax import kv_cost, provenance, report
from pdjax.experiments import analytic_plots, flags, launcher
from pdjax.experiments.kv_cost_tables import answer, arithmetic, milliseconds, size, table
from pdjax.kv_cost import ACCELERATORS, BUSY, BYTES, LINKS, Cost, Job, Shape
from pdjax.models import hf_config, source
from pdjax.models.buckets import layer_groups
from pdjax.models.config import ModelConfig
from pdjax.models.presets import PRESETS
from pdjax.models.tokenizer import read_json

PROMPT_TOKENS = absl_flags.DEFINE_integer("prompt_tokens", 2048, "Of a prompt.", lower_bound=1)
KV_DTYPE = absl_flags.DEFINE_enum("kv_dtype", "float16", list(BYTES), "Of the KV.")
LAYERS = absl_flags.DEFINE_integer("layers", None, "In place of the model's.", lower_bound=1)
KV_HEADS = absl_flags.DEFINE_integer("kv_heads", None, "In place of the model's.", lower_bound=1)
HEAD_DIM = absl_flags.DEFINE_integer("head_dim", None, "In place of the model's.", lower_bound=1)
PREFILL_MS = absl_flags.DEFINE_float(
    "prefill_ms", None, "Of the prompt; unset: from its operations.", lower_bound=1e-3, upper_bound=1e9
)
ACCELERATOR = absl_flags.DEFINE_enum("accelerator", "a100", list(ACCELERATORS), "That computes the prompt.")
CHIPS = absl_flags.DEFINE_integer("chips", 1, "Accelerators of a prefill instance.", lower_bound=1)
MFU = absl_flags.DEFINE_float("mfu", 0.5, "Part of their peak that a prefill reaches.", lower_bound=0.01, upper_bound=1)
LINK_NAMES = absl_flags.DEFINE_list("links", list(LINKS), "Names, or NAME:GBITS, or NAME:GBITS:rdma.")
EFFICIENCY = absl_flags.DEFINE_float(
    "efficiency", 0.9, "Part of a link's line rate that KV gets.", lower_bound=0.01, upper_bound=1
)
KV_RATE = absl_flags.DEFINE_float(
    "kv_rate",
    None,
    f"Prompts/s on a link; unset: of one prefill instance, busy {BUSY:.0%}.",
    lower_bound=0,
    upper_bound=1e9,
)
SHARE = absl_flags.DEFINE_float(
    "share", 0.1, "Of the prefill's time; what of the transfer may be seen.", lower_bound=0, upper_bound=1
)
absl_flags.set_default(flags.MODEL, "llama2-7b")
for _name in ("model", "stream_layers", "out"):
    absl_flags.declare_key_flag(_name)  # --help shows these


def config_of(model: str) -> ModelConfig:
    """A model's config; of a folder its config.json is enough. ValueError naming `model`."""
    if model in PRESETS:
        return PRESETS[model]
    file = Path(model).expanduser() / "config.json"
    return hf_config.from_dict(read_json(file)) if file.exists() else source.resolve(model).config


def prefill_of(config: ModelConfig | None, tokens: int) -> tuple[float, str]:
    """Seconds of the prefill, and where they come from. ValueError naming the flag."""
    if PREFILL_MS.value is not None:
        return PREFILL_MS.value / 1e3, "given"
    if config is None:
        raise ValueError("prefill_ms is not given; allowed with --layers, --kv_heads and --head_dim: milliseconds > 0")
    flops, peak = kv_cost.prefill_flops(config, tokens), ACCELERATORS[ACCELERATOR.value] * CHIPS.value
    seconds = flops / (peak * 1e12 * MFU.value)
    chips = f"{CHIPS.value} x {ACCELERATOR.value}"
    return seconds, f"{flops / 1e12:,.1f} TFLOP at {MFU.value:.0%} of the {peak:g} TFLOP/s of {chips}"


def model_of() -> tuple[ModelConfig | None, Shape]:
    """The model, None if its shape alone is given. ValueError naming the flag that is missing."""
    layers, kv_heads, head_dim = LAYERS.value, KV_HEADS.value, HEAD_DIM.value
    if layers is None and kv_heads is None and head_dim is None:
        config = config_of(flags.MODEL.value)
        return config, kv_cost.shape_of(config)
    if layers is None or kv_heads is None or head_dim is None:
        missing = next(holder.name for holder in (LAYERS, KV_HEADS, HEAD_DIM) if holder.value is None)
        raise ValueError(f"{missing} is not given; allowed: layers, kv_heads and head_dim together, or none")
    return None, Shape(layers, kv_heads, kv_heads, head_dim)


def main(argv: list[str]) -> None:
    del argv
    config, shape = model_of()
    tokens, per_group = PROMPT_TOKENS.value, absl_flags.FLAGS["stream_layers"].value
    if not LINK_NAMES.value:
        raise ValueError(f"links is empty; allowed: {', '.join(LINKS)}, NAME:GBITS or NAME:GBITS:rdma, with commas")
    links = [kv_cost.link(name) for name in LINK_NAMES.value]
    if per_group and per_group > shape.layers:
        raise ValueError(f"stream_layers is {per_group}; allowed: at most the {shape.layers} layers of the model")
    nbytes = shape.bytes_per_token(KV_DTYPE.value) * tokens
    prefill_s, origin = prefill_of(config, tokens)
    groups = len(layer_groups(shape.layers, per_group)) if per_group else 1
    rate = KV_RATE.value if KV_RATE.value is not None else BUSY / prefill_s
    job = Job(nbytes, prefill_s, groups, rate)
    costs = [kv_cost.cost(job, link, EFFICIENCY.value) for link in links]
    needs, why = answer(job, costs, SHARE.value)
    console = launcher.console()
    for line in (
        arithmetic(shape, KV_DTYPE.value, tokens),
        f"Prefill: {milliseconds(prefill_s)} ms ({origin})",
        f"Streamed in {groups} layer groups, all but the last are hidden from "
        f"{job.hiding_bytes_per_s / 1e9:.3g} GB/s ({job.hiding_bytes_per_s * 8e-9:.3g} Gb/s) on",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table(job, costs))
    console.print(
        f"Links at {EFFICIENCY.value:.0%} of their line rate; in brackets the part of the prefill's time. Sustained: "
        f"{BUSY:.0%} of what saturates. Queue: mean wait for other prompts' KV.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Does disaggregation need RDMA here? {why}", highlight=False, soft_wrap=True)
    if folder := flags.OUT.value:
        own = {holder.name: holder.value for holder in (PROMPT_TOKENS, KV_DTYPE, LINK_NAMES, EFFICIENCY, MFU, SHARE)}
        summary = {
            "provenance": provenance.collect(flags.given() | own),
            "bytes_per_token": shape.bytes_per_token(KV_DTYPE.value),
            "job": dataclasses.asdict(job) | {"hiding_bytes_per_s": job.hiding_bytes_per_s, "prefill": origin},
            "links": [_entry(one, job, SHARE.value) for one in costs],
            "needs_rdma": needs,
            "answer": why,
        }
        report.write_summary(folder, summary)
        what = flags.MODEL.value if config else "a model"
        title = f"KV of a prompt of {tokens:,} tokens ({what}, {KV_DTYPE.value}): {size(nbytes)}"
        analytic_plots.kv_cost(job, costs, EFFICIENCY.value, title, Path(folder) / "kv_cost.png")
        console.print(f"{folder}/ has summary.json and a picture", highlight=False)


def _entry(one: Cost, job: Job, share: float) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"enough": kv_cost.suffices(one, job, share)}


if __name__ == "__main__":
    launcher.run(main)
