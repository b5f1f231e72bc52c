"""Bad input is refused at the door: a ValueError that names the field, the value and what is allowed, before anything
runs, and while other requests go on undisturbed."""

import dataclasses
import re
import subprocess
import sys

import pytest

import pdjax
from pdjax.config import DTYPES
from tests.engines import WAIT_S, engine, settle, wire

PARAMS = pdjax.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def served():
    with engine() as made:
        yield made


@pytest.fixture
def other(served):
    """A request in the middle of its life, which must end as if nothing had happened."""
    (want,) = served.generate([PROMPT], PARAMS)
    wire(served).hold()
    handle = served.submit(PROMPT, PARAMS)
    yield handle
    wire(served).release()
    assert handle.result(WAIT_S).token_ids == want.token_ids
    settle(served)


BAD_PROMPTS = [
    ("", "prompt is empty; allowed: at least one character, message or token id"),
    ([], "prompt is empty; allowed: at least one character, message or token id"),
    (7, "prompt is 7; allowed: a text, a list of messages, or a list of token ids"),
    (None, "prompt is None; allowed: a text, a list of messages, or a list of token ids"),
    ({"role": "user", "content": "hi"}, "allowed: a text, a list of messages, or a list of token ids"),
    ([1, 2, 512], "prompt[2] is 512; allowed: token ids 0..511"),
    ([-1], "prompt[0] is -1; allowed: token ids 0..511"),
    ([1, "a"], "prompt[1] is 'a'; allowed: token ids 0..511"),
    ([1.0], "prompt[0] is 1.0; allowed: token ids 0..511"),
    (b"hello", "prompt is b'hello'; allowed: a text, a list of messages, or a list of token ids"),
    ("a\ud800b", "allowed: Unicode without lone surrogates"),
    ([{"role": "user", "content": "\udc00"}], "allowed: Unicode without lone surrogates"),
    ([True], "prompt[0] is True; allowed: token ids 0..511"),
    ([{"role": "user"}], "messages[0]['content'] is None; allowed: a text"),
    ([{"role": "user", "content": "hi"}, "hi"], "messages[1] is 'hi'; allowed:"),
    ([1] * 256, "prompt has 256 tokens; allowed: fewer than max_model_len = 256"),
    ("x" * 5000, "tokens; allowed: fewer than max_model_len = 256"),
    ([1] * 249, "max_tokens is 8; allowed: at most 7 after 249 prompt tokens (max_model_len = 256)"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo": 500}, "slo is 500; allowed: a pdjax.SLO, None, or the name of a class of slo_classes"),
        ({"slo": "chat"}, "slo is 'chat'; allowed: a pdjax.SLO, None, or a class: none here"),
        ({"sampling": {"temperature": 0}}, "sampling is {'temperature': 0}; allowed: a pdjax.SamplingParams, or None"),
    ],
)
def test_options_of_another_type_are_refused_at_the_door(served, other, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        served.submit(PROMPT, **options)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[message[:40] for _, message in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_and_nobody_else_is_disturbed(served, other, prompt, message):
    live = set(served._handles)
    for ask in (served.submit, served.check, served.stream):
        with pytest.raises(ValueError, match=re.escape(message)):
            ask(prompt, PARAMS)
    assert set(served._handles) == live


@pytest.mark.parametrize("bos", [None, 256])
def test_a_prompt_whose_text_comes_to_nothing_is_refused_unless_a_bos_makes_it_something(served, monkeypatch, bos):
    tokenizer = dataclasses.replace(served._source.tokenizer(), bos_id=bos)
    source = dataclasses.replace(served._source, chat_template="{# nothing #}", tokenizer_or_none=tokenizer)
    monkeypatch.setattr(served, "_source", source)
    with pytest.raises(ValueError, match="prompt is empty; allowed:"):
        served.check("", PARAMS)
    messages = [{"role": "user", "content": "hi"}]
    if bos is None:
        with pytest.raises(ValueError, match="which has no tokens; allowed: at least one token"):
            served.check(messages, PARAMS)
    else:
        assert served.check(messages, PARAMS) == (bos,)


@pytest.mark.parametrize("bad", [[], "", [9999], 7])
def test_a_bad_prompt_in_a_list_is_named_and_none_of_the_list_is_started(served, other, bad):
    live = set(served._handles)
    with pytest.raises(ValueError, match=r"^prompts\[1\]: prompt"):
        served.generate([PROMPT, bad, PROMPT], PARAMS)
    assert set(served._handles) == live


def test_one_list_of_ids_is_not_a_list_of_prompts(served):
    with pytest.raises(ValueError, match=r"prompts\[0\]: prompt is 5; allowed: a text, a list"):
        served.generate(PROMPT, PARAMS)


def test_as_many_sampling_parameters_as_prompts(served):
    with pytest.raises(ValueError, match="sampling has 3 entries; allowed: one, or one for each of 2 prompts"):
        served.generate([PROMPT, PROMPT], [PARAMS] * 3)


@pytest.mark.parametrize("token", [512, -1, "a"])
def test_a_stop_token_that_cannot_come_is_refused(served, token):
    with pytest.raises(ValueError, match=f"stop_token_ids has {token!r}; allowed: token ids 0..511"):
        served.submit(PROMPT, pdjax.SamplingParams(stop_token_ids=(token,)))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", float("nan"), "a finite number >= 0"),
        ("temperature", float("inf"), "a finite number >= 0"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 1.01, "a number in (0, 1]"),
        ("top_k", -1, "a whole number >= 0"),
        ("max_tokens", 0, "a whole number >= 1"),
        ("max_tokens", -3, "a whole number >= 1"),
    ],
)
def test_sampling_outside_its_range_is_refused(field, value, allowed):
    with pytest.raises(ValueError, match=re.escape(f"{field} is {value!r}; allowed: {allowed}")):
        pdjax.SamplingParams(**{field: value})


# --- configurations -------------------------------------------------------------------------------------------------


def refused(message, **changes):
    """Refused before a weight is loaded."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=re.escape(message)):
        patch.setattr("pdjax.home.build", lambda *arguments: pytest.fail("it went on to load the weights"))
        engine(**changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("model is 'llama9'; allowed: tiny, smollm2-135m", {"model": "llama9"}),
        ("model is 'llama2-7b', a preset of shapes without weights; allowed: tiny", {"model": "llama2-7b"}),
        (f"dtype is 'int8'; allowed: {', '.join(DTYPES)}", {"dtype": "int8"}),
        ("scheduler is 'fifo'; allowed: colocated", {"scheduler": "fifo"}),
        ("transfer is 'fax'; allowed: device_put", {"transfer": "fax"}),
        ("prefill_tp is 3; allowed: a divisor of the 8 query heads", {"prefill_tp": 3}),
        ("decode_tp is 5; allowed: a divisor of the 8 query heads", {"decode_tp": 5}),
        ("decode_num_pages is 16; allowed: at least 17 for one request", {"decode_num_pages": 16}),
        ("max_model_len is 4096; allowed: at most 1024", {"max_model_len": 4096}),
        ("the instances need 1001 devices; there are", {"prefill_instances": 1000}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_that_cannot_be_served_is_refused_before_anything_is_loaded(message, changes):
    refused(message, **changes)


def test_a_folder_without_a_config_is_refused(tmp_path):
    refused(f"model is {str(tmp_path)!r}, a folder without config.json; allowed:", model=str(tmp_path))


# --- launchers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model=llama9", "model is 'llama9'; allowed: tiny"),
        ("--decode_tp=3", "decode_tp is 3; allowed: a divisor"),
        ("--max_model_len=9999", "max_model_len is 9999; allowed: at most 1024"),
    ],
)
def test_a_launcher_says_it_in_one_line_and_ends_with_2(tmp_path, flag, message):
    ended = subprocess.run(
        [sys.executable, "-m", "pdjax.experiments.serve", "--model=tiny", flag, f"--out={tmp_path / 'out'}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=WAIT_S,
    )
    assert ended.returncode == 2
    assert message in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
