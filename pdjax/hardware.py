"""What datasheets say of accelerators, by name. Enters: a name; leaves: a `Hardware` for rooflines and for what a
cluster costs. Called by `pdjax.roofline`, by the planner and by users, who put their own prices in:

    mine = dataclasses.replace(hardware.get("h100"), price_per_hour=2.5)

Prices are of one device with its share of the machine. Those of A100 and H100 are what the Splitwise paper compares by
(a CoreWeave machine of eight: 17.6 and 38 $/h, 2023); the others are list prices of another day, so a ranking by
dollars across these two groups needs your own.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """One device.

    Attributes:
        flops: dense bf16 FLOP/s.
        flops_8bit: the same of 8-bit weights: FP8, on TPU INT8. Where FP8 is missing, they are widened: `flops`.
        memory_bytes, memory_bytes_per_s: of its own memory (HBM or GDDR).
        link_bytes_per_s: to the other devices of its machine or slice, one direction, all links together.
        nic_bytes_per_s: its share of what the machine sends to others, one direction.
        price_per_hour: dollars.
        watts: at most.
    """

    name: str
    flops: float
    flops_8bit: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    nic_bytes_per_s: float
    price_per_hour: float
    watts: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} of {self.name!r} is {value!r}; allowed: a finite number > 0")


_GB = 2.0**30  # datasheets say GB, drivers report GiB
_GBIT = 1e9 / 8

_ALL = {
    entry.name: entry
    for entry in (
        # NVIDIA A100 80GB SXM datasheet: 312 TF, 2039 GB/s, NVLink 600 GB/s both ways, 400 W. DGX A100: eight HDR
        # adapters, 200 Gb/s each. No FP8.
        Hardware("a100-80g", 312e12, 312e12, 80 * _GB, 2039e9, 300e9, 200 * _GBIT, 17.6 / 8, 400),
        # NVIDIA H100 SXM datasheet: 989 TF, FP8 1979 TF, 3.35 TB/s, NVLink 900 GB/s both ways, 700 W. DGX H100: eight
        # NDR adapters, 400 Gb/s each.
        Hardware("h100", 989e12, 1979e12, 80 * _GB, 3.35e12, 450e9, 400 * _GBIT, 38 / 8, 700),
        # The same with half the power for the GPU, which is 70 % for the machine (Splitwise, table V): passes of
        # prompts take 1.3 times as long, steps are as fast.
        Hardware("h100-capped", 989e12 / 1.3, 1979e12 / 1.3, 80 * _GB, 3.35e12, 450e9, 400 * _GBIT, 38 / 8, 0.7 * 700),
        # NVIDIA H200 SXM datasheet: as H100, with 141 GB at 4.8 TB/s. CoreWeave, early 2026: 50.44 $/h for eight.
        Hardware("h200", 989e12, 1979e12, 141 * _GB, 4.8e12, 450e9, 400 * _GBIT, 50.44 / 8, 700),
        # NVIDIA L40 and L40S datasheets: 181 and 362 TF, FP8 362 and 733 TF, 48 GB (of which ECC takes 3), 864 GB/s,
        # PCIe 4 x16 and no NVLink, 300 and 350 W. CoreWeave, early 2026: 18 $/h for eight L40S. Assumed: 10 $/h for
        # eight L40, 100 Gb/s per device.
        Hardware("l40", 181e12, 362e12, 45 * _GB, 864e9, 32e9, 100 * _GBIT, 10 / 8, 300),
        Hardware("l40s", 362e12, 733e12, 45 * _GB, 864e9, 32e9, 100 * _GBIT, 18 / 8, 350),
        # Google Cloud's pages on TPU v5e, v5p, v6e: bf16 and INT8 (v5p: FP8 at 459 TF), memory, ICI 400, 1200 and 800
        # GB/s both ways, network 2 x 100 Gb/s for eight chips and 50 Gb/s a chip. Assumed: v6e's network, prices (near
        # the on-demand ones), and power, which is not published.
        Hardware("tpu-v5e", 197e12, 393e12, 16 * _GB, 819e9, 200e9, 25 * _GBIT, 1.20, 200),
        Hardware("tpu-v5p", 459e12, 459e12, 95 * _GB, 2765e9, 600e9, 50 * _GBIT, 4.20, 450),
        Hardware("tpu-v6e", 918e12, 1836e12, 32 * _GB, 1638e9, 400e9, 100 * _GBIT, 2.70, 300),
    )
}


def names() -> tuple[str, ...]:
    """All that `get` knows."""
    return tuple(_ALL)


def get(name: str) -> Hardware:
    """By name, such as "h100". ValueError with the names there are."""
    if name not in _ALL:
        raise ValueError(f"hardware is {name!r}; allowed: {', '.join(_ALL)}")
    return _ALL[name]
