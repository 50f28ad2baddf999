#!/usr/bin/env bash
# Everything that needs a GPU, what is most wanted first. Each part ends by its limit, and the next one goes on.
#
#     OUT=folder bash benchmarks/on_gpu.sh                 all parts: about 25 minutes on an H200
#     OUT=folder bash benchmarks/on_gpu.sh tests agents    these parts
#
# PYTHON names the interpreter; the repository and what it needs must be importable. Results go to $OUT as one JSON
# object a line, tables to the screen.
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu-results}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"

part() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2 begin=$SECONDS
  shift 2
  timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  echo "== $name: exit $?, $((SECONDS - begin)) s"
  tail -n "${LINES_SHOWN:-14}" "$OUT/$name.log"
}
bench() { part "$1" "$2" "$PYTHON" -m "benchmarks.$3" "${@:4}"; }
tests() {
  for file in test_gpu_cuts test_gpu_learner test_real_weights test_gpu test_gpu_families; do
    part 180 "$file" "$PYTHON" -m pytest "tests/gpu/$file.py" -q -p no:cacheprovider
  done
}
agents() {
  local load="--shape 1.5B --episodes 256 --turns 8 --sampled 256 --observed 512 --workers 8"
  # shellcheck disable=SC2086
  bench 400 environments environments $load --turn-seconds 0.1,1,5 --out "$OUT/environments.jsonl"
  bench 300 environments_trl environments_trl --shape 1.5B --episodes 32 --turns 8 --sampled 128 --observed 256 \
    --turn-seconds 0.1 --workers 8 --repeat 1
}
ranks() {
  bench 500 fake_world fake_world --out "$OUT/fake_world.jsonl"
}
steps() {
  bench 300 grpo_step grpo_step --steps 3 --limit 120 --out "$OUT/grpo_step.jsonl"
  bench 200 sft_step sft_step --out "$OUT/sft_step.jsonl"
  bench 200 dpo_step dpo_step --out "$OUT/dpo_step.jsonl"
}
decoding() {
  bench 400 decode decode --out "$OUT/decode.jsonl"
  bench 200 eval_overlap eval_overlap --out "$OUT/eval_overlap.jsonl"
}
for chosen in "${@:-tests agents ranks steps decoding}"; do
  for one in $chosen; do "$one"; done
done
