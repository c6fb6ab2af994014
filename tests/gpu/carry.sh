#!/usr/bin/env bash
# Fetches into .carry/ (20 MB, not committed) what the trainer's step needs beside torch, transformers and peft, and TRL
# with what it needs, for the Python of the GPU machine:  bash tests/gpu/carry.sh [3.12]
set -euo pipefail
cd "$(dirname "$0")/../.."
platforms=()
for libc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${libc}_x86_64"); done
rm -rf .carry
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version "${1:-3.12}" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 -d .carry \
    pydantic-core uuid-utils trl==1.16.0 datasets==4.8.5 dill==0.4.1 multiprocess==0.70.19 xxhash
