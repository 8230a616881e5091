# One file for CPU and GPU machines; docs/kubernetes.md describes how to run the image.
#   docker build -t mtpctl:cpu .
#   docker build -t mtpctl:gpu --build-arg EXTRA=gpu .
ARG PYTHON=3.12.12
FROM python:${PYTHON}-slim-bookworm AS dependencies
ARG EXTRA=cpu
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
RUN --mount=type=cache,target=/root/.cache pip install uv==0.13.9 && python -m venv /opt/mtpctl
WORKDIR /src
COPY pyproject.toml constraints/${EXTRA}.txt ./
# ray[default] has the job server that KubeRay's RayJob needs.
RUN --mount=type=cache,target=/root/.cache uv pip install --python /opt/mtpctl/bin/python --requirements pyproject.toml --extra "${EXTRA}" \
    --constraints "${EXTRA}.txt" "ray[default]"

FROM dependencies AS wheel
COPY README.md LICENSE ./
COPY recipes recipes
COPY mtpctl mtpctl
RUN --mount=type=cache,target=/root/.cache uv build --wheel --python /opt/mtpctl/bin/python

FROM python:${PYTHON}-slim-bookworm
# A compiler for Triton and torch.compile, libnuma for vLLM on CPUs, bubblewrap for the sandbox, and procps and wget for KubeRay's probes.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap g++ libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home mtpctl \
    && install --directory --owner mtpctl /runs
COPY --from=dependencies /opt/mtpctl /opt/mtpctl
# The project itself is a small layer on top.
RUN --mount=type=bind,from=wheel,source=/src/dist,target=/dist /opt/mtpctl/bin/python -m pip install --no-cache-dir --no-deps /dist/*.whl
ENV PATH=/opt/mtpctl/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /
HEALTHCHECK --interval=1h --timeout=10m --start-period=10m --retries=1 CMD ["mtpctl", "doctor", "--quick"]
CMD ["mtpctl", "--help"]
