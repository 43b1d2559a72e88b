from types import SimpleNamespace

from tests.train import small_runs as runs
from vit_jax.checkpoint.description import FORMAT_VERSION, stored_architecture
from vit_jax.train.overview import checkpoint_metadata


class Images(list):
    class_names = tuple("0123456789")


def test_a_run_describes_its_network_as_every_format_does():
    run = runs.build("input.test_resize=direct")
    metadata = checkpoint_metadata(run, SimpleNamespace(train=Images(range(160))))
    assert stored_architecture(metadata) == run.architecture
    assert metadata["format_version"] == FORMAT_VERSION
    assert (metadata["grid"], metadata["class_names"]) == (list(run.architecture.grid), [*"0123456789"])
    assert metadata["preprocessing"]["crop_fraction"] == 1.0
    assert (metadata["num_examples"], metadata["global_batch"]) == (160, 16)
