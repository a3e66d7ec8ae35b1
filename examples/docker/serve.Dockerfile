# Host that serves a bundle on its CPU over HTTP. It holds no compiler and no PyTorch:
#   docker build -f serve.Dockerfile -t loka-onnx-serve DIRECTORY_OF_THE_WHEEL
#   docker run -p 8000:8000 -v "$PWD/runs/RUN/bundle:/bundle:ro" loka-onnx-serve
# For an NVIDIA GPU take the image of build.Dockerfile, with `bundle serve /bundle --key PUB`.
# Written against the packages that the extras name, and not built: no Docker was at hand.
FROM python:3.12-slim-trixie

COPY loka_onnx-0.1.0-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir "/tmp/loka_onnx-0.1.0-py3-none-any.whl[cpu,serve,sign]" \
    && useradd --uid 10001 --create-home loka
USER 10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready')"]
ENTRYPOINT ["loka-onnx", "bundle", "serve", "/bundle", "--host", "0.0.0.0", "--port", "8000"]
