# shellcheck shell=bash
# What the launch scripts share: options, and the choice of threads, interface and port. It is sourced, not run.
#
# A variable that the user has set is never changed. What is chosen is said on stderr.
# shellcheck disable=SC2034 # some variables are for the scripts that source this

launcher=${0##*/}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

program=$root/train.py
nproc_per_node=
max_restarts=0
dry_run=0
torchrun_flags=()
chosen=()         # names of the variables that the dry run shows
interface=        # found by find_route, as are the next two
source_address=   # this machine's address on the way to the master
master_is_here=   # 1, 0, or empty where it is not known

shared_options="  --nproc-per-node N  processes on each machine (default: its GPUs; without a GPU %s)
  --max-restarts N    restarts of all processes after a failure (default: 0)
  --torchrun FLAG     a further flag of torchrun, such as --torchrun=--monitor-interval=1; may be repeated
  --program FILE      what to run instead of train.py
  --dry-run           print what would run, and run nothing
  --help              print this"

say() { printf '%s: %s\n' "$launcher" "$*" >&2; }

refuse() {
    say "error: $*"
    exit 2
}

# split_option ARGUMENT...: sets `arguments`, in which --name=value has become --name value
split_option() {
    arguments=("$@")
    if [[ $1 == --*=* ]]; then
        arguments=("${1%%=*}" "${1#*=}" "${@:2}")
    fi
}

# need_value OPTION [VALUE]
need_value() {
    if (($# < 2)) || [[ -z $2 || $2 == -- ]]; then
        refuse "option $1 needs a value; $launcher --help lists the options"
    fi
}

# need_number OPTION VALUE LEAST
need_number() {
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
        refuse "option $1: '$2' is not a whole number; give one of at least $3"
    fi
}

# shared_option ARGUMENT...: takes one option off the front; `taken` is the number of arguments that it was
shared_option() {
    taken=2
    case $1 in
        --nproc-per-node) need_value "$@"; need_number "$1" "$2" 1; nproc_per_node=$2 ;;
        --max-restarts) need_value "$@"; need_number "$1" "$2" 0; max_restarts=$2 ;;
        --torchrun)
            need_value "$@"
            [[ $2 == -* ]] || refuse "option $1: '$2' is not a flag of torchrun; write $1=--flag=value"
            torchrun_flags+=("$2")
            ;;
        --program) need_value "$@"; program=$2 ;;
        --dry-run) dry_run=1 taken=1 ;;
        --help | -h) usage; exit 0 ;;
        -*) refuse "unknown option '$1'; $launcher --help lists the options, those of train.py come after --" ;;
        *) refuse "unexpected argument '$1'; what train.py is to get comes after --" ;;
    esac
}

# check_programs: is there something to run, and torchrun to run it
check_programs() {
    [[ -f $program ]] || refuse "option --program: there is no file '$program'; name the training script"
    command -v torchrun >/dev/null ||
        refuse "torchrun is not on PATH; activate the environment that PyTorch is installed in"
}

# keep_or_set NAME VALUE REASON
keep_or_set() {
    chosen+=("$1")
    if [[ -n ${!1:-} ]]; then
        say "$1=${!1} (as you set it)"
    else
        export "$1=$2"
        say "$1=$2 ($3)"
    fi
}

# settle_processes DEFAULT: sets nproc_per_node where it was not given
settle_processes() {
    local gpus=0
    [[ -z $nproc_per_node ]] || return 0
    if command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
    fi
    if ((gpus > 0)); then
        nproc_per_node=$gpus
        say "$gpus processes on this machine (one for each GPU)"
    else
        nproc_per_node=$1
        say "$1 process(es) on this machine (no GPU found)"
    fi
}

# settle_threads: OMP_NUM_THREADS, which torchrun would set to 1
settle_threads() {
    local cores origin quota period threads
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        cores=$SLURM_CPUS_PER_TASK origin="cores by SLURM_CPUS_PER_TASK"
    else
        # env -u: nproc answers with OMP_NUM_THREADS where that is set
        cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
        origin="cores available"
        if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [[ $quota =~ ^[0-9]+$ ]]; then
            if ((quota / period < cores)); then # a container's limit is a share of time, which nproc does not see
                cores=$((quota / period > 0 ? quota / period : 1)) origin="cores allowed to the container"
            fi
        fi
    fi
    [[ $cores =~ ^[0-9]+$ ]] || refuse "SLURM_CPUS_PER_TASK: '$cores' is not a whole number; unset it, or set OMP_NUM_THREADS"
    threads=$((cores / nproc_per_node > 0 ? cores / nproc_per_node : 1))
    keep_or_set OMP_NUM_THREADS "$threads" "$cores $origin / $nproc_per_node process(es)"
}

# find_route ADDRESS: this machine's interface and address on the way there
find_route() {
    local route owner
    if ! command -v ip >/dev/null; then
        say "no ip command here (package iproute2): the interface is left to Gloo and NCCL;" \
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME if they choose a wrong one"
        return 0
    fi
    if ! route=$(ip -o route get "$1" 2>&1); then
        refuse "no route to the master '$1' (ip route get: $route); check --master and this machine's network"
    fi
    [[ $route =~ (^|\ )dev\ ([^ ]+) ]] && interface=${BASH_REMATCH[2]}
    [[ $route =~ (^|\ )src\ ([^ ]+) ]] && source_address=${BASH_REMATCH[2]}
    master_is_here=0
    if [[ $route == local\ * ]]; then
        master_is_here=1
        # The way to an address of one's own is the loopback; others come in by the interface that has the address.
        owner=$(ip -o addr show to "$1" 2>/dev/null | awk 'NR == 1 { print $2 }')
        interface=${owner:-$interface}
    fi
}

# settle_interface ADDRESS: after find_route
settle_interface() {
    if [[ -z $interface ]]; then
        chosen+=(GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME) # shown if the user has set them
        return 0
    fi
    keep_or_set GLOO_SOCKET_IFNAME "$interface" "route to $1"
    # NCCL takes prefixes: eth1 would be eth10 as well. The sign of equality asks for this name alone.
    keep_or_set NCCL_SOCKET_IFNAME "=$interface" "route to $1; = is for this name alone"
}

# start COMMAND...: become it, so that signals reach it and its status is the script's; or print it
start() {
    local name
    # torchrun takes PET_... for its options; a version without this option does not look.
    keep_or_set PET_SIGNALS_TO_HANDLE SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "what torchrun hands on to the ranks"
    if ((dry_run)); then
        for name in "${chosen[@]}"; do
            [[ -z ${!name:-} ]] || printf '%s=%q ' "$name" "${!name}"
        done
        printf '%q ' "$@"
        printf '\n'
        exit 0
    fi
    exec "$@"
}
