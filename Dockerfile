# The whole pipeline for a machine with NVIDIA GPUs: web UI, daemon, vLLM and training in one image.
#
#   docker build -t eagle3-pipeline .
#   docker run --gpus all --shm-size 16g -p 127.0.0.1:3000:3000 \
#       -v /big-disk/eagle3:/data -v eagle3-dagster:/dagster -e EAGLE3_RECIPES=qwen3-8b-1gpu eagle3-pipeline
#
# --gpus all      needs the NVIDIA container toolkit on the host, and a driver for CUDA 13.
# --shm-size 16g  the workers of a tensor- or expert-parallel server pass tensors through /dev/shm, which is
#                 64 MB by default; too little ends in "Bus error". --ipc=host instead shares the host's.
# -p 127.0.0.1:   the web UI has no login. Inside the container it listens on 0.0.0.0, or nothing could be
#                 published; on the host it stays local. From elsewhere: ssh -L 3000:127.0.0.1:3000 HOST
# -v ...:/data    samples, hidden states, drafts, caches: terabytes for a large target. Owned by uid 10001.
# -v ...:/dagster runs, events, schedules (SQLite: a local disk, no network file system).
#
# Stopping the container stops the vLLM servers in it; `docker stop --timeout 180` lets a running step record what is
# complete first. deploy/compose.yaml runs web UI and daemon apart, so that
# the web UI can be restarted alone.

# 3.11 is the Python of the lock file.
FROM python:3.11-slim-bookworm

# tini: reaps the orphans that killed servers leave behind, and passes signals on.
# g++: Triton and torch.compile build small C++ launchers at run time.
# Debian's point releases drop old versions, so a pinned one would soon fail to build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --uid 10001 --create-home --shell /bin/bash eagle3 \
    && install --directory --owner eagle3 --group eagle3 /data /dagster /run/eagle3

# The dependencies before the source: 10 GB that an edit of the source does not build again.
COPY requirements/lock-gpu.txt /app/requirements/
RUN pip install --no-cache-dir --no-deps --only-binary :all: -r /app/requirements/lock-gpu.txt

WORKDIR /app
COPY LICENSE README.md pyproject.toml definitions.py workspace.yaml dagster.yaml ./
COPY deploy/entrypoint.sh deploy/
COPY recipes recipes/
COPY eagle3_pipeline eagle3_pipeline/
COPY resources resources/
COPY assets assets/
COPY sensors sensors/
# Editable: definitions.py, recipes/ and the library stay beside each other, as in a checkout.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .

# XDG_CACHE_HOME: downloaded models and vLLM's compiled graphs outlast the container.
# TMPDIR: the sockets of Dagster's code servers, in a folder that web UI and daemon can share.
# EAGLE3_HOST_STATE: leases and server records, in the container itself. Process ids in them mean nothing elsewhere,
# so leave it off volumes, and let one container per machine do the runs.
ENV DAGSTER_HOME=/dagster \
    EAGLE3_HOST_STATE=/tmp/eagle3-pipeline \
    EAGLE3_STORAGE=/data \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONUNBUFFERED=1 \
    TMPDIR=/run/eagle3 \
    XDG_CACHE_HOME=/data/.cache

# By number: an orchestrator that insists on non-root cannot look names up.
USER 10001:10001
VOLUME ["/data", "/dagster"]
EXPOSE 3000

HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:3000/server_info', timeout=5)"]

ENTRYPOINT ["/usr/bin/tini", "--", "/app/deploy/entrypoint.sh"]
CMD ["all"]
