"""The export level of generated modeling code."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.models.architectures.architecture import dimension_of
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.codegen.patterns import pattern_of, sparse_attentions
from graphwright.models.codegen.source import CodeFiles, emittable, generate, generate_task
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.export.dead_units import without_dead_units
from graphwright.models.export.levels import ExportLevel, LevelPlan, Reason
from graphwright.models.export.receipt import edit_rows
from graphwright.models.export.template_levels import TemplateCase
from graphwright.models.export.template_match import (
    TRUNK,
    Deviation,
)
from graphwright.models.export.write import write_model
from graphwright.models.generation.recomputed import is_cacheable
from graphwright.models.tokenizer import known_special_ids
from graphwright.ops import traits

if TYPE_CHECKING:
    from graphwright.models.model import Model


_SIZES = {"heads", "kv_heads", "mlp", "experts", "expert_width", "shared_width"}
"""Dimensions whose fields state the sizes of generated code."""

_IN_CODE = (
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
)
"""Fields that generated code replaces: transformers would build windowed caches, and check rotations of equal heads."""


class GeneratedCode(ExportLevel):
    """Generated modeling code for the program's structure, for programs whose ops all have source text.

    Dead experts and heads are left out.
    """

    number, name, summary = 5, "generated_code", "generated modeling code"
    runs_code = True

    @cached_property
    def written(self) -> Model:
        """The model, without units that are switched off."""
        model = self.case.model
        alive = without_dead_units(model.program)
        return model if alive is model.program else model.with_program(alive)

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if every op has source text."""
        p = self.written.program
        try:
            emittable(p, self._language_model, self._buffers)
        except ExportLevelImpossible as error:
            why = error.what if error.got is None else f"{error.what}: {error.got}"
            return self._refused(Reason(str(error.where), why))
        read = p.reachable(p.outputs()) if self.case.deviations else set(p.params())
        nbytes = sum(p.spec(n).nbytes for n in p.params() if n in read)
        return self._accepted(nbytes, files=("configuration_<id>.py", "modeling_<id>.py"))

    def carries(self, d: Deviation) -> bool:
        """Return True, because this level carries every deviation."""
        return True

    @cached_property
    def _ident(self) -> str:
        """Part of the names of the files; it includes constants, which are code, as loaders cache classes by name."""
        return self.written.program.hash()[:10]

    @cached_property
    def _code(self) -> CodeFiles:
        edits = [f"{row['why']} ({row['author']}; {row['summary']})" for row in edit_rows(self.case.edited)]
        if not self._language_model:
            return generate_task(self.written.program, self._ident, edits, self._buffers)
        cached = self.written.arch.imported is None or is_cacheable(self.written.program)
        return generate(self.written.program, self._ident, edits, cached=cached)

    @property
    def _language_model(self) -> bool:
        return self.case.model.task == LANGUAGE_MODEL

    @property
    def _buffers(self) -> dict[str, str]:
        """Path of each constant that is in the files -> its key."""
        model = self.written
        return {path: model.keys.get(path, path) for path in model.arch.buffers}

    @property
    def tables(self) -> frozenset[str]:
        """Keys of the integer tensors in the files: the blocks of patterns."""
        return frozenset(self._code.tensors)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on limits of the files, for the receipt."""
        found = {pattern_of(self.written.program, n) for n in sparse_attentions(self.written.program)}
        shortest = min((pattern.tokens[0] for pattern in found if pattern is not None), default=None)
        positions = getattr(self.written.config_dims, "positions", 0)
        if shortest is None or shortest >= positions:
            return ()
        return (f"a pattern of attention has {shortest} tokens, so the files refuse longer texts",)

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write the weights that outputs need, a config that names the code, and the code."""
        model, p = self.written, self.written.program
        ident, made = self._ident, self._code
        needed = p.reachable(p.outputs())
        count = sum(traits(p.op(n)).attention or traits(p.op(n)).routed_heads for n in needed)
        given = {k: v for k, v in model.config.fields.items() if k not in _IN_CODE}
        code = {"AutoConfig": f"configuration_{ident}.EditedConfig"}
        kind, name = "AutoModelForCausalLM", "EditedForCausalLM"
        if not self._language_model:
            kind, name = "AutoModel", "EditedModel"
        code[kind] = f"modeling_{ident}.{name}"
        given |= {"architectures": [name], "model_type": f"graphwright-{ident}"}
        given |= {**self._widths(), **made.config, "num_hidden_layers": max(count, 1), "auto_map": code}
        config = (json.dumps(given, indent=2) + "\n").encode()
        only = {p.key(n) for n in p.params() if n in needed}
        only |= {key for path, key in self._buffers.items() if p.find(path) in needed}
        write_model(model, directory, dtype=dtype, max_shard_size=max_shard_size, config=config, only=only,
                    joined=False, besides=made.tensors)  # fmt: skip
        for name, text in made.files.items():
            (directory / name).write_text(text, encoding="utf-8")

    def _widths(self) -> dict[str, Any]:
        """Return the config fields of sizes that the program changed: a number, or a list with each layer's.

        A layer has 0 where it lacks the branch with this size, and null where this branch computes something else. If
        the experts of a layer differ in width, the layer has a list.
        """
        if not isinstance(self.case, TemplateCase):
            return {}
        match, found = self.case.match, dict[str, dict[int, Any]]()
        for i, (branch, part) in enumerate(zip(match.branches, match.parts, strict=True)):
            of_branch = {dimension_of(n) for path, ts in match.terms.items() if path.startswith(f"{branch.name}.")
                         for t in ts for n in t.split("*")} & _SIZES  # fmt: skip
            missing = None if i in match.mismatched else 0
            for name in of_branch:
                here = [n for full, n in match.sizes.get(i, {}).items() if dimension_of(full) == name]
                size = here[0] if len(set(here)) == 1 else here
                found.setdefault(name, {})[branch.layer] = size if part is not None else missing
        made: dict[str, Any] = {}
        for name, sizes in found.items():
            if any(v != getattr(match.given, name) for v in sizes.values()):
                values = [sizes.get(layer, 0) for layer in range(match.dims.layers)]
                made[match.fields[name]] = values if any(v != values[0] for v in values) else values[0]
        hidden = match.sizes[TRUNK].get("hidden", match.dims.hidden)
        made |= {} if hidden == match.dims.hidden else {match.fields["hidden"]: hidden}
        return made | known_special_ids(self.case.model.config, self.case.model.vocab)
