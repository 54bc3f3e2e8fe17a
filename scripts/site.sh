#!/usr/bin/env bash
# Build the site in site/; fails on a link or a page of the menu that leads nowhere.
set -eu
venv=${VENV:-.venv}
rm -rf build/docs site
mkdir -p build/docs/reference
cp -r docs/*.md docs/pictures build/docs/
sed -E 's/\]\(docs\//](/g; 1s/.*/# Reporting a vulnerability/' SECURITY.md >build/docs/reporting.md  # stored outside docs/
sed -E 's/\]\(\.\.\/SECURITY\.md/](reporting.md/g' docs/security.md >build/docs/security.md
for init in src/graphwright/*/__init__.py; do
  name=$(basename "$(dirname "$init")")
  case $name in cli | files) continue ;; esac  # commands tell with --help; files/ is not public
  printf '# graphwright.%s\n\n::: graphwright.%s\n' "$name" "$name" >"build/docs/reference/$name.md"
done
for page in $(cd build/docs && find . -name '*.md' | sed 's|^\./||'); do
  grep -q -- "- $page\$" mkdocs.yml || { echo "mkdocs.yml: $page is not in the menu" >&2; exit 1; }
done
"$venv/bin/zensical" build --clean --strict
