#!/usr/bin/env bash
# A laptop cluster in Docker: kind, KubeRay's operator, our images and our operator. Needs docker, kind, kubectl, helm.
# Every step may be repeated: what is there already is left as it is, images and chart are brought up to date, and volumes
# whose claim is gone may be claimed again.
set -euo pipefail
cd "$(dirname "$0")/../.."

KUBERAY_VERSION=1.6.2
VERSION=0.1.0
shared=${RLJOB_SHARED:-$HOME/.cache/rljob/kind}
mkdir -p "$shared"/volume{1,2,3,4}
chmod 777 "$shared"/volume*

if ! kind get clusters | grep -qx rljob; then
    sed "s|SHARED_FOLDER|$shared|" deploy/kind/cluster.yaml | kind create cluster --config - --wait 120s
fi
kubectl config use-context kind-rljob

for target in operator trainer; do
    docker build --target "$target" --tag "rljob/$target:$VERSION" .
    kind load docker-image --name rljob "rljob/$target:$VERSION"
done

kubectl apply -f deploy/kind/volumes.yaml
kubectl get pv --output jsonpath='{range .items[?(@.status.phase=="Released")]}{.metadata.name}{"\n"}{end}' |
    while read -r volume; do
        kubectl patch pv "$volume" --type json --patch '[{"op":"remove","path":"/spec/claimRef"}]'
    done

# Eight GPUs a worker that nobody has: pods that ask for some are scheduled. Engines and ranks in them find no CUDA and fail;
# jobs that are to train here have `gpusPerReplica: 0`.
for node in $(kubectl get nodes --selector '!node-role.kubernetes.io/control-plane' --output name); do
    kubectl patch "$node" --subresource status --type merge --patch '{"status":{"capacity":{"nvidia.com/gpu":"8"}}}'
done

helm upgrade --install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm \
    --version "$KUBERAY_VERSION" --namespace ray-system --create-namespace --wait
helm upgrade --install rljob-operator charts/rljob-operator --namespace rljob --create-namespace --wait
# The new image has the old one's tag, by which Kubernetes sees no change: pods would go on with the old one.
kubectl rollout restart deployment/rljob-operator --namespace rljob
kubectl rollout status deployment/rljob-operator --namespace rljob --timeout 180s

cat <<'NEXT'

  kubectl get nodes
  make e2e
NEXT
