#!/bin/bash
# setup.sh [DIR]: an environment DIR/venv with sglang-router 0.3.2, the router that `make bench-overhead` compares with.
# Does nothing where DIR is complete. Safe to run twice at once. PYTHON names the interpreter (default: python3).
set -euo pipefail

release=0.3.2
default=${ROLLOUTD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rolloutd}/sglang-router-$release
mkdir -p "${1:-$default}"
dir=$(cd "${1:-$default}" && pwd)

say() { printf 'sglang-router: %s\n' "$*" >&2; }
complete() { [[ -f $dir/complete && $(<"$dir/complete") == "$release" ]]; }

exec 9>"$dir/lock"
flock 9
if ! complete; then
    say "building in $dir (about half a minute, 100 MB)"
    rm -rf "$dir/complete" "$dir/venv"
    "${PYTHON:-python3}" -m venv "$dir/venv"
    "$dir/venv/bin/python" -m pip install --quiet --disable-pip-version-check "sglang-router==$release"
    printf '%s' "$release" >"$dir/complete"
fi
printf '%s\n' "$dir/venv/bin/sglang-router"
