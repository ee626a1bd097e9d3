#!/usr/bin/env bash
# The environment of `make gpu`: PYTHON VENV CUDA [WHEELS]
# JAX for one version of CUDA, and what tests/gpu and the benchmarks import. With a folder of wheels no index is
# asked: PYTHON's own packages are seen from the environment, and only what they lack is installed, from the folder.
set -eu
python=$1 venv=$2 cuda=$3 wheels=${4:-}
cd "$(dirname "$0")/.."
"$python" -m venv --clear "$venv"
if [ -z "$wheels" ]; then
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet --editable ".[cuda$cuda,cluster]" --group gpu
    exit
fi
# A path file and not --system-site-packages, which would show the system's packages where PYTHON is a venv, too.
"$python" -c 'import site; [print(f"import site; site.addsitedir({path!r})") for path in site.getsitepackages()]' \
    > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/reused.pth"
extras=cluster
# The plugin may use CUDA libraries of the image: those of packages are not needed then.
"$venv/bin/python" -c "import importlib.metadata as m; m.version('jax-cuda$cuda-plugin')" 2> /dev/null || extras="cuda$cuda,cluster"
"$venv/bin/python" -m pip install --quiet --no-index --find-links "$wheels" --upgrade pip
"$venv/bin/python" -m pip install --quiet --no-index --find-links "$wheels" --editable ".[$extras]" --group gpu
