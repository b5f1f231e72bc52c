"""Writes a model as an orbax folder: what enters is anything `--model` can name, what leaves is a folder that `--model`
can name, with weights, config, tokenizer and chat template. Run as `python -m pdjax.experiments.convert`.

The folder loads faster than the original, on any mesh, and needs nothing beside it.
"""

import json
from pathlib import Path

import jax
from absl import flags as absl_flags

from pdjax.experiments import flags, launcher
from pdjax.models import source
from pdjax.models.checkpoints import orbax
from pdjax.models.sharding import make_mesh

for _name in ("model", "out", "dtype"):
    absl_flags.declare_key_flag(_name)  # --help shows these


def convert(model: str, out: Path, dtype: str) -> None:
    """Writes `model` to the folder `out`. Needs host memory for the whole model once.

    Args:
        dtype: "auto" is float32, which loses nothing; it can be loaded as either.

    Raises:
        ValueError: `model` cannot be loaded, `out` has something in it, or is no folder that can be made.
    """
    found = source.resolve(model)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out is {str(out)!r}, which is not empty; allowed: a new or empty folder")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out is {str(out)!r}, which is no folder to write to: {error.strerror}; allowed: a new or empty folder"
        ) from None
    # One device: nothing is padded, so the folder fits every mesh.
    values = found.load(make_mesh(found.config, jax.devices("cpu")[:1]), "float32" if dtype == "auto" else dtype)
    tokenizer = found.tokenizer_or_none
    if tokenizer is not None:
        (out / "tokenizer.json").write_text(tokenizer.backend.to_str())
        eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        settings = {
            "bos_token": tokenizer.text_of(tokenizer.bos_id),
            "eos_token": tokenizer.text_of(eos),
            "add_bos_token": tokenizer.bos_id is not None,
        }
        (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if found.chat_template is not None:
        (out / "chat_template.jinja").write_text(found.chat_template)
    orbax.save(out, found.config, values)


def main(argv: list[str]) -> None:
    del argv
    if flags.OUT.value is None:
        raise ValueError("out is not given; allowed: a new or empty folder")
    convert(flags.MODEL.value, Path(flags.OUT.value).expanduser(), flags.DTYPE.value)
    print(f"{flags.MODEL.value} -> {flags.OUT.value} ({flags.DTYPE.value})")


if __name__ == "__main__":
    launcher.run(main)
