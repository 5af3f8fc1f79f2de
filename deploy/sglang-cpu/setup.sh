#!/bin/bash
# setup.sh [DIR]: an environment DIR/venv with SGLang 0.5.23 on the CPU and two tiny checkpoints, DIR/model-0 and DIR/model-1.
# Does nothing where DIR is complete and of this recipe. Safe to run twice at once. PYTHON names the interpreter (default: python3).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
default=${ROLLOUTD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rolloutd}/sglang-cpu-0.5.23
mkdir -p "${1:-$default}"
dir=$(cd "${1:-$default}" && pwd)

say() { printf 'sglang-cpu: %s\n' "$*" >&2; }

# The environment is good for exactly this recipe: a changed pin or plugin builds it again.
recipe=$(cd "$here" && find . -type f ! -name README.md ! -name serve.sh ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 cat | cksum)
complete() { [[ -f $dir/complete && $(<"$dir/complete") == "$recipe" ]]; }

complete && exit 0
exec 9>"$dir/lock"
if ! flock -n 9; then
    say "another setup is at work in $dir, waiting for it"
    flock 9
fi
complete && exit 0

say "building in $dir (about 3 minutes, 1.6 GB)"
rm -rf "$dir/complete" "$dir/venv" "$dir/model-0" "$dir/model-1"
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
# Built from a copy, because building leaves files beside the sources and a checkout may be read-only.
cp -R "$here/platform" "$here/triton_stub" "$sources"
chmod -R u+w "$sources"

"${PYTHON:-python3}" -m venv "$dir/venv"
python=$dir/venv/bin/python
pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
say "1/3 torch and libraries"
pip_install -r "$here/requirements.txt" -c "$here/constraints.txt"
if [[ $("$python" -c 'import torch; print(torch.version.cuda)') != None ]]; then
    say "pip chose a CUDA build of torch; point it at an index with CPU builds (see README.md) and run this again"
    exit 1
fi
say "2/3 SGLang"
pip_install --no-deps -r "$here/requirements-nodeps.txt" "$sources/platform" "$sources/triton_stub"
say "3/3 checkpoints"
for seed in 0 1; do
    "$python" "$here/make_model.py" "$dir/model-$seed" --seed "$seed"
done
printf '%s' "$recipe" >"$dir/complete"
say "ready: $dir"
