#!/bin/sh
# Installs primad for one user on Linux or macOS. It says what it will do, asks, and does nothing else: no root, no service, no
# start-up file of a shell is touched.
#
#   packaging/install.sh                              from the checkout that it lies in
#   packaging/install.sh --from primad-0.1.0-py3-none-any.whl
#   packaging/install.sh --dry-run                    say it, and end
#   packaging/install.sh --yes                        do not ask
#   packaging/install.sh --with uv|pipx|venv          with that tool; otherwise the first of them that is here
#   packaging/install.sh --extras hub,plot            also models by name, and plots
#   packaging/install.sh --llama-wheel FILE --sha256 HASH     with an llama.cpp that tools/wheelhouse built: no compiler
#
# PYTHON names the interpreter (3.11 or later), CMAKE_ARGS other parts of llama.cpp, as in CMAKE_ARGS="-DGGML_VULKAN=on".
set -eu

die() { printf 'install: error: %s\n' "$*" >&2; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }
absolute() { (cd "$(dirname "$1")" && printf '%s/%s\n' "$PWD" "$(basename "$1")"); }

from="" tool="" extras="" wheel="" hash="" yes=0 dry=0
while [ $# -gt 0 ]; do
  case "$1" in
    --from | --with | --extras | --llama-wheel | --sha256) [ $# -gt 1 ] || die "$1: needs a value" ;;
  esac
  case "$1" in
    --from) from=$2; shift 2 ;;
    --with) tool=$2; shift 2 ;;
    --extras) extras=$2; shift 2 ;;
    --llama-wheel) wheel=$2; shift 2 ;;
    --sha256) hash=$2; shift 2 ;;
    --yes) yes=1; shift ;;
    --dry-run) dry=1; shift ;;
    -h | --help) sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    *) die "$1: not known; --help says what there is" ;;
  esac
done

# ---- what there is -----------------------------------------------------------------------------------------------------

system=$(uname -s)
case "$system" in
  Linux | Darwin) ;;
  *) die "knows Linux and macOS, not $system; docs/install.md says how to install primad there" ;;
esac

if [ -z "$from" ]; then
  from=$(absolute "$(dirname "$0")/..") && from=$(cd "$from" && pwd)
  [ -f "$from/pyproject.toml" ] || die "does not lie in a checkout; name a wheel or a checkout: --from FILE"
fi
[ -e "$from" ] || die "--from $from: no such file"
from=$(absolute "$from")
case "$extras" in
  *[!a-z,]*) die "--extras $extras: give names with commas between, as in hub,plot" ;;
esac

good_python() { have "$1" && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
  if good_python "$candidate"; then
    python=$("$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))') # of no environment
    break
  fi
done

if [ -z "$tool" ]; then
  for candidate in uv pipx venv; do
    if [ "$candidate" = venv ] || have "$candidate"; then
      tool=$candidate
      break
    fi
  done
fi
case "$tool" in
  uv | pipx) have "$tool" || die "--with $tool: $tool is not installed" ;;
  venv) ;;
  *) die "--with $tool: not known; there are uv, pipx and venv" ;;
esac
if [ -z "$python" ]; then
  [ "$tool" = uv ] || die "needs Python 3.11 or later; install it, or name it: PYTHON=/path/to/python3.12"
  python=3.12
fi

cxx=${CXX:-c++}
flags=""
if [ -n "$wheel$hash" ]; then
  if [ -z "$wheel" ] || [ -z "$hash" ]; then
    die "--llama-wheel and --sha256 go together: a file, and the hash it must have"
  fi
  [ -f "$wheel" ] || die "--llama-wheel $wheel: no such file"
  wheel=$(absolute "$wheel")
  case "$(basename "$wheel")" in
    llama_cpp_python-*.whl) ;;
    *) die "--llama-wheel $wheel: not a wheel of llama-cpp-python" ;;
  esac
  if have sha256sum; then found=$(sha256sum "$wheel"); else found=$(shasum -a 256 "$wheel"); fi
  [ "${found%% *}" = "$hash" ] || die "--llama-wheel $wheel: its SHA-256 is ${found%% *}, not $hash; take the file and its hash from one place"
else
  case "$system" in
    Darwin) hint="xcode-select --install" ;;
    *) hint="apt install g++, or dnf install gcc-c++" ;;
  esac
  have "$cxx" || die "needs a C++ compiler to build llama.cpp; install one ($hint), or give --llama-wheel"
  # GCC 11, 12 before 12.4 and 13 before 13.3 break llama.cpp's code for AMX; two flags cure it.
  if ! "$cxx" --version 2>/dev/null | head -n 1 | grep -qiE 'clang|icp|icx'; then
    case "$("$cxx" -dumpfullversion 2>/dev/null)" in
      11.* | 12.[0-3].* | 13.[0-2].*) flags="-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'" ;;
    esac
  fi
fi
args="${CMAKE_ARGS:-}${CMAKE_ARGS:+${flags:+ }}$flags"
what=$from${extras:+[$extras]}
lib=$HOME/.local/lib/primad
bin=$HOME/.local/bin

# ---- what it will do ---------------------------------------------------------------------------------------------------

echo "This will:"
case "$tool" in
  uv) echo "  - install $what and the packages that it needs with uv, into the folder that \`uv tool dir\` names" ;;
  pipx) echo "  - install $what and the packages that it needs with pipx, into the folder that \`pipx environment\` names" ;;
  venv) echo "  - make the folder $lib, a Python environment, and install $what and the packages that it needs there" ;;
esac
if [ "$python" = 3.12 ]; then
  echo "  - let uv fetch Python 3.12, as there is no Python 3.11 or later here"
else
  echo "  - use the interpreter $python"
fi
if [ -n "$wheel" ]; then
  echo "  - take llama.cpp from $wheel, whose SHA-256 is right"
else
  echo "  - build llama.cpp on this machine, which takes 4 to 10 minutes on two cores${args:+, with CMAKE_ARGS=\"$args\"}"
fi
case "$tool" in
  venv) echo "  - link $bin/primad to the program" ;;
  *) echo "  - have $tool put the program primad where it puts programs, most often $bin" ;;
esac
echo "It changes nothing else. Packages come from the index that $([ "$tool" = uv ] && echo uv || echo pip) is set up for."
[ "$dry" = 0 ] || exit 0
if [ "$yes" = 0 ]; then
  [ -t 0 ] || die "asks before it does that, and nobody can answer here; give --yes, or --dry-run to see it only"
  printf 'Go on? [y/N] '
  read -r answer
  case "$answer" in
    y | Y | yes | Yes) ;;
    *) echo "nothing was changed"; exit 1 ;;
  esac
fi

# ---- it does that ------------------------------------------------------------------------------------------------------

[ -z "$args" ] || export CMAKE_ARGS="$args"
links=""
if [ -n "$wheel" ]; then
  links=$(mktemp -d)
  trap 'rm -rf "$links"' EXIT
  cp "$wheel" "$links/"
fi
case "$tool" in
  uv)
    uv tool install --force --python "$python" ${links:+--find-links "$links" --no-build-package llama-cpp-python} "$what"
    ;;
  pipx)
    pipx install --force --python "$python" ${links:+--pip-args="--find-links=$links --only-binary=llama-cpp-python"} "$what"
    ;;
  venv)
    [ ! -e "$bin/primad" ] || [ -L "$bin/primad" ] || die "$bin/primad is there and not ours; move it away"
    "$python" -m venv --clear "$lib" || die "cannot create $lib; install venv (apt install python3-venv)"
    "$lib/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
      ${links:+--find-links "$links" --only-binary llama-cpp-python} "$what"
    mkdir -p "$bin"
    ln -sf "$lib/bin/primad" "$bin/primad"
    ;;
esac
echo "primad is installed. Next: primad doctor"
case "$tool:$PATH" in
  venv:*"$bin"*) ;;
  venv:*) echo "$bin is not on your PATH; add it, or type $bin/primad" ;;
esac
case "$tool" in
  uv) echo "To remove it: uv tool uninstall primad" ;;
  pipx) echo "To remove it: pipx uninstall primad" ;;
  venv) echo "To remove it: rm -r $lib $bin/primad" ;;
esac
