#!/usr/bin/env bash
# Train on the GPUs, or on the CPU, of this machine.
#
#     launch/local.sh [options] -- [arguments of train.py]
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    # shellcheck disable=SC2059 # the format is the text
    printf "usage: $launcher [options] -- [arguments of train.py]\n\n$shared_options\n" 2
}

while (($#)); do
    [[ $1 != -- ]] || { shift; break; }
    split_option "$@"
    set -- "${arguments[@]}"
    shared_option "$@"
    shift "$taken"
done

check_programs
if command -v getent >/dev/null; then
    loopback=$(getent ahosts localhost || true)
    [[ $loopback =~ ^(127\.|::1[[:space:]]) ]] ||
        refuse "'localhost' is not this machine's loopback address; put '127.0.0.1 localhost' into /etc/hosts"
fi
if command -v ip >/dev/null; then
    loopback=$(ip -o link show lo 2>/dev/null || true)
    [[ $loopback =~ [\<,]UP[,\>] ]] || refuse "the loopback interface is down; bring it up: ip link set lo up"
fi
settle_processes 2
settle_threads
find_route 127.0.0.1
settle_interface 127.0.0.1
say "a free port, which torchrun finds (--standalone)"
start torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$nproc_per_node" \
    --max-restarts "$max_restarts" "${torchrun_flags[@]}" "$program" "$@"
