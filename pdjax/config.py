"""The one frozen configuration of an engine. Launchers build it from flags; scripts write it by hand."""

import dataclasses
from typing import Any

from pdjax.checks import check_whole, is_number

DTYPES = ("auto", "float32", "bfloat16")
TRANSFERS = ("device_put", "jax_transfer")
MAX_TIMEOUT_S = 1e6  # more than that no lock can wait for everywhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from.

    Attributes:
        model: preset name, Hugging Face folder, GGUF file or orbax folder.
        dtype: of the weights: "float32", "bfloat16", or "auto", which is float32 on CPU (many have no bfloat16
            arithmetic) and bfloat16 elsewhere. KV is float32 on CPU, else the dtype of the weights.
        scheduler: "colocated", "colocated_chunked", "disaggregated", "dynamic", or an object with the methods of
            `pdjax.schedulers.Scheduler`.
        prefill_instances, decode_instances: how many of each.
        prefill_pp, decode_pp: pipeline stages of one instance; each holds a run of the layers.
        prefill_tp, decode_tp: devices of one stage.
        prefill_chunk, decode_chunk: most prompt tokens in one iteration of such an instance; 0: chosen from the
            context length.
        prefill_max_batch: most prompts in one iteration of an instance.
        decode_max_batch: most decode rows of an instance.
        prefill_num_pages, decode_num_pages: KV pages of one instance; 0: room for `decode_max_batch` requests of
            1024 tokens (or of the context length, where that is less).
        page_size: tokens in a page.
        max_model_len: most tokens of one request; 0: the model's context, at most 8192.
        transfer: how KV moves between instances: "device_put" from device to device, or "jax_transfer" by
            `jax.experimental.transfer`, through the host and sockets.
        verify_kv: compare the KV of both sides, read back from their pages, at the end of every transfer; a
            difference fails it. For debugging: it copies pools to the host.
        stream_layers: layers per streamed group; 0 sends a prompt's KV whole after its prefill.
        transfer_timeout_s: a transfer that takes longer is given up, and the request starts over.
        max_queue: requests that may wait for their first pass; one more is rejected. 0: any number.
        seed: of sampling, for requests that bring none.
        warmup: compile every program before the first request.
        compilation_cache: folder of JAX's persistent compilation cache; "" turns it off.
        event_log: file that every event of the controller and the commands that follow are written to
            (`pdjax.eventlog`); "": none.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    scheduler: Any = "disaggregated"
    prefill_instances: int = 1
    decode_instances: int = 1
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_chunk: int = 0
    decode_chunk: int = 0
    prefill_max_batch: int = 4
    decode_max_batch: int = 8
    prefill_num_pages: int = 0
    decode_num_pages: int = 0
    page_size: int = 64
    max_model_len: int = 0
    transfer: str = "device_put"
    verify_kv: bool = False
    stream_layers: int = 3
    transfer_timeout_s: float = 60.0
    max_queue: int = 0
    seed: int = 0
    warmup: bool = True
    compilation_cache: str = "~/.cache/pdjax/xla"
    event_log: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise ValueError(f"model is {self.model!r}; allowed: a preset name or a path, as text")
        for name, allowed in (("dtype", DTYPES), ("transfer", TRANSFERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        for name in (
            "prefill_instances",
            "decode_instances",
            "prefill_pp",
            "decode_pp",
            "prefill_tp",
            "decode_tp",
            "prefill_max_batch",
            "decode_max_batch",
            "page_size",
        ):
            check_whole(name, getattr(self, name), 1)
        for name in (
            "prefill_chunk",
            "decode_chunk",
            "prefill_num_pages",
            "decode_num_pages",
            "max_model_len",
            "stream_layers",
            "max_queue",
            "seed",
        ):
            check_whole(name, getattr(self, name), 0)
        if self.max_model_len == 1:
            raise ValueError("max_model_len is 1; allowed: 0, or at least 2: a prompt token and an answer")
        if not isinstance(self.event_log, str):
            raise ValueError(f"event_log is {self.event_log!r}; allowed: a path as text, or an empty one")
        if not isinstance(self.verify_kv, bool):
            raise ValueError(f"verify_kv is {self.verify_kv!r}; allowed: True, False")
        timeout = self.transfer_timeout_s
        if not is_number(timeout) or not 0 < timeout <= MAX_TIMEOUT_S:
            raise ValueError(f"transfer_timeout_s is {timeout!r}; allowed: seconds > 0, at most {MAX_TIMEOUT_S:.0f}")

    @property
    def stream_from(self) -> int | None:
        """What a named policy is told: from how many prompt tokens on KV is streamed; None: never."""
        return 1 if self.stream_layers else None

    @property
    def devices(self) -> int:
        """Of both pools together; colocated instances use as many."""
        prefill = self.prefill_instances * self.prefill_pp * self.prefill_tp
        return prefill + self.decode_instances * self.decode_pp * self.decode_tp
