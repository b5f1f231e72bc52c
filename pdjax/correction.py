"""Corrects the latency model of one instance while it serves. Enters: what passes and whole transfers took, told by the
controller. Leaves: the model that policies see.

Each kind of pass, and transfers, have a factor: the moving average of log(actual / predicted by the model that was
measured). One observation counts by at most LIMIT, so a single pause changes nothing (WEIGHT * LIMIT < QUANTUM), while
a machine that has become twice as slow is followed within fifty passes. The model that is shown changes only when a
factor has moved by more than QUANTUM from the one shown: results are cached by model
(`pdjax.latency.saturating_tokens`).

Times come from events alone: who replays them gets the same models.
"""

import dataclasses
import math
from typing import cast

from pdjax.latency import KINDS, Latency, LatencyModel, Load, kind
from pdjax.messages import InstanceSpec

WEIGHT = 0.1  # of the newest observation: about the last ten count
LIMIT = math.log(1.2)  # of its distance from the average, either way
QUANTUM = math.log(1.02)
_TRANSFER = len(KINDS)


class Correction:
    """The measured model of an instance and its factors.

    Attributes:
        model: the corrected one.
    """

    def __init__(self, measured: Latency) -> None:
        self.model: Latency = measured
        self._measured = measured
        self._means = [0.0] * (len(KINDS) + 1)  # logarithms
        self._shown = [0.0] * (len(KINDS) + 1)

    def passed(self, spec: InstanceSpec, load: Load, seconds: float) -> None:
        """A pass with this load took so long."""
        self._observe(kind(load), seconds, self._measured.iteration_s(spec, load))

    def moved(self, nbytes: int, seconds: float) -> None:
        """A transfer that overlapped with no computation of its own took so long."""
        self._observe(_TRANSFER, seconds, self._measured.transfer_s(nbytes))

    def _observe(self, which: int, actual_s: float, predicted_s: float) -> None:
        if actual_s <= 0 or predicted_s <= 0:
            return  # says nothing about their ratio
        distance = math.log(actual_s / predicted_s) - self._means[which]
        self._means[which] += WEIGHT * min(max(distance, -LIMIT), LIMIT)
        if abs(self._means[which] - self._shown[which]) > QUANTUM:
            self._shown[which] = self._means[which]
            self.model = self._corrected()

    def _corrected(self) -> LatencyModel:
        measured = self._measured
        if not isinstance(measured, LatencyModel):
            raise ValueError(f"latency is a {type(measured).__name__}; allowed with correct: a LatencyModel")
        *passes, transfer = map(math.exp, self._shown)
        scale = tuple(old * factor for old, factor in zip(measured.scale, passes, strict=True))
        return dataclasses.replace(
            measured,
            scale=cast(tuple[float, float, float], scale),
            transfer_alpha_s=measured.transfer_alpha_s * transfer,
            transfer_bytes_per_s=measured.transfer_bytes_per_s / transfer,
        )
