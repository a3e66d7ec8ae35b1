# Host that runs the pipeline and builds engines for its NVIDIA GPU. Needs the NVIDIA container toolkit:
#   docker build -f build.Dockerfile -t loka-onnx-build DIRECTORY_OF_THE_WHEEL
#   docker run --gpus all -v "$PWD:/work" loka-onnx-build run RUN.yaml
# Written against the packages that the extras name, and not built: no Docker was at hand.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Inductor compiles with g++; Ubuntu 24.04 brings Python 3.12.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH="/opt/loka-onnx/bin:$PATH"

# PyTorch and ONNX Runtime from the package index are builds for CUDA.
COPY loka_onnx-0.1.0-py3-none-any.whl /tmp/
RUN python3 -m venv /opt/loka-onnx \
    && pip install --no-cache-dir "/tmp/loka_onnx-0.1.0-py3-none-any.whl[nvidia,export,inductor,sign,registry]" \
    && useradd --uid 10001 --create-home loka
USER 10001
WORKDIR /work
ENV LOKA_ONNX_CACHE=/home/loka/cache
ENTRYPOINT ["loka-onnx"]
CMD ["doctor"]
