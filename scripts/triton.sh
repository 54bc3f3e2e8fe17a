#!/usr/bin/env bash
# Install Triton for the tests of its kernels into .venv/apart: transformers and torch.compile load it with every import
# wherever they find it. Without a wheel for this machine those tests are skipped.
set -eu
venv=${VENV:-.venv}
pin=$(grep '^triton==' constraints.txt)
stamp=$venv/apart/.$pin
[ "$(uname -s)" = Linux ] || exit 0
[ -e "$stamp" ] && exit 0
rm -rf "$venv/apart"
echo "installing $pin into $venv/apart (290 MB)" >&2
if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$venv/apart" "$pin"; then
  mkdir -p "$venv/apart" && touch "$stamp"
else
  echo "there is no $pin for this machine: tests of its kernels are skipped" >&2
fi
