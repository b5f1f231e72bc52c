"""Whether an instance fits: by arithmetic, and with what a compiler said."""

import dataclasses

import jax
import pytest

from pdjax import build, hardware
from pdjax.aot import memory
from pdjax.aot.compiled import Compiled, Memory, bytes_on_device
from pdjax.catalogue import Program
from pdjax.config import EngineConfig
from pdjax.messages import Role
from pdjax.models import weights
from pdjax.models.kv import pool_shapes
from pdjax.models.presets import PRESETS
from pdjax.models.sharding import make_meshes, shares
from pdjax.schedulers.base import Traits
from pdjax.testing import spec

TINY = PRESETS["tiny"]
MODEL = PRESETS["llama3.1-8b"]
CHIP = dataclasses.replace(hardware.get("h100"), name="abacus", memory_bytes=1000.0)
SMALL = spec(0, Role.DECODE, max_rows=2, max_chunk=16, page_size=4, num_pages=31, max_model_len=8)


@pytest.mark.parametrize(("tp", "pp", "dtype"), [(1, 1, "float32"), (2, 2, "bfloat16"), (8, 1, "bfloat16")])
def test_weights_and_pages_of_a_chip_are_those_of_its_shards(tp, pp, dtype):
    config = EngineConfig(model="tiny", dtype=dtype, decode_tp=tp, decode_pp=pp, max_model_len=256)
    one = build.specs_of(config, TINY, Traits(), "gpu")[-1]
    held = zip(make_meshes(TINY, jax.devices()[: tp * pp], pp), shares(TINY.num_layers, pp), strict=True)
    want = []
    for mesh, share in held:
        arrays = weights.shapes(TINY, mesh, dtype, share)
        pool = pool_shapes(TINY, mesh, 1, one.page_size, dtype, len(share.layers))
        sizes = [sum(map(bytes_on_device, jax.tree.leaves(tree))) for tree in ((arrays.outer, arrays.layers), pool)]
        want.append(memory.Need(*sizes))
    assert memory.needs(one, TINY, dtype) == tuple(want)


def test_what_is_left_beside_weights_and_temporaries_is_for_pages():
    found = memory.fit(SMALL, TINY, [memory.Need(weights=300, page=20, extra=100)], CHIP)
    assert (found.total, found.fits, found.pages) == (300 + 31 * 20 + 100, False, 30)
    assert (found.batch, found.context) == (29 // 2, 29 // 2 * 4)  # two pages each, or two rows


def test_the_fullest_stage_says_how_many_pages_there_are():
    need = [memory.Need(weights=100, page=20), memory.Need(weights=100, page=40)]
    found = memory.fit(SMALL, TINY, need, CHIP)
    assert (found.stage, found.pages, found.pool) == (1, 22, 31 * 40)


def test_too_many_pages_are_refused_with_the_numbers_and_what_would_do():
    config = EngineConfig(model="llama3.1-8b", decode_tp=4, decode_num_pages=9000, max_model_len=4096)
    one = build.specs_of(config, MODEL, Traits(), "tpu")[-1]
    chip = hardware.get("tpu-v5e")
    found = memory.fit(one, MODEL, memory.needs(one, MODEL, "bfloat16"), chip)
    # 8.03e9 weights of 2 bytes in four parts; 131072 bytes of KV a token.
    assert found.need.weights == pytest.approx(2 * 8.03e9 / 4, rel=1e-3) and found.need.page == 131072 * 64 // 4
    have = r"3\.74 GiB of weights, 17\.58 GiB of pages on a chip of 16 GiB \(tpu-v5e\)"
    with pytest.raises(ValueError, match=rf"^decode_num_pages is 9000: {have}; allowed: at most 627\d$"):
        memory.check(one, found, chip)


def test_weights_that_do_not_fit_ask_for_more_chips():
    config = EngineConfig(model="llama3.1-8b", max_model_len=16384)
    one = build.specs_of(config, MODEL, Traits(), "tpu")[0]
    found = memory.fit(one, MODEL, memory.needs(one, MODEL, "bfloat16"), hardware.get("tpu-v5e"))
    with pytest.raises(
        ValueError, match=r"prefill_tp is 1 and prefill_pp 1: 14\.96 GiB of weights.*allowed: chips enough"
    ):
        memory.check(one, found, hardware.get("tpu-v5e"))


def answered(kind, args, alias=0, donated=0, **sizes):
    program = Program(f"{kind} of 1 4+0", Role.DECODE, 0, None, args)
    return program, Compiled(program.name, 1.0, Memory(alias=alias, **sizes), donated, bool(alias) or None)


def test_temporaries_are_what_the_hungriest_program_needs_beside_weights_and_pages():
    ten, four = (jax.ShapeDtypeStruct((n,), "int8") for n in (10, 4))
    embed = answered("embed", (ten, four, four), argument=18, output=7, temp=5)
    group = answered("group", (ten, ten, four), argument=24, output=14, alias=10, donated=10, temp=9)
    (need,) = memory.measured([memory.Need(weights=100, page=20)], [embed, group])
    assert need == memory.Need(weights=100, page=20, extra=18 + 7 + 5 - 10)
    (need,) = memory.measured([memory.Need(weights=100, page=20)], [group])
    assert need.extra == (24 + 14 - 10 + 9) - 20


def test_tiles_that_a_page_does_not_fill_make_it_larger():
    ten = jax.ShapeDtypeStruct((10,), "int8")
    group = answered("group", (ten, ten), argument=30, output=20, alias=20, donated=10, temp=0)
    assert memory.measured([memory.Need(weights=100, page=20)], [group]) == (memory.Need(100, 40, 0),)


def test_a_program_that_was_refused_needs_nothing():
    refused = Program("group of 1 4+0", Role.DECODE, 0, None, ()), Compiled("group", 1.0, error="no")
    assert memory.measured([memory.Need(1, 2)], [refused]) == (memory.Need(1, 2),)
