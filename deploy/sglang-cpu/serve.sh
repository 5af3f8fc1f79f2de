#!/bin/bash
# serve.sh DIR PORT [SGLang flags]: one SGLang server on the CPU, in the foreground, on the loopback interface.
# Later flags win, so any default below can be given again. GET /ready answers 200 when it serves.
set -euo pipefail

if (($# < 2)); then
    echo "usage: serve.sh DIR PORT [SGLang flags]" >&2
    exit 2
fi
dir=$1
port=$2
shift 2
if [[ ! -f $dir/complete ]]; then
    echo "serve.sh: $dir holds no finished environment, run setup.sh $dir first" >&2
    exit 1
fi

export SGLANG_PLATFORM=torch_cpu
# One thread: the model is so small that two threads mostly wait for each other, much more so beside a busy neighbour.
export OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1

exec "$dir/venv/bin/python" -m sglang.launch_server \
    --model-path "$dir/model-0" \
    --host 127.0.0.1 --port "$port" \
    --device cpu --dtype float32 \
    --context-length 4096 --max-total-tokens 16384 --page-size 16 \
    --incremental-streaming-output --stream-interval 8 \
    --sleep-on-idle --skip-server-warmup \
    "$@"
