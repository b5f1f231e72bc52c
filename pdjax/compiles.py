"""Counts XLA compilations of this process, to prove that none happens while serving."""

import threading

import jax

_lock = threading.Lock()
_count = 0
_seconds = 0.0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count, _seconds
    if event == "/jax/core/compile/backend_compile_duration":
        with _lock:
            _count += 1
            _seconds += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiled() -> tuple[int, float]:
    """Programs handed to XLA since this module was imported, and the seconds that took (cache hits included)."""
    with _lock:
        return _count, _seconds
