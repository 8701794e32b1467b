"""`sglang-dspark calibrate`: temperatures for a draft's confidences, fitted on recorded rounds."""
