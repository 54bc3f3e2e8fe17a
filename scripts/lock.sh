#!/usr/bin/env bash
# Rewrite constraints.txt from the environment: names and versions only, torch first; no local version, address or hash.
set -eu -o pipefail
venv=${VENV:-.venv}
frozen=$("$venv/bin/python" -m pip freeze --exclude-editable --disable-pip-version-check)
pins=$(grep -E '^[A-Za-z0-9._-]+==' <<<"$frozen" | grep -v '^graphwright==' | sed -E 's/[+ ;].*$//' | LC_ALL=C sort -f -t= -k1,1)
# scripts/triton.sh installs Triton elsewhere: its pin stays
pins=$({ grep -v '^triton==' <<<"$pins"; grep '^triton==' constraints.txt || true; } | LC_ALL=C sort -f -t= -k1,1)
old=$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')
{ grep '^torch==' <<<"$pins"; grep -v '^torch==' <<<"$pins"; } >constraints.txt.new
mv constraints.txt.new constraints.txt
new=$(cat pyproject.toml constraints.txt | cksum | tr -d ' ')
if [ "$old" != "$new" ] && [ -e "$venv/.extras-$old" ]; then  # these pins are what is installed
  mv "$venv/.extras-$old" "$venv/.extras-$new"
fi
