#!/usr/bin/env bash
# Builds, checks and times the CUDA programs on this machine's GPU, in the root of a checkout:
#   gpu.sh OUT [PEERS.tar.xz [CACHES.tar.xz]]
# OUT gets the result files that `--write` would put beside the scripts. PEERS is an archive of installed packages
# (fla-core, flash-qla, tilelang and what they need); CACHES one of the folders tilelang and triton that OUT/caches.tar.xz
# of an earlier run holds. Without PEERS whatever is installed is measured. STEPS chooses steps (unpack, build, warm, tune,
# keep, golden, check, sanitize, time), BENCH, WARM, ACCURACY and SANITIZE pass options on.
set -euo pipefail
out=$(realpath -m "${1:?usage: gpu.sh OUT [PEERS.tar.xz [CACHES.tar.xz]]}")
here=packages/cake_gdn_det_train/benchmarks
place=${PEERS_PLACE:-/tmp/peers}
steps=" ${STEPS:-unpack build warm check time} "
commit=${COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}
mkdir -p "$out" "$place/site" "$place/tilelang" "$place/triton"
export FLA_FLASH_QLA=0 PYTHONUNBUFFERED=1 TILELANG_CACHE_DIR=$place/tilelang TRITON_CACHE_DIR=$place/triton
# Named outright, so that kernels compiled on a machine without a GPU have the same keys.
export TILELANG_DEFAULT_TARGET='{"kind":"cuda","arch":"sm_90a"}'
[ -n "${2:-}" ] && export PYTHONPATH=$place/site:${PYTHONPATH:-}

step() { [[ $steps == *" $1 "* ]]; }

if step unpack && [ -n "${2:-}" ]; then
  tar xf "$2" -C "$place/site"
  ln -sf libz3.so "$place/site/z3/lib/libz3.so.4.15"
  [ -n "${3:-}" ] && tar xf "$3" -C "$place"
fi
if step build; then
  for package in cake_gdn_det_train cake_gdn_train; do  # side by side: each has units that take longest
    python3 -c "from cake_shared import jit, target
print(jit.build_module('$package', target.target_of().name))" &
  done
  wait
fi
if step warm; then python3 $here/warm_peers.py ${WARM:-}; fi
if step tune; then python3 $here/warm_peers.py --tune only; fi
if step keep; then  # of Triton's the choices and what they launch, without its intermediate texts
  python3 $here/warm_peers.py --used | sed -n "s|^$place/||p" >"$place/used"
  tar cf - -C "$place" --exclude=cuda-binaries --exclude=.staging --exclude='*.ttir' --exclude='*.ttgir' \
    --exclude='*.llir' --exclude='*.ptx' --exclude='*.source' tilelang -T "$place/used" | xz -T0 -4 >"$out/caches.tar.xz"
fi
if step golden; then
  cp packages/cake_gdn_det_train/tests/golden.json "$out/"
  python3 -m cake_shared.testing.gdn_golden cake_gdn_det_train "$out/golden.json"
fi
if step check; then python3 $here/accuracy.py --commit "$commit" --out "$out/accuracy-h200.json" ${ACCURACY:-}; fi
if step sanitize; then python3 $here/sanitize.py --commit "$commit" --out "$out/sanitizer_h200.json" ${SANITIZE:-}; fi
if step time; then python3 $here/bench_gpu.py --commit "$commit" --out "$out/h200.json" ${BENCH:-}; fi
