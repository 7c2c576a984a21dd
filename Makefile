# Two commands do everything: `make quickstart` trains, `make test` checks. Both make the environment first when needed.
# What the project is pinned for and tested with; the first of them that this machine has is the one of .venv.
PYTHONS := 3.12 3.11 3.13
PYTHON ?= $(shell sh requirements/python.sh $(PYTHONS) || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# What hundreds of processes import is compiled once.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PYTHON) requirements/install.py $(if $(ACCELERATOR),--accelerator $(ACCELERATOR))

CLUSTER := PYTHONPATH=deploy $(BIN)/python -m testcluster
# Whether a cluster of ours is kind's.
IN_DOCKER := [ -z "$$PLAIN" ] && docker info >/dev/null 2>&1 && kind version >/dev/null 2>&1
KIND_CONFIG := $(HOME)/.cache/rljob/kind-kubeconfig
# PACKAGED=1: jobs start from the trainer's image; 0: no longer; not said: as the cluster was started.
PACKAGED_OPTION = $(if $(PACKAGED),$(if $(filter 0,$(PACKAGED)),--no-packaged,--packaged))

# Which slow tests run (tests/support/slow.py): none, all, or the tenth that belongs to the commit.
SLOW ?= none

.PHONY: help install quickstart test lint unit slow-tenth everything land hunt pythons-test runs-test machine programs integration snapshots cluster-up cluster-apply cluster-down cluster-test images gpu-check gpu-accept e2e e2e-smoke generate constraints clean

help:            ## what there is
	@grep -E '^[a-z0-9-]+: .*##|^[a-z0-9-]+:  +##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

install:         ## make or mend the virtual environment (.venv); nothing to do when it is right; ACCELERATOR=gpu: for GPUs, until ACCELERATOR=cpu
	@$(INSTALL)

quickstart: install  ## train a small language model to add two numbers, from random weights, and write a report
	$(BIN)/rljob run examples/quickstart.yaml --output runs/quickstart --resume never

test: lint unit  ## everything that is fast: lint, types, import rules, tests; 7 minutes on two cores

lint: install    ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2 api/rljob_api trainer/rljob_trainer operator/rljob_operator deploy/testcluster
	$(BIN)/lint-imports

unit: install    ## the fast tests alone
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --slow $(SLOW)

slow-tenth: programs  ## a tenth of the tests that say again what quicker ones say, another one for each commit
	$(BIN)/python -m pytest $$(git grep -l 'mark\.slow' -- 'tests/**/test_*.py') -n 2 --dist loadfile --no-loadscope-reorder --slow tenth

everything:      ## all of CI with all slow tests and other random numbers each time, all end-to-end cases included; leaves the record of what tests cost
	.ci/run everything

land: install    ## what CI will do with HEAD, in a clean clone, in the background; again: where it stands, and its verdict
	@$(BIN)/python scripts/land.py $(if $(ANEW),--anew)

hunt: TIMES ?= 10
hunt: install    ## run TEST=... (an id, a file, a folder) TIMES=10 under load: two busy loops a core; lists what failed how often
	@$(BIN)/python tests/support/hunt.py "$(TEST)" $(TIMES)

pythons-test: install  ## import, versions and the quick start on the other Pythons that this machine has; 2 minutes, more the first time
	PYTHONPATH=. $(BIN)/python tests/support/pythons.py --slow $(SLOW) $(PYTHONS)

runs-test: install  ## whole training runs: killed, stopped, resumed, watched, and some that must learn; 6 minutes on two cores
	$(BIN)/python -m pytest tests/runs -n 3 --dist worksteal --slow $(SLOW)

machine:         ## whether this machine has what make programs and the test cluster need; a second
	@PYTHONPATH=deploy $(PYTHON) -m testcluster machine

programs: install  ## build Kubernetes, KubeRay, Helm and CoreDNS from Go modules and unpack etcd and containerd: 20 minutes, once
	$(CLUSTER) programs
	PYTHONPATH=deploy $(BIN)/python tests/integration/kube/kueue.py

integration: programs  ## the operator against a real API server
	$(BIN)/python -m pytest tests/integration -n 3 --dist loadfile --no-loadscope-reorder --slow $(SLOW)

snapshots:       ## what the chart renders, anew (needs the helm of make programs); look at the difference before committing it
	PYTHONPATH=deploy $(BIN)/python tests/integration/snapshots.py

cluster-up:      ## a test cluster with KubeRay and rljob: in Docker by kind where both work, else of plain processes (root, 20 s)
	@if $(IN_DOCKER); then deploy/kind/up.sh; \
	else PYTHONPATH=deploy $(PYTHON) -m testcluster check >/dev/null && $(INSTALL) && $(CLUSTER) up $(PACKAGED_OPTION); fi

cluster-apply: FILES ?= examples/cluster/storage.yaml examples/cluster/quickstart.yaml
cluster-apply:   ## the quick start in pods of the test cluster, whose jobs may need the checkout; FILES="a.yaml b.yaml": these files
	@if $(IN_DOCKER); then kubectl --context kind-rljob apply $(addprefix -f ,$(FILES)); else $(CLUSTER) apply $(FILES); fi

cluster-down:    ## end it; nothing stays behind but its images
	@if $(IN_DOCKER); \
	then kind delete cluster --name rljob; else $(CLUSTER) down; fi

cluster-test: programs  ## the test cluster's own tests: it comes up, heals, and leaves nothing behind
	$(BIN)/python -m pytest tests/cluster

images: install  ## build both images without Docker or a registry (Debian's packages and buildah), as archives
	$(CLUSTER) image operator
	$(CLUSTER) image trainer

gpu-check:       ## what only a GPU can say: attention, log-probs, publication, sleep, MFU, speeds; eight minutes at most, no network; GPU="--only learner"
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m benchmarks.gpu $(GPU)

gpu-accept:      ## known results on a GPU of 80 GB, in an hour: MODELS=FOLDER with Qwen2.5-0.5B-Instruct and Qwen3-0.6B
	@$(if $(MODELS),,echo "make gpu-accept MODELS=FOLDER: the folder with Qwen2.5-0.5B-Instruct and Qwen3-0.6B" >&2; exit 2)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m benchmarks.gpu.accept --models "$(MODELS)" $(GPU)

e2e: install     ## RLJobs in real pods on the test cluster, which stays up; or on the cluster of KUBECONFIG, if that is set
	@set -e; if [ -n "$$KUBECONFIG" ]; then :; \
	elif $(IN_DOCKER); then \
	    kind get clusters 2>/dev/null | grep -qx rljob || deploy/kind/up.sh; \
	    mkdir -p "$(dir $(KIND_CONFIG))"; (umask 077; kind get kubeconfig --name rljob > "$(KIND_CONFIG)"); \
	    export KUBECONFIG="$(KIND_CONFIG)" RLJOB_E2E_IMAGE="$${RLJOB_E2E_IMAGE:-rljob/trainer:0.1.0}"; \
	else $(CLUSTER) up; KUBECONFIG=$$($(CLUSTER) kubeconfig); \
	    export KUBECONFIG RLJOB_E2E_IMAGE="$${RLJOB_E2E_IMAGE-$$($(CLUSTER) trainer-image)}"; fi; \
	$(BIN)/python -m pytest tests/e2e $(E2E)

e2e-smoke: TIMES ?= 1
e2e-smoke:       ## the end-to-end cases that say most in the least time: async, scale, suspend, a lost trainer; TIMES=10: as often
	for run in $$(seq $(TIMES)); do echo "smoke run $$run of $(TIMES)"; $(MAKE) e2e E2E="-m smoke" || exit 1; done

generate: install  ## what is generated from the code: tables of methods, CRD, list of metrics, table of conditions, values of the chart, pictures (tests check them for drift)
	$(BIN)/python scripts/method_tables.py
	$(BIN)/python -m rljob_api.crd
	$(BIN)/python -m rljob_operator.reference
	$(BIN)/python scripts/version.py
	$(BIN)/python scripts/chart_readme.py
	$(BIN)/python -m rljob_trainer.telemetry.names > docs/metrics.md
	$(BIN)/python -m benchmarks.pictures

constraints: install  ## pin anew after a change of pyproject.toml
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python requirements/lock.py --all

clean:           ## remove the environment and the outputs of make quickstart
	rm -rf .venv runs .pytest_cache .ruff_cache .mypy_cache
