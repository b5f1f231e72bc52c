"""Measures what KV between ranks costs on several links, against plain MPI on the same link, and how much of it a user
sees, with whole prompts and layer by layer. Flags enter; tables, summary.json and a picture leave.

    python -m pdjax.experiments.transfer

It starts an `mpirun` job of three ranks for each link; those that need two hosts run in `two_hosts.sh`. The balanced
link is as slow as makes the KV of the longest prompt take as long as its prefill did on the first link.

    mpirun -n 3 python -m pdjax.experiments.transfer --transfer_test

says how KV would cross between the ranks of that job, and how fast.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

import pdjax
from pdjax import mpi, provenance, report
from pdjax.config import EngineConfig
from pdjax.experiments import flags, kv_times, launcher, links, mpirun, transfer_tables, wire
from pdjax.models import source
from pdjax.models.buckets import layer_groups, wire_buckets

for name in ("model", "seed", "out", "transfer", "prefill_chunk", "stream_layers", "pin"):
    absl_flags.declare_key_flag(name)
absl_flags.set_default(flags.TRANSFER, "mpi")
absl_flags.set_default(flags.PIN, True)
LINKS = absl_flags.DEFINE_list("links", list(links.NAMES), f"Some of {', '.join(links.NAMES)}, in this order.")
PROMPTS = absl_flags.DEFINE_list("prompts", ["128", "256", "512", "1024", "2048"], "Tokens of each prompt.")
REPEATS = absl_flags.DEFINE_integer("repeats", 3, "Requests of each length and kind; medians are shown.", lower_bound=1)
TRANSFER_TEST = absl_flags.DEFINE_bool("transfer_test", False, "Only say what carries KV, and the bandwidth both ways.")
RESULTS = absl_flags.DEFINE_string("results", "", "File of a job's outcome. Set by the launcher for its own jobs.")

JOB_S = 900.0
MODES = ("whole", "streamed")
_FLOAT_BYTES = 4
_PASSED_ON = ("model", "seed", "transfer", "prefill_chunk", "stream_layers", "pin", "repeats")


def lengths() -> list[int]:
    """The prompts, ascending. ValueError naming the flag."""
    if not all(text.isdigit() and int(text) for text in PROMPTS.value) or not PROMPTS.value:
        raise ValueError(f"prompts is {','.join(PROMPTS.value)!r}; allowed: token counts with commas, like 128,2048")
    return sorted({int(text) for text in PROMPTS.value})


def names() -> list[str]:
    """The links, in order. ValueError naming the flag."""
    given = LINKS.value
    if not given or set(given) - set(links.NAMES) or given == ["balanced"]:
        raise ValueError(
            f"links is {','.join(given)!r}; allowed: some of {', '.join(links.NAMES)}; balanced with another before it"
        )
    return [name for name in links.NAMES if name in given]


def config(mode: str) -> EngineConfig:
    """The engine of one mode: a prefill and a decode instance that serve one request at a time. ValueError naming the
    flag."""
    layers = absl_flags.FLAGS["stream_layers"].value
    if not layers:
        raise ValueError("stream_layers is 0; allowed: at least 1, to compare with whole prompts")
    longest = max(lengths()) + kv_times.STEPS + 1
    pages = 2 * (longest // EngineConfig().page_size + 2)
    return flags.build_config(
        scheduler="disaggregated",
        stream_layers=layers if mode == "streamed" else 0,
        prefill_max_batch=1,
        decode_max_batch=1,
        max_model_len=longest,
        prefill_num_pages=pages,
        decode_num_pages=pages,
        on_failure="fail",
    )


def job(results: Path) -> None:
    """One link, in every rank of a job: plain MPI first, then an engine for each mode."""
    import mpi4py

    mpi4py.rc.finalize = False  # `pdjax.mpi.run` ends MPI
    from mpi4py import MPI

    one = config("streamed")
    model = source.resolve(one.model, max_len=one.max_model_len).config
    per_token = model.num_layers * 2 * model.num_kv_heads * model.head_dim * _FLOAT_BYTES
    group = layer_groups(model.num_layers, 0)[0]
    message = per_token * len(group) // model.num_layers * wire_buckets(256)[-1]
    nbytes = per_token * max(lengths())
    raw_s = links.raw(MPI.COMM_WORLD, nbytes, message, max(5, REPEATS.value))

    def control() -> None:
        points: dict[str, list[kv_times.Point]] = {}
        for mode in MODES:
            with pdjax.Engine(config(mode)) as engine:
                asked = lengths(), REPEATS.value, flags.SEED.value, model.vocab_size
                points[mode] = kv_times.measure(engine, *asked)
                chunk = engine.specs[0].max_chunk
        layers_last = len(layer_groups(model.num_layers, one.stream_layers)[-1])
        parts = [kv_times.last_part(tokens, chunk, layers_last, model.num_layers) for tokens in lengths()]
        outcome = {
            "raw_bytes": nbytes,
            "raw_s": raw_s,
            "chunk": chunk,
            **{mode: [dataclasses.asdict(point) for point in points[mode]] for mode in MODES},
            "hidden": [kv_times.hidden(*each) for each in zip(points["whole"], points["streamed"], parts, strict=True)],
        }
        results.write_text(json.dumps(outcome))

    mpi.run(control, one)


def run(name: str, rate: str | None) -> dict[str, Any]:
    """Runs the job of a link; RuntimeError with what it said if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        given = [f"--{flag}={absl_flags.FLAGS[flag].value}" for flag in _PASSED_ON]
        argv = ["-m", "pdjax.experiments.transfer", *given, f"--prompts={','.join(PROMPTS.value)}"]
        done = mpirun.run(links.command(name, [*argv, f"--results={results}"], rate), JOB_S)
        if done.returncode:
            raise RuntimeError(
                f"the job over {name} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        outcome: dict[str, Any] = json.loads(results.read_text())
    return {"link": name, "rate": rate or links.RATES.get(name), **outcome}


def main(argv: list[str]) -> None:
    del argv
    console = launcher.console()
    asked = names()
    one = config("streamed")
    if TRANSFER_TEST.value:
        if not mpi.launched():
            raise ValueError("transfer_test is True; allowed: in a job, started by mpirun -n 3 python ...")
        wire.run(one, lambda line: console.print(line, highlight=False, soft_wrap=True))
        return
    if RESULTS.value:
        job(Path(RESULTS.value))
        return
    if mpi.launched():
        raise ValueError("transfer starts its own mpirun jobs; allowed under mpirun: with --transfer_test")
    if folder := flags.OUT.value:
        report.out_folder(folder)
    outcomes: list[dict[str, Any]] = []
    for name in asked:
        if (why := links.missing(name)) is not None:
            console.print(f"{name} is left out: {why}", highlight=False, soft_wrap=True)
            continue
        rate = None
        if name == "balanced":
            longest = outcomes[0]["whole"][-1]
            rate = links.balanced_rate(longest["nbytes"], longest["prefill_s"])
        outcomes.append(run(name, rate))
        console.print(f"{name} is done", highlight=False)
    console.print(transfer_tables.bandwidth(outcomes))
    console.print(transfer_tables.visible(outcomes))
    console.print(transfer_tables.NOTE, highlight=False, soft_wrap=True)
    if folder:
        given = {"links": asked, "prompts": lengths(), "repeats": REPEATS.value}
        origin = provenance.collect(flags.given() | given)
        report.write_summary(folder, {"provenance": origin, "links": outcomes})
        transfer_tables.picture(outcomes, Path(folder) / "transfer.png")
        console.print(f"{folder}/ has summary.json and a picture", highlight=False)


if __name__ == "__main__":
    launcher.run(main)
