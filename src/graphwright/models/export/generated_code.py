"""Export level `generated_code`: modeling code of the program's own structure, beside its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from graphwright.models.codegen.source import check_emittable, generate
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.export.level import ExportLevel, LevelPlan, Reason
from graphwright.models.export.receipt import edit_rows
from graphwright.models.export.write import write_model
from graphwright.ops import traits

if TYPE_CHECKING:
    from pathlib import Path

    from graphwright.models.export.deviation import Deviation

_CACHE_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""Fields from which transformers would build a windowed cache; generated code applies windows in each attention."""


class GeneratedCode(ExportLevel):
    """Carries any structure whose ops have source text."""

    number, name, summary = 5, "generated_code", "generated modeling code"  # 4 is free for another original class
    runs_code = True

    def plan(self) -> LevelPlan:
        """Possible if every op has source text."""
        p = self.case.model.program
        try:
            check_emittable(p)
        except ExportLevelImpossible as error:
            return self._refused(Reason(str(error.where), f"{error.what}: {error.got}"))
        read = p.reachable(p.outputs()) if self.case.deviations else set(p.params())
        nbytes = sum(p.spec(n).nbytes for n in p.params() if n in read)
        return self._accepted(nbytes, files=("configuration_<id>.py", "modeling_<id>.py"))

    def carries(self, d: Deviation) -> bool:
        """All."""
        return True

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write the weights that outputs need, a config that names the code, and the code."""
        model = self.case.model
        p = model.program
        ident = p.hash()[:10]  # includes the constants, which are part of the code: loaders cache classes by name
        edits = [f"{row['why']} ({row['author']}; {row['summary']})" for row in edit_rows(model)]
        needed = p.reachable(p.outputs())
        attentions = sum(traits(p.op(n)).attention for n in needed)
        fields = {k: v for k, v in model.config.fields.items() if k not in _CACHE_FIELDS}
        fields |= {
            "architectures": ["EditedForCausalLM"],
            "model_type": f"graphwright-{ident}",
            "tie_word_embeddings": False,
            "num_hidden_layers": max(attentions, 1),
            "auto_map": {
                "AutoConfig": f"configuration_{ident}.EditedConfig",
                "AutoModelForCausalLM": f"modeling_{ident}.EditedForCausalLM",
            },
        }
        config = (json.dumps(fields, indent=2) + "\n").encode()
        only = {p.key(n) for n in p.params() if n in needed}
        write_model(model, directory, dtype=dtype, max_shard_size=max_shard_size, config=config, only=only)
        for name, text in generate(p, ident, edits).items():
            (directory / name).write_text(text, encoding="utf-8")
