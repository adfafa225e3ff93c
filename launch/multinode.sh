#!/usr/bin/env bash
# Run a training script on several machines: start this on each of them with the same line.
#
#   RDZV=first-machine NNODES=2 launch/multinode.sh SCRIPT [ARGUMENTS...]
#
# RDZV=host[:port]  where they meet: one of the machines, by an address that all of them reach; port 29500
# NNODES=2          machines; 1:4 starts when one is there and goes on with what is left, up to four
# RDZV_ID=name      the same for all of one run, another for the next one; default: disthooks
# NPROC=8           processes on this machine; default: its GPUs, or one on the CPU
# NODE=address      of this machine; default: the address it reaches RDZV from
# IFNAME=eth0       the network interface for gloo and nccl; default: the one that has NODE's address
# JOIN_TIMEOUT=900  seconds to wait for the other machines, and for RDZV's name to be known
# MAX_RESTARTS=3    so often all processes are started again when one fails, or the machines change
# LOGS=folder       what each rank prints, and its error.json, under this machine's address; default: runs/logs;
#                   LOGS= for none
# HOOKS=hooks.yaml  attach disthooks as that file says, without a change to the script
# PYTHON=...        that Python instead of the first one on PATH
set -euo pipefail

say() { echo "launch/multinode.sh: $*" >&2; }

if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit $(($# == 0))
fi
[[ -f $1 ]] || { say "no script $1"; exit 2; }
[[ -n ${RDZV:-} ]] || { say "RDZV=host[:port] is missing: where the machines meet"; exit 2; }
[[ -z ${HOOKS:-} || -f $HOOKS ]] || { say "no file HOOKS=$HOOKS"; exit 2; }

# The Python of the environment that is active; `python` is missing where only python3 is installed.
python=${PYTHON:-$(command -v python || command -v python3 || echo python)}

# Port 29500: torchrun's own habit. An IPv6 address stands in brackets, [fd00::1]:29500.
[[ $RDZV =~ :[0-9]+$ ]] || RDZV=$RDZV:29500

# The address this machine has towards RDZV, the interface that has the address, and whether RDZV is this machine
# (not said for 127.0.0.1: there the launchers on one machine find out among themselves).
# torchrun's own guess goes by the host's name, which in containers and clouds is often another network, or 127.0.1.1.
# The name of a pod is known only once it has an address: that is waited for.
read -r node ifname host < <("$python" - "${RDZV%:*}" "${RDZV##*:}" "${NODE:-}" "${JOIN_TIMEOUT:-900}" <<'PY'
import fcntl, socket, struct, sys, time

host, port, node, deadline = sys.argv[1].strip("[]"), int(sys.argv[2]), sys.argv[3], time.monotonic() + int(sys.argv[4])


def resolve():
    told = False
    while True:
        try:
            return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            if time.monotonic() >= deadline:
                sys.exit(f"{host}: {error}")
            told = told or not print(f"launch/multinode.sh: {host}: {error}; waiting", file=sys.stderr)
            time.sleep(1)


def interfaces(probe):
    for _, name in socket.if_nameindex():
        try:
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        except OSError:
            continue  # an interface without an address
        yield name, socket.inet_ntoa(found[20:24])


def routed(family, there):  # connecting UDP sends nothing: it asks the routing table
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(there)
        except OSError:
            return ""
        return probe.getsockname()[0]


family, _, _, _, there = resolve()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    names = {address: name for name, address in interfaces(probe)}
loopback = there[0].startswith("127.") or there[0] == "::1"
own = loopback and host != "localhost" and host != there[0]  # /etc/hosts has this machine's name there, on Debian
try:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((there[0], 0, *there[2:]))  # only an address of this machine can be bound
    same = True
except OSError:
    same = False
if own and not node:  # nobody else reaches that: the address of the default route, else any
    outside = [address for address in names if not address.startswith("127.")]
    node = routed(socket.AF_INET, ("192.0.2.1", port)) or (outside or [""])[0]
node = node or routed(family, there) or sys.exit(f"{there[0]}: no route to it")
try:
    found = names.get(socket.gethostbyname(node), "-")
except OSError:
    found = "-"
print(node, found, f"is_host={int(same)}," if own or not loopback else "")
PY
) || true # read fails when nothing came
[[ -n ${node:-} ]] || { say "the address of $RDZV is not known here"; exit 2; }
ifname=${IFNAME:-$ifname}

# gloo listens on the address of the host's name if it is not told, nccl on the first interface it likes; both must be
# one that the other machines reach. What is set already stays. "-": not found (IPv6), then they choose themselves.
# "=": nccl takes a bare name for the beginning of one, eth1 for eth10 too.
if [[ $ifname != - ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$ifname}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$ifname}
fi

# One on a machine without GPU, since there is another machine to talk to.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || { say "$python cannot import torch"; exit 2; }
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || { say "NPROC=$nproc is not a number of processes"; exit 2; }

# torchrun would set 1 for several processes; here the cores are shared out. Those that this process may use: Slurm and
# taskset give fewer than the machine has, and a container's limit is a quota of time.
cores=$(env -u OMP_NUM_THREADS nproc)
if read -r quota period 2>/dev/null </sys/fs/cgroup/cpu.max && [[ $quota != max ]] && ((quota / period < cores)); then
    cores=$((quota / period))
fi
threads=$((cores / nproc))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# Without this a restart meets the keys of the life before in the store, and never comes up (torch 2.13, gloo).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

command=("$python" -m torch.distributed.run --nnodes "${NNODES:-2}" --nproc-per-node "$nproc")
# c10d needs no server besides: the machine that RDZV names holds the store.
command+=(--rdzv-backend c10d --rdzv-endpoint "$RDZV" --rdzv-id "${RDZV_ID:-disthooks}" --local-addr "$node")
# Who holds the store is said, not guessed. Fifteen minutes: machines of a queue do not start together.
command+=(--rdzv-conf "${host}join_timeout=${JOIN_TIMEOUT:-900}")
# All processes of all machines start again when one fails; the script goes on from its checkpoint.
command+=(--max-restarts "${MAX_RESTARTS:-3}")
# Both streams of every rank; after a crash read every rank, the first to fall may be a victim. The launcher's folders
# have only numbers on a machine in their names, and the machines may share the disk.
logs=${LOGS-runs/logs}
[[ -z $logs ]] || command+=(--log-dir "$logs/$node" --redirects 3 --tee 3)
# "--": else the launcher takes a script's option for an abbreviation of its own (--run, of --run-path) and stops.
if [[ -n ${HOOKS:-} ]]; then
    command+=(-m -- disthooks.run --hooks "$HOOKS")
else
    command+=(--)
fi

echo "launch/multinode.sh: $node ($ifname), $gpus GPU(s): OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]} $*"
exec "${command[@]}" "$@"
