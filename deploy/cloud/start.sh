#!/bin/bash
# The start script (user data) of instances of AWS or Google Cloud that train together; docs/how-to/cloud.md explains it.
#
# Settings are tags of the instance (AWS, with "tags in instance metadata" allowed) or attributes (Google):
#     training-endpoint   node0.training.internal:29400, or etcd0:2379,etcd1:2379 with training-backend=etcd-v3
#     training-nodes      2:4
#     training-command    train.py --epochs 100
#     training-run-id     my-job
# and, if they differ from these: training-backend=c10d, training-workers=auto, training-restarts=3.
set -uo pipefail
aws=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
google=http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance

refuse() {
    echo "start.sh: $1, see docs/how-to/cloud.md" >&2
    exit 2
}
ask_google() { curl -fsS --max-time 5 -H 'Metadata-Flavor: Google' "$google/$1" 2>/dev/null; }
ask_aws() {
    local token
    token=$(curl -fsS --max-time 5 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$aws/latest/api/token" 2>/dev/null) &&
        curl -fsS --max-time 5 -H "X-aws-ec2-metadata-token: $token" "$aws/latest/meta-data/$1" 2>/dev/null
}

if ask_google id >/dev/null; then
    setting() { ask_google "attributes/$1"; }
    address=$(ask_google network-interfaces/0/ip)
    cloud=google
elif address=$(ask_aws local-ipv4); then
    setting() { ask_aws "tags/instance/$1"; }
    cloud=aws
else
    refuse "neither $aws nor $google answers: this is no instance of AWS or Google Cloud, or its metadata are switched off"
fi

for name in endpoint nodes command run-id; do
    [[ -n $(setting "training-$name") ]] || refuse "this instance has no tag or attribute training-$name"
done
read -ra command <<<"$(setting training-command)"
backend=$(setting training-backend) workers=$(setting training-workers) restarts=$(setting training-restarts)

cd "${TRAINING_FOLDER:-/opt/training}" || refuse "there is no folder ${TRAINING_FOLDER:-/opt/training}"
[[ -f notice.py ]] || refuse "there is no notice.py in $PWD: put deploy/cloud/notice.py there"
PATH=$PWD/venv/bin:$PATH
aelastic --nnodes "$(setting training-nodes)" --nproc-per-node "${workers:-auto}" --max-restarts "${restarts:-3}" \
    --rdzv-backend "${backend:-c10d}" --rdzv-endpoint "$(setting training-endpoint)" --rdzv-id "$(setting training-run-id)" \
    --local-addr "$address" --shutdown-timeout 25 --notice-command "python notice.py $cloud" "${command[@]}" &
agent=$!
trap 'is_interrupted=yes; kill -TERM "$agent"' TERM INT
while is_interrupted=; do # the trap ends `wait`, not the agent
    wait "$agent"
    code=$?
    [[ -n $is_interrupted ]] || break
done
exit "$code"
