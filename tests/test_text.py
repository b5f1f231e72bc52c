"""The text of an answer: stop texts are found wherever they lie, and what is shown depends on the tokens alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.models.tokenizer import byte_tokenizer
from pdjax.text import AnswerText, StopTexts, text_of

BYTES = byte_tokenizer()
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=60)


def cut(text, stops):
    """By definition: the text before the stop text that ends first, the longest of those; and whether there is one."""
    for end in range(1, len(text) + 1):
        if complete := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(complete)], True
    return text, False


@EXAMPLES
@given(st.text("ab", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_the_first_stop_text_to_be_complete_cuts_the_text_however_it_comes(text, stops, data):
    found, shown, stopped, rest = StopTexts(stops), "", False, text
    while rest and not stopped:
        size = data.draw(st.integers(1, 4))
        piece, rest = rest[:size], rest[size:]
        new, stopped = found.push(piece)
        shown += new
        assert text.startswith(shown + found.held)
    assert (shown + found.held, stopped) == cut(text, stops)


@EXAMPLES
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_exactly_what_could_begin_a_stop_text_is_held_back(text, stops):
    text, stopped = cut(text, stops)
    if stopped:
        return
    found = StopTexts(stops)
    found.push(text)
    starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
    assert found.held == max((start for start in starts if text.endswith(start)), key=len, default="")


@EXAMPLES
@given(
    st.text("aé你🎉", max_size=20),
    st.lists(st.text("aé你🎉", min_size=1, max_size=3), max_size=3),
    st.integers(1, 7),
)
def test_the_pieces_of_an_answer_add_up_to_its_text_and_hold_no_half_character(text, stops, size):
    ids = list(text.encode())
    answer = AnswerText(BYTES, stops)
    pieces = [answer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert ("".join(pieces) + answer.finish(), answer.stopped) == cut(text, stops)
    assert text_of(BYTES, stops, ids) == cut(text, stops)[0]


@EXAMPLES
@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 9))
def test_broken_text_reads_alike_however_it_comes(ids, size):
    answer = AnswerText(BYTES, ("ab",))
    pieces = [answer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + answer.finish() == text_of(BYTES, ("ab",), ids)


def test_a_stop_text_is_complete_with_its_last_token_and_not_before():
    answer = AnswerText(BYTES, ("你!",))
    assert [(answer.push([byte]), answer.stopped) for byte in "a你!b".encode()] == [
        ("a", False),
        ("", False),
        ("", False),
        ("", False),
        ("", True),
        ("", True),
    ]
    assert answer.finish() == ""


def test_what_was_held_back_is_shown_at_the_end():
    answer = AnswerText(BYTES, ("User:",))
    assert (answer.push(b"all of them Use"), answer.finish()) == ("all of them ", "Use")


def test_a_character_that_never_ends_is_shown_as_broken():
    answer = AnswerText(BYTES)
    assert (answer.push([97, 0xE4, 0xBD]), answer.finish()) == ("a", "\ufffd")


@pytest.mark.parametrize("byte", [0x80, 0xF0, 400, 97])
def test_the_work_for_a_token_is_bounded_whatever_came_before(byte, monkeypatch):
    sizes, decode = [], type(BYTES).decode
    monkeypatch.setattr(type(BYTES), "decode", lambda self, ids: sizes.append(len(ids)) or decode(self, ids))
    answer = AnswerText(BYTES, ("ab", "b"))
    answer.push([byte] * 300)
    assert max(sizes) < 50 and len(sizes) <= 600


def test_without_a_tokenizer_there_is_no_text():
    assert text_of(None, (), [1, 2]) == ""
