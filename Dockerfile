# megasparse with PyTorch's build for CUDA. It is built from a checkout: docker build -t megasparse .
#   docker run --gpus all -v "$PWD:/work" megasparse pretrain quickstart
FROM python:3.12-slim

# Triton and DeepSpeed compile when they first run; g++ and make are what they compile with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make git \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /src/
COPY megasparse /src/megasparse
COPY configs /src/configs
RUN pip install --no-cache-dir "/src[hf,tasks,remote,compress]" ninja==1.13.0 \
    && useradd --create-home --uid 1000 user
USER 1000
WORKDIR /work
ENTRYPOINT ["megasparse"]
