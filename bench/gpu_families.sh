#!/usr/bin/env bash
# The large families at full size, with random weights, on a GPU machine that needs no network: bash bench/gpu_families.sh
#
# It needs Python 3.12 with torch, Triton and numpy, and 139 GiB of GPU memory for what is compared with transformers,
# if that is there; what memory does not do for says so and loses no other part. Weights are made on the device. Results
# go to $OUT (out/ by default): gemma_bf16, gemma_fp8, dream_bf16 and dream_fp8 as .txt and .json, and families.txt. The
# whole takes less than six minutes. With `--tiny --device cpu` small models show that the script works; SLOWER=10 gives
# each part ten times as long.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${OUT:-out}")
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
: > "$OUT/families.txt"
say() { echo "$*" | tee -a "$OUT/families.txt"; }
export PYTHONPATH="$PWD:$PWD/engine:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

failed=0
# part NAME SECONDS FAMILY TYPE ARGUMENTS...: one model in a process of its own, what it prints in NAME.txt.
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout --kill-after=5 "$((limit * ${SLOWER:-1}))" "$PYTHON" -W ignore -m bench.gpu_families "$@" --json "$OUT/$name.json" \
        > "$OUT/$name.txt" 2>&1
    status=$?
    case $status in
        0) say "$name: done in $((SECONDS - start)) s" ;;
        124 | 137) say "$name: stopped after $limit s" ;;
        *) say "$name: failed with $status after $((SECONDS - start)) s: $(tail -n 1 "$OUT/$name.txt")" ;;
    esac
    [ "$status" -eq 0 ] || failed=1
    # Where it was stopped the rows so far stand there as they came.
    grep -v '^$' "$OUT/$name.txt" | tail -n 20 >> "$OUT/families.txt"
}

part gemma_bf16 120 diffusion-gemma bf16 "$@"
part gemma_fp8 80 diffusion-gemma fp8 "$@"
part dream_bf16 80 dream bf16 "$@"
part dream_fp8 60 dream fp8 "$@"
cat "$OUT/families.txt"
exit "$failed"
