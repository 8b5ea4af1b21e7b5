# What each pod of a Ray cluster runs (docs/kubernetes.md): docker build --build-arg DEVICE=cuda -t pliant:cuda .
# For CPUs, DEVICE=cpu and --build-arg PIP_EXTRA_INDEX_URL=..., PyTorch's index of builds for CPUs: otherwise pip takes
# the one that brings CUDA's libraries along.
ARG DEVICE=cpu

FROM python:3.11-slim-bookworm AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ python3 python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE} AS built
ARG PIP_EXTRA_INDEX_URL
COPY . /src
RUN python3 -m venv /opt/pliant \
    && /opt/pliant/bin/pip install --no-cache-dir -c /src/constraints.txt /src

FROM ${DEVICE}
COPY --from=built /opt/pliant /opt/pliant
COPY deploy/profile.sh /etc/profile.d/pliant.sh
RUN useradd --uid 1001 --create-home pliant && install -d -o pliant /var/cache/pliant
ENV PATH=/opt/pliant/bin:$PATH PLIANT_CACHE=/var/cache/pliant
USER 1001
WORKDIR /home/pliant
CMD ["pliant", "--help"]
