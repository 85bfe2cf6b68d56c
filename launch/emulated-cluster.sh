#!/usr/bin/env bash
# A cluster on one machine: N hosts, each a network namespace, on a switch, with links of a given rate.
#
#     launch/emulated-cluster.sh N RATE [options] -- COMMAND [ARGUMENT...]
#
# Everything lives in network namespaces, the switch as well: the machine's own network does not see it, two clusters do
# not see each other, and all of it is gone at the end, however that comes.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<TEXT
usage: $launcher N RATE [options] -- COMMAND [ARGUMENT...]

  N                   number of hosts, 1 to 200
  RATE                of each host's link, in each direction: 100mbit, 1gbit, 2.5gbit
  --ranks-per-host M  processes on each host (default: 1); they talk over its loopback, which has no limit
  --torchrun          run torchrun on each host, by launch/multinode.sh; COMMAND is then a Python program
  --grace SECONDS     how long the others may live on when one has failed or a signal came (default: 10)
  --dry-run           print what would run, and run nothing
  --help              print this

The status is the first one that is not 0. stdout is that of rank 0 alone, or of all hosts with --torchrun.
Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT.
TEXT
}

ranks_per_host=1
by_torchrun=0
grace=10
positional=()
separated=0
while (($#)); do
    [[ $1 != -- ]] || { separated=1; shift; break; }
    split_option "$@"
    set -- "${arguments[@]}"
    taken=2
    case $1 in
        --ranks-per-host) need_value "$@"; need_number "$1" "$2" 1; ranks_per_host=$2 ;;
        --grace) need_value "$@"; need_number "$1" "$2" 0; grace=$2 ;;
        --torchrun) by_torchrun=1 taken=1 ;;
        --dry-run) dry_run=1 taken=1 ;;
        --help | -h) usage; exit 0 ;;
        -*) refuse "unknown option '$1'; $launcher --help lists the options, the command comes after --" ;;
        *) positional+=("$1") taken=1 ;;
    esac
    shift "$taken"
done
((${#positional[@]} == 2)) ||
    refuse "${#positional[@]} arguments before -- where N and RATE are wanted; write $launcher 4 1gbit -- COMMAND"
((separated && $# > 0)) || refuse "no command; give it after --, as in $launcher 4 1gbit -- COMMAND"
hosts=${positional[0]}
rate=${positional[1]}
if ! [[ $hosts =~ ^[0-9]{1,3}$ ]] || ((10#$hosts < 1 || 10#$hosts > 200)); then
    refuse "N: '$hosts' is not a number of hosts; give a whole number from 1 to 200"
fi
hosts=$((10#$hosts))
declare -A units=([kbit]=1000 [mbit]=1000000 [gbit]=1000000000)
if ! [[ ${rate,,} =~ ^([0-9]{1,6}(\.[0-9]{1,6})?)(kbit|mbit|gbit)$ ]]; then
    refuse "RATE: '$rate' is not a rate; write 100mbit, 1gbit or 2.5gbit"
fi
bits=$(awk -v number="${BASH_REMATCH[1]}" -v unit="${units[${BASH_REMATCH[3]}]}" 'BEGIN { printf "%.0f", number * unit }')
((bits >= 64000)) || refuse "RATE: '$rate' is too slow to start anything; give at least 64kbit"
if ((by_torchrun)); then
    program=$1
    check_programs
elif ! command -v "$1" >/dev/null; then
    refuse "the command '$1' is neither on PATH nor a program; check what comes after --"
fi

# The bucket holds 1 ms of the rate, so that this is the most that passes at full speed after a pause, but at least what
# the kernel hands over in one piece. The queue holds 50 ms, enough for all hosts that send to one at the same time.
burst=$((bits / 8000 > 70000 ? bits / 8000 : 70000))
queue_limit=$((bits / 160 + burst))

prefix=sidco$$
switch=$prefix-switch
subnet=198.18.0 # of the block that is set apart for benchmarks of networks
port=29500      # nobody else is in there

run() {
    if ((dry_run)); then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

limit() { # NAMESPACE INTERFACE: what leaves by it
    run tc -n "$1" qdisc add dev "$2" root tbf rate "${bits}bit" burst "$burst" limit "$queue_limit"
}

build() {
    local host name
    run ip netns add "$switch"
    run ip -n "$switch" link add bridge type bridge
    run ip -n "$switch" link set bridge up
    for ((host = 0; host < hosts; host++)); do
        name=$prefix-$host
        run ip netns add "$name"
        run ip -n "$name" link set lo up
        run ip -n "$switch" link add "port$host" type veth peer name eth0 netns "$name"
        run ip -n "$switch" link set "port$host" master bridge
        run ip -n "$name" link set eth0 addrgenmode none
        run ip -n "$name" addr add "$subnet.$((host + 1))/24" dev eth0
        limit "$name" eth0
        limit "$switch" "port$host"
        run ip -n "$switch" link set "port$host" up
        run ip -n "$name" link set eth0 up
    done
}

inside() { # every process of the cluster: in its namespaces, or on the way there
    local pid
    {
        stat -Lc '%d:%i' "/run/netns/$prefix"-* || true
        stat -Lc '%d:%i %n' /proc/[0-9]*/ns/net || true # of which some end meanwhile
    } 2>/dev/null | awk 'NF == 1 { ours[$1] } NF == 2 && $1 in ours { split($2, part, "/"); print part[3] }'
    for pid in "${!rank_of[@]}"; do
        ! kill -0 "$pid" 2>/dev/null || printf '%s\n' "$pid"
    done
}

signal_all() { # SIGNAL
    local pids
    mapfile -t pids < <(inside | sort -u)
    ((${#pids[@]} == 0)) || kill "-$1" "${pids[@]}" 2>/dev/null || true
}

# shellcheck disable=SC2329 # called by remove
gone_within() { # SECONDS
    local until=$((SECONDS + $1))
    while [[ -n $(inside) ]]; do
        ((SECONDS < until)) || return 1
        sleep 0.1
    done
}

# shellcheck disable=SC2329 # a trap
remove() {
    local status=$? host name rank tries
    trap '' INT TERM HUP
    trap - EXIT
    set +e
    if ((!built)) && [[ -z $signalled ]]; then
        say "error: the network could not be made (the reason is above); in a container this needs --privileged"
    fi
    [[ -z $signalled ]] || status=$([[ $signalled == INT ]] && echo 130 || echo 143)
    signal_all TERM
    gone_within 5
    for ((tries = 0; tries < 10; tries++)); do
        ! gone_within 1 || break
        signal_all KILL
    done
    for name in "$switch" "$prefix"-{0..199}; do
        [[ ! -e /run/netns/$name ]] || ip netns del "$name"
    done
    if [[ -n $scratch ]]; then
        for rank in "$scratch"/*; do
            : <>"$rank" # lets a reader go whose writer never came
        done
        wait 2>/dev/null # for the last lines of output
        rm -rf -- "$scratch"
    fi
    exit "$status"
}

environment_of() { # HOST LOCAL_RANK: sets `variables`
    variables=(MASTER_ADDR="$subnet.1" MASTER_PORT="$port")
    # Not the user's: the machine's interfaces are not in there.
    variables+=(GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME==eth0 OMP_NUM_THREADS="$OMP_NUM_THREADS")
    if ! ((by_torchrun)); then
        variables+=(RANK="$(($1 * ranks_per_host + $2))" WORLD_SIZE="$((hosts * ranks_per_host))")
        variables+=(LOCAL_RANK="$2" LOCAL_WORLD_SIZE="$ranks_per_host" GROUP_RANK="$1")
    fi
}

nproc_per_node=$((hosts * ranks_per_host)) # all of them share this machine's cores
settle_threads
say "$hosts host(s) with $ranks_per_host process(es) each, links of $rate (burst $burst bytes, queue $queue_limit bytes)"

command=("$@")
((by_torchrun)) && command=("$root/launch/multinode.sh" --nnodes "$hosts" --nproc-per-node "$ranks_per_host"
    --job-id "$prefix" --program "$1" -- "${@:2}")
starts=$((by_torchrun ? 1 : ranks_per_host)) # on each host

if ((dry_run)); then
    build
    for ((host = 0; host < hosts; host++)); do
        for ((local_rank = 0; local_rank < starts; local_rank++)); do
            environment_of "$host" "$local_rank"
            run ip netns exec "$prefix-$host" env "${variables[@]}" "${command[@]}"
        done
    done
    exit 0
fi

for needed in ip tc; do
    command -v "$needed" >/dev/null || refuse "the command $needed is not on PATH; install iproute2 (apt-get install iproute2)"
done
((EUID == 0)) || refuse "needs root to make network namespaces; run it with sudo -E, or as root in a container (--privileged)"
scratch=
built=0
signalled=
status=0
declare -A rank_of=() # by process
trap remove EXIT
trap 'signalled=INT; exit' INT
trap 'signalled=TERM; exit' TERM HUP
build
built=1
trap 'signalled=INT' INT
trap 'signalled=TERM' TERM HUP
scratch=$(mktemp -d)
for ((rank = 0; rank < hosts * starts; rank++)); do
    mkfifo "$scratch/$rank"
done

# Only rank 0 writes to stdout, and under torchrun every host; all else goes to stderr, behind who says it.
# Each process gets a group of its own (set -m): Ctrl-C at a terminal comes to this script alone, which passes it on.
label=$( ((by_torchrun)) && echo host || echo rank)
set -m
for ((rank = 0; rank < hosts * starts; rank++)); do
    host=$((rank / starts))
    environment_of "$host" "$((rank % starts))"
    sed -u "s/^/[$label $rank] /" <"$scratch/$rank" >&2 &
    whole=(ip netns exec "$prefix-$host" env "${variables[@]}" "${command[@]}")
    if ((by_torchrun || rank == 0)); then
        "${whole[@]}" </dev/null 2>"$scratch/$rank" &
    else
        "${whole[@]}" </dev/null >"$scratch/$rank" 2>&1 &
    fi
    rank_of[$!]=$rank
done
set +m # from here on, what runs in the foreground must not take the terminal

give_up_at='' told=''
while ((${#rank_of[@]})); do
    for pid in "${!rank_of[@]}"; do
        ! kill -0 "$pid" 2>/dev/null || continue
        ended=0
        wait "$pid" 2>/dev/null || ended=$?
        if ((ended)); then
            say "$label ${rank_of[$pid]} ended with status $ended"
            ((status)) || status=$ended
            [[ -n $give_up_at ]] || give_up_at=$((SECONDS + grace))
        fi
        unset "rank_of[$pid]"
    done
    if [[ -n $signalled && -z $told ]]; then
        say "SIG$signalled, passed on to all processes"
        signal_all "$signalled"
        give_up_at=$((SECONDS + grace)) told=1
    fi
    if [[ -n $give_up_at ]] && ((SECONDS >= give_up_at && ${#rank_of[@]} > 0)); then
        say "ending ${#rank_of[@]} process(es) that have not ended within $grace s"
        break
    fi
    sleep 0.2 || true
done
exit "$status"
