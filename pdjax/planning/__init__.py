"""Plans a cluster before there is one: a model, hardware, a workload and limits enter, a `Plan` leaves
(`pdjax.planning.planner`). Called by users as `pdjax.plan` and by the launcher `pdjax.experiments.plan`.

    mix       what is asked of the cluster
    stock     the devices there are, and what a model takes on them
    bounds    what an instance can carry at most, in closed form
    clusters  which clusters can be made of the devices
    trial     plays a cluster at a rate in virtual time; its goodput, and what it fails by
    search    the order of it all, on all cores
"""
