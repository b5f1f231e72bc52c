"""Text to token ids and back, whole or as it is generated; built by `models.source`, called by the engine.

One class over a `tokenizers` backend serves all models: those with a tokenizer.json, those whose GGUF metadata
describe one, and `tiny`, whose tokens are bytes. Lists of token ids that a user gives never pass through here.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pdjax.models.hf_config import merge_ids

_SPACE = "\u2581"  # how sentencepiece writes a space
_REPLACEMENT = "\ufffd"  # what the backend decodes an incomplete UTF-8 character to
_UNSURE = 3  # so many of them, at the end of a text, may still become one character of four bytes
_WINDOW = 32  # ids that are kept at most, where nothing readable comes


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A backend and what it does not know.

    Attributes:
        backend: does the work.
        bos_id: put in front of every text, or None.
        eos_ids: ids that end a text, as far as the tokenizer's files tell.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a text."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS in front if the model wants it and the text does not bring it."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens and ids without a token have none, broken UTF-8 is U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def text_of(self, token: int | None) -> str:
        """How a special token is written; "" for None. Chat templates need it for BOS and EOS."""
        return "" if token is None else self.backend.id_to_token(token) or ""


class Detokenizer:
    """Decodes the ids of one text as they come: the pieces add up to `decode` of all ids, however these are grouped.

    Only a run of sentencepiece byte tokens that is broken UTF-8 can differ: `decode` gives up the whole run, here what
    was readable is already out. The work for an id is bounded, also in a text that is never valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # A token's text depends on the ones before (spaces, bytes of one character), so some ids stay: the first
        # `_context` of them are whole in what is out, which is the first `_sent` characters of their text.
        self._ids: list[int] = []
        self._context = 0
        self._sent = 0

    def push(self, ids: Iterable[int]) -> str:
        """Takes new ids; the text that they complete, without half a UTF-8 character at its end."""
        return "".join([self._next(i) for i in ids if i not in self._tokenizer.special_ids])

    def finish(self) -> str:
        """The text that was held back, if any."""
        new = self._tokenizer.decode(self._ids)[self._sent :]
        self._sent += len(new)
        return new

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        complete = len(text.rstrip(_REPLACEMENT))
        full = len(self._ids) > _WINDOW
        ready = max(complete, self._sent, len(text) - _UNSURE if full else 0)
        new, self._sent = text[self._sent : ready], ready
        if full:
            self._keep(_WINDOW // 2, held=len(text) - ready)
        elif new and complete == len(text):
            self._keep(len(self._ids) - self._context, held=0)
            self._context = len(self._ids)
        return new

    def _keep(self, count: int, held: int) -> None:
        """Forgets all but the last `count` ids, of whose text the last `held` characters are not out yet."""
        self._ids, self._context = self._ids[-count:], 0
        self._sent = max(0, len(self._tokenizer.decode(self._ids)) - held)


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None if it has no tokenizer.json.

    Raises:
        ValueError: tokenizer.json or tokenizer_config.json cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the backend raises plain Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    config = read_json(folder / "tokenizer_config.json")
    plain, added = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    adds_bos = added[:1] != plain[:1]
    bos = _token_id(backend, config.get("bos_token"))
    if bos is None and adds_bos:
        bos = added[0]
    wanted = config.get("add_bos_token")
    return Tokenizer(
        backend,
        bos_id=bos if (adds_bos if wanted is None else wanted) else None,
        eos_ids=merge_ids(_token_id(backend, config.get("eos_token"))),
    )


def from_gguf(metadata: dict[str, Any], file: str) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describe.

    Raises:
        ValueError: it is of a kind that is not built here.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    needed = ["tokens", "scores" if kind == "llama" else "merges"]
    missing = [key for key in needed if f"tokenizer.ggml.{key}" not in metadata]
    if missing:
        raise ValueError(f"{file}: metadata 'tokenizer.ggml.{missing[0]}' is missing")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if kind == "llama":
        backend = _sentencepiece(tokens, metadata["tokenizer.ggml.scores"])
        if not metadata.get("tokenizer.ggml.add_space_prefix", True):
            backend.normalizer = normalizers.Replace(" ", _SPACE)
    elif kind == "gpt2" and split in ("smollm", "gpt-2"):
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        backend = tokenizers.Tokenizer(models.BPE(_numbered(tokens), merges))
        _byte_level(backend, digits=split == "smollm")
    else:
        raise ValueError(
            f"{file}: tokenizer.ggml.model is {kind!r} with tokenizer.ggml.pre {split!r}; allowed: 'llama', or 'gpt2' "
            "with 'smollm' or 'gpt-2'. For other models give a Hugging Face folder, which has a tokenizer.json"
        )
    # Types of the format: 3 control (matched whole, never shown), 4 user-defined (matched whole, shown).
    types = metadata.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((3, True), (4, False)):
        matched = [token for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in matched])
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    return Tokenizer(
        backend,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id") if adds_bos else None,
        eos_ids=merge_ids(metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")),
    )


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of `tiny`: token i is byte i; 256 is BOS, 257 is EOS."""
    # The byte-level alphabet writes printable bytes as themselves and the others, in order, as characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    _byte_level(backend, digits=False)
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, bos_id=256, eos_ids=(257,))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's table, {} if there is no file; ValueError naming the file if it holds something else."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: holds {type(table).__name__}; allowed: a JSON object")
    return table


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _sentencepiece(tokens: list[str], scores: list[float]) -> tokenizers.Tokenizer:
    """BPE as sentencepiece does it: of all neighbours that form a token, the best-scored is joined first."""
    vocab = _numbered(tokens)
    merges = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs = [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token=tokens[0], fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _byte_level(backend: tokenizers.Tokenizer, digits: bool) -> None:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # Each digit is split off before the regular expression sees the text; a space before it stays on its own.
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if digits else split
    )
    backend.decoder = decoders.ByteLevel()


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a token as tokenizer_config.json writes it: a text, or a table with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
