#!/usr/bin/env bash
# Builds .venv from the lock files. Called by `make setup`; safe to call again at any time.
#
#   .venv/ready   written last: the hash of all that the environment was made from. The same hash = nothing to do.
#   .setup.log    what pip said; its end is shown when a step fails
#
# Settings: EAGLE3_PYTHON (the interpreter to build with), EAGLE3_SKIP_PLATFORM_CHECK=1 (at your own risk).
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly LOG=.setup.log
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly NEED_DISK_KIB=$((6 * 1024 * 1024))     # about 3.4 GiB installed, and the downloads beside it
readonly NEED_MEMORY_KIB=$((15 * 1024 * 1024))  # a "16 GB" machine shows a little less than 16 GiB
# In the way when left over from an earlier lock or installed by hand; the head of lock-cpu.txt says why.
readonly HARMFUL=(torchvision torchaudio torchcodec)

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# The folder belongs to it: scripts carry its path.
fingerprint() {
    { pwd -P; cat requirements/lock-cpu.txt requirements/lock-dev.txt pyproject.toml scripts/setup.sh; } |
        sha256sum | cut -d' ' -f1
}

check_platform() {
    local system machine memory_kib free_kib have_kib
    system=$(uname -s)
    machine=$(uname -m)
    [[ $system == Linux && $machine == x86_64 ]] ||
        fail "this is $system on $machine; the locked vLLM and torch are built for Linux on x86-64." \
            "Use such a machine, or the Dockerfile on one."
    grep -qw avx2 /proc/cpuinfo ||
        fail "this processor has no AVX2; vLLM's CPU backend is compiled for it." \
            "Any x86-64 server or desktop processor since about 2015 has it; in a virtual machine, pass it through."
    memory_kib=$(awk '$1 == "MemTotal:" {print $2}' /proc/meminfo)
    ((memory_kib >= NEED_MEMORY_KIB)) ||
        fail "$((memory_kib / 1024 / 1024)) GiB of memory; a server and the training beside it need 15 GiB."
    free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
    # What an interrupted set-up has on disk already counts.
    have_kib=0
    [[ -d $VENV ]] && have_kib=$(du -sk "$VENV" | cut -f1)
    ((free_kib + have_kib >= NEED_DISK_KIB)) ||
        fail "$((free_kib / 1024 / 1024)) GiB free in $PWD; the environment needs 6 GiB."
}

# Each candidate is run, not only looked up: version managers leave names on PATH that start nothing.
find_python() {
    local candidate
    for candidate in ${EAGLE3_PYTHON:+"$EAGLE3_PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 (or 3.12) with the venv module." \
        "Debian and Ubuntu: apt-get install python3.11 python3.11-venv; or name one in EAGLE3_PYTHON."
}

# One line per step with its seconds; the output goes to the log.
step() {
    local title=$1 started=$SECONDS
    shift
    printf '  %-58s' "$title"
    echo "== $title: $*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        printf ' failed\n'
        tail -n 25 "$LOG" >&2
        fail "\"$title\" failed; the whole log is $LOG. Running make setup again goes on from here."
    fi
    printf ' %4d s\n' $((SECONDS - started))
}

# Steps run as the condition of an `if`, where bash ignores -e: hence each && and `|| return`.
make_venv() {
    # An environment that was moved or copied here has the old path in its scripts, and is made anew.
    if grep -qsF "$PWD/$VENV" "$VENV/bin/activate" && "$VENV/bin/python" -c "import pip"; then
        echo "kept $VENV"
    else
        "$1" -m venv --clear "$VENV" || return
    fi
    drop_unfinished
}

# pip writes RECORD last: a package without one was cut off while being unpacked, and would count as installed.
drop_unfinished() {
    local info
    for info in "$VENV"/lib/python3.*/site-packages/*.dist-info; do
        if [[ -d $info && ! -e $info/RECORD ]]; then
            echo "unfinished: $info"
            rm -r "$info" || return
        fi
    done
    # What an interrupted uninstall had set aside.
    rm -rf "$VENV"/lib/python3.*/site-packages/~*
}

# Wheels only: on a platform without one, an error that names the package beats a compiler run.
pip_install() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --only-binary :all: "$@"
}

# The plain request first: pip may be set up with a local wheel or a mirror that has it. PyPI carries no +cpu
# build, so elsewhere this fails in a second, and PyTorch's own index is asked.
install_torch() {
    local torch
    torch=$(grep '^torch==' requirements/lock-cpu.txt)
    pip_install "$torch" || pip_install --index-url "$TORCH_CPU_INDEX" "$torch"
}

remove_harmful() {
    "$VENV/bin/python" -m pip uninstall --disable-pip-version-check --yes "${HARMFUL[@]}"
}

install_project() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
}

check_imports() {
    "$VENV/bin/python" -c 'import torch, transformers, vllm; print(torch.__version__, vllm.__version__)'
}

main() {
    local want python started=$SECONDS
    want=$(fingerprint)
    [[ -e $VENV/ready && $(<"$VENV/ready") == "$want" ]] && return

    [[ ${EAGLE3_SKIP_PLATFORM_CHECK:-} == 1 ]] || check_platform
    python=$(find_python)
    # Two set-ups in one folder take turns; the second then finds the work done.
    exec 9<requirements
    flock 9
    [[ -e $VENV/ready && $(<"$VENV/ready") == "$want" ]] && return
    rm -f "$VENV/ready"
    : >"$LOG"

    echo "Setting up .venv with $("$python" -VV | head -1 | cut -d' ' -f1,2) (3 minutes, once)"
    step "virtual environment" make_venv "$python"
    step "pip" pip_install "$(grep '^pip==' requirements/lock-cpu.txt)"
    step "torch" install_torch
    step "locked dependencies" pip_install -r requirements/lock-cpu.txt
    step "development tools" pip_install -r requirements/lock-dev.txt
    step "removal of torch extras that break transformers" remove_harmful
    step "eagle3-pipeline itself, editable" install_project
    step "import check of torch, transformers and vLLM" check_imports
    echo "$want" >"$VENV/ready.new"
    mv "$VENV/ready.new" "$VENV/ready"
    echo "Ready in $((SECONDS - started)) s."
}

main "$@"
