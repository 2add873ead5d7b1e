#!/usr/bin/env bash
# Trains an adapter on a GPU machine that need have no network: bash bench/gpu_train.sh
#
# It needs Python 3.12 with torch, numpy, tokenizers and safetensors; the rest comes as wheels (`make wheels`). What it
# trains on is made beforehand, where there is a network, by `bash bench/gpu_train.sh parts`: base weights and windows
# with gaps, cut into parts/*.part of at most 30 MiB, which may be brought over in several goes.
#
# MINUTES of training (7 by default, of which the last 2 with a falling rate), WINDOWS a step (8) and LR (8e-4) may be
# set. The adapter, its log and checkpoints' end go to $OUT (out/ by default): adapter.safetensors, log.jsonl, train.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
PARTS=${PARTS:-parts}
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = parts ]; then
    cache=${INFILL_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/infill-lsp}
    corpus=${CORPUS:-$cache/corpus}
    bin=${BIN:-.venv/bin}
    mkdir -p "$PARTS"
    rm -f "$PARTS"/*.part
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    "$bin/infill-lsp" gaps --corpus "$corpus" --split train --windows "${COUNT:-24000}" --seed 11 --gaps 20 \
        --snippets 0.25 --out "$scratch/train.jsonl.gz"
    "$bin/infill-lsp" gaps --corpus "$corpus" --split held --windows 300 --seed 0 --out "$scratch/held.jsonl.gz"
    model=$("$bin/infill-engine" fetch)
    split -b 30M -d --additional-suffix=.part "$model" "$PARTS/model-"
    split -b 30M -d --additional-suffix=.part "$scratch/train.jsonl.gz" "$PARTS/train-"
    split -b 30M -d --additional-suffix=.part "$scratch/held.jsonl.gz" "$PARTS/held-"
    ls -l "$PARTS"
    exit 0
fi

OUT=$(realpath -m "${OUT:-out}")
WHEELS=${WHEELS:-wheels}
mkdir -p "$OUT"
for what in model train held; do
    compgen -G "$PARTS/$what-*.part" > /dev/null || {
        echo "$PARTS holds no part of $what: make them with \`bash bench/gpu_train.sh parts\` and bring them here"
        exit 1
    }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$scratch/site:$PWD:$PWD/engine:$PWD/kernels" PYTHONUNBUFFERED=1 INFILL_CACHE_DIR="$scratch/cache"
if compgen -G "$WHEELS/*.whl" > /dev/null; then
    "$PYTHON" -m pip install --disable-pip-version-check -q --no-index --no-deps --target "$scratch/site" "$WHEELS"/*.whl
fi
cat "$PARTS"/model-*.part > "$scratch/model.gguf"
cat "$PARTS"/train-*.part > "$scratch/train.jsonl.gz"
cat "$PARTS"/held-*.part > "$scratch/held.jsonl.gz"
export INFILL_MODEL_FILE=$scratch/model.gguf
minutes=${MINUTES:-7}
"$PYTHON" -m infill_engine train --gaps "$scratch/train.jsonl.gz" --held "$scratch/held.jsonl.gz" --out "$scratch/run" \
    --minutes "$minutes" --decay "${DECAY:-2}" --windows "${WINDOWS:-8}" --lr "${LR:-8e-4}" --device "${DEVICE:-auto}" \
    2>&1 | tee "$OUT/train.txt"
cp "$scratch/run/adapter.safetensors" "$scratch/run/log.jsonl" "$OUT/"
ls -l "$OUT"
