#!/usr/bin/env bash
# The contract, `fit`, run-ahead and callbacks with sources of Keras that are not released:
#   tools/keras_sources.sh ~/keras             # a clone, whose commit is printed
#   tools/keras_sources.sh ~/keras -k resume   # with arguments of pytest
# The sources stand before those that are installed in .venv, as do `src` and the tests of this tree.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=$(realpath "$1")
shift
core=(
  tests/unit/{step,training} tests/virtual/strategies/test_contract.py
  tests/virtual/{models,callbacks,training} tests/virtual/step/test_{tape,eager_tape,variable}.py
)
test -e "$sources/keras/src/version.py" || { echo "$sources holds no folder keras/src"; exit 2; }
export KERAS_BACKEND=jax PYTHONPATH=$sources:$PWD/src:$PWD
.venv/bin/python -c "import keras; print('Keras', keras.__version__, keras.__file__)"
git -C "$sources" log -1 --format='commit %H of %cs' -- keras 2>/dev/null || true
exec .venv/bin/python -m pytest -p no:cacheprovider -q -m "not exhaustive and not slow" "${core[@]}" "$@"
