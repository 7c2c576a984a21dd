#!/usr/bin/env bash
# A laptop cluster in Docker: kind, KubeRay's operator, our images and our operator. Needs docker, kind, kubectl, helm.
# Every step may be repeated: what is there already is left as it is, images and chart are brought up to date, and volumes
# whose claim is gone may be claimed again. kubectl's current context becomes kind-rljob.
set -euo pipefail
cd "$(dirname "$0")/../.."

KUBERAY_VERSION=1.6.2
VERSION=0.1.0
# Whose node image cluster.yaml has; an older kind can't load images into it.
OLDEST_KIND_MINOR=32

fail() {
    echo "deploy/kind/up.sh: $1" >&2
    exit 1
}

# Before anything is built: an image takes minutes.
missing=
for program in docker kind kubectl helm; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] || fail "not installed:$missing (needed are docker, kind 0.$OLDEST_KIND_MINOR or newer, kubectl and helm)"
docker info >/dev/null 2>&1 || fail "docker is installed, but its engine doesn't answer: start it (docker info says more)"
kind_version=$(kind version)
minor=$(sed -n 's/^kind v0\.\([0-9]*\).*/\1/p' <<<"$kind_version")
if [ -n "$minor" ] && [ "$minor" -lt "$OLDEST_KIND_MINOR" ]; then
    fail "this is $kind_version; the cluster's node image needs kind 0.$OLDEST_KIND_MINOR or newer"
fi

shared=${RLJOB_SHARED:-$HOME/.cache/rljob/kind}
mkdir -p "$shared"/volume{1,2,3,4}
chmod 777 "$shared"/volume*

before=$(kubectl config current-context 2>/dev/null || true)
clusters=$(kind get clusters)
if grep -qx rljob <<<"$clusters"; then
    kind export kubeconfig --name rljob
else
    sed "s|SHARED_FOLDER|$shared|" deploy/kind/cluster.yaml | kind create cluster --config - --wait 120s
fi

revision=$(git rev-parse HEAD 2>/dev/null || true)
# Pods run on workers only: the control plane is tainted, and the trainer's image has gigabytes.
workers=$(kind get nodes --name rljob | grep -v -e '-control-plane$')
for target in operator trainer; do
    docker build --target "$target" --tag "rljob/$target:$VERSION" --build-arg "REVISION=$revision" .
    kind load docker-image --name rljob --nodes "${workers//$'\n'/,}" "rljob/$target:$VERSION"
done

kubectl apply -f deploy/kind/volumes.yaml
kubectl get pv --output jsonpath='{range .items[?(@.status.phase=="Released")]}{.metadata.name}{"\n"}{end}' |
    while read -r volume; do
        kubectl patch pv "$volume" --type json --patch '[{"op":"remove","path":"/spec/claimRef"}]'
    done

# Eight GPUs a worker that nobody has: pods that ask for some are scheduled. Engines and ranks in them find no CUDA and fail;
# jobs that are to train here have `gpusPerReplica: 0`.
for node in $workers; do
    kubectl patch node "$node" --subresource status --type merge --patch '{"status":{"capacity":{"nvidia.com/gpu":"8"}}}'
done

helm upgrade --install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm \
    --version "$KUBERAY_VERSION" --namespace ray-system --create-namespace --wait
helm upgrade --install rljob-operator charts/rljob-operator --namespace rljob --create-namespace --wait
# The new image has the old one's tag, by which Kubernetes sees no change: pods would go on with the old one.
kubectl rollout restart deployment/rljob-operator --namespace rljob
kubectl rollout status deployment/rljob-operator --namespace rljob --timeout 180s

case $before in
"" | kind-rljob) echo "kubectl's current context is kind-rljob." ;;
*) echo "kubectl's current context is kind-rljob now; back to the one before: kubectl config use-context $before" ;;
esac
cat <<'NEXT'
What comes next (docs/laptop.md has more):

  kubectl apply -f examples/cluster/storage.yaml
  kubectl apply -f examples/cluster/quickstart.yaml
  kubectl wait rlj/quickstart --for=condition=Finished --timeout=30m
NEXT
