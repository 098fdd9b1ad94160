# The images of agent-rollouts; docs/images.md describes each. `hack/images/build` builds them, also without Docker.
#
# BASE must be a Debian with Python 3.11 or newer and its venv module.
ARG BASE=python:3.13.9-slim-bookworm

FROM ${BASE} AS base
LABEL org.opencontainers.image.vendor="agent-rollouts" \
      org.opencontainers.image.licenses="Apache-2.0"

# ---- The executor's bundle ----
FROM base AS bundle
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev binutils && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY hack/images/launcher.c hack/images/bundle.py ./
COPY agent_runtime/__init__.py agent_runtime/
COPY agent_runtime/executor agent_runtime/executor
RUN python3 bundle.py /bundle/python agent_runtime.executor \
    && gcc -static -Os -s -Wall -Wextra -Werror -D_GNU_SOURCE -o /bundle/executor launcher.c

FROM scratch AS executor
LABEL org.opencontainers.image.title="agent-rollouts executor" \
      org.opencontainers.image.description="The portable executor alone: an image volume of sandbox pods, or copied by an init container" \
      org.opencontainers.image.vendor="agent-rollouts" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=bundle /bundle /
ENTRYPOINT ["/executor"]

# ---- Python dependencies of runner and operator ----
# In a separate stage, so that dependencies are installed again only if the requirements change.
FROM base AS requirements
WORKDIR /build
COPY pyproject.toml hack/images/requirements.py hack/images/entry_points.py ./
RUN python3 requirements.py cluster environments mcp terminal > runtime.txt && python3 requirements.py operator > operator.txt \
    && python3 entry_points.py

# Settings of the package index (address, certificate authority) are build secrets, so that no layer contains them.
FROM base AS runtime-dependencies
WORKDIR /build
COPY --from=requirements /build/runtime.txt requirements.txt
COPY constraints.txt ./
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/venv \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir -c constraints.txt -r requirements.txt

FROM base AS operator-dependencies
WORKDIR /build
COPY --from=requirements /build/operator.txt requirements.txt
COPY constraints.txt ./
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/venv \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir -c constraints.txt -r requirements.txt

FROM base AS product
# The user needs a name and a home folder, because much software looks them up.
RUN groupadd -g 65532 rollout && useradd -u 65532 -g rollout -d /app -M -s /usr/sbin/nologin rollout
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH=/app
WORKDIR /app
COPY rollout_api rollout_api

FROM product AS runtime
LABEL org.opencontainers.image.title="agent-rollouts runtime" \
      org.opencontainers.image.description="Runner pods: the engine that drives rollouts"
COPY --from=runtime-dependencies /opt/venv /opt/venv
COPY agent_runtime agent_runtime
COPY rolloutctl rolloutctl
COPY agent_rollouts agent_rollouts
COPY --from=requirements /build/agent_rollouts.dist-info agent_rollouts.dist-info
RUN python3 -m compileall -q .
USER 65532:65532
ENTRYPOINT ["python3", "-m", "agent_runtime.runner"]

# ---- The standalone session proxy ----
FROM runtime AS proxy
LABEL org.opencontainers.image.title="agent-rollouts proxy" \
      org.opencontainers.image.description="The standalone session proxy: docker run agent-rollouts-proxy SETTINGS-FILE"
USER 0
# Docker gives a new volume at this path the folder's owner.
RUN install -d -o 65532 -g 65532 /sessions
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["python3", "-m", "agent_runtime.proxy"]

# ---- The control plane ----
FROM product AS operator
LABEL org.opencontainers.image.title="agent-rollouts operator" \
      org.opencontainers.image.description="The control plane: turns RolloutJobs, Sandboxes and ModelServers into pods"
COPY --from=operator-dependencies /opt/venv /opt/venv
COPY operator/rollout_operator rollout_operator
RUN python3 -m compileall -q .
USER 65532:65532
ENTRYPOINT ["python3", "-m", "rollout_operator"]
