# Images of rljob:
#   docker build --target operator --tag rljob/operator:0.1.0 .
#   docker build --target trainer --tag rljob/trainer:0.1.0 .                                  # CPUs
#   docker build --target trainer --build-arg ACCELERATOR=gpu --tag rljob/trainer:0.1.0-gpu .
# and with --build-arg REVISION=$(git rev-parse HEAD) they say which commit they were built from.
#
# Packages are those that requirements/*.txt pins, and one without a hash there is refused, be it installed or only used to
# build ours. Two things have none: torch's CPU build (TORCH_BACKEND), and Debian's packages, whose signatures apt checks
# and whose versions are those of the day. The GPU variant needs no CUDA base: the wheels bring the libraries, and the
# node's runtime the driver.

# Any image with Python 3.11 to 3.13 as `python`, its pip, bash, and lscpu (vLLM on CPUs asks it). `make images` passes one
# made of Debian packages, whose Python is Debian's 3.11. The digest is that of the list of architectures
# (`docker buildx imagetools inspect` prints it).
ARG PYTHON_IMAGE=docker.io/library/python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${PYTHON_IMAGE} AS build
# Where the package index is a mirror, or its certificate isn't one that everybody trusts. None of it stays in the image.
ARG PIP_INDEX_URL
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
ENV UV_LINK_MODE=copy UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /build
COPY requirements/uv.txt requirements/
RUN python -m pip install --quiet --no-cache-dir --target /opt/uv --require-hashes --requirement requirements/uv.txt \
    && python -m venv --without-pip /opt/rljob
ENV PATH=/opt/rljob/bin:/opt/uv/bin:$PATH VIRTUAL_ENV=/opt/rljob
COPY pyproject.toml README.md LICENSE ./
COPY requirements/build.txt requirements/
COPY deploy/images/sbom.py ./
# The wheel also holds what people read and lay over; images need none of it.
RUN mkdir charts crds examples

FROM build AS operator-build
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
COPY requirements/cpu.txt requirements/
RUN uv pip install --quiet --require-hashes --no-build --constraints requirements/cpu.txt --requirement pyproject.toml \
        --extra operator
COPY api api
COPY operator operator
COPY trainer trainer
# The distribution is one; what the operator must not import isn't installed, so its code may as well not be there.
RUN uv pip install --quiet --no-deps --build-constraints requirements/build.txt --require-build-hashes . \
    && rm -r /opt/rljob/lib/python3.*/site-packages/rljob_trainer /opt/rljob/bin/rljob \
    # The Kubernetes client has calls and models of all kinds, twice. Nothing here makes use of more than a few, and the
    # bytecode of all would be a fifth of the image.
    && find /opt/rljob/lib/python3.*/site-packages/kubernetes -path '*/client/*/__pycache__/*' ! -name '__init__.*' -delete \
    && python sbom.py > /opt/rljob/sbom.spdx.json

FROM build AS trainer-build
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
ARG ACCELERATOR=cpu
# "cpu" takes torch's CPU build from PyTorch's own index. requirements/torch.txt has the hashes of the ordinary wheels alone,
# so torch is then not checked, and hashes can't be required; those of all else are still compared, and tests find all else
# to have one. Empty takes the ordinary wheel, where that index is out of reach, and requires all hashes.
ARG TORCH_BACKEND=cpu
COPY requirements requirements
RUN case "${ACCELERATOR}" in \
        cpu) set -- --overrides requirements/cpu-overrides.txt; backend=${TORCH_BACKEND} ;; \
        gpu) set --; backend= ;; \
        *) echo "ACCELERATOR is cpu or gpu, not ${ACCELERATOR}" >&2; exit 64 ;; \
    esac \
    && if [ -n "${backend}" ]; then set -- "$@" --torch-backend "${backend}"; \
    else set -- "$@" --require-hashes --constraints requirements/torch.txt; fi \
    && uv pip install --quiet --no-build "$@" --constraints "requirements/${ACCELERATOR}.txt" --requirement pyproject.toml \
        --extra trainer --extra "${ACCELERATOR}"
COPY api api
COPY operator operator
COPY trainer trainer
RUN uv pip install --quiet --no-deps --build-constraints requirements/build.txt --require-build-hashes . \
    && cp sbom.py /opt/rljob/

FROM ${PYTHON_IMAGE} AS operator
LABEL org.opencontainers.image.title="rljob operator" \
      org.opencontainers.image.description="Turns RLJobs into KubeRay clusters" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=operator-build /opt/rljob /opt/rljob
ENV PATH=/opt/rljob/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["python", "-m", "rljob_operator"]
ARG REVISION=
LABEL org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}"

FROM ${PYTHON_IMAGE} AS trainer
LABEL org.opencontainers.image.title="rljob trainer" \
      org.opencontainers.image.description="Driver, learner and rollout engines of rljob" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=trainer-build /opt/rljob /opt/rljob
# Ray looks for a home and a user name.
RUN (getent passwd 1000 >/dev/null || echo 'rljob:x:1000:1000::/home/rljob:/bin/bash' >> /etc/passwd) \
    && mkdir -p /home/rljob && chown 1000:1000 /home/rljob
# vLLM on CPUs asks libnuma for the memory of each; Python's slim images don't have it. On GPUs Triton compiles C against
# Python's headers before its first kernel, and torch may compile C++; slim images have no compiler. CUDA's own (nvcc) comes
# with the packages, in nvidia/cu13/bin below site-packages, where nothing looks for it: not on PATH, and CUDA_HOME is not
# set. It is only FlashInfer's to use, which vLLM leaves alone where it finds none but on Blackwell (docs/real-cluster.md).
# NCCL loads libibverbs when it runs: without it, or a provider for the adapter, it goes by TCP and says so to nobody.
ARG ACCELERATOR=cpu
RUN if [ "${ACCELERATOR}" = gpu ]; then set -- gcc g++ libc6-dev libibverbs1 ibverbs-providers librdmacm1; else set --; fi \
    && if ! python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then set -- "$@" libnuma1; fi \
    && if [ $# -gt 0 ]; then \
        apt-get update && apt-get install --yes --no-install-recommends "$@" && rm -rf /var/lib/apt/lists/*; \
    fi \
    && if [ "${ACCELERATOR}" = gpu ]; then \
        echo '#include <Python.h>' | gcc -fsyntax-only -x c \
            -I "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" - \
        && python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1"), ctypes.CDLL("librdmacm.so.1")'; \
    fi
ENV PATH=/opt/rljob/bin:$PATH HOME=/home/rljob PYTHONUNBUFFERED=1
# Here and not where the packages were installed: Debian's of this stage belong in it.
RUN python /opt/rljob/sbom.py > /opt/rljob/sbom.spdx.json
USER 1000:1000
WORKDIR /home/rljob
CMD ["rljob", "--help"]
ARG REVISION=
LABEL org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}"
