"""What `pdjax.experiments.kv_cost` says: shapes and costs enter; sentences and a table leave."""

from collections.abc import Sequence

from rich.table import Table

from pdjax.kv_cost import BYTES, Cost, Job, Shape, suffices


def arithmetic(shape: Shape, dtype: str, tokens: int) -> str:
    """The bytes of a token and of a prompt, step by step."""
    per_token = shape.bytes_per_token(dtype)
    total = per_token * tokens
    text = (
        f"KV of a token: 2 (K and V) x {shape.layers} layers x {shape.kv_heads} kv heads x {shape.head_dim} x "
        f"{BYTES[dtype]} bytes ({dtype}) = {per_token:,} bytes ({per_token / 2**10:g} KiB)\n"
        f"KV of the prompt: {tokens:,} tokens x {per_token:,} bytes = {total:,} bytes ({size(total)})"
    )
    if shape.heads > shape.kv_heads:
        group = shape.heads / shape.kv_heads
        text += f"; {shape.heads} query heads share the {shape.kv_heads}: without that {size(group * total)}"
    return text


def answer(job: Job, costs: Sequence[Cost], share: float) -> tuple[bool | None, str]:
    """Whether disaggregation needs RDMA for this job, and why; None where no link given is enough to tell."""
    plain = [one for one in costs if not one.link.rdma]
    fast = sorted((one for one in costs if one.link.rdma), key=lambda one: one.link.gbits)
    need = f"{job.rate:.3g} prompts/s, at most {share:.0%} of the prefill visible"
    enough = [one for one in plain if suffices(one, job, share)]
    if enough:
        return False, f"No ({need}): {_verdict(min(enough, key=lambda one: one.link.gbits), job)} is enough."
    best = max(plain, key=lambda one: one.link.gbits, default=None)
    why = f"{_verdict(best, job)} is not enough; " if best else ""
    good = next((one for one in fast if suffices(one, job, share)), None)
    if good is None:
        return None, f"None of these links is enough ({need}). {why}{_verdict(fast[-1], job) if fast else ''}".rstrip()
    if best is None:
        return None, f"No link without RDMA is given ({need}): {_verdict(good, job)} is enough."
    return True, f"Yes ({need}): {why}{_verdict(good, job)} is enough."


def _verdict(one: Cost, job: Job) -> str:
    share = one.share(job)
    seen = (
        "it cannot keep up"
        if share == float("inf")
        else f"visible {milliseconds(share * job.prefill_s)} ms, {share:.1%} of the prefill"
    )
    return f"{one.link.name} (busy {one.busy:.0%}, {seen})"


def table(job: Job, costs: Sequence[Cost]) -> Table:
    """A row per link; times are milliseconds, in brackets their part of the prefill's."""
    out = Table(title=f"KV of a prompt, {size(job.nbytes)}; prefill {milliseconds(job.prefill_s)} ms", pad_edge=False)
    out.add_column("link", no_wrap=True)
    for column in ("GB/s", "whole, ms", "streamed,\nleft, ms", "prompts/s\nsustained", "prompts/s\nsaturated"):
        out.add_column(column, justify="right")
    out.add_column(f"busy at\n{job.rate:.3g}/s", justify="right")
    out.add_column("queue,\nms", justify="right")
    for one in costs:
        out.add_row(
            one.link.name,
            f"{job.nbytes / one.whole_s / 1e9:.3g}",
            f"{milliseconds(one.whole_s)} ({one.whole_s / job.prefill_s:.0%})",
            f"{milliseconds(one.streamed_s)} ({one.streamed_s / job.prefill_s:.1%})",
            f"{one.sustained_rate:.3g}",
            f"{one.saturated_rate:.3g}",
            f"{one.busy:.0%}",
            "grows" if one.queue_s is None else milliseconds(one.queue_s),
        )
    return out


def size(nbytes: float) -> str:
    """In the binary unit that leaves one to four digits before the point."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def milliseconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
