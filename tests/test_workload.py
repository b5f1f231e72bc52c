"""Every kind of workload and every arrival; trace files of the known layouts, and broken ones."""

import json
import math

import numpy as np
import pytest

from pdjax.request import SLO, SamplingParams
from pdjax.workload import Item, Workload, parse


def make(kind, num_requests=None, *, vocab_size=500, max_model_len=1000, rate=math.inf, **options):
    return parse(
        kind, num_requests=num_requests, vocab_size=vocab_size, max_model_len=max_model_len, rate=rate, **options
    )


def lengths(workload):
    return [(len(item.prompt), item.sampling.max_tokens) for item in workload.items]


def arrivals(workload):
    return [item.arrival_s for item in workload.items]


def csv_file(folder, header, *rows, name="trace.csv", end="\n"):
    path = folder / name
    path.write_bytes(end.join([header, *rows, ""]).encode())
    return path


@pytest.fixture
def azure(tmp_path):
    path = csv_file(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,30,4",
        "2023-11-16 18:15:47.6805900,20,8",
        "2023-11-16 18:15:49.6805900,40,5",
        end="\r\n",
    )
    return f"azure:{path}"


def mooncake_file(folder, *rows):
    path = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    return f"mooncake:{path}"


# --- kinds ----------------------------------------------------------------------------------------------------------


def test_chat_asks_for_the_capital_of_france_first():
    first = make("chat", max_tokens=9).items[0]
    assert first.prompt == [{"role": "user", "content": "What is the capital of France?"}]
    assert first.sampling.max_tokens == 9


def test_chat_has_sixteen_prompts_and_starts_over():
    assert len(make("chat").items) == 16
    again = make("chat", 20).items
    assert again[16].prompt == again[0].prompt
    assert len({item.user_id for item in again}) == 20


def test_chat_stops_at_eos_and_length_driven_kinds_do_not():
    assert not make("chat").items[0].sampling.ignore_eos
    fixed = make("fixed:3,4", 1)
    assert fixed.items[0].sampling.ignore_eos
    assert "EOS is ignored" in fixed.note
    assert "EOS" not in make("chat").note


def test_fixed_gives_every_request_the_same_lengths():
    assert lengths(make("fixed:12,5", 3)) == [(12, 5)] * 3


def test_uniform_draws_lengths_from_both_ranges_with_their_ends():
    pairs = lengths(make("uniform:3-5,7-8", 200))
    assert {pair[0] for pair in pairs} == {3, 4, 5}
    assert {pair[1] for pair in pairs} == {7, 8}


def test_random_prompts_stay_in_the_vocabulary_and_use_it():
    tokens = make("fixed:400,1", 5, vocab_size=7)
    assert {token for item in tokens.items for token in item.prompt} == set(range(7))


def test_lengths_draws_pairs_from_the_file(tmp_path):
    path = csv_file(tmp_path, "prompt_len,output_len", "10,1", "20,2", "30,3")
    drawn = lengths(make(f"lengths:{path}", 100))
    assert set(drawn) == {(10, 1), (20, 2), (30, 3)}
    assert len(drawn) == 100


def test_azure_replays_rows_in_order(azure):
    workload = make(azure, arrival="trace", rate=None)
    assert lengths(workload) == [(30, 4), (20, 8), (40, 5)]
    assert arrivals(workload) == [0.0, 1.0, 3.0]
    assert "0.667 requests/s in the trace" in workload.note


def test_the_burstgpt_layout_is_known(tmp_path):
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    path = csv_file(tmp_path, header, "5,ChatGPT,472,18,490,log", "45,GPT-4,10,20,30,log")
    workload = make(f"azure:{path}", arrival="trace", rate=None)
    assert lengths(workload) == [(472, 18), (10, 20)]
    assert arrivals(workload) == [0.0, 40.0]


def test_mooncake_timestamps_are_milliseconds(tmp_path):
    kind = mooncake_file(tmp_path, (500, 7, 2, [1]), (2500, 8, 3, [2]))
    workload = make(kind, arrival="trace", rate=None)
    assert arrivals(workload) == [0.0, 2.0]
    assert lengths(workload) == [(7, 2), (8, 3)]


def test_mooncake_prompts_share_the_blocks_their_ids_share(tmp_path):
    kind = mooncake_file(tmp_path, (0, 600, 1, [4, 5]), (0, 700, 1, [4, 6]), (0, 100, 1, [5]))
    first, second, third = (item.prompt for item in make(kind).items)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert third[:88] == first[512:]


def test_prompts_may_be_text_messages_or_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    path.write_text(
        json.dumps({"prompt": "Once"})
        + "\n\n"
        + json.dumps({"messages": chat, "max_tokens": 3})
        + "\n"
        + json.dumps({"token_ids": [1, 2], "id": "ids"})
        + "\n"
    )
    items = make(f"prompts:{path}", max_tokens=9).items
    assert [item.prompt for item in items] == ["Once", chat, [1, 2]]
    assert [item.sampling.max_tokens for item in items] == [9, 3, 9]
    assert items[2].user_id == "2-ids"


def test_every_item_carries_the_slo_and_the_temperature():
    item = make("chat", 1, slo=SLO(ttft_ms=5), temperature=0.5).items[0]
    assert (item.slo, item.sampling.temperature) == (SLO(ttft_ms=5), 0.5)


# --- repeatability --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_workload_and_another_does_not():
    one, same, other = (make("uniform:3-50,7-80", 20, rate=2.0, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert lengths(one) != lengths(other)
    assert arrivals(one) != arrivals(other)


def test_a_request_does_not_depend_on_how_many_follow():
    assert make("uniform:3-50,7-80", 5).items == make("uniform:3-50,7-80", 50).items[:5]


def test_requests_sample_with_different_seeds():
    assert len({item.sampling.seed for item in make("chat").items}) == 16


# --- arrivals -------------------------------------------------------------------------------------------------------


def test_uniform_arrivals_are_evenly_spaced():
    assert arrivals(make("fixed:1,1", 4, arrival="uniform", rate=4.0)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("arrival", "variation"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:2", 2.0)])
def test_random_gaps_have_the_mean_and_variation_asked_for(arrival, variation):
    gaps = np.diff(arrivals(make("fixed:1,1", 4_000, arrival=arrival, rate=5.0)))
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


@pytest.mark.parametrize("arrival", ["poisson", "gamma:2", "uniform"])
def test_an_infinite_rate_is_all_at_once(arrival):
    assert arrivals(make("chat", 3, arrival=arrival, rate=math.inf)) == [0.0, 0.0, 0.0]


def test_a_closed_loop_has_clients_and_no_times():
    workload = make("chat", 5, arrival="closed:2", rate=None)
    assert workload.clients == 2
    assert arrivals(workload) == [0.0] * 5


def test_a_trace_at_twice_its_rate_has_half_the_intervals(azure):
    assert arrivals(make(azure, arrival="trace", rate=4 / 3)) == pytest.approx([0.0, 0.5, 1.5])


def test_a_trace_may_come_all_at_once(azure):
    assert arrivals(make(azure, arrival="trace", rate=math.inf)) == [0.0, 0.0, 0.0]


def test_a_trace_may_have_other_arrivals(azure):
    assert arrivals(make(azure, arrival="uniform", rate=2.0)) == [0.0, 0.5, 1.0]


def test_epoch_and_zero_based_times_give_the_same_replay(tmp_path):
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    epoch = csv_file(tmp_path, header, "1700158546.5,3,4", "1700158548.5,5,6", name="epoch.csv")
    zero = csv_file(tmp_path, header, "0,3,4", "2,5,6", name="zero.csv")
    replays = [make(f"azure:{path}", arrival="trace", rate=None) for path in (epoch, zero)]
    assert replays[0].items == replays[1].items


def test_rows_out_of_order_are_sorted_stably_and_it_is_said(tmp_path):
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path = csv_file(tmp_path, header, "5,1,1", "0,2,1", "5,3,1", "1,4,1")
    workload = make(f"azure:{path}", arrival="trace", rate=None)
    assert [pair[0] for pair in lengths(workload)] == [2, 4, 1, 3]
    assert arrivals(workload) == [0.0, 1.0, 5.0, 5.0]
    assert "sorted" in workload.note


# --- rows that cannot be served -------------------------------------------------------------------------------------


def test_rows_without_tokens_are_skipped_and_counted(tmp_path):
    path = csv_file(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "0,0,4", "1,5,0", "2,5,6")
    workload = make(f"azure:{path}")
    assert lengths(workload) == [(5, 6)]
    assert "2 rows without prompt or answer skipped" in workload.note
    assert "1 of 3 rows" in workload.note


def test_rows_above_the_context_are_dropped_and_counted(tmp_path):
    path = csv_file(tmp_path, "prompt_len,output_len", "6,4", "7,4", "100,1")
    workload = make(f"lengths:{path}", 20, max_model_len=10)
    assert set(lengths(workload)) == {(6, 4)}
    assert "2 rows above 10 tokens dropped" in workload.note


def test_a_window_takes_a_part_of_the_trace(azure):
    workload = make(azure, arrival="trace", rate=None, trace_start_s=1.0, trace_end_s=3.0)
    assert lengths(workload) == [(20, 8)]
    assert arrivals(workload) == [0.0]


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chatty", {}, "workload is 'chatty'; allowed: chat, fixed:IN,OUT"),
        ("azure", {}, "workload is 'azure'; allowed"),
        ("chat:x", {}, "workload is 'chat:x'; allowed"),
        ("fixed:3", {}, "workload has lengths '3'; allowed: IN,OUT"),
        ("fixed:0,4", {}, "workload has lengths '0,4'; allowed"),
        ("uniform:5-3,4", {}, "workload has lengths '5-3,4'; allowed"),
        ("fixed:999,2", {}, "allowed: at most 1000 tokens together"),
        ("fixed:3,4", {"num_requests": None}, "num_requests is None; allowed"),
        ("chat", {"num_requests": 0}, "num_requests is 0; allowed"),
        ("chat", {"rate": 0.0}, r"rate is 0\.0; allowed"),
        ("chat", {"rate": math.nan}, "rate is nan; allowed"),
        ("chat", {"rate": None}, "rate is None; allowed with arrival 'poisson'"),
        ("chat", {"arrival": "poison"}, "arrival is 'poison'; allowed: poisson, gamma:CV"),
        ("chat", {"arrival": "gamma:x"}, "arrival is 'gamma:x'; allowed"),
        ("chat", {"arrival": "gamma:0"}, "arrival is 'gamma:0'; allowed"),
        ("chat", {"arrival": "gamma:1e200"}, "arrival is 'gamma:1e200'; allowed: gamma:CV with CV from 0.001 to 1000"),
        ("chat", {"arrival": "gamma:1e-200"}, "arrival is 'gamma:1e-200'; allowed: gamma:CV with CV from 0.001"),
        (
            "chat",
            {"rate": 1e-12},
            "rate is 1e-12 with arrival 'poisson': the last of 2 requests comes after .* allowed",
        ),
        ("chat", {"rate": 5e-324, "arrival": "uniform"}, "rate is 5e-324 .* comes after inf s; allowed"),
        ("chat", {"trace_end_s": math.nan}, "trace_end_s is nan; allowed: seconds"),
        ("chat", {"trace_start_s": math.nan}, "trace_start_s is nan; allowed: seconds"),
        ("chat", {"arrival": "closed:1.5", "rate": None}, "arrival is 'closed:1.5'; allowed"),
        ("chat", {"arrival": "closed:2"}, "rate is inf; allowed with arrival 'closed:2': none"),
        ("chat", {"arrival": "trace"}, "arrival is 'trace'; allowed with a workload without times"),
        ("chat", {"max_tokens": 0}, "max_tokens is 0; allowed"),
        ("chat", {"temperature": -1.0}, r"temperature is -1\.0; allowed"),
        ("prompts:/no/such.jsonl", {}, "workload: cannot read '/no/such.jsonl'"),
    ],
)
def test_a_mistake_is_refused_by_name(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **({"num_requests": 2} | options))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,b"], r"has columns \['a', 'b'\]; allowed: one of them named prompt_len"),
        (["ContextTokens,GeneratedTokens", "1,2"], "allowed: one of them named TIMESTAMP"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens"], r"no usable row in .* \(it has none\)"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,x,2"], r"csv:2: ContextTokens is 'x'; allowed: a whole number"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,-1,2"], "ContextTokens is '-1'; allowed"),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,2"],
            "csv:2: TIMESTAMP is 'noon'; allowed: a number >= 0, or",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "nan,1,2"], "TIMESTAMP is 'nan'; allowed"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,1"], "csv:2: 2 cells; allowed: 3"),
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "x" * 200_000],
            r"csv:2: not CSV \(field larger than field limit",
        ),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,999,2"], "1 rows above 1000 tokens dropped"),
    ],
)
def test_a_broken_csv_is_refused_by_place(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        make(f"azure:{csv_file(tmp_path, *rows)}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no line"),
        ("{", "jsonl:1: .*; allowed: one JSON object a line"),
        ("[1]", "allowed: one JSON object a line"),
        ("[" * 100_000, "jsonl:1: not JSON .*recursion"),
        ('{"prompt": "x", "max_tokens": ' + "9" * 5000 + "}", "jsonl:1: not JSON .*digits"),
        ('{"text": "x"}', r"keys are \['text'\]; allowed: one of prompt, messages, token_ids"),
        ('{"prompt": "x", "token_ids": [1]}', "allowed: one of prompt"),
        ('{"prompt": [1]}', r"prompt is \[1\]; allowed: text"),
        ('{"prompt": "x", "max_tokens": "many"}', "max_tokens is 'many'; allowed"),
    ],
)
def test_a_broken_prompts_file_is_refused_by_place(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        make(f"prompts:{path}")


def test_a_mooncake_row_with_too_few_blocks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hash_ids has 1 entries; allowed: one for each 512 of 600 tokens"):
        make(mooncake_file(tmp_path, (0, 600, 1, [4])))


HUGE = 10**400


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 1, 1, None), "jsonl:1: hash_ids is None; allowed: a list"),
        ((0, 1, 1, 3), "jsonl:1: hash_ids is 3; allowed: a list"),
        ((0, math.inf, 1, []), "jsonl:1: input_length is inf; allowed: a whole number"),
        ((0, HUGE, 1, []), r"jsonl:1: input_length is 10+\.\.\.0+; allowed: a whole number"),
        ((HUGE, 1, 1, []), r"jsonl:1: timestamp is 10+\.\.\.0+; allowed: a number"),
    ],
)
def test_a_mooncake_value_of_another_kind_is_refused_by_place(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        make(mooncake_file(tmp_path, row))


@pytest.mark.parametrize("kind", ["prompts", "lengths", "mooncake"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, kind):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ValueError, match="binary' is not UTF-8 text; allowed"):
        make(f"{kind}:{tmp_path}/binary", 1)


@pytest.mark.parametrize("rate", [None, 1e-300])
def test_a_trace_that_would_take_too_long_is_refused(tmp_path, rate):
    kind = mooncake_file(tmp_path, (0, 1, 1, []), (2e9, 1, 1, []))
    with pytest.raises(ValueError, match=f"rate is {rate} with arrival 'trace': the last of 2 requests comes after"):
        make(kind, arrival="trace", rate=rate)


@pytest.mark.parametrize("arrival_s", [-1.0, 1e300, math.nan, "0"])
def test_an_item_arrives_at_a_time_that_one_can_wait_for(arrival_s):
    with pytest.raises(ValueError, match=r"arrival_s is .*; allowed: seconds from 0 to 1000000"):
        Item(arrival_s, "Hi", SamplingParams(), SLO(), "a")


@pytest.mark.parametrize("clients", [0, 1.5])
def test_a_closed_loop_has_whole_clients(clients):
    with pytest.raises(ValueError, match=f"clients is {clients}; allowed: a whole number >= 1"):
        Workload((), "none", clients)


def test_a_trace_with_too_few_rows_is_refused(azure):
    with pytest.raises(ValueError, match="num_requests is 4; allowed: at most the 3 usable rows"):
        make(azure, 4)


def test_an_empty_window_is_refused(azure):
    with pytest.raises(ValueError, match="trace_start_s to trace_end_s is 50 to inf; allowed"):
        make(azure, trace_start_s=50.0)
