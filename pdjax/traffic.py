"""What arrived lately: rates and lengths as moving averages. Enters: arrivals and ends, told by the controller. Leaves:
numbers that policies look at. Times are those of the events, so that a replay sees the same.
"""

import dataclasses

WEIGHT = 0.05  # of the newest request in an average: about the last twenty count


@dataclasses.dataclass(slots=True)
class Traffic:
    """Moving averages over requests.

    Attributes:
        arrivals: requests seen.
        prompt_tokens: mean length of a prompt; 0 before the first.
        output_tokens: mean length of an answer, counted as soon as it is known: when it is complete, or when its
            request comes if no stop can end it before its last token. 0 before the first.
    """

    arrivals: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    _answers: int = 0
    _gap_s: float = 0.0
    _last_s: float = 0.0

    def arrived(self, now: float, prompt_tokens: int, output_tokens: int | None) -> None:
        """A request came. `output_tokens`: of its answer; None: nobody knows yet."""
        if self.arrivals:
            self._gap_s = _mixed(self._gap_s, now - self._last_s, self.arrivals)
        self.prompt_tokens = _mixed(self.prompt_tokens, prompt_tokens, self.arrivals + 1)
        self._last_s = now
        self.arrivals += 1
        if output_tokens is not None:
            self._answer(output_tokens)

    def finished(self, output_tokens: int) -> None:
        """An answer is complete that nobody knew the length of."""
        self._answer(output_tokens)

    def _answer(self, tokens: int) -> None:
        self._answers += 1
        self.output_tokens = _mixed(self.output_tokens, tokens, self._answers)

    def rate(self, now: float) -> float:
        """Requests per second; a long silence counts as a gap. 0 before the second request."""
        gap_s = max(self._gap_s, WEIGHT * (now - self._last_s))
        return 1 / gap_s if self.arrivals > 1 and gap_s > 0 else 0.0


def _mixed(mean: float, new: float, count: int) -> float:
    """The mean of all as long as there are few, then a moving one."""
    return mean + max(WEIGHT, 1 / count) * (new - mean)
