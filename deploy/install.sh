#!/bin/sh
# Installs into .venv of this checkout, making it first if need be. Does nothing for what is there already.
#
#   sh deploy/install.sh run      kvpool with its daemons
#   sh deploy/install.sh dev      the same, with tests and checks
#   sh deploy/install.sh demo     the same, with torch and transformers for the demo
#   sh deploy/install.sh proto    the stub generator, in .venv-proto
#
#   PYTHON   the interpreter to make .venv with (3.11 or newer); default python3
#   TORCH    what to hand to pip for torch: a requirement, a wheel, with pip's options if need be;
#            default: the torch that .venv has, else torch==2.13.0
#            "installed": the torch of PYTHON itself, which is then only linked to, not copied
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-}
PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_DISABLE_PIP_VERSION_CHECK

refuse() {
    echo "kvpool: $*" >&2
    exit 1
}

make_venv() {
    [ -x "$1/bin/python" ] && "$1/bin/python" -c 'import pip' 2>/dev/null && return
    command -v "$PYTHON" >/dev/null || refuse "there is no $PYTHON; install Python 3.11 or newer, or set PYTHON"
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        refuse "$PYTHON is Python $version; 3.11 or newer is needed (PYTHON=... names another one)"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        refuse "$PYTHON has no venv module; on Debian and Ubuntu: apt install python$version-venv"
    echo "making $1 with Python $version"
    "$PYTHON" -m venv "$1"
}

has() {
    .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@"
}

# A stamp holds what was asked for: installing again is needed when pyproject.toml has changed, and only then.
installed() {
    cmp -s pyproject.toml ".venv/installed-$1.toml"
}

install_extra() {
    installed "$1" && return
    echo "installing kvpool[$1] into .venv"
    .venv/bin/python -m pip install --quiet --editable ".[$1]"
    cp pyproject.toml ".venv/installed-$1.toml"
}

install_torch() {
    if [ "$TORCH" = installed ]; then
        where=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') ||
            refuse "$PYTHON has no torch"
        echo "$where" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-of-python.pth"
    elif [ -n "$TORCH" ] || ! has torch; then
        cat <<'TEXT'
torch: a CPU build takes about 200 MB to download and, with all the rest, 1.2 GB on disk. On x86-64 the registry's
  build may be the one for CUDA: several GB. For another one stop this and say one of
    make demo TORCH='./torch-...whl'     (a requirement or a wheel, with options of pip if need be)
    make demo TORCH=installed            (the torch that python3 has already)
TEXT
        # Word splitting is wanted: TORCH may hold options of pip.
        # shellcheck disable=SC2086
        .venv/bin/python -m pip install --quiet ${TORCH:-torch==2.13.0}
    fi
}

for what in "$@"; do
    case $what in
    run) make_venv .venv && { installed dev || installed daemon,demo || install_extra daemon; } ;;
    dev) make_venv .venv && install_extra dev ;;
    demo) make_venv .venv && install_torch && install_extra daemon,demo ;;
    proto)
        make_venv .venv-proto
        # setuptools below 81 still has pkg_resources, which this generator imports.
        .venv-proto/bin/python -m pip install --quiet grpcio-tools==1.66.2 mypy-protobuf==3.7.0 'setuptools<81'
        ;;
    *) refuse "install.sh: run, dev, demo or proto, not $what" ;;
    esac
done
