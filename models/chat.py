"""Turns chat messages into one prompt text with the model's own template; called by the engine.

Templates come with checkpoints and are other people's programs: they run in jinja2's sandbox and see only the messages
and the texts of the special tokens.
"""

import datetime
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str, messages: Sequence[dict[str, str]], *, bos: str, eos: str, add_generation_prompt: bool = True
) -> str:
    """The prompt text of a conversation.

    Args:
        template: jinja2 source, as `Source.chat_template` gives it.
        messages: {"role": ..., "content": ...} each, both texts.
        bos, eos: how the special tokens are written, "" where there is none.
        add_generation_prompt: end with the start of the assistant's answer.

    Raises:
        ValueError: messages of another form, or the template refuses them.
    """
    check(messages)
    try:
        return _compiled(template).render(
            messages=list(messages), bos_token=bos, eos_token=eos, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"messages are refused by the model's chat template: {error}") from None


def check(messages: Any) -> None:
    """ValueError unless `messages` is a non-empty list of {"role": text, "content": text}."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages is {messages!r}; allowed: a non-empty list of {{'role': ..., 'content': ...}}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{i}] is {message!r}; allowed: {{'role': ..., 'content': ...}}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages[{i}][{key!r}] is {message.get(key)!r}; allowed: a text")


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    # Block trimming and these helpers are what templates of Hugging Face checkpoints are written for.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
