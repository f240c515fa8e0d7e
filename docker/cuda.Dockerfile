# rollpacker[all,vllm] for NVIDIA GPUs.
#
#   docker build -f docker/cuda.Dockerfile -t rollpacker:cuda .
#   docker run --rm --gpus all --ipc host -v "$PWD:/job" --user "$(id -u)" rollpacker:cuda train job.yaml
#
# Never built and never run, neither the image nor vLLM on a GPU inside it. What was seen: its packages
# resolve for Python 3.12 on x86_64 Linux (torch 2.13.0, vllm 0.32.0, CUDA 13.0; 2026-11-26), and hadolint
# finds nothing.
# Of CUDA the wheels bring their own libraries; the devel image is for nvcc, with which vLLM's kernels are
# compiled as they are first used.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/rollpacker
COPY LICENSE README.md pyproject.toml ./
COPY requirements requirements
COPY src src
RUN python -m pip install --no-cache-dir --prefer-binary --constraint requirements/constraints.txt '.[all,vllm]'

# Any user may write here; --user needs no account, for which torch would otherwise look.
ENV HOME=/job USER=rollpacker
WORKDIR /job
RUN chmod 1777 /job
USER 1000
ENTRYPOINT ["rollpacker"]
CMD ["doctor"]
