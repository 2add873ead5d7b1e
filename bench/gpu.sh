#!/usr/bin/env bash
# What only a GPU can tell, on a machine that need have no network: bash bench/gpu.sh
#
# It needs Python 3.12 with torch, Triton, numpy, tokenizers, safetensors, pytest and hypothesis. The rest comes as
# wheels, which `make wheels` puts into wheels/ beforehand. Base weights may lie in weights/ as one *.gguf file or in
# pieces of it named *.part (`split -b 45M model.gguf weights/`, then `.part` behind each), in order of their names;
# without them the model is measured with random weights of its shape.
#
# Results go to $OUT (out/ by default): kernels.{txt,json}, engine.{txt,json}, tests.txt, engine_tests.txt, summary.txt.
# A part that fails or takes too long loses no other's. The whole takes some six minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(realpath -m "${OUT:-out}")
WHEELS=${WHEELS:-wheels}
WEIGHTS=${WEIGHTS:-weights}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: > "$OUT/summary.txt"
say() { echo "$*" | tee -a "$OUT/summary.txt"; }

export PYTHONPATH="$scratch/site:$PWD:$PWD/engine:$PWD/kernels" PYTHONUNBUFFERED=1
if compgen -G "$WHEELS/*.whl" > /dev/null; then
    pip=("$PYTHON" -m pip install --disable-pip-version-check -q --no-index --no-deps --target "$scratch/site")
    "${pip[@]}" "$WHEELS"/*.whl || for wheel in "$WHEELS"/*.whl; do
        "${pip[@]}" --upgrade "$wheel" || say "wheels: $(basename "$wheel") could not be installed"
    done
else
    say "wheels: none in $WHEELS/ (make wheels); what is installed serves"
fi
"$PYTHON" - <<'PY' | tee -a "$OUT/summary.txt" || { say "gpu: torch finds none, nothing was run"; exit 1; }
import platform, sys, torch
if not torch.cuda.is_available():
    sys.exit(1)
import triton
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}")
PY

if [ -z "${INFILL_MODEL_FILE:-}" ]; then
    if compgen -G "$WEIGHTS/*.gguf" > /dev/null; then
        INFILL_MODEL_FILE=$(compgen -G "$WEIGHTS/*.gguf" | head -n 1)
    elif compgen -G "$WEIGHTS/*.part" > /dev/null; then
        INFILL_MODEL_FILE=$scratch/model.gguf
        cat "$WEIGHTS"/*.part > "$INFILL_MODEL_FILE"
    fi
fi
random=()
if [ -n "${INFILL_MODEL_FILE:-}" ]; then
    export INFILL_MODEL_FILE
    say "weights: $INFILL_MODEL_FILE"
else
    random=(--random-weights)
    say "weights: none in $WEIGHTS/, so the engine runs with random ones of the same shape"
fi

failed=0
# part NAME SECONDS COMMAND...: runs it, keeps what it prints in NAME.txt and says how it ended.
part() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout --kill-after=5 "$limit" "$@" > "$OUT/$name.txt" 2>&1
    status=$?
    case $status in
        0) say "$name: done in $((SECONDS - start)) s" ;;
        5) say "$name: there are none" ;; # pytest's word for no tests
        124 | 137) say "$name: stopped after $limit s" ;;
        *) say "$name: failed with $status after $((SECONDS - start)) s: $(tail -n 1 "$OUT/$name.txt")" ;;
    esac
    [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || failed=1
}

part kernels 120 "$PYTHON" -W ignore -m bench.kernels --seconds 100 --json "$OUT/kernels.json"
if [ -f bench/engine.py ]; then
    part engine 80 "$PYTHON" -W ignore -m bench.engine --device cuda "${random[@]}" --json "$OUT/engine.json"
else
    say "engine: bench/engine.py is not there"
fi
# `-m` here overrides the project's, which leaves out the GPU's tests. Other GPUs' machine code and the CPU are no matter
# of this machine.
pytest=("$PYTHON" -m pytest -q -p no:cacheprovider --continue-on-collection-errors)
part tests 110 "${pytest[@]}" -m "gpu or not gpu" tests/kernels \
    --ignore tests/kernels/test_cubin.py --ignore tests/kernels/test_bench.py --ignore tests/kernels/test_cpu.py
part engine_tests 60 "${pytest[@]}" -m gpu tests/engine
cat "$OUT/kernels.txt"
tail -n 30 "$OUT/tests.txt"
[ ! -f "$OUT/engine.txt" ] || tail -n 40 "$OUT/engine.txt"
cat "$OUT/summary.txt"
exit "$failed"
