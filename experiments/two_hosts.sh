#!/usr/bin/env bash
# Two hosts made of this one, and an mpirun job over both: network namespaces a and b with a link between them, which tc
# slows down. For Linux, as root, with iproute2, an Open MPI, and a command that every rank runs. Nothing is left behind.
#
#   experiments/two_hosts.sh [--rate=1gbit] [--latency=50ms] [--ranks=2,1] [--survive] -- .venv/bin/python -m ...
#   experiments/two_hosts.sh --check
#
#   --rate      of the link, each way, as tc writes it; none: as fast as this machine is
#   --latency   the longest time that a packet may wait in the queue of a link with a rate, before it is dropped
#   --ranks     on host a and on host b: by default rank 0 and rank 1, which prefills, on a, rank 2, which decodes, on b
#   --survive   the job goes on when a rank dies (mpirun --with-ft ulfm)
#   --check     only says whether this machine can do it
#
# Each host has half of the CPU cores that this process may use, where there are two. Exit status: that of mpirun; 2, with
# one line, if something is missing.
set -u

rate=1gbit latency=50ms ranks=2,1 check= survive=()
declare -A address=([a]=10.77.0.1 [b]=10.77.0.2) cores=()
declare -A space=([a]=pdjax-a-$$ [b]=pdjax-b-$$)

refuse() {
    echo "error: $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --rate=*) rate=${1#*=} ;;
        --latency=*) latency=${1#*=} ;;
        --ranks=*) ranks=${1#*=} ;;
        --survive) survive=(--with-ft ulfm) ;;
        --check) check=yes ;;
        --) shift && break ;;
        *) refuse "argument '$1'; allowed: --rate=, --latency=, --ranks=, --survive, --check, and -- before a command" ;;
    esac
    shift
done
[[ $rate = none || $rate =~ ^[1-9][0-9]*(kbit|mbit|gbit)$ ]] || refuse "rate is '$rate'; allowed: none, or like 1gbit"
[[ $ranks =~ ^([1-9][0-9]*),([1-9][0-9]*)$ ]] || refuse "ranks is '$ranks'; allowed: two numbers like 2,1"
declare -A slots=([a]=${BASH_REMATCH[1]} [b]=${BASH_REMATCH[2]})
[ -n "$check" ] || [ $# -gt 0 ] || refuse "there is no command; allowed: one behind --"
[ "$(id -u)" = 0 ] || refuse "two hosts need network namespaces, which root may make; allowed: as root"
for tool in ip tc unshare taskset; do
    command -v "$tool" >/dev/null || refuse "two hosts need $tool, which is not here (iproute2, util-linux)"
done

# --- whatever happens, processes and namespaces go --------------------------------------------------------------------

folder=$(mktemp -d)
clean() {
    trap - EXIT
    local host signal process left
    for signal in TERM KILL; do
        left=
        for host in a b; do
            for process in $(ip netns pids "${space[$host]}" 2>/dev/null); do
                left=yes
                kill -s "$signal" "$process" 2>/dev/null
            done
        done
        [ "$signal" = TERM ] && [ -n "$left" ] && sleep 1
    done
    for host in a b; do ip netns delete "${space[$host]}" 2>/dev/null; done
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# --- hosts and link ---------------------------------------------------------------------------------------------------

inside() { # host, command: there
    local host=$1
    shift
    ip netns exec "${space[$host]}" "$@"
}

build() {
    ip netns add "${space[a]}" && ip netns add "${space[b]}" &&
        ip link add link-a netns "${space[a]}" type veth peer name link-b netns "${space[b]}" || return
    local host
    for host in a b; do
        inside "$host" ip address add "${address[$host]}/24" dev "link-$host" &&
            inside "$host" ip link set "link-$host" up && inside "$host" ip link set lo up || return
        [ "$rate" = none ] || shape "$host" || return
    done
}

shape() { # host: what it sends. The bucket holds what the link moves in 2 ms, and the largest packet in any case.
    local -A unit=([kbit]=1000 [mbit]=1000000 [gbit]=1000000000)
    local burst=$((${rate%?bit} * ${unit[${rate: -4}]} / 8 / 500))
    ((burst > 65536)) || burst=65536
    inside "$1" tc qdisc add dev "link-$1" root tbf rate "$rate" burst "$burst" latency "$latency"
}

said=$(build 2>&1) || refuse "no network namespaces with a link of $rate here: $(echo "$said" | tr '\n' ' ')"
[ -z "$check" ] || exit 0

# --- the job ----------------------------------------------------------------------------------------------------------

all=()
IFS=, read -r -a runs <<<"$(taskset -cp $$ | sed 's/.*: //')"
for run in "${runs[@]}"; do mapfile -t -O ${#all[@]} all < <(seq "${run%-*}" "${run#*-}"); done
half=$((${#all[@]} / 2))
cores[a]=$(IFS=, && echo "${all[*]:0:$((half > 0 ? half : 1))}")
cores[b]=$(IFS=, && echo "${all[*]:half}")

enter() { # host: the words that run a command there, under a host name of its own, for a shell to read
    echo "ip netns exec ${space[$1]} unshare --uts taskset -c ${cores[$1]} bash -c 'hostname host$1; exec \"\$@\"' --"
}

# mpirun starts its daemon on the other host by this, with the host as the first argument.
printf '#!/usr/bin/env bash\nshift\nexec %s bash -c "$*"\n' "$(enter b)" >"$folder/agent"
chmod +x "$folder/agent"
for host in a b; do echo "${address[$host]} slots=${slots[$host]}"; done >"$folder/hosts"
mpirun=$(dirname -- "$1")/mpirun
[ -x "$mpirun" ] || mpirun=$(command -v mpirun) || refuse "there is no mpirun beside $1 or on PATH"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
eval "$(enter a)" '"$mpirun"' --allow-run-as-root '"${survive[@]}"' --prtemca plm_ssh_agent '"$folder/agent"' \
    --hostfile '"$folder/hosts"' --map-by slot --bind-to none --mca pml ob1 --mca btl tcp,self \
    -n $((slots[a] + slots[b])) '"$@"' '&'
wait $!
