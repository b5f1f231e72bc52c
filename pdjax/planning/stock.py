"""The devices that a cluster can be made of, and what the model takes on them: names enter, `Stock`s leave. Called by
`pdjax.planning.planner`; users make stocks of their own. The search asks a stock for a `Pool` and does not know where
its times come from:

    a published measurement     "opt-66b", or "opt-66b/vllm" where several engines were measured (`pdjax.published`)
    a roofline                  a model known by name, on a device that it was not measured on (`pdjax.roofline`)
    a profile of our own        a file (`pdjax.profile`)
"""

import dataclasses
from collections.abc import Callable, Sequence

from pdjax import hardware, profile, published, roofline
from pdjax.fleet import Pool
from pdjax.hardware import Hardware
from pdjax.messages import Role
from pdjax.models.config import ModelConfig
from pdjax.models.presets import PRESETS

Source = Callable[[Role, int, int], Pool | None]
"""(role, tp, pp) -> one instance; None where the model does not fit, or nothing is known."""

NODE = 8  # devices


@dataclasses.dataclass(frozen=True)
class Stock:
    """Devices of one kind.

    Attributes:
        name: of the hardware.
        devices: how many there are.
        source: instances of one, of `tp` devices in each of `pp` stages.
        link_bytes_per_s: of a device to the others of its node.
        nic_bytes_per_s: of a device to other nodes.
        price_per_hour: of a device, dollars.
        node_devices: of a node; a stage lies in one.
        known_by: where the times come from and what they are off by, for the reader of a plan.
    """

    name: str
    devices: int
    source: Source
    link_bytes_per_s: float
    nic_bytes_per_s: float
    price_per_hour: float
    node_devices: int = NODE
    known_by: str = ""

    def __post_init__(self) -> None:
        for name in ("devices", "node_devices", "link_bytes_per_s", "nic_bytes_per_s", "price_per_hour"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} of {self.name!r} is {value!r}; allowed: a number > 0")


def stocks(
    model: str,
    devices: str,
    *,
    profile_path: str = "",
    node_devices: int = NODE,
    node_bytes_per_s: float | None = None,
) -> tuple[Stock, ...]:
    """Stocks of devices that are known by name.

    Args:
        model: a name of `pdjax.published`, with an engine behind a slash if wanted, or of a model whose shapes are
            known.
        devices: "a100-80g:16", or several with commas: "h100:8,a100-80g:16".
        profile_path: a profile of the model on these devices, which are then of one kind; "": none.
        node_devices: of a node.
        node_bytes_per_s: what a node sends to others; None: what the datasheet says.

    Raises:
        ValueError: an unknown name, or devices that are no number.
    """
    found = []
    for text in devices.split(","):
        name, _, number = text.strip().rpartition(":")
        if not number.isdecimal() or not int(number):
            raise ValueError(f"hardware is {devices!r}; allowed: NAME:DEVICES, several with commas")
        device = hardware.get(name)
        source, known_by = _profiled(profile_path) if profile_path else _known(model, device)
        nic = device.nic_bytes_per_s if node_bytes_per_s is None else node_bytes_per_s / node_devices
        found.append(
            Stock(
                name,
                int(number),
                source,
                device.link_bytes_per_s,
                nic,
                device.price_per_hour,
                node_devices,
                known_by,
            )
        )
    if len({stock.name for stock in found}) < len(found) or (profile_path and len(found) > 1):
        raise ValueError(f"hardware is {devices!r}; allowed: each name once, and one only with a profile")
    return tuple(found)


def _known(model: str, device: Hardware) -> tuple[Source, str]:
    name, _, engine = model.partition("/")
    entries = [published.get(entry) for entry in published.names()]
    entries = [entry for entry in entries if entry.model == name and engine in ("", entry.engine)]
    if name in PRESETS and not engine:
        return _roofline(PRESETS[name], device), (
            f"{device.name}: roofline from the datasheet; passes are off by {roofline.EXPECTED_ERROR:.0%} on average "
            "where they were measured"
        )
    if not entries:
        known = ", ".join(sorted({*PRESETS, *(published.get(entry).model for entry in published.names())}))
        raise ValueError(f"model is {model!r}; allowed for a plan: {known}, or one of these and /ENGINE")
    engine = entries[0].engine
    sizes = {
        (entry.devices // entry.pp, entry.pp): entry
        for entry in entries
        if entry.engine == engine and entry.hardware == device.name
    }
    if not sizes:
        there = ", ".join(sorted({entry.hardware for entry in entries}))
        raise ValueError(f"hardware is {device.name!r}; allowed for {model}, which was measured there: {there}")
    return _published(sizes), f"{device.name}: published measurements of {name} with {engine}"


def _published(sizes: dict[tuple[int, int], published.Published]) -> Source:
    def source(role: Role, tp: int, pp: int) -> Pool | None:
        return sizes[tp, pp].pool(role) if (tp, pp) in sizes else None

    return source


def _roofline(config: ModelConfig, device: Hardware) -> Source:
    def source(role: Role, tp: int, pp: int) -> Pool | None:
        try:
            return roofline.pool(role, 1, config, device, tp, pp)
        except ValueError:  # it does not fit, or does not divide
            return None

    return source


def _profiled(path: str) -> tuple[Source, str]:
    known = profile.load(path)

    def source(role: Role, tp: int, pp: int) -> Pool | None:
        for kind in known.kinds:
            spec = kind.spec
            if spec.pp == pp and spec.devices == tp * pp and spec.max_rows and spec.max_chunk:
                return Pool(
                    role,
                    1,
                    known.latency(spec),
                    kv_tokens=(spec.num_pages - 1) * spec.page_size,
                    kv_bytes_per_token=spec.kv_bytes_per_token,
                    devices=spec.devices,
                    pp=pp,
                    max_rows=spec.max_rows,
                    max_chunk=spec.max_chunk,
                    max_chunks=spec.max_chunks,
                    max_model_len=spec.max_model_len,
                    page_size=spec.page_size,
                )
        return None

    return source, f"{known.origin}; passes of sizes between are not padded here"


def names(stocks: Sequence[Stock]) -> str:
    """In words, such as "16 a100-80g"."""
    return " + ".join(f"{stock.devices} {stock.name}" for stock in stocks)
