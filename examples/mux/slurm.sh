#!/usr/bin/env bash
#SBATCH --job-name=rollmux
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600       # checkpoints ten minutes before the end
# The nodes of this allocation for RollMux: an agent on each, the first ROLLOUT ones for rollouts.
#
#     sbatch examples/mux/slurm.sh FOLDER ROLLOUT          # the daemon on the first node too
#     sbatch examples/mux/slurm.sh FOLDER ROLLOUT URL      # or elsewhere, at URL
#
# FOLDER is on a disk that all nodes see, and only yours. For a daemon elsewhere it has node.token
# (role node) and cert.pem. For one here it has nodes.yaml (`nodes: []` and teams); the script makes
# the certificate and the tokens, and says where it listens in FOLDER/url:
#
#     rollpacker mux submit job.yaml --url "$(cat FOLDER/url)" --token-file FOLDER/token \
#         --cafile FOLDER/cert.pem
set -euo pipefail

folder=${1:?which folder?} rollout=${2:?how many rollout nodes?} url=${3:-}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
export FOLDER=$folder URL=$url
step=(srun --overlap --ntasks-per-node=1 --kill-on-bad-exit=0)
umask 077

mux() { rollpacker mux "$@" --url "$URL" --token-file "$folder/token" --cafile "$folder/cert.pem"; }

if [ -z "$url" ]; then
	# The database needs a local disk. It ends with the allocation: runs have their checkpoints.
	state=/tmp/rollmux-$SLURM_JOB_ID
	port=$((20000 + SLURM_JOB_ID % 20000))   # two allocations may share a node
	URL=https://$head:$port
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj "/CN=$head" \
		-addext "subjectAltName=DNS:$head" -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
	[ -e "$folder/token" ] || openssl rand -hex 32 >"$folder/token"
	rm -f "$folder/node.token"
	# Here, on the first node.
	rollpacker mux serve --state "$state" --host 0.0.0.0 --port "$port" \
		--inventory "$folder/nodes.yaml" --token-file "$folder/token" \
		--tls-cert "$folder/cert.pem" --tls-key "$folder/key.pem" &
	daemon=$!
	until mux status >/dev/null 2>&1; do
		kill -0 "$daemon"   # ends the script where the daemon has ended
		sleep 1
	done
	mux token add agents --role node --to "$folder/node.token"
	# By a rename: who waits for the file must not read it empty.
	echo "$URL" >"$folder/url.new"
	mv "$folder/url.new" "$folder/url"
fi

# Slurm's name of the node, which may differ from the host's. A node that failed is empty when its
# agent ends, and its next agent reports it again.
agents() { # POOL NODE...
	local pool=$1 list
	shift
	list=$(IFS=,; echo "$*")
	POOL=$pool "${step[@]}" --nodes=$# --ntasks=$# -w "$list" bash -c '
		until rollpacker mux agent --url "$URL" --token-file "$FOLDER/node.token" \
			--cafile "$FOLDER/cert.pem" --node "$SLURMD_NODENAME" --pool "$POOL" \
			--programs "/tmp/rollmux-$SLURM_JOB_ID-$SLURMD_NODENAME"; do sleep 5; done' &
}
agents rollout "${nodes[@]:0:rollout}"
agents train "${nodes[@]:rollout}"

# Jobs of a daemon here end with a checkpoint; the same `mux submit` continues them in the next
# allocation. A daemon elsewhere sees these nodes fail, and jobs go on from their last checkpoint.
leave() {
	if [ -z "$url" ]; then
		for job in $(mux status --json | python3 -c '
import json, sys
print(*(job["id"] for job in json.load(sys.stdin)["jobs"] if job["state"] != "ended"))'); do
			mux end "$job"
			mux wait "$job" || true
		done
	fi
	trap - TERM
	kill $(jobs -p)
}
trap leave TERM
while [ -n "$(jobs -rp)" ]; do wait || true; done
