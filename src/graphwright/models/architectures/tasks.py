"""The task of a model class of transformers, by the end of its name."""

from __future__ import annotations

LANGUAGE_MODEL = "causal-lm"
"""Task of a model that predicts the next token."""
_TASKS = {
    "ForCausalLM": LANGUAGE_MODEL, "LMHeadModel": LANGUAGE_MODEL,
    "ForMaskedLM": "masked-lm", "ForPreTraining": "pretraining",
    "ForConditionalGeneration": "sequence-to-sequence", "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification", "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification", "ForMultipleChoice": "multiple-choice",
    "ForAudioClassification": "audio-classification", "ForCTC": "speech-recognition",
    "ForSemanticSegmentation": "semantic-segmentation", "ForDepthEstimation": "depth-estimation",
    "ForPrediction": "time-series-prediction",
}  # fmt: skip
"""End of a class name -> task."""


def task_of(name: str) -> str:
    """Return the task of a class by the end of its name; `features` for a model without a head."""
    return next((task for end, task in _TASKS.items() if name.endswith(end)), "features")
