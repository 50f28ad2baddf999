"""GPUs by name: what their makers' data sheets say. Memory is what the driver reports, in GiB."""

from __future__ import annotations

from dataclasses import dataclass

from lemma.core.errors import UserError, nearest


@dataclass(frozen=True)
class Gpu:
    """Rates per second: dense bf16 FLOP, bytes to its own memory, bytes to another GPU of the machine in one direction.

    `device` is a part of the name that the driver gives it.
    """

    device: str
    memory_gib: float
    matrix_rate: float
    memory_rate: float
    link_rate: float


# Where the part of one name contains another's, it stands first. NVLink: half of its total; PCIe 4.0 x16: 32 GB/s.
GPUS = {
    "h200-141": Gpu("H200", 140.4, 989e12, 4800e9, 450e9),
    "h100-80": Gpu("H100", 79.6, 989e12, 3350e9, 450e9),
    "b200-180": Gpu("B200", 179.1, 2250e12, 8000e9, 900e9),
    "a100-80": Gpu("A100", 80.0, 312e12, 2039e9, 300e9),
    "a100-40": Gpu("A100", 40.0, 312e12, 1555e9, 300e9),
    "l40s-48": Gpu("L40S", 45.0, 362e12, 864e9, 32e9),
    "l40-48": Gpu("L40", 45.0, 181e12, 864e9, 32e9),
    "l4-24": Gpu("L4", 22.5, 121e12, 300e9, 32e9),
    "rtx4090-24": Gpu("RTX 4090", 24.0, 165e12, 1008e9, 32e9),
    "a10-24": Gpu("A10", 22.5, 125e12, 600e9, 32e9),
}
# Between machines, in one direction: 400 Gbit/s for each GPU, as usual where eight of them share a machine.
NETWORK_RATE = 50e9
GPUS_A_MACHINE = 8


def find_gpu(name: str) -> Gpu:
    """A GPU by its name here, such as h100-80; `h100` will do where there is only one."""
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    close = [key for key in GPUS if key == wanted or key.startswith(f"{wanted}-")]
    if len(close) != 1:
        raise UserError(f"no GPU is called '{name}' here", fix=nearest(wanted, GPUS))
    return GPUS[close[0]]
