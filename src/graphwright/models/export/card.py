"""The model card of an export: what was edited, the receipt as a table, and a loading snippet that the check runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from graphwright.models.export.clean_process import GREEDY_TOKENS

if TYPE_CHECKING:
    from graphwright.models.export.receipt import Receipt


def snippet(name: str, trust: bool) -> str:
    """The lines that load an exported directory, run from the folder that it stands in."""
    extra = ", trust_remote_code=True" if trust else ""
    load = f"model = AutoModelForCausalLM.from_pretrained({json.dumps(f'./{name}')}{extra})"
    return f"from transformers import AutoModelForCausalLM\n\n{load}\n"


def write_card(place: Path, receipt: Receipt, name: str, code: str) -> None:
    """Write `README.md`."""
    base = _plain(receipt.source["name"])
    rows = "\n".join(f"| {label} | {value} |" for label, value in receipt.summary())
    made = receipt.journal["edits"]
    trust = " --trust-code" if receipt.rung == 5 else ""
    edits = "\n".join(f"1. {_plain(e['why'])} ({_plain(e['author'])}; {e['summary']})" for e in made)
    text = f"""---
library_name: transformers
base_model: {json.dumps(base, ensure_ascii=False)}
---
# {_plain(name)}

Exported by Graphwright {receipt.graphwright} from `{base}`.

```python
{code.rstrip()}
```

## Edits

{edits or "None."}

## Receipt

| | |
| --- | --- |
{rows}

`receipt.json` holds all figures; `graphwright verify {_plain(name)}{trust}` checks the files against it. Greedy tokens
per prompt: {GREEDY_TOKENS}.
"""
    (place / "README.md").write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    """A text on one line that is no markup."""
    return re.sub(r"[<>`|\[\]]", " ", " ".join(text.split()))
