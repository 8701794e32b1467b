"""sglang-dspark: confidence-scheduled, ragged speculative decoding for SGLang."""

__version__ = "0.1.0"
