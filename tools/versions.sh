#!/usr/bin/env bash
# The core of the tests with the oldest and the newest JAX and Keras that pyproject.toml allows, on each Python given:
#   tools/versions.sh python3.11 python3.13
# Each pair is installed into a throw-away environment. Prints a table; fails if the tests of a pair do.
set -euo pipefail
cd "$(dirname "$0")/.."

core=(
  tests/unit/{step,collectives,checkpoint} tests/unit/test_{context,mesh,values}.py
  tests/virtual/step/test_{tape,eager_tape,variable}.py tests/virtual/collectives
  tests/virtual/strategies/test_contract.py src/unisono/{step,collectives,checkpoint}
)
oldest() { sed -n "s/^ *\"$1>=\([0-9.]*\).*/\1/p" pyproject.toml; }

table="| Python | JAX | Keras | tests |"$'\n'"|---|---|---|---|"
failed=0
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
for python in "$@"; do
  for versions in "jax==$(oldest jax) keras==$(oldest keras)" "jax keras"; do
    rm -rf "$place/venv"
    "$python" -m venv "$place/venv"
    bin=$place/venv/bin
    # shellcheck disable=SC2086 # two requirements
    "$bin/python" -m pip install --quiet -e '.[cluster,export]' $versions \
      flax hypothesis optax 'pytest>=8' pytest-timeout scikit-learn
    "$bin/python" -m pytest -p no:cacheprovider -m "not exhaustive" "${core[@]}" >"$place/log" 2>&1 || {
      failed=1
      tail -n 60 "$place/log"
    }
    found=$("$bin/python" -c "import platform, importlib.metadata as m
print(platform.python_version(), m.version('jax'), m.version('keras'), sep=' | ')")
    table+=$'\n'"| $found | $(tail -n 1 "$place/log") |"
    echo "$found: $(tail -n 1 "$place/log")"
  done
done
echo "$table"
exit "$failed"
