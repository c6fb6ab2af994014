#!/usr/bin/env bash
# Measures the trainer on a CUDA card in at most ten minutes, and prints a table and, as the last line, one JSON object.
#   bash tests/gpu/run.sh          on a machine with torch, transformers and peft; no network, no vLLM
#   bash tests/gpu/run.sh --cpu    tries the same program with tiny shapes, and a stand-in for CUDA's kernel
# What such a machine may lack is made before, where there is a network, by `bash tests/gpu/carry.sh`.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G ".carry/*.whl" > /dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    if "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --target "$site" .carry/*.whl; then
        PYTHONPATH="$site:$PYTHONPATH"
    else
        echo "run.sh: .carry/ is not for this Python: goes on without" >&2
    fi
fi
export PYTHONPATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"${PYTHON:-python3}" tests/gpu/measure.py "$@"
