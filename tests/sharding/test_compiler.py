import jax

from tests.sharding.test_mesh import slices
from vit_jax.sharding import build_mesh, compiler_options


def test_tpus_gather_for_fsdp_instead_of_looping():
    options = compiler_options(build_mesh(slices(1)))
    assert options == {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def test_other_compilers_know_no_such_option():
    assert compiler_options(build_mesh(jax.devices())) is None
