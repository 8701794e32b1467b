"""The stages of benchmarks/gpu.py, one module each with a function `run(settings, result)`.

runner     gives every stage its time and a process, and gathers what it finds
settings   what a stage is told, and the file that it writes
servers    real SGLang servers, and loads for them
pair       a target and a draft whose acceptance is known, of any size
"""
