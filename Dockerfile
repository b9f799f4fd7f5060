# docker build -t locos --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
# docker run --rm -v "$PWD/results:/locos/results" locos -j2 results/smollm2-135m/summary.md
# Without the build argument, torch comes with the CUDA libraries; then run with --gpus all.
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=
WORKDIR /locos

# Before the project, so that an edit to it does not install everything again.
COPY requirements.lock .
RUN PIP_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL" pip install --no-cache-dir -r requirements.lock

COPY . .
ENTRYPOINT ["snakemake"]
