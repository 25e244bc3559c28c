"""Published specifications of GPUs, for planning a device that is not at hand. Nothing here was measured.

A device does not reach its specification. The shares that are assumed are named once, here, and printed with a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from xmcray import config as configs
from xmcray.errors import ConfigError
from xmcray.planning.rates import Rates

PRODUCT_SHARE, TRANSFORMER_SHARE, BANDWIDTH_SHARE, RANDOM_SHARE = 0.6, 0.4, 0.8, 0.4
CALL_S, EXCHANGE_S = 8e-6, 30e-6
HOST_FLOP_S, HOST_DISK_BYTES_S, HOST_SORT_S = (
    1e12,
    1e9,
    5e-8,
)  # of a GPU's share of a server: some 16 cores
HOST_BYTES = 128 << 30
PROCESS_BYTES = (1 << 30, 3 << 29)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A data sheet, without sparsity.

    Attributes:
        memory_bytes: as sold. bandwidth: bytes per second of the device's memory. half, single: flop/s in bfloat16
            (float16 where there is none) on tensor cores, and in float32 without them.
        link: bytes per second to other devices of the machine, in one direction.
    """

    memory_bytes: int
    bandwidth: float
    half: float
    single: float
    link: float


SPECS = {
    "v100-32gb": Spec(
        memory_bytes=32 << 30, bandwidth=0.900e12, half=125e12, single=15.7e12, link=150e9
    ),
    "a100-40gb": Spec(
        memory_bytes=40 << 30, bandwidth=1.555e12, half=312e12, single=19.5e12, link=300e9
    ),
    "a100-80gb": Spec(
        memory_bytes=80 << 30, bandwidth=2.039e12, half=312e12, single=19.5e12, link=300e9
    ),
    "h100-80gb": Spec(
        memory_bytes=80 << 30, bandwidth=3.350e12, half=989e12, single=67e12, link=450e9
    ),
    "h200-141gb": Spec(
        memory_bytes=141 * 10**9, bandwidth=4.800e12, half=989e12, single=67e12, link=450e9
    ),
    "l4-24gb": Spec(
        memory_bytes=24 << 30, bandwidth=0.300e12, half=121e12, single=30.3e12, link=32e9
    ),
    "l40s-48gb": Spec(
        memory_bytes=48 << 30, bandwidth=0.864e12, half=362e12, single=91.6e12, link=32e9
    ),
}


def device_rates(name: str, matmul: str = "float32") -> Rates:
    """Rates of a device by its specification.

    Args:
        matmul: as `optim.matmul`: "bf16" lets products of float32 matrices use the tensor cores.
    Raises:
        ConfigError: an unknown device (names the nearest).
    """
    if name not in SPECS:
        raise ConfigError(configs.unknown("device", name, ["cpu", *SPECS]))
    spec = SPECS[name]
    moved = BANDWIDTH_SHARE * spec.bandwidth
    rows = {str(width): ((1.0, width / (RANDOM_SHARE * spec.bandwidth)),) for width in (256, 1024)}
    return Rates(
        device=name,
        source="published specs",
        memory_bytes=spec.memory_bytes,
        host_bytes=HOST_BYTES,
        threads=1,
        process_bytes=PROCESS_BYTES,
        products=((1.0, PRODUCT_SHARE * (spec.half if matmul == "bf16" else spec.single)),),
        passes=((1.0, moved),),
        row_reads={width: tuple((x, y / 2) for x, y in points) for width, points in rows.items()},
        row_writes=rows,
        exp_s=8 / moved,
        softplus_s=8 / moved,
        top_s=32 / moved,
        sort_s=HOST_SORT_S,
        random_s=1e-9,
        call_s=CALL_S,
        exchange_s=EXCHANGE_S,
        exchange_bytes_s=BANDWIDTH_SHARE * spec.link,
        disk_bytes_s=HOST_DISK_BYTES_S,
        build_flop_s=HOST_FLOP_S,
        search_flop_s=HOST_FLOP_S / 2,
        transformer_flop_s=TRANSFORMER_SHARE * spec.half,
        on_gpu=True,
    )


def assumptions() -> list[str]:
    """The assumed shares, in words."""
    return [
        f"device rates are published specs, of which products reach {PRODUCT_SHARE:.0%}, a transformer"
        f" {TRANSFORMER_SHARE:.0%}, memory {BANDWIDTH_SHARE:.0%} in order and {RANDOM_SHARE:.0%} row by row",
        f"a GPU's share of its server: {HOST_BYTES >> 30} GiB of memory, {HOST_FLOP_S / 1e12:g} Tflop/s for its index,"
        f" {HOST_DISK_BYTES_S / 1e9:g} GB/s of storage; indexes are built there",
    ]
