#!/bin/sh
# Several machines whose processes are started anew when one dies. The same command on each; HOST is one of them:
#   NODES=2 scripts/torchrun_elastic.sh HOST:29400 train wmt14-en-de-big --output /shared/runs/big
# NODES: how many machines, or from how many to how many (1:2: one continues alone, until the other is back).
# PROCESSES: on each machine, one for each GPU if not given. RESTARTS: how often a machine may start its own anew (3).
# RUN: a name, where several trainings use the same HOST:PORT.
# All see the data and the output folder under the same path. A machine that was down gets the same command again; only
# HOST has to live on, or all are started again: in each case the training resumes from its last checkpoint.
set -eu
[ $# -ge 2 ] || { echo "usage: NODES=2 $0 HOST:PORT train RECIPE [OPTIONS]" >&2; exit 2; }
endpoint=$1
shift
# Without it torchrun gives restarted processes the store of those before, whose addresses they would then connect to.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# When torchrun is stopped, its processes have this long for a checkpoint, which may come behind a validation.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
exec python -m torch.distributed.run --nnodes "${NODES:-2}" --nproc-per-node "${PROCESSES:-gpu}" \
    --max-restarts "${RESTARTS:-3}" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN:-vaswani}" \
    -m vaswani_transformer "$@"
