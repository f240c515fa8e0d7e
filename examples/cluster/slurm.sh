#!/usr/bin/env bash
#SBATCH --job-name=rollpacker
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300       # a checkpoint five minutes before the end
# A Ray cluster over the nodes of this allocation for as long as the job runs:
#
#     sbatch examples/cluster/slurm.sh examples/cluster/eight-nodes.yaml
set -euo pipefail

job=${1:?which job file?}
# No reader may leave early: with pipefail its writer's SIGPIPE would end the script.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
address="$(getent hosts "$head" | awk 'NR == 1 { print $1 }'):6379"

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
	ray start --head --node-ip-address="${address%:*}" --port="${address##*:}" --block &
for _ in $(seq 60); do
	srun --nodes=1 --ntasks=1 --overlap -w "$head" ray status --address="$address" >/dev/null 2>&1 && break
	sleep 2
done
if [ "$SLURM_NNODES" -gt 1 ]; then
	srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --overlap -x "$head" \
		ray start --address="$address" --block &
fi

srun --nodes=1 --ntasks=1 --overlap -w "$head" \
	rollpacker train "$job" --resume auto cluster.address="$address" \
	checkpoint.signals='[USR1]' checkpoint.grace_s=280 &
train=$!
trap 'kill -USR1 "$train"' USR1
while kill -0 "$train" 2>/dev/null; do wait "$train" || status=$?; done
exit "${status:-0}"
