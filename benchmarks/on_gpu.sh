#!/usr/bin/env bash
# Everything that needs a GPU, what is most wanted first. Each part takes at most 9 minutes: rows for which no time is
# left are not run, and the table says so.
#
#     OUT=folder bash benchmarks/on_gpu.sh                 all parts: about an hour on an H200
#     OUT=folder bash benchmarks/on_gpu.sh main decode     these parts
#
# PYTHON names the interpreter; the repository and what it needs must be importable. LEMMA_COMMIT names the commit where
# there is no repository. Each table goes to $OUT as NAME.md and NAME.jsonl, one JSON object a row. `ppo` needs the wheel
# of TRL 1.12.0 in .gpu/ppo_trl, and `evaluation` recorded completions in .gpu/data/rollouts. `real` takes an instruct model
# (MODEL, a folder; benchmarks/gguf_folder.py makes one of a GGUF file) and questions (QUESTIONS, JSON lines), TRL and vLLM.
set -u
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu-results}
PART_SECONDS=${PART_SECONDS:-520}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"

part() { # SECONDS NAME COMMAND...
  local limit=$1 name=$2 begin=$SECONDS
  shift 2
  timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  echo "== $name: exit $?, $((SECONDS - begin)) s"
  tail -n "${LINES_SHOWN:-14}" "$OUT/$name.log"
}
bench() { # SECONDS NAME MODULE OPTIONS...
  part "$(($1 + 15))" "$2" "$PYTHON" -m "benchmarks.$3" --within "$1" --out "$OUT/$2.jsonl" --table "$OUT/$2.md" "${@:4}"
}

# Steps of reinforcement learning
main() { bench "$PART_SECONDS" grpo_main grpo_step --set main; }
long() { bench "$PART_SECONDS" grpo_long grpo_step --set long; }
small() { bench "$PART_SECONDS" grpo_small grpo_step --set small; }
seven() { bench "$PART_SECONDS" grpo_seven grpo_step --set seven; }
ppo() { bench "$PART_SECONDS" ppo grpo_step --set ppo; }
real() { bench "$PART_SECONDS" real_step real_step --model "$MODEL" --questions "$QUESTIONS"; }
# Decoding and evaluation
decode() { bench "$PART_SECONDS" decode decode --set main; }
decode_more() { bench "$PART_SECONDS" decode_more decode --set seven first transformers; }
decode_long() { bench "$PART_SECONDS" decode_long decode --set long --limit 260; }
evaluation() { bench 300 eval_overlap eval_overlap; }
# Supervised learning and preferences
steps() {
  bench 240 sft_step sft_step
  bench 240 dpo_step dpo_step
}
test_files() {
  for file in "$@"; do part "${TEST_SECONDS:-400}" "$file" "$PYTHON" -m pytest "tests/gpu/$file.py" -q -p no:cacheprovider; done
}
tests() { test_files test_gpu_learner test_gpu_flash test_gpu_adapters test_gpu_cuts test_gpu_ranks test_real_weights; }
tests_more() { test_files test_gpu test_gpu_decoding test_gpu_families; }
agents() {
  local load="--shape 1.5B --episodes 256 --turns 8 --sampled 256 --observed 512 --workers 8"
  # shellcheck disable=SC2086
  part 300 environments "$PYTHON" -m benchmarks.environments $load --turn-seconds 0.1,1,5 --out "$OUT/environments.jsonl"
  part 220 environments_trl "$PYTHON" -m benchmarks.environments_trl --shape 1.5B --episodes 32 --turns 8 --sampled 128 \
    --observed 256 --turn-seconds 0.1 --workers 8 --repeat 1
}
ranks() { bench "$PART_SECONDS" fake_world fake_world; }

ALL="long ppo tests main steps decode evaluation small tests_more seven decode_more decode_long agents ranks"
for chosen in "${@:-$ALL}"; do
  for one in $chosen; do "$one"; done
done
