"""One Ray cluster for all tests of this folder: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from xmcray.ray_adapter.session import start_ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A quiet local cluster of four logical CPUs, which may be more than the machine has."""
    ray.shutdown()  # a test of another folder may have left a cluster of another size
    start_ray(num_cpus=4, object_store_bytes=256 << 20)
    yield
    ray.shutdown()
