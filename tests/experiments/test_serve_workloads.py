"""Every --workload and every --arrival, from flags to what goes into summary.json, on one small engine."""

import contextlib
import io
import json
import math

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver
from rich.console import Console

from pdjax import report
from pdjax.experiments import flags, serve
from pdjax.models import source
from tests.engines import engine, settle

COUNT = 4
FILES = {
    "lengths.csv": "prompt_len,output_len\n5,2\n9,3\n",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n / 50},{5 + n},2\n" for n in range(6)),
    "mooncake.jsonl": "".join(
        json.dumps({"timestamp": 20 * n, "input_length": 6 + n, "output_length": 2, "hash_ids": [n % 2]}) + "\n"
        for n in range(6)
    ),
    "prompts.jsonl": '{"prompt": "one two"}\n{"token_ids": [1, 2, 3], "max_tokens": 2}\n',
}


@pytest.fixture(scope="module")
def served():
    with engine() as made:
        yield made
        settle(made)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(served, *arguments):
    """The entry of summary.json of one run with these flags, and its lines of requests.jsonl."""
    with flagsaver.flagsaver():
        absl_flags.FLAGS.unparse_flags()
        absl_flags.FLAGS(["test", "--model=tiny", "--scheduler=disaggregated", f"--num_requests={COUNT}", *arguments])
        config = flags.build_config(**{name: getattr(served.config, name) for name in ("max_model_len", "page_size")})
        workload = serve.build_workload([config], source.resolve(config.model, max_len=config.max_model_len))
        entries, reports = serve.serve(
            {"disaggregated": config},
            workload,
            Console(file=io.StringIO()),
            warmup_requests=flags.WARMUP_REQUESTS.value,
            targets=flags.build_targets(),
            attainment=flags.ATTAINMENT.value,
            make_engine=lambda config, progress: contextlib.nullcontext(served),
        )
    (made,) = reports.values()
    return json.loads(json.dumps(entries[0])), [
        report.request_line(record, made.start_s, made.specs) for record in made.records
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "chat",
        "fixed:6,3",
        "uniform:3-9,1-4",
        "lengths:lengths.csv",
        "azure:azure.csv",
        "mooncake:mooncake.jsonl",
        "prompts:prompts.jsonl",
    ],
)
def test_every_workload_is_served(served, folder, kind):
    name, colon, detail = kind.partition(":")
    path = f"{folder}/{detail}" if detail in FILES else detail
    count = 2 if kind == "chat" else COUNT  # its third prompt is long
    entry, lines = run(
        served, f"--workload={name}{colon}{path}", f"--num_requests={count}", "--rate=inf", "--max_tokens=3"
    )
    assert entry["completed"] == entry["num_requests"] == len(lines) == count
    assert all(line["token_ids"] for line in lines)
    assert entry["attainment_target"] == 0.9
    assert len(entry["targets"]) == 3
    assert entry["capacity"]["instances"][0]["instance"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arrival", ["poisson", "gamma:2", "uniform", "trace", "closed:2"])
def test_every_arrival_is_kept(served, folder, arrival):
    rate = () if arrival in ("trace", "closed:2") else ("--rate=100",)
    entry, lines = run(served, f"--workload=azure:{folder}/azure.csv", f"--arrival={arrival}", *rate)
    times = [line["timeline"]["arrival_s"] for line in lines]
    assert entry["completed"] == COUNT
    assert times[0] == 0 and times == sorted(times)
    if arrival == "uniform":
        assert times == pytest.approx([0.01 * n for n in range(COUNT)], abs=0.02)
    if arrival == "trace":
        assert times == pytest.approx([n / 50 for n in range(COUNT)], abs=0.02)


@pytest.mark.slow
def test_warmup_requests_are_served_and_left_out(served):
    entry, lines = run(served, "--workload=fixed:6,3", "--rate=inf", "--warmup_requests=1")
    assert entry["num_requests"] == len(lines) == COUNT - 1
    assert [line["request_id"] for line in lines] == ["1", "2", "3"]
    assert math.isfinite(entry["duration_s"])
