"""Hugging Face: a `transformers.Trainer` that trains privately. See docs/huggingface.md."""

from clipless.integrations.transformers.trainer import PrivateTrainer

__all__ = ["PrivateTrainer"]
