"""Published specifications of GPUs, for planning a device that is not available; nothing is measured.

A device does not reach its specification. The shares that are assumed are named once, here, and
printed with a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray import config as configs
from xmcray.errors import ConfigError
from xmcray.planning.rates import Rates

PRODUCT_SHARE = 0.6
BANDWIDTH_SHARE = 0.8
RANDOM_SHARE = 0.4
# Of a GPU's share of a server: some 16 cores.
HOST_BYTES = 128 << 30
HOST_FLOP_S = 1e12
HOST_DISK_BYTES_S = 1e9
HOST_ENTRY_S = 2.5e-7  # a token or label is read, sorted and compared some five times
HOST_MERGE_S = 5e-8  # of a found label; a core of a Xeon takes 31 to 46 ns (planning/probe.py)
PROCESS_BYTES = (1 << 30, 3 << 29)


@dataclass(frozen=True)
class Spec:
    """A data sheet, without sparsity.

    Attributes:
        memory_bytes: as sold.
        bandwidth: bytes per second of the device's memory.
        half: flop/s in bfloat16 (float16 if there is none) on tensor cores.
        tf32: flop/s of float32 products whose factors are rounded to TF32 on tensor cores; as
            `single` if there are none for it.
        single: flop/s in float32 without tensor cores.
        link: bytes per second to other devices of the machine, in one direction.
    """

    memory_bytes: int
    bandwidth: float
    half: float
    tf32: float
    single: float
    link: float


SPECS = {
    "v100-32gb": Spec(32 << 30, 0.900e12, 125e12, 15.7e12, 15.7e12, 150e9),
    "a100-40gb": Spec(40 << 30, 1.555e12, 312e12, 156e12, 19.5e12, 300e9),
    "a100-80gb": Spec(80 << 30, 2.039e12, 312e12, 156e12, 19.5e12, 300e9),
    "h100-80gb": Spec(80 << 30, 3.350e12, 989e12, 494e12, 67e12, 450e9),
    "h200-141gb": Spec(141 * 10**9, 4.800e12, 989e12, 494e12, 67e12, 450e9),
    "l4-24gb": Spec(24 << 30, 0.300e12, 121e12, 60e12, 30.3e12, 32e9),
    "l40s-48gb": Spec(48 << 30, 0.864e12, 362e12, 183e12, 91.6e12, 32e9),
}


def device_rates(name: str, matmul: str = "float32") -> Rates:
    """Rates of a device by its specification.

    Args:
        name: such as "a100-80gb".
        matmul: as `optim.matmul`: with "bf16", torch rounds the factors of float32 products to TF32
            on a GPU.

    Raises:
        ConfigError: an unknown device (names the nearest).
    """
    if name not in SPECS:
        raise ConfigError(configs.unknown("device", name, ["cpu", *SPECS]))
    spec = SPECS[name]
    ordered_bytes_s = BANDWIDTH_SHARE * spec.bandwidth
    flop_s = spec.tf32 if matmul == "bf16" else spec.single
    return Rates(
        device=name,
        source="published specs",
        memory_bytes=spec.memory_bytes,
        host_bytes=HOST_BYTES,
        threads=1,
        process_bytes=PROCESS_BYTES,
        product_flop_s=PRODUCT_SHARE * flop_s,
        half_flop_s=PRODUCT_SHARE * spec.half,
        pass_bytes_s=ordered_bytes_s,
        row_bytes_s=RANDOM_SHARE * spec.bandwidth,
        slow_s=0.0,  # bound by memory
        sort_s=64 / ordered_bytes_s,
        call_s=8e-6,
        host_entry_s=HOST_ENTRY_S,
        merge_s=HOST_MERGE_S,
        exchange_s=30e-6,
        exchange_bytes_s=BANDWIDTH_SHARE * spec.link,
        disk_bytes_s=HOST_DISK_BYTES_S,
        build_flop_s=HOST_FLOP_S,
        search_flop_s=HOST_FLOP_S / 2,
        on_gpu=True,
    )


def assumptions() -> list[str]:
    """The assumed shares, in words."""
    return [
        f"device rates are published specs, of which products reach {PRODUCT_SHARE:.0%}, memory"
        f" {BANDWIDTH_SHARE:.0%} in order and {RANDOM_SHARE:.0%} row by row",
        f"a GPU's share of its server: {HOST_BYTES >> 30} GiB of memory, {HOST_FLOP_S / 1e12:g}"
        f" Tflop/s for its index, {HOST_DISK_BYTES_S / 1e9:g} GB/s of storage; indexes are built"
        " there",
        f"the host spends {HOST_ENTRY_S * 1e9:g} ns on each token and label of a batch, and"
        f" {HOST_MERGE_S * 1e9:g} ns on each label that an index shard has found",
    ]
