#!/bin/sh
# Installs primad for one user on Linux or macOS. It lists what it will do, asks, and does nothing else: no root, no service,
# no change to a shell's start-up files.
#
#   packaging/install.sh                              from the checkout that contains it
#   packaging/install.sh --from primad-0.1.0-py3-none-any.whl
#   packaging/install.sh --dry-run                    list the actions, and exit
#   packaging/install.sh --yes                        do not ask
#   packaging/install.sh --extras plot                also the packages that plots need
#   packaging/install.sh --installer uv               by 'uv tool install'; pipx: by 'pipx install'; venv (default): its own
#   packaging/install.sh --llama-wheel FILE --sha256 HASH     with llama.cpp as built on another machine; needs no compiler
#
# Every package has the version and hash in the checkout's tools/constraints.txt, including llama.cpp's sources and build tools.
# llama.cpp is built once, with a line every half minute, and its wheel is kept; at the end the script prints how to copy it to
# other machines. PYTHON names the interpreter (3.11 or later; if there is none, uv fetches one), CMAKE_ARGS build options of
# llama.cpp, as in CMAKE_ARGS="-DGGML_VULKAN=on".
set -eu

say() { printf 'install: %s\n' "$*" >&2; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 2; }
have() { command -v "$1" >/dev/null 2>&1; }
sha256() { if have sha256sum; then sha256sum "$1"; else shasum -a 256 "$1"; fi | cut -d ' ' -f 1; }
absolute() { (cd "$(dirname "$1")" && printf '%s/%s\n' "$PWD" "$(basename "$1")"); }

from="" extras="" wheel="" hash="" installer=venv yes=0 dry=0
while [ $# -gt 0 ]; do
  case "$1" in
    --from | --extras | --installer | --llama-wheel | --sha256) [ $# -gt 1 ] || die "$1: needs a value" ;;
  esac
  case "$1" in
    --from) from=$2; shift 2 ;;
    --extras) extras=$2; shift 2 ;;
    --installer) installer=$2; shift 2 ;;
    --llama-wheel) wheel=$2; shift 2 ;;
    --sha256) hash=$2; shift 2 ;;
    --yes) yes=1; shift ;;
    --dry-run) dry=1; shift ;;
    -h | --help) sed -n '2,/^set -eu/{/^set -eu/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    *) die "$1: not known; --help says what there is" ;;
  esac
done

# ---- what is there -----------------------------------------------------------------------------------------------------

system=$(uname -s)
case "$system" in
  Linux | Darwin) ;;
  *) die "knows Linux and macOS, not $system; docs/install.md says how to install primad there" ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$root/tools/constraints.txt" ] || die "not in a checkout of primad, whose tools/constraints.txt has the hashes of packages; run it from there"
[ -n "$from" ] || from=$root
[ -e "$from" ] || die "--from $from: no such file"
from=$(absolute "$from")
case ",$extras," in
  ,, | ,plot, | ,hub, | ,hub,plot, | ,plot,hub,) ;; # hub was an extra of earlier versions; it is always installed now
  *) die "--extras $extras: the only extra is plot" ;;
esac

case "$installer" in
  venv) ;;
  uv | pipx) have "$installer" || die "--installer $installer: is not installed; leave it out, or install $installer" ;;
  *) die "--installer $installer: not known; there are uv, pipx and venv" ;;
esac

good_python() { have "$1" && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
  if good_python "$candidate"; then
    python=$("$candidate" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))') # of no environment
    break
  fi
done

if [ -z "$python" ]; then
  have uv || die "needs Python 3.11 or later; install it, or uv, which fetches one, or name it: PYTHON=/path/to/python3.12"
  python=3.12
fi

fits() { # PYTHON: whether this machine's processor can run the wheel
  found=$("$1" "$root/tools/wheel_cpu.py" "$wheel" 2>&1) ||
    die "--llama-wheel $wheel: $found; leave it out to build one here, or take one of tools/wheelhouse"
}

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
  found=$(sha256 "$wheel")
  [ "$found" = "$hash" ] || die "--llama-wheel $wheel: its SHA-256 is $found, not $hash; take the file and its hash from one place"
  [ "$python" = 3.12 ] || fits "$python"
else
  case "$system" in
    Darwin) hint="xcode-select --install" ;;
    *) hint="apt install g++, or dnf install gcc-c++" ;;
  esac
  have "${CXX:-c++}" || die "needs a C++ compiler to build llama.cpp; install one ($hint), or give --llama-wheel"
fi
what=$from${extras:+[$extras]}
groups=$(printf %s "$extras" | tr , ' ')
lib=$HOME/.local/lib/primad
bin=$HOME/.local/bin

# ---- what it will do ---------------------------------------------------------------------------------------------------

echo "This will:"
case "$installer" in
  venv) echo "  - make the folder $lib, a Python environment, and install $what there" ;;
  *) echo "  - let $installer make an environment, install $what there, and link the program" ;;
esac
echo "  - install the packages that it needs there, each with its version and hash of $root/tools/constraints.txt"
if [ "$python" = 3.12 ]; then
  echo "  - let uv fetch Python 3.12, as there is no Python 3.11 or later here"
else
  echo "  - use the interpreter $python"
fi
if [ -n "$wheel" ]; then
  echo "  - take llama.cpp from $wheel, whose SHA-256 is right"
else
  echo "  - build llama.cpp on this machine${CMAKE_ARGS:+ with CMAKE_ARGS=\"$CMAKE_ARGS\"}: 4 to 16 minutes on two cores, once"
  echo "  - keep its wheel in ${XDG_CACHE_HOME:-$HOME/.cache}/primad/wheels, and take it from there the next time"
fi
[ "$installer" != venv ] || echo "  - link $bin/primad to the program"
echo "It changes nothing else. Packages come from the index that pip is set up for."
[ "$dry" = 0 ] || exit 0
if [ "$yes" = 0 ]; then
  [ -t 0 ] || die "cannot ask for confirmation without a terminal; give --yes, or --dry-run to only list the actions"
  printf 'Continue? [y/N] '
  read -r answer
  case "$answer" in
    y | Y | yes | Yes) ;;
    *) echo "nothing was changed"; exit 1 ;;
  esac
fi

# ---- do it -------------------------------------------------------------------------------------------------------------

[ ! -e "$bin/primad" ] || [ -L "$bin/primad" ] || die "$bin/primad is there and not ours; move it away"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
environment() { # FOLDER WHAT: an environment there, with pip
  say "$2"
  if [ "$python" = 3.12 ]; then
    rm -rf "$1"
    uv venv --quiet --seed --python "$python" "$1" || die "uv could not make $1; see the lines above"
  else
    "$python" -m venv --clear "$1" || die "cannot create $1; install venv (apt install python3-venv)"
  fi
}
pip() { # FOLDER COMMAND...: the pip of that environment; nothing is built with unchecked tools
  folder=$1
  shift
  "$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-cache-dir "$@" || die "it could not be installed; see the lines above"
}
install_locked() { # FOLDER GROUP...
  folder=$1
  shift
  "$root/tools/locked" "$@" >"$work/locked.txt"
  pip "$folder" install --only-binary :all: --require-hashes --requirement "$work/locked.txt"
}

mkdir "$work/wheels"
case "$installer:$wheel:$from" in
  venv:?*:*.whl) ;; # nothing is built
  *) environment "$work/build" "preparing the build" ;;
esac
case "$from" in
  *.whl) cp "$from" "$work/wheels/" ;;
  *)
    install_locked "$work/build" build
    say "building primad"
    pip "$work/build" wheel --no-deps --no-build-isolation --wheel-dir "$work/wheels" "$from"
    ;;
esac
if [ -n "$wheel" ]; then
  built=""
else
  say "llama.cpp: taking the wheel of an earlier build, or building it"
  built=$("$root/tools/build-llama" --kept "$work/build/bin/python") || exit 2
fi
cp "${wheel:-$built}" "$work/wheels/"
# installs exactly the file that was checked, even if it was replaced meanwhile
[ -z "$wheel" ] || [ "$(sha256 "$work/wheels/$(basename "$wheel")")" = "$hash" ] || die "--llama-wheel $wheel: changed meanwhile"
case "$installer" in
  venv)
    environment "$lib" "making $lib"
    [ -z "$wheel" ] || fits "$lib/bin/python"
    say "installing the packages, a minute or two"
    # shellcheck disable=SC2086  # names of groups have no blanks
    install_locked "$lib" base $groups
    pip "$lib" install --no-deps "$work"/wheels/*.whl
    "$lib/bin/python" -m pip --disable-pip-version-check check || die "$from does not match $root/tools/constraints.txt; take both from the same version"
    mkdir -p "$bin"
    ln -sf "$lib/bin/primad" "$bin/primad"
    remove="rm -r $lib $bin/primad"
    ;;
  *) # it installs the checked files and uses no index
    [ -z "$wheel" ] || fits "$work/build/bin/python"
    say "fetching the packages, a minute or two"
    # shellcheck disable=SC2086
    "$root/tools/locked" base $groups >"$work/locked.txt"
    pip "$work/build" download --only-binary :all: --require-hashes --requirement "$work/locked.txt" --dest "$work/wheels"
    interpreter=$("$work/build/bin/python" -c 'import sys; print(sys._base_executable)')
    program=primad${extras:+[$extras]}
    cd "$work" # a folder of that name here would be installed instead
    case "$installer" in
      uv) uv tool install --force --python "$interpreter" --no-index --find-links "$work/wheels" "$program" ;;
      pipx) pipx install --force --python "$interpreter" --pip-args "--no-index --find-links $work/wheels" "$program" ;;
    esac || die "$installer could not install it; see the lines above"
    remove="$installer uninstall primad"
    [ "$installer" = pipx ] || remove="uv tool uninstall primad"
    ;;
esac

# ---- what comes next ---------------------------------------------------------------------------------------------------

if [ -n "$built" ]; then
  echo "Other machines need not build llama.cpp again. Copy its wheel there:"
  echo "  scp $built OTHER:"
  echo "and in a checkout there type:"
  echo "  packaging/install.sh --llama-wheel ~/$(basename "$built") --sha256 $(sha256 "$built")"
  echo "It needs a processor with $("$work/build/bin/python" "$root/tools/wheel_cpu.py" "$built"), and is refused on others."
fi
echo "primad is installed. Next: primad doctor"
case "$installer:$PATH" in
  uv:* | pipx:* | *"$bin"*) ;; # uv and pipx report it themselves
  *) echo "$bin is not on your PATH; add it, or type $bin/primad" ;;
esac
echo "To remove it: $remove"
