"""Checks that every placement gives the same tokens: serves stored prompts on each row of `pdjax.experiments.grid` and
compares with stored greedy answers. Flags enter; a table and summary.json leave. Ends with status 1 if a row differs.

    python -m pdjax.experiments.grid_check --model=FOLDER --references=FILE.json

By default the rows are a cover in which every pair of settings occurs; --full takes all, --limit a sample of all.
References are a JSON file {"cases": [{"name", "prompt_ids", "generated_ids", "top2_gap"}, ...]}, with float32 greedy
ids and the gap between the two best logits of each step; an .npz beside it may hold NAME.first_logits.
"""

import dataclasses
import gc
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags as absl_flags
from rich.progress import Progress
from rich.table import Table

import pdjax
from pdjax import build, provenance, report
from pdjax.experiments import flags, grid, launcher
from pdjax.models import source

REFERENCES = absl_flags.DEFINE_string("references", None, "JSON file of stored greedy runs.")
FULL = absl_flags.DEFINE_bool("full", False, "All rows of the grid instead of a pairwise cover.")
LIMIT = absl_flags.DEFINE_integer("limit", 0, "So many rows of the full grid, chosen by --seed; 0: no.", lower_bound=0)
CASES = absl_flags.DEFINE_list("cases", [], "Names of stored runs; none: all.")
_FLAGS = (REFERENCES, FULL, LIMIT, CASES)

absl_flags.adopt_module_key_flags(flags)


def serve(
    row: grid.Row,
    model: str,
    cases: Mapping[str, grid.Case],
    max_tokens: int,
    devices: Sequence[jax.Device],
) -> grid.Outcome:
    """Serves every case at once on one row.

    The decode pool has the last of the devices: where it lies does not depend on the prefill pool, so that rows share
    its programs.
    """
    began = time.perf_counter()
    longest = max(len(case.prompt_ids) + min(len(case.token_ids), max_tokens) for case in cases.values())
    config = pdjax.EngineConfig(
        model=model,
        dtype="float32",
        warmup=False,
        prefill_max_batch=2,
        decode_max_batch=2,  # fewer than there are prompts: slots are used again
        **row.fields(-(-longest // 64) * 64),
    )
    used = [*devices[: row.devices - row.decode_devices], *devices[-row.decode_devices :]]
    params = pdjax.SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=True)
    try:
        with pdjax.Engine(config, devices=used) as engine:
            answers = engine.generate([list(case.prompt_ids) for case in cases.values()], params)
    except (RuntimeError, ValueError) as error:  # a row that cannot be served hides no other
        return grid.Outcome(row, time.perf_counter() - began, error=f"{type(error).__name__}: {error}")
    finally:
        gc.collect()  # its weights and pages, before the next ones are made
    outcomes = [(answer.token_ids, answer.logprobs) for answer in answers]
    return grid.compare(row, cases, outcomes, max_tokens, time.perf_counter() - began)


def summary(outcomes: Sequence[grid.Outcome]) -> dict[str, Any]:
    """What summary.json has of the rows."""
    return {
        "checked": len(outcomes),
        "ok": sum(outcome.ok for outcome in outcomes),
        "near_ties": sum(split.near_tie for outcome in outcomes for split in outcome.splits),
        "logprob_error": max((o.logprob_error for o in outcomes if o.logprob_error is not None), default=None),
        "results": [{"name": o.row.name, "ok": o.ok, **dataclasses.asdict(o)} for o in outcomes],
    }


def table(outcomes: Sequence[grid.Outcome]) -> Table:
    """A line for each row."""
    shown = Table("row", "devices", "answers", "first log prob. off by", "s")
    for outcome in outcomes:
        off = "-" if outcome.logprob_error is None else f"{outcome.logprob_error:.1e}"
        shown.add_row(outcome.row.name, str(outcome.row.devices), _verdict(outcome), off, f"{outcome.seconds:.1f}")
    return shown


def _verdict(outcome: grid.Outcome) -> str:
    if outcome.ok:
        return "[green]equal[/green]"
    parts = [f"{s.case} splits at step {s.step} (gap {s.gap:.1e})" for s in outcome.splits]
    return f"[red]{'; '.join(parts) or outcome.error or 'first logits differ'}[/red]"


def _chosen(config: Any) -> list[grid.Row]:
    every = grid.rows(config.num_heads, config.num_layers)
    if LIMIT.value:
        return grid.sample(every, LIMIT.value, flags.SEED.value)
    return every if FULL.value else grid.cover(every)


def main(argv: list[str]) -> None:
    del argv
    logging.getLogger("pdjax").setLevel(flags.LOG_LEVEL.value.upper())
    if REFERENCES.value is None:
        raise ValueError("references is not given; allowed: a JSON file of stored greedy runs, see --help")
    found = source.resolve(flags.MODEL.value)
    cases = grid.read_cases(Path(REFERENCES.value).expanduser())
    if unknown := set(CASES.value) - set(cases):
        raise ValueError(f"cases is {sorted(unknown)}; allowed: {', '.join(cases)}")
    cases = {name: case for name, case in cases.items() if not CASES.value or name in CASES.value}
    rows = _chosen(found.config)
    devices = build.devices_for(
        max(row.devices - row.decode_devices for row in rows) + max(row.decode_devices for row in rows)
    )
    console = launcher.console()
    every = len(grid.rows(found.config.num_heads, found.config.num_layers))
    console.print(f"{len(rows)} of {every} rows, {len(cases)} prompts each", highlight=False)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("rows", total=len(rows))
        outcomes: list[grid.Outcome] = []
        for row in rows:
            if outcomes and row.prefill != outcomes[-1].row.prefill:
                jax.clear_caches()  # programs take some 2 MB each, and a full grid has thousands
            bar.update(task, description=row.name)
            outcomes.append(serve(row, flags.MODEL.value, cases, flags.MAX_TOKENS.value, devices))
            bar.advance(task)
            if not console.is_terminal or not outcomes[-1].ok:  # in a file, lines say how far it is
                console.print(f"{row.name}: {_verdict(outcomes[-1])}", highlight=False, soft_wrap=True)
    result = summary(outcomes)
    console.print(table(outcomes))
    console.print(f"{result['ok']} of {result['checked']} rows equal, {result['near_ties']} near ties", highlight=False)
    if folder := flags.OUT.value:
        given = flags.given() | {flag.name: flag.value for flag in _FLAGS}
        origin = provenance.collect(given, devices=devices)
        report.write_summary(folder, {"provenance": origin, "model": flags.MODEL.value, "rows": every, **result})
    if result["ok"] < result["checked"]:
        sys.exit(f"error: {result['checked'] - result['ok']} rows differ")


if __name__ == "__main__":
    launcher.run(main)
