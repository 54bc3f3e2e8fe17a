#!/usr/bin/env bash
# Make a virtual environment that has the package with the given extras; does nothing when it is there already.
# Usage: scripts/environment.sh EXTRAS      e.g. hf, or all,dev
set -eu
extras=$1
venv=${VENV:-.venv}
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null 2>&1; then
  echo "Python 3.11 or newer is needed, and there is no '$python'; set PYTHON=/path/to/python3" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  version=$("$python" -V 2>&1) || version="a command that does not run"
  echo "Python 3.11 or newer is needed; '$python' is $version. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "Python's venv module is missing; on Debian: apt-get install python3-venv" >&2
  exit 2
fi

wanted=$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')
stamp=$venv/.extras-$wanted
# what an earlier call installed is kept: ask for the union, so that demo and test do not undo each other
have=$(cat "$stamp" 2>/dev/null || true)
case ",$have," in *",$extras,"*) exit 0 ;; esac
all=${have:+$have,}$extras

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing graphwright[$all] into $venv (torch is about 200 MB)" >&2
# --no-compile: of 15 000 modules a quarter is ever imported, and Python compiles those when it first reads them
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[$all]"
rm -f "$venv"/.extras-*
echo "$all" >"$stamp"
