"""Programs compiled ahead of time, for chips that are not there: `targets` (which chips), `programs` (the very programs
that an engine would run), `memory` (whether weights and pages fit), `compiled` (what the compiler says of a program).

Nothing is allocated and no weight is read: all arguments are shapes. Called by `pdjax.experiments.aot`.
"""
