"""The programs that are described are those that an instance has, and take what it gives them."""

import jax
import numpy as np
import pytest

from pdjax import build
from pdjax.aot.programs import catalog
from pdjax.config import EngineConfig
from pdjax.models import weights
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_meshes, shares
from pdjax.schedulers.base import traits_of

TINY = PRESETS["tiny"]


def described(argument):
    """Shape, dtype and which device has what; None: it comes from the host."""
    sharding = getattr(argument, "sharding", None)
    where = sharding and sharding.devices_indices_map(argument.shape)
    return argument.shape, np.dtype(argument.dtype), where


def told(program):
    """What must agree: the function is the very same, and so are its arguments."""
    args = [described(leaf) for leaf in jax.tree.leaves(program.args)]
    return program.name, program.role, program.stage, program.fn, args, jax.tree.structure(program.args)


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduler": "disaggregated", "prefill_tp": 2, "decode_pp": 2},
        {"scheduler": "dynamic", "decode_tp": 4, "stream_layers": 1},
        {"scheduler": "disaggregated", "decode_pp": 2, "decode_tp": 8, "stream_layers": 0, "prefill_max_batch": 1},
        {"scheduler": "colocated_chunked", "prefill_tp": 2, "decode_tp": 2},
    ],
)
def test_described_programs_are_those_of_the_instance(changes):
    config = EngineConfig(
        model="tiny", max_model_len=256, prefill_chunk=64, decode_max_batch=2, prefill_num_pages=9, decode_num_pages=9,
        **changes,
    )  # fmt: skip
    specs = build.specs_of(config, TINY, traits_of(build.scheduler_of(config)))
    kinds, devices = set(), jax.devices()
    for spec in specs:
        mine, devices = devices[: spec.devices], devices[spec.devices :]
        meshes = make_meshes(TINY, mine, spec.pp)
        held = zip(meshes, shares(TINY.num_layers, spec.pp), strict=True)
        loaded = [weights.random(TINY, mesh, "float32", share=share) for mesh, share in held]
        instance = build.instance_of(spec, specs, TINY, loaded, meshes, config.stream_layers)
        programs = list(catalog(spec, specs, TINY, meshes, "float32", config.stream_layers))
        assert [told(program) for program in programs] == [told(program) for program in instance.programs()]
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for each in programs for leaf in jax.tree.leaves(each.args))
        kinds |= {program.kind for program in programs}
    assert kinds >= {"embed", "group", "head"}


def test_instances_that_exchange_nothing_have_no_program_for_it():
    config = EngineConfig(model="tiny", scheduler="colocated", max_model_len=256, prefill_chunk=64)
    specs = build.specs_of(config, TINY, traits_of(build.scheduler_of(config)), "gpu")
    meshes = make_meshes(TINY, jax.devices()[:1], 1)
    kinds = {program.kind for program in catalog(specs[0], specs, TINY, meshes, "bfloat16", 3)}
    assert kinds == {"embed", "group", "head"}


def test_weights_have_the_dtype_that_is_asked_for_and_norms_stay_float32():
    config = EngineConfig(model="tiny", max_model_len=256, prefill_chunk=64)
    specs = build.specs_of(config, TINY, traits_of(build.scheduler_of(config)), "gpu")
    meshes = make_meshes(TINY, jax.devices()[:1], 1)
    programs = catalog(specs[0], specs, TINY, meshes, "bfloat16", 3)
    group = next(program for program in programs if program.kind == "group")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(group.args[0]) if leaf.ndim > 1} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(group.args[0]) if leaf.ndim == 1} == {"float32"}
