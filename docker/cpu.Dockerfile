# rollpacker[all] without a GPU: training with the built-in engine, simulations, RollMux's daemon.
#
#   docker build -f docker/cpu.Dockerfile -t rollpacker:cpu .
#   docker run --rm --shm-size 2g -v "$PWD/runs:/job/runs" --user "$(id -u)" rollpacker:cpu demo --quick
#
# Never built: no Docker daemon was at hand. Its pip and rollpacker lines ran in a virtual environment of
# Python 3.13 (2026-11-26), and hadolint finds nothing.
# pip's default torch brings CUDA, gigabytes that nothing here uses; for torch's CPU build name its index:
# --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.13-slim

ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/rollpacker
COPY LICENSE README.md pyproject.toml ./
COPY requirements requirements
COPY src src
RUN python -m pip install --no-cache-dir --prefer-binary --constraint requirements/constraints.txt '.[all]'

# Any user may write here; --user needs no account, for which torch would otherwise look.
ENV HOME=/job USER=rollpacker
WORKDIR /job
RUN chmod 1777 /job
USER 1000
ENTRYPOINT ["rollpacker"]
CMD ["doctor"]
