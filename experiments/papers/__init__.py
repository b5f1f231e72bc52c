"""Published results, each computed again with our controller and policies on the simulated cluster. A module per paper
has `run(setup) -> Outcome`; `pdjax.experiments.reproduce` calls it by name (`PAPERS`)."""

PAPERS = ("distserve", "splitwise", "taichi", "mooncake", "sarathi", "engine_replay")
