"""The task of a class of transformers, by the mappings of its `Auto` classes."""

from __future__ import annotations

from graphwright.models.architectures.tasks import LANGUAGE_MODEL, task_of

_OTHERS = ("OBJECT_DETECTION", "VIDEO_CLASSIFICATION", "QUESTION_ANSWERING", "IMAGE_TO_IMAGE", "UNIVERSAL_SEGMENTATION")
"""Mappings of classes whose names end in other words than those of their task."""


def hub_task(name: str) -> str:
    """Return the task of a class: by the end of its name, where the mappings of transformers say no other one."""
    task = task_of(name)
    if task not in (LANGUAGE_MODEL, "features"):
        return task
    if _listed(name, "CAUSAL_LM"):
        return LANGUAGE_MODEL
    if _listed(name, "MASKED_LM"):
        return "masked-lm"
    if _listed(name, "SEQ_TO_SEQ_CAUSAL_LM"):
        return "sequence-to-sequence"
    return next((kind.lower().replace("_", "-") for kind in _OTHERS if _listed(name, kind)), task)


def _listed(name: str, kind: str) -> bool:
    from transformers.models.auto import modeling_auto

    listed = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values()
    return any(name == entry or (isinstance(entry, tuple) and name in entry) for entry in listed)
