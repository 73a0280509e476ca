# syntax=docker/dockerfile:1
# The image of all pods of k8s/. On GPUs:
#   docker build -t spd-serve:0.1.0 --build-arg EXTRAS=gpu \
#     --build-arg BASE=rayproject/ray:2.60.0-py311-cu128 .
ARG BASE=rayproject/ray:2.60.0-py311-cpu
FROM ${BASE}

# Empty, or gpu: what NCCL between stages needs.
ARG EXTRAS=""
# The index of torch's builds for CPUs alone, if you want those: they are some GB smaller.
ARG PIP_EXTRA_INDEX_URL=""

LABEL org.opencontainers.image.title="spd-serve" \
      org.opencontainers.image.description="A server for Speculative Pipeline Decoding" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1

USER 0
RUN install --directory --owner=1000 --group=100 /opt/spd
USER 1000:100
WORKDIR /opt/spd

# What is needed, before the code: a change of the code leaves this layer as it is. Ray must stay as
# the base has it, since its binaries start the pods.
COPY --chown=1000:100 pyproject.toml README.md LICENSE ./
RUN mkdir service clients && touch service/__init__.py clients/__init__.py \
    && python -c 'import ray; print(f"ray=={ray.__version__}")' > /tmp/constraints.txt \
    && python -m pip install --constraint /tmp/constraints.txt --editable ".${EXTRAS:+[${EXTRAS}]}" \
    && rm /tmp/constraints.txt

COPY --chown=1000:100 clients clients
COPY --chown=1000:100 deployments deployments
COPY --chown=1000:100 service service
# An image that lacks something shall not be made.
RUN python -c 'import service.app, service.preflight'
