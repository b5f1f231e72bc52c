"""The programs of an 8B model are lowered for other platforms on this machine, with the kernels that they get there;
nothing of its size is allocated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pdjax.models import attention
from pdjax.models.attention import gpu, tpu
from pdjax.models.kv import pool_shapes, unit_shape
from pdjax.models.llama import layer_graph
from pdjax.models.params import layer_params
from pdjax.models.plan import PassShape, pack_pass, unpack_pass
from pdjax.models.presets import PRESETS
from pdjax.models.programs import extract_program, insert_program, pack_insert, pass_programs
from pdjax.models.sharding import make_mesh
from tests.paged import forced

MODEL = PRESETS["llama3.1-8b"]
PAGE, PAGES = 64, 512
BF16 = jnp.bfloat16
BACKENDS = {"tpu": tpu.backend(), "cuda": gpu.backend(cudnn="left out")}
KERNEL = {"tpu": "tpu_custom_call", "cuda": "triton"}  # how text names one


@pytest.fixture(params=list(BACKENDS))
def platform(request):
    """Whose backend all meshes get."""
    with forced(lambda mesh: BACKENDS[request.param]):
        yield request.param


def mesh():
    return make_mesh(MODEL, jax.devices()[:1])


def group_text(model, platform, tokens, rows):
    """The lowered text of two layers."""
    shape = PassShape(tokens, rows, 4 if tokens else 0, 2048 // PAGE, PAGE, PAGES, rows + 1)
    _, step, _ = jax.eval_shape(
        lambda vector: unpack_pass(shape, vector, jnp.zeros(shape.slots, jnp.int32)), pack_pass(shape, [], None)
    )
    table, names = layer_params(model, 1, 0), layer_graph(model, 1)[2]
    layers = 2
    columns = tuple(
        (jax.ShapeDtypeStruct(table[name].shape, jnp.float32 if table[name].norm else BF16),) * layers for name in names
    )
    caches = tuple(pool_shapes(model, mesh(), PAGES, PAGE, BF16, layers))
    x = jax.ShapeDtypeStruct((tokens + rows, model.hidden_size), jnp.float32)
    group = pass_programs(model, mesh(), shape, True, BF16).group
    chip = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu") if platform == "cuda" else None
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=chip)):  # newer JAX asks which GPU a kernel is for
        return group.trace(columns, caches, x, step).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("tokens", "rows"), [(256, 0), (0, 16), (256, 16)])
def test_a_layer_group_of_an_8b_model_lowers_with_its_kernels_for(platform, tokens, rows):
    text = group_text(MODEL, platform, tokens, rows)
    assert "bf16" in text and KERNEL[platform] in text


def test_what_kernels_refuse_lowers_without_them_for(platform):
    model = dataclasses.replace(MODEL, head_dim=72)
    text = group_text(model, platform, 256, 16)
    assert KERNEL[platform] not in text and "optimization_barrier" not in text  # a form that only CPUs like


def test_units_go_in_and_out_of_its_pages_for(platform):
    one = mesh()
    caches = tuple(pool_shapes(MODEL, one, PAGES, PAGE, BF16, 2))
    unit = unit_shape(MODEL, one, 2, 256, BF16)
    insert = insert_program(one, PAGE, 256).trace(caches, pack_insert(PAGE, 256, 0, 0, ()), unit)
    extract = extract_program(one, 256).trace(caches, np.zeros(5, np.int32), np.int32(0))
    assert extract.out_info.shape == unit.shape
    for traced in (insert, extract):
        assert "while" not in traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_gpu_reads_no_page_where_it_writes_so_that_nothing_is_copied(platform):
    one = mesh()
    caches, unit = tuple(pool_shapes(MODEL, one, PAGES, PAGE, BF16, 2)), unit_shape(MODEL, one, 2, 256, BF16)
    insert = insert_program(one, PAGE, 256).trace(caches, pack_insert(PAGE, 256, 0, 0, ()), unit)
    lines = insert.lower(lowering_platforms=(platform,)).as_text().splitlines()
    pages = f"tensor<{MODEL.num_kv_heads * PAGES}x{PAGE}x{MODEL.head_dim}xbf16>"
    assert any("stablehlo.gather" in line and pages in line for line in lines) == (platform == "tpu")


@pytest.mark.parametrize(
    ("kind", "name"), [("cpu", "cpu"), ("tpu", "tpu"), ("gpu", "gpu"), ("cuda", "gpu"), ("rocm", "gpu")]
)
def test_the_devices_of_the_mesh_choose_the_backend(kind, name):
    device = dataclasses.make_dataclass("Device", ["platform"], frozen=True)(kind)
    mesh = dataclasses.make_dataclass("Mesh", ["devices"])(np.array([[device]]))
    assert attention.backend_for(mesh).name == name == attention.backend_on(kind).name
