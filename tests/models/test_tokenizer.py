"""Texts become the ids of the references and come back, whole and piece by piece."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.models import chat, source
from pdjax.models.tokenizer import Detokenizer, byte_tokenizer, from_folder, from_gguf

TEXTS = ["Once upon a time", "  two  spaces\n", "héllo 你好 🎉", "", " ", "12 345 in 6", "don't"]


def cases(weights_dir, name):
    reference = json.loads((weights_dir / "ref" / f"{name}.json").read_text())
    texts = [(c["text"], c["kind"], c["prompt_ids"]) for c in reference["cases"] if c.get("text") is not None]
    return texts + [(c["text"], "raw", c["ids"]) for c in reference["nll"]]


def bpe(tokens, merges, types, pre="gpt-2", **more):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": types,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def test_stories_prompts_have_the_reference_ids(stories, weights_dir):
    tokenizer = source.resolve(str(stories)).tokenizer()
    for text, _, ids in cases(weights_dir, "stories"):
        assert tokenizer.encode(text) == ids


def test_smollm2_prompts_have_the_reference_ids(smollm2, weights_dir):
    tokenizer = smollm2.tokenizer()
    for text, kind, ids in cases(weights_dir, "smollm2"):
        if kind == "chat":
            messages = [{"role": "user", "content": text}]
            text = chat.render(smollm2.chat_template, messages, bos=tokenizer.text_of(tokenizer.bos_id), eos="")
        assert tokenizer.encode(text) == ids


def test_stories_decode_to_the_reference_texts(stories, weights_dir):
    tokenizer = source.resolve(str(stories)).tokenizer()
    for case in json.loads((weights_dir / "ref" / "stories.json").read_text())["cases"]:
        assert tokenizer.decode(case["generated_ids"]) == case["generated_text"].replace("<s>", "").replace("</s>", "")


def test_sentencepiece_metadata_tokenize_like_tokenizer_json(stories):
    tokenizer = source.resolve(str(stories)).tokenizer()
    vocab = tokenizer.backend.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [259.0 - i for i in range(259, len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    built = from_gguf(metadata, "x.gguf")
    assert (built.bos_id, built.eos_ids) == (tokenizer.bos_id, tokenizer.eos_ids)
    for text in [*TEXTS, "<s>Once</s> more"]:
        assert built.encode(text) == tokenizer.encode(text)
        assert built.decode(built.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_bos_is_never_doubled():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a") == [256, 97]


@pytest.mark.parametrize(("wanted", "first"), [(True, [1]), (False, []), (None, [1])])
def test_bos_is_as_the_tokenizer_config_or_else_the_tokenizer_says(stories, tmp_path, wanted, first):
    (tmp_path / "tokenizer.json").write_text((stories / "tokenizer.json").read_text())
    table = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"} | (
        {} if wanted is None else {"add_bos_token": wanted}
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    assert from_folder(tmp_path).encode("") == first


def test_empty_text_without_bos_is_empty(smollm2):
    assert smollm2.tokenizer().encode("") == []


def test_special_tokens_have_no_text():
    assert byte_tokenizer().decode([256, 97, 257]) == "a"


def test_ids_without_a_token_have_no_text():
    # The vocabulary of `tiny` is larger than its tokenizer, so random weights do produce such ids.
    assert byte_tokenizer().decode([97, 400, 98]) == "ab"


def test_control_tokens_are_matched_whole_and_digits_split():
    tokens = ["<|im_end|>", "1", "2", "12", "a"]
    one = from_gguf(bpe(tokens, ["1 2"], [3, 1, 1, 1, 1], pre="smollm", eos_token_id=0), "x.gguf")
    assert one.encode("12<|im_end|>a") == [1, 2, 0, 4]
    assert one.eos_ids == (0,) and one.decode([4, 0]) == "a"
    assert from_gguf(bpe(tokens, ["1 2"], [3, 1, 1, 1, 1]), "x.gguf").encode("12") == [3]


def test_unknown_split_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"x.gguf: .*'llama-bpe'.*Hugging Face folder"):
        from_gguf(bpe([], [], [], pre="llama-bpe"), "x.gguf")


def test_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        from_folder(tmp_path)


@given(st.text(alphabet="aZ é你🎉\n\t\0<bos>\u0301\x85", max_size=20))
def test_bytes_round_trip(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<bos>" + text)
    assert tokenizer.decode(ids) == text.replace("<bos>", "").replace("<eos>", "")


@given(st.lists(st.integers(0, 257), max_size=30), st.integers(1, 4))
def test_pieces_add_up_for_any_bytes(ids, size):
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@given(st.text(alphabet="aé你🎉 ", max_size=12))
def test_no_piece_holds_half_a_character(text):
    stream = Detokenizer(byte_tokenizer())
    pieces = [stream.push([byte]) for byte in text.encode()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert stream.finish() == ""


def test_pieces_of_a_sentencepiece_text_keep_their_spaces(stories, weights_dir):
    tokenizer = source.resolve(str(stories)).tokenizer()
    for case in json.loads((weights_dir / "ref" / "stories.json").read_text())["cases"]:
        # A special token in the middle has no text, but must not cost the space after it.
        ids = [*case["generated_ids"][:50], 1, *case["generated_ids"][50:]]
        stream = Detokenizer(tokenizer)
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == tokenizer.decode(ids)
