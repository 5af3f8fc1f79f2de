#!/bin/bash
# setup.sh PACKAGE [DIR]: an environment DIR/venv with a router that the benchmarks compare with; prints its program's path.
# PACKAGE is sglang-router or smg. Does nothing where DIR is complete. Safe to run twice at once. PYTHON names the interpreter
# (default: python3).
set -euo pipefail

package=${1:-}
case $package in
    sglang-router) release=0.3.2 ;;
    smg) release=1.13.0 ;;
    *)
        printf 'setup.sh: %s is not a router that we compare with; say sglang-router or smg\n' "'$package'" >&2
        exit 2
        ;;
esac
default=${ROLLOUTD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rolloutd}/$package-$release
mkdir -p "${2:-$default}"
dir=$(cd "${2:-$default}" && pwd)

say() { printf '%s: %s\n' "$package" "$*" >&2; }
complete() { [[ -f $dir/complete && $(<"$dir/complete") == "$release" ]]; }

exec 9>"$dir/lock"
flock 9
if ! complete; then
    say "building in $dir (about half a minute, 100 MB)"
    rm -rf "$dir/complete" "$dir/venv"
    "${PYTHON:-python3}" -m venv "$dir/venv"
    "$dir/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package==$release"
    printf '%s' "$release" >"$dir/complete"
fi
printf '%s\n' "$dir/venv/bin/$package"
