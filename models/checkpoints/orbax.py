"""Writes and restores weights in pdjax's own layout with orbax; called by `models.source` and by
`pdjax.experiments.convert`.

A folder holds `pdjax.json` (format and config), `weights/` (one orbax checkpoint: "outer" and "layers.N" with the
names of `models.params`, nothing padded), and the tokenizer and chat template as a Hugging Face folder has them. Every
device restores just its own part, so any mesh can load it; padding is added on the way.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from pdjax.models import weights
from pdjax.models.config import ModelConfig, RopeScaling
from pdjax.models.params import Weights
from pdjax.models.sharding import Share

MANIFEST, WEIGHTS = "pdjax.json", "weights"
_FORMAT = 1


def save(folder: Path, config: ModelConfig, values: Weights) -> None:
    """Writes config and weights. The weights must be unpadded, as on a mesh of one device."""
    with _checkpointer() as checkpointer:
        checkpointer.save((folder / WEIGHTS).absolute(), args=ocp.args.PyTreeSave(_parts(values.outer, values.layers)))
    # Written last: a folder with a manifest is complete.
    manifest = {"format": _FORMAT, "config": dataclasses.asdict(config)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_config(folder: Path) -> ModelConfig:
    """The config that `save` wrote; ValueError if it is broken or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != _FORMAT:
            raise ValueError(f"format is {manifest['format']!r}; allowed: {_FORMAT}")
        fields = manifest["config"]
        scaling = fields["rope_scaling"] and RopeScaling(**fields["rope_scaling"])
        return ModelConfig(**fields | {"rope_scaling": scaling, "eos_ids": tuple(fields["eos_ids"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest of pdjax: {error}") from None


def restore(folder: Path, config: ModelConfig, mesh: Mesh, dtype: str, share: Share | None = None) -> Weights:
    """The weights of one stage (None: of the whole model) on its mesh, in "float32" or "bfloat16"; norms in float32.

    Raises:
        ValueError: an array is missing, has another shape, belongs to nothing, or cannot be read.
    """
    path = (folder / WEIGHTS).absolute()
    outer, layers = weights.tables(config, mesh.size, share)
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(path).item_metadata if path.is_dir() else None
        if stored is None:
            raise ValueError(f"{path}: not an orbax checkpoint, or its index is broken")
        _check(path, stored.tree, _parts(*weights.tables(config, 1)))
        restored = {}
        # One layer at a time bounds what is in memory twice.
        for name, table in _parts(outer, layers).items():
            if not table:
                continue  # a stage between the ends
            restore_args = {
                key: ocp.ArrayRestoreArgs(
                    sharding=NamedSharding(mesh, param.spec),
                    global_shape=param.shape,
                    dtype=weights.kind_of(param, dtype),
                    strict=False,  # pads with zeros
                )
                for key, param in table.items()
            }
            item = {
                key: jax.ShapeDtypeStruct(param.shape, weights.kind_of(param, dtype)) for key, param in table.items()
            }
            args = ocp.args.PyTreeRestore(item={name: item}, restore_args={name: restore_args}, partial_restore=True)
            try:
                restored[name] = checkpointer.restore(path, args=args)[name]
            except Exception as error:  # orbax raises plain Exception, with the reason as its cause
                reason = str(error.__cause__ or error).splitlines()[0]
                raise ValueError(f"{path}: cannot restore {name!r}: {reason}") from error
    return Weights(restored.get("outer", {}), {layer: restored[_layer(layer)] for layer in layers})


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _parts(outer: Any, layers: dict[int, Any]) -> dict[str, Any]:
    return {"outer": outer} | {_layer(number): layer for number, layer in layers.items()}


def _layer(number: int) -> str:
    return f"layers.{number}"


def _check(path: Path, stored: Any, expected: dict[str, Any]) -> None:
    there = {(part, name): tuple(array.shape) for part, table in stored.items() for name, array in table.items()}
    wanted = {(part, name): param.shape for part, table in expected.items() for name, param in table.items()}
    for part, name in sorted(there.keys() | wanted.keys()):
        have, want = there.get((part, name)), wanted.get((part, name))
        if have != want:
            said = "is missing" if have is None else f"has shape {list(have)}"
            allowed = f"shape {list(want)}" if want else "no such array"
            raise ValueError(f"{path}: array '{part}.{name}' {said}; allowed by the config: {allowed}")
