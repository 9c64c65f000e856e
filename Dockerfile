# peftlab in a container, for CPUs by default:
#
#   docker build -t peftlab .
#   docker run --rm --user "$(id -u)" -v "$PWD:/work" peftlab run recipe.yaml
#
# and for GPUs. torch brings CUDA along, the machine has the driver:
#
#   docker build -t peftlab:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --gpus all --shm-size 4g --user "$(id -u)" -v "$PWD:/work" peftlab:cuda run recipe.yaml
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY peftlab peftlab
COPY recipes recipes
RUN pip wheel --no-cache-dir --no-deps --constraint constraints.txt --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=report,gguf,metrics
COPY constraints.txt /wheels/
# First and by itself: it is large and changes rarely.
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt --index-url "${TORCH_INDEX}" torch
COPY --from=build /wheels/*.whl /wheels/
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt "$(echo /wheels/peftlab-*.whl)[${EXTRAS}]"

# Not root. With `--user "$(id -u)"` what is written belongs to whoever starts it.
RUN useradd --uid 1000 --create-home peftlab \
    && chmod 1777 /home/peftlab \
    && install --directory --mode=1777 /work
USER 1000
ENV HOME=/home/peftlab USER=peftlab
WORKDIR /work
ENTRYPOINT ["peftlab"]
CMD ["--help"]
