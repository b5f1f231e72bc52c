#!/usr/bin/env bash
# Runs one rank of a job on a share of a core, so that instances that outnumber the cores are as fast while the others
# work as while they do not, as machines of their own would be:
#
#     mpirun -n 4 experiments/cpu_share.sh 0.6 python -m pdjax.experiments.switch --profile=...
#
# gives each of three instances 0.6 of a core; rank 0, the controller, is left alone. A profile for that has to be
# measured in the same way. Needs root and control groups (version 1 or 2). The group of a rank is removed when it ends.
set -eu
share=${1:?"the share of a core, such as 0.6"}
shift
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:?"no rank: to be started by mpirun"}}
if [ "$rank" = 0 ]; then exec "$@"; fi

period_us=10000 # short against a decode step, or steps would stand still for a whole one
quota_us=$(awk -v share="$share" -v period="$period_us" 'BEGIN { printf "%d", share * period }')
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    group=/sys/fs/cgroup/pdjax-$$
    echo +cpu > /sys/fs/cgroup/cgroup.subtree_control
    mkdir "$group"
    echo "$quota_us $period_us" > "$group/cpu.max"
else
    group=/sys/fs/cgroup/cpu/pdjax-$$
    mkdir "$group"
    echo "$period_us" > "$group/cpu.cfs_period_us"
    echo "$quota_us" > "$group/cpu.cfs_quota_us"
fi
(echo "$BASHPID" > "$group/cgroup.procs" && exec "$@") &
child=$!
trap 'kill -TERM "$child"' TERM
trap 'kill -INT "$child"' INT
status=0
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child" || status=$?; done # a signal ended only the waiting
rmdir "$group"
exit "$status"
