"""The frozen teacher and the student that starts as its copy."""

import copy

from transformers import PreTrainedModel


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model into eval mode and take its parameters out of training; returns the model."""
    model.eval()
    return model.requires_grad_(False)


def student_of(teacher: PreTrainedModel) -> PreTrainedModel:
    """A trainable float32 copy of the teacher that shares no memory with it.

    Tied embeddings stay tied inside the copy. The student is float32 whatever the teacher's dtype:
    AdamW's small updates are rounded away in bfloat16.
    """
    student = copy.deepcopy(teacher).float()
    student.requires_grad_(True)
    return student.train()
