#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command of this checkout on GPUs inside the image of docker/Dockerfile.gpu.
#
#   bash docker/gpu_ci.sh build               build the image, unless this machine has it
#   bash docker/gpu_ci.sh run GPUS COMMAND... run COMMAND on the first GPUS devices
#
# The image is named after what it is made from, so a change of the requirement files or of the Dockerfile makes another
# one, and nothing is pushed or pulled but the base image. Models and data that a command downloads are kept in
# VERL_CI_CACHE (default ~/.cache/verl-ci). Exit code: that of the command; 2 for a wrong call.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
usage() {
    echo "usage: docker/gpu_ci.sh build | docker/gpu_ci.sh run GPUS COMMAND..." >&2
    exit 2
}

image="verl-gpu:$(bash scripts/setup_env.sh --hash)-$(cat docker/Dockerfile.gpu scripts/setup_env.sh | sha256sum | cut -c1-12)"

case "${1:-}" in
build)
    [[ $# -eq 1 ]] || usage
    if docker image inspect "$image" >/dev/null 2>&1; then
        echo "gpu_ci: $image is there"
    else
        DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile.gpu --tag "$image" .
    fi
    ;;
run)
    [[ $# -ge 3 && "$2" =~ ^[1-9][0-9]*$ ]] || usage
    cache="${VERL_CI_CACHE:-$HOME/.cache/verl-ci}"
    mkdir -p "$cache"
    # As the runner's own user, or the next checkout could not remove what the command wrote.
    docker run --rm --init --gpus "$2" --ipc host --user "$(id -u):$(id -g)" \
        --volume "$PWD:/workspace/verl" --volume "$cache:/cache" --workdir /workspace/verl \
        --env HOME=/tmp --env USER=ci --env HF_HOME=/cache/huggingface \
        "$image" "${@:3}"
    ;;
*) usage ;;
esac
