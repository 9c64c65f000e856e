#!/usr/bin/env bash
# Measure this machine's GPU: tests, GLUE, training steps beside peft (and unsloth, if installed), decoding, merging.
#
#   tests/gpu/measure.sh OUT            every part
#   tests/gpu/measure.sh OUT steps-roberta glue-mrpc ...
#
# Each part writes OUT/PART.json, with versions and the card's name, and OUT/PART.log. It takes 9 minutes at most: a part
# that takes longer is ended; glue-* continue where they were stopped when called again.
#
# It needs the environment of `make install` with a CUDA build of torch (or PYTHON=...), the GLUE files in
# ../shared/data/glue or PEFTLAB_GLUE, probably 16 GiB of GPU memory for steps-llama-1b, 40 for steps-llama-8b, and 50 GiB of disk
# in OUT for merge. Trained drafts to measure: PEFTLAB_DRAFTS=DIR:DIR... with PEFTLAB_TARGET and PEFTLAB_PROMPTS.
# What is in OPTIONS goes to each part: OPTIONS="--device cpu --tiny" tries the script without a GPU.
set -u
out=${1:?usage: measure.sh OUT [PART ...]}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$root" || exit 1
if [ $# -eq 0 ]; then
    mapfile -t parts < <("$python" -c 'from tests.gpu.__main__ import PARTS; print(*PARTS, sep="\n")')
    set -- "${parts[@]}"
fi
failed=0
for part in "$@"; do
    # shellcheck disable=SC2086 # OPTIONS are several words
    if timeout 540 "$python" -m tests.gpu "$part" "$out" ${OPTIONS:-} >"$out/$part.log" 2>&1; then
        echo "$part: $out/$part.json"
    else
        echo "$part: failed or out of time, see $out/$part.log"
        failed=1
    fi
done
exit $failed
