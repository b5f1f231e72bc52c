"""The front door: a prompt in any of its forms and a user's options enter, a `Request` leaves, or a ValueError that
says why not. Called by the engine, and by launchers that check before there is one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pdjax.checks import is_number
from pdjax.config import MAX_TIMEOUT_S, EngineConfig, class_chain
from pdjax.models import chat
from pdjax.models.source import Source
from pdjax.request import SLO, Request, SamplingParams, SLOClass

Prompt = str | Sequence[dict[str, Any]] | Sequence[int]


def encode(prompt: Prompt, source: Source) -> tuple[int, ...]:
    """Token ids of a text, of chat messages (by the model's template), or of a list of ids (unchanged).

    Raises:
        ValueError: empty, not a prompt, or an id outside the vocabulary.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError(f"prompt is {prompt!r}; allowed: a text, a list of messages, or a list of token ids")
    if len(prompt) == 0:
        raise ValueError("prompt is empty; allowed: at least one character, message or token id")
    if isinstance(prompt, str):
        ids = _tokenize(prompt, source)
    elif isinstance(prompt[0], dict):
        ids = _chat(prompt, source)
    else:
        ids = list(prompt)  # type: ignore[arg-type]
    vocab = source.config.vocab_size
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise ValueError(f"prompt[{position}] is {token!r}; allowed: token ids 0..{vocab - 1}")
    if not ids:
        raise ValueError(f"prompt is {prompt!r}, which has no tokens; allowed: at least one token")
    return tuple(ids)


def check_length(prompt_ids: Sequence[int], sampling: SamplingParams, max_model_len: int) -> None:
    """ValueError if the request could outgrow the context."""
    if len(prompt_ids) >= max_model_len:
        raise ValueError(f"prompt has {len(prompt_ids)} tokens; allowed: fewer than max_model_len = {max_model_len}")
    total = len(prompt_ids) + sampling.max_tokens
    if total > max_model_len:
        raise ValueError(
            f"max_tokens is {sampling.max_tokens}; allowed: at most {max_model_len - len(prompt_ids)} after "
            f"{len(prompt_ids)} prompt tokens (max_model_len = {max_model_len})"
        )


def _chat(messages: Any, source: Source) -> list[int]:
    if source.chat_template is None:
        raise ValueError(f"prompt is a list of messages; allowed: text or ids, {source.name!r} has no chat template")
    tokenizer = source.tokenizer()
    eos = tokenizer.text_of(tokenizer.eos_ids[0] if tokenizer.eos_ids else None)
    text = chat.render(source.chat_template, messages, bos=tokenizer.text_of(tokenizer.bos_id), eos=eos)
    return _tokenize(text, source)


def _tokenize(text: str, source: Source) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prompt is no text: {error}; allowed: Unicode without lone surrogates") from None
    return source.tokenizer().encode(text)


def check_stops(sampling: SamplingParams, source: Source) -> None:
    """ValueError for a stop id that the model can never generate, and for stop texts where tokens have no text."""
    vocab = source.config.vocab_size
    for token in sampling.stop_token_ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
            raise ValueError(f"stop_token_ids has {token!r}; allowed: token ids 0..{vocab - 1}")
    if sampling.stop and source.tokenizer_or_none is None:
        raise ValueError(f"stop is {sampling.stop!r}; allowed: none, since {source.name!r} has no tokenizer.json")


def limits_of(slo: Any, classes: Sequence[SLOClass]) -> tuple[SLO, str, tuple[SLOClass, ...]]:
    """What a user's `slo` (limits, the name of a class, or None) means: the limits, the class ("": none), and those
    that the request may be degraded to.

    Raises:
        ValueError: it is neither, or there is no such class.
    """
    if isinstance(slo, str):
        asked, *laxer = class_chain(classes, slo)
        return asked.slo, asked.name, tuple(laxer)
    if slo is not None and not isinstance(slo, SLO):
        raise ValueError(f"slo is {slo!r}; allowed: a pdjax.SLO, None, or the name of a class of slo_classes")
    return slo or SLO(), "", ()


def check_options(user_id: Any, deadline_s: Any) -> None:
    """ValueError for what `Engine.submit` cannot take beside a prompt, its sampling and its SLO."""
    if user_id is not None and not isinstance(user_id, str):
        raise ValueError(f"user_id is {user_id!r}; allowed: a text, or None")
    if deadline_s is not None and not (is_number(deadline_s) and 0 < deadline_s <= MAX_TIMEOUT_S):
        raise ValueError(f"deadline_s is {deadline_s!r}; allowed: seconds > 0, at most {MAX_TIMEOUT_S:.0f}, or None")


def request_of(
    number: int,
    ids: tuple[int, ...],
    sampling: SamplingParams | None,
    slo: SLO | str | None,
    user_id: str | None,
    deadline_s: float | None,
    now: float,
    source: Source,
    config: EngineConfig,
) -> Request:
    """The request that a user's options mean, all of which have been checked. It arrives now; one without a seed gets
    one from its number and the engine's seed."""
    sampling = sampling or SamplingParams()
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=(config.seed * 1_000_003 + number) % 2**31)
    eos = () if sampling.ignore_eos else source.config.eos_ids
    limits, slo_class, laxer = limits_of(slo, config.slo_classes)
    return Request(
        id=number,
        prompt_ids=ids,
        sampling=sampling,
        stop_ids=frozenset(sampling.stop_token_ids).union(eos),
        slo=limits,
        slo_class=slo_class,
        laxer=laxer,
        arrival_s=now,
        user_id=user_id,
        deadline_s=None if deadline_s is None else now + deadline_s,
    )
