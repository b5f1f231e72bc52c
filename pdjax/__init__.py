"""pdjax: LLaMA serving in JAX with prefill and decode on separate device meshes.

    import pdjax

    with pdjax.Engine(pdjax.EngineConfig(model="smollm2-135m", scheduler="disaggregated")) as engine:
        for result in engine.generate(["The capital of France is"], pdjax.SamplingParams(temperature=0, max_tokens=16)):
            print(result.text, result.placement)

Names are loaded when first used: importing pdjax starts neither JAX nor MPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdjax.build import Warmup as Warmup
    from pdjax.config import EngineConfig as EngineConfig
    from pdjax.engine import Engine as Engine
    from pdjax.handle import Delta as Delta
    from pdjax.handle import Handle as Handle
    from pdjax.handle import Placement as Placement
    from pdjax.handle import Result as Result
    from pdjax.planning.planner import plan as plan
    from pdjax.report import Report as Report
    from pdjax.request import SLO as SLO
    from pdjax.request import SamplingParams as SamplingParams
    from pdjax.request import SLOClass as SLOClass
    from pdjax.workload import Workload as Workload

__version__ = "0.1.0"

_HOMES = {
    "Delta": "pdjax.handle",
    "Engine": "pdjax.engine",
    "EngineConfig": "pdjax.config",
    "Handle": "pdjax.handle",
    "Placement": "pdjax.handle",
    "Report": "pdjax.report",
    "Result": "pdjax.handle",
    "SLO": "pdjax.request",
    "SLOClass": "pdjax.request",
    "SamplingParams": "pdjax.request",
    "Warmup": "pdjax.build",
    "Workload": "pdjax.workload",
    "plan": "pdjax.planning.planner",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
