"""The width of an HTML page in a narrow window of Chromium."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.conftest import CHROMIUM

WINDOW = 500
"""Pixels; headless Chromium has no narrower window."""


def width(file: Path) -> int:
    """Return the width in pixels that a page takes in a window of `WINDOW` pixels; its policy is lifted in a copy."""
    script = "document.title = 'WIDE ' + document.documentElement.scrollWidth"
    page = re.sub("<meta[^>]*Content-Security-Policy[^>]*>", "", file.read_text("utf-8"))
    copy = file.with_name("narrow.html")
    copy.write_text(page.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={WINDOW},900",
               "--dump-dom", f"--user-data-dir={file.parent / 'profile'}", copy.as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    return int(re.findall(r"WIDE (\d+)", shown)[0])
