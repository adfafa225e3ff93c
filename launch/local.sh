#!/usr/bin/env bash
# Run a training script on this machine: one process for each GPU, or two on the CPU where there is none.
#
#   launch/local.sh SCRIPT [ARGUMENTS...]
#
# NPROC=4           that many processes instead
# HOOKS=hooks.yaml  attach disthooks as that file says, without a change to the script
# MAX_RESTARTS=3    so often all processes are started again when one fails; default: 0
# LOGS=folder       what each rank prints, and its error.json; default: runs/logs; LOGS= for none, and a plain terminal
# PYTHON=...        that Python instead of the first one on PATH
set -euo pipefail

if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
    exit $(($# == 0))
fi
[[ -f $1 ]] || { echo "launch/local.sh: no script $1" >&2; exit 2; }
[[ -z ${HOOKS:-} || -f $HOOKS ]] || { echo "launch/local.sh: no file HOOKS=$HOOKS" >&2; exit 2; }

# The Python of the environment that is active; `python` is missing where only python3 is installed.
python=${PYTHON:-$(command -v python || command -v python3 || echo python)}
"$python" -c 'import torch' || { echo "launch/local.sh: $python cannot import torch" >&2; exit 2; }

# torch is asked, not nvidia-smi: it knows of CUDA_VISIBLE_DEVICES, and whether its build can use a GPU at all.
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')

# Two on a machine without GPU: the fewest that are a distributed run.
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || { echo "launch/local.sh: NPROC=$nproc is not a number of processes" >&2; exit 2; }

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

# -m and not the torchrun script: it need not be on PATH. --standalone: a free port, this machine alone.
command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc")
# None by default: on one machine a failure is more often a mistake than a lost neighbour.
command+=(--max-restarts "${MAX_RESTARTS:-0}")
# Both streams of every rank go to files and the terminal; after a crash read every rank, the first to fall may be a
# victim. The launcher writes each line with its rank, so progress bars want LOGS=.
logs=${LOGS-runs/logs}
[[ -z $logs ]] || command+=(--log-dir "$logs" --redirects 3 --tee 3)

# "--": else the launcher takes a script's option for an abbreviation of its own (--run, of --run-path) and stops.
if [[ -n ${HOOKS:-} ]]; then
    command+=(-m -- disthooks.run --hooks "$HOOKS")
else
    command+=(--)
fi

echo "launch/local.sh: $gpus GPU(s), $cores core(s): OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]} $*"
exec "${command[@]}" "$@"
