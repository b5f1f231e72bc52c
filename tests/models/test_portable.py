"""The programs of an 8B model are lowered for other platforms on this machine; nothing of its size is allocated."""

import jax
import jax.numpy as jnp
import pytest

from pdjax.models.kv import LayerKV
from pdjax.models.llama import layer_graph
from pdjax.models.params import layer_params
from pdjax.models.plan import PassShape, pack_pass, unpack_pass
from pdjax.models.presets import PRESETS
from pdjax.models.programs import pass_programs
from pdjax.models.sharding import make_mesh

MODEL = PRESETS["llama3.1-8b"]
PAGE, PAGES = 64, 512
BF16 = jnp.bfloat16


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("tokens", "rows"), [(256, 0), (0, 16), (256, 16)])
def test_a_layer_group_of_an_8b_model_lowers_for(platform, tokens, rows):
    mesh = make_mesh(MODEL, jax.devices()[:1])
    shape = PassShape(tokens, rows, 4 if tokens else 0, 2048 // PAGE, PAGE, PAGES, rows + 1)
    _, step, _ = jax.eval_shape(
        lambda vector: unpack_pass(shape, vector, jnp.zeros(shape.slots, jnp.int32)), pack_pass(shape, [], None)
    )
    table, names = layer_params(MODEL, 1, 0), layer_graph(MODEL, 1)[2]
    layers = 2
    columns = tuple(
        (jax.ShapeDtypeStruct(table[name].shape, jnp.float32 if table[name].norm else BF16),) * layers for name in names
    )
    K, H = MODEL.num_kv_heads, MODEL.head_dim
    caches = (LayerKV(*(jax.ShapeDtypeStruct((PAGES, K, *ends), BF16) for ends in ((H, PAGE), (PAGE, H)))),) * layers
    x = jax.ShapeDtypeStruct((tokens + rows, MODEL.hidden_size), jnp.float32)
    group = pass_programs(MODEL, mesh, shape, True, BF16).group
    lowered = group.trace(columns, caches, x, step).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    assert "bf16" in text and "optimization_barrier" not in text  # a form that only CPUs like
