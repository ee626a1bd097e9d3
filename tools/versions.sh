#!/usr/bin/env bash
# The core of the tests with the oldest and the newest JAX and Keras that pyproject.toml allows, on each Python given:
#   tools/versions.sh python3.11 python3.13
# Each pair is installed into a throw-away environment. Prints a table; fails if any pair fails.
set -euo pipefail
cd "$(dirname "$0")/.."

core=(
  tests/unit/{step,collectives,checkpoint,system} tests/unit/test_{context,mesh,values,export_specs}.py
  tests/virtual/{step/test_tape.py,step/test_eager_tape.py,checkpoint/test_checkpoint.py}
  tests/virtual/training/test_exact.py tests/virtual/strategies/test_contract.py
  src/unisono/{step,collectives,checkpoint}
)
oldest() { sed -n "s/^ *\"$1>=\([0-9.]*\).*/\1/p" pyproject.toml; }

table="| Python | JAX | Keras | tests |"$'\n'"|---|---|---|---|"
failed=0
for python in "$@"; do
  for versions in "jax==$(oldest jax).* keras==$(oldest keras).0" "jax keras"; do
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    "$python" -m venv "$place"
    # shellcheck disable=SC2086 # two requirements
    "$place/bin/python" -m pip install --quiet -e '.[cluster,export]' $versions \
      hypothesis optax 'pytest>=8' pytest-timeout pytest-xdist scikit-learn
    "$place/bin/python" -m pytest -n 2 --dist worksteal -m "not exhaustive" "${core[@]}" >"$place/log" 2>&1 || {
      failed=1
      tail -n 60 "$place/log"
    }
    found=$("$place/bin/python" -c "import platform, importlib.metadata as m
print(platform.python_version(), m.version('jax'), m.version('keras'), sep=' | ')")
    table+=$'\n'"| $found | $(tail -n 1 "$place/log") |"
    rm -rf "$place"
  done
done
echo "$table"
exit "$failed"
