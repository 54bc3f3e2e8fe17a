"""HTML pages that load nothing: a policy in each page admits the page's own scripts, by their hashes, and no others."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256

from graphwright.program.draw.shapes import escaped


def html_page(title: str, style: str, body: str, script: str = "") -> str:
    """Return an HTML page of a style sheet, a body (HTML), and a script that runs after it.

    The Content Security Policy forbids everything but inline styles and this script, whatever the body holds.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    scripts = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escaped(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>{body}'
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )
