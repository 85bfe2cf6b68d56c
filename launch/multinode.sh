#!/usr/bin/env bash
# Train on several machines: run it once on each of them, with the same options.
#
#     launch/multinode.sh --nnodes N --master HOST [options] -- [arguments of train.py]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

master=${MASTER_ADDR:-}
port=${MASTER_PORT:-}
port_origin="MASTER_PORT"
job_id=${SLURM_JOB_ID:-}
nnodes=
patience=60

usage() {
    # shellcheck disable=SC2059 # the format is the text
    printf "usage: $launcher --nnodes N --master HOST [options] -- [arguments of train.py]

  --nnodes N          number of machines; MIN:MAX for as many as there are
  --master HOST       the machine to meet at, by name or address (default: MASTER_ADDR); rank 0 may be elsewhere
  --port N            its port (default: MASTER_PORT, else one that follows from the job)
  --job-id ID         a name of this run, the same on all machines (default: SLURM_JOB_ID)
  --wait SECONDS      how long the name of the master may take to be known (default: $patience)
$shared_options\n" 1
}

while (($#)); do
    [[ $1 != -- ]] || { shift; break; }
    split_option "$@"
    set -- "${arguments[@]}"
    taken=2
    case $1 in
        --nnodes) need_value "$@"; nnodes=$2 ;;
        --master) need_value "$@"; master=$2 ;;
        --port) need_value "$@"; port=$2 port_origin="option --port" ;;
        --job-id) need_value "$@"; job_id=$2 ;;
        --wait) need_value "$@"; need_number "$1" "$2" 0; patience=$2 ;;
        *) shared_option "$@" ;;
    esac
    shift "$taken"
done

[[ -n $nnodes ]] || refuse "option --nnodes is missing; give the number of machines"
[[ $nnodes =~ ^([1-9][0-9]{0,4}:)?[1-9][0-9]{0,4}$ ]] ||
    refuse "option --nnodes: '$nnodes' is not a number of machines; give a whole number of at least 1, or MIN:MAX"
[[ -n $master ]] || refuse "option --master is missing and MASTER_ADDR is not set; name the machine to meet at"
if [[ -z $port ]]; then
    [[ -n $job_id ]] || refuse "no port: give --port N or --job-id ID, the same on all machines"
    # Below 32768, where Linux begins to hand out ports by itself, and away from 29500, which everyone takes.
    if [[ $job_id =~ ^[0-9]{1,15}$ ]]; then
        port=$((15000 + 10#$job_id % 10000))
    else
        port=$((15000 + $(printf '%s' "$job_id" | cksum | cut -d ' ' -f 1) % 10000))
    fi
    port_origin="from job '$job_id'"
fi
if ! [[ $port =~ ^[0-9]{1,5}$ ]] || ((10#$port < 1 || 10#$port > 65535)); then
    refuse "$port_origin: '$port' is not a port; give a whole number from 1 to 65535"
fi
job_id=${job_id:-port-$port}
check_programs

# resolve HOST: its address, IPv4 first
resolve() {
    local found
    found=$(getent ahostsv4 "$1" || getent ahosts "$1") || return 1
    printf '%s\n' "${found%%[[:space:]]*}"
}

address=
if ! command -v getent >/dev/null; then
    say "no getent command here: the name '$master' is not checked"
    address=$master
elif ! address=$(resolve "$master"); then
    if ((dry_run)); then
        say "the master '$master' cannot be resolved here, so nothing about it is known"
    else
        say "waiting up to $patience s for the name of the master '$master'"
        deadline=$((SECONDS + patience))
        until address=$(resolve "$master"); do
            ((SECONDS < deadline)) ||
                refuse "the master '$master' cannot be resolved on this machine; give --master its address, or add it to DNS or /etc/hosts"
            sleep 1
        done
    fi
fi
if [[ $nnodes != 1 && $address =~ ^(127\.|::1$|localhost$) ]]; then
    refuse "the master '$master' is the loopback address $address on this machine, where no other machine can meet it;" \
        "give --master the address of its network interface (ip -br addr), or correct /etc/hosts"
fi

settle_processes 1
settle_threads
flags=()
if [[ -n $address ]]; then
    find_route "$address"
    settle_interface "$address"
    # torchrun would compare host names to find out whether it is at the endpoint, and would tell the others its own
    # host name, which they may not know.
    case $master_is_here in
        1) flags+=(--rdzv-conf is_host=true) ;;
        0) flags+=(--rdzv-conf is_host=false) ;;
    esac
    [[ -z $source_address ]] || flags+=(--local-addr "$source_address")
fi
if [[ $master_is_here == 1 ]] && ! ((dry_run)) && (exec 3<>"/dev/tcp/$address/$port") 2>/dev/null; then
    refuse "$port_origin: port $port of $address is taken; give another --port or --job-id on all machines," \
        "or see what holds it: ss -ltnp 'sport = :$port'"
fi
say "meeting at $master:$port ($port_origin), job '$job_id'"
start torchrun --nnodes "$nnodes" --nproc-per-node "$nproc_per_node" --max-restarts "$max_restarts" \
    --rdzv-backend c10d --rdzv-endpoint "$master:$port" --rdzv-id "$job_id" \
    "${flags[@]}" "${torchrun_flags[@]}" "$program" "$@"
