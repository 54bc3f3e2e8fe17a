#!/usr/bin/env bash
# Make sure that there is a Chromium for the browser tests; without one they say so and are not run.
set -eu
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing chromium with apt-get" >&2
  export DEBIAN_FRONTEND=noninteractive
  timeout 300 sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium" >/dev/null ||
    echo "chromium could not be installed: the browser tests are not run" >&2
elif command -v brew >/dev/null 2>&1; then
  brew install --quiet --cask chromium || echo "chromium could not be installed: the browser tests are not run" >&2
else
  echo "no Chromium, and no package manager that may install one: the browser tests are not run" >&2
fi
