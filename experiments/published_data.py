"""The folder with published measurements and traces, which several launchers compare with: one flag enters, a path
leaves. It is no part of pdjax.
"""

from pathlib import Path

from absl import flags as absl_flags

DATA = absl_flags.DEFINE_string("data", "", "The folder with published measurements and traces; some of this needs it.")


def folder() -> Path | None:
    """What --data names; None: nothing. ValueError if it is no folder."""
    data = Path(DATA.value).expanduser() if DATA.value else None
    if data is not None and not data.is_dir():
        raise ValueError(f"data is {DATA.value!r}, which is no folder; allowed: the one with published measurements")
    return data
