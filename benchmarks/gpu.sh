#!/usr/bin/env bash
# Runs what needs a GPU: the tests that are marked so, and the benchmarks. Writes into $1.
#
# On some systems a package of AOTInductor only loads with the system's libstdc++ in front.
set -u
out=${1:?usage: benchmarks/gpu.sh FOLDER}
export LD_PRELOAD=${LD_PRELOAD:-$(g++ -print-file-name=libstdc++.so.6)}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
status=0

check() {
    "$@" || status=1
}

python3 -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
check python3 -m pytest -q -m gpu -W ignore -o filterwarnings= tests/models -k "eager or inductor_triton"
check python3 -m pytest -q -m gpu -W ignore -o filterwarnings= tests/models -k "aoti and (gpt2 or mixtral)"
check python3 benchmarks/steady_state.py --model gpt2 --json "$out/gpt2.json"
check python3 benchmarks/training.py --memory --device cuda --json "$out/training.json"
check python3 benchmarks/call_overhead.py
check python3 -m pytest -q -W ignore -o filterwarnings= tests/core --ignore tests/core/test_cli.py \
    --ignore tests/core/test_demo.py --ignore tests/core/test_doctor.py
exit $status
